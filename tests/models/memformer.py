"""Memformer: what its tests must know, by the names of tests/helpers/variants.py."""

import numpy as np

from reference.memformer import State
from reference.variants.memformer import TASKS, Task

VARIANTS = {
    "encoder-decoder": {},
    "encoder-decoder-clipped": {"max_distance": 2},
    "encoder-decoder-xl": {"positions": "transformer_xl"},
    "encoder-decoder-projected": {"slot_value": "projected"},
    "encoder-decoder-biased": {"slot_normalization": "biased"},
    "decoder-only": {"encoder_layers": 0},
    "decoder-only-clipped": {"encoder_layers": 0, "max_distance": 1, "slot_value": "projected"},
    "decoder-only-biased": {"encoder_layers": 0, "slot_normalization": "biased"},
    "decoder-only-xl": {"encoder_layers": 0, "positions": "transformer_xl", "decoder_layers": 2},
    "one-token": {"segment": 1},
    "one-slot": {"slots": 1, "encoder_layers": 1, "decoder_layers": 1},
    "one-head": {"heads": 1, "width": 5},
}
KINDS = ("encoder-decoder", "decoder-only")
MORE_KINDS = ("encoder-decoder-xl", "decoder-only-xl")
OTHER_TYPES = ("encoder-decoder-projected", "one-slot")
NO_CHOICE = ("one-token", "one-slot")

CARRIED = ("memory",)
LONG_LIVED = ("memory",)
WRONG_LENGTHS = {length: f"{length} tokens is not one of 6" for length in (0, 5, 7)}
DESCRIBED = {
    "encoder-decoder": (12, "4 memory slots (encoder-decoder)"),
    "decoder-only": (6, "4 memory slots (decoder-only, in each of its layers)"),
}
READ_TASKS = tuple(name for name in VARIANTS if not name.startswith("decoder-only"))


def random_state(config, rng, batch):
    """Random slots and previous tokens; the decoder-only model keeps no tokens."""
    memory = rng.standard_normal((batch, config.slot_sets, config.slots, config.width))
    length = config.segment if config.encoder_layers else 0
    previous = rng.integers(config.vocabulary, size=(batch, length))
    return State(memory, previous)


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
