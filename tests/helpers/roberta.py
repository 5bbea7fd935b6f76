"""A small RoBERTa with recurrence, random weights and a batch of examples, for the tests of both sides."""

import numpy as np

from reference import roberta

CONFIG = roberta.Config(
    vocabulary=11,
    width=6,
    layers=3,
    heads=2,
    feed_forward=7,
    segment=8,
    module_width=5,
    dropout=0.0,
)


def shaken(config, rng):
    """The reference's parameters, moved away from zero and one so that every term has an effect."""
    return {name: value + 0.3 * rng.standard_normal(value.shape) for name, value in roberta.init_params(config, rng).items()}


def example(config, rng):
    """(three windows [(tokens, readable, text)], Answer) of three lanes: one has padding, the last ends before the others."""
    windows, n = [], config.segment
    for k in range(3):
        readable = np.ones((3, n), bool)
        readable[0, n - 2 :] = False
        readable[2] = k < 2
        text = readable.copy()
        text[:, :3] = False
        windows.append((rng.integers(config.vocabulary, size=(3, n)), readable, text))
    return windows, roberta.Answer(np.array([0, 2, 0]), np.array([n + 3, 0, 4]), np.array([n + 5, 0, n + 6]))
