"""RoBERTa for its tests: a small config, random weights, and a question over three windows."""

import numpy as np

from reference import roberta
from tests.helpers.variants import shaken

ROBERTA = roberta.Config(
    vocabulary=11,
    width=6,
    layers=3,
    heads=2,
    feed_forward=7,
    segment=8,
    module_width=5,
    dropout=0.0,
)


def roberta_params(config, rng):
    """The reference's parameters, moved away from zero and one so that every term has an effect."""
    return shaken(roberta.init_params(config, rng), rng)


def roberta_example(config, rng):
    """(three windows [(tokens, readable, text)], Answer) of three lanes.

    Lane 0 has padding; lane 2 ends before the others.
    """
    n = config.segment
    windows = []
    for k in range(3):
        readable = np.ones((3, n), bool)
        readable[0, n - 2 :] = False
        readable[2] = k < 2
        text = readable.copy()
        text[:, :3] = False
        tokens = rng.integers(config.vocabulary, size=(3, n))
        windows.append((tokens, readable, text))

    answer = roberta.Answer(
        np.array([0, 2, 0]), np.array([n + 3, 0, 4]), np.array([n + 5, 0, n + 6])
    )
    return windows, answer
