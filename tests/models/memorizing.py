"""Memorizing: what its tests must know, by the names of tests/helpers/variants.py."""

from reference.memorizing import State, unit_norm_forward

VARIANTS = {
    "ten-of-thirteen": {},
    "all-of-memory": {"retrieved": 13},
    "one-of-thirteen": {"retrieved": 1},
    "short-memory": {"memory": 3, "retrieved": 2},
    "as-long-as-a-segment": {"memory": 4, "retrieved": 2},
    "first-layer": {"memory_layer": 1},
    "last-layer": {"memory_layer": 3},
    "one-layer": {"layers": 1, "memory_layer": 1},
    "transformer-xl": {"memory": 0},
    "output-dropout": {"output_dropout": True},
}
KINDS = ("ten-of-thirteen",)

CARRIED = ("keys", "values")
WRONG_LENGTHS = {length: f"{length} tokens is not one of 4" for length in (0, 3, 8)}
DESCRIBED = {
    "ten-of-thirteen": (12, "12 tokens back; layer 2 looks up 10 of the last 13 tokens"),
}


def random_state(config, rng, batch):
    """A random state with keys of unit length."""
    cache = (batch, config.layers, config.heads, config.segment, config.head_width)
    memory = (batch, config.heads, config.memory, config.head_width)
    keys, _ = unit_norm_forward(rng.standard_normal(cache))
    memory_keys, _ = unit_norm_forward(rng.standard_normal(memory))
    values = rng.standard_normal(cache)
    memory_values = rng.standard_normal(memory)
    return State(keys, values, memory_keys, memory_values)
