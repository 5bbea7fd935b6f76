"""Memformer: what its tests must know, by the names of tests/helpers/variants.py."""

import numpy as np

from reference.variants.memformer import TASKS, Task

LONG_LIVED = ("memory",)


def random_task(config, rng, kinds):
    """A random Task with one of `kinds` per lane; infilling lanes have padding."""
    kinds = np.array(kinds)
    batch = len(kinds)
    n = config.segment
    reading, prompt = rng.integers(config.vocabulary, size=(2, batch, n))
    readable = np.ones((batch, n), bool)
    for lane in np.flatnonzero(kinds == TASKS.index("infilling")):
        reading[lane, n // 2] = config.special("mask")
        readable[lane, n // 2 + 1 + lane % 2 :] = False
    return Task(kinds, reading, readable, prompt)
