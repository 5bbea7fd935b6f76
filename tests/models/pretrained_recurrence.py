"""Recurrence in GPT-2: what its tests must know, by the names of tests/helpers/variants.py."""

import numpy as np

from reference.pretrained_recurrence import State, initial_state

SHORTER = 2


def random_state(config, rng, batch):
    """A random state; lanes are in mid-document, except the last of several."""
    if config.vectors == 0:
        return initial_state({}, config, batch)
    pooled = rng.standard_normal((batch, config.width))
    present = np.arange(batch) < max(1, batch - 1)
    return State(pooled, present)
