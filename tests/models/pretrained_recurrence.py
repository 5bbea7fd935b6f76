"""Recurrence in GPT-2: what its tests must know, by the names of tests/helpers/variants.py."""

import numpy as np

from reference.pretrained_recurrence import State, initial_state

VARIANTS = {
    "overlapping": {},
    "disjoint": {"overlap": 0},
    "all-but-one-shared": {"overlap": 5},
    "plain": {"vectors": 0},
    "several-vectors": {"vectors": 4},
    "at-every-layer": {"insertion_layers": (1, 2, 3)},
    "at-the-last-layer": {"insertion_layers": (3,), "vectors": 2},
    "max": {"pooling": "max"},
    "fixed-key": {"pooling": "attention"},
    "advance": {"pool": "advance"},
    "advance-fixed-key": {"pool": "advance", "pooling": "attention", "overlap": 1},
    "pooled-after-the-norm": {"pool_final_norm": True},
    "linear-module": {"module_layers": 0},
    "one-token": {"segment": 1, "overlap": 0},
    "one-layer-one-head": {"layers": 1, "insertion_layers": (1,), "heads": 1, "width": 5},
}
KINDS = ("overlapping",)
MORE_KINDS = ("plain", "several-vectors")
OTHER_TYPES = ("max", "advance-fixed-key", "pooled-after-the-norm")
NO_CHOICE = ("one-token", "one-layer-one-head")

CARRIED = ("pooled",)
WRONG_LENGTHS = {length: f"a window of {length} tokens; it must have 1 to 6" for length in (0, 7)}
SHORTER = 2
DESCRIBED = {
    "overlapping": (6, "one pooled vector is carried from window to window, into layer 2"),
    "at-the-last-layer": (6, "2 of them shared with the previous one; 2 vectors are carried"),
}


def random_state(config, rng, batch):
    """A random state; lanes are in mid-document, except the last of several."""
    if config.vectors == 0:
        return initial_state({}, config, batch)
    pooled = rng.standard_normal((batch, config.width))
    present = np.arange(batch) < max(1, batch - 1)
    return State(pooled, present)
