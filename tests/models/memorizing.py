"""Memorizing: what its tests must know, by the names of tests/helpers/variants.py."""

from reference.memorizing import State, unit_norm_forward


def random_state(config, rng, batch):
    """A random state with keys of unit length."""
    cache = (batch, config.layers, config.heads, config.segment, config.head_width)
    memory = (batch, config.heads, config.memory, config.head_width)
    keys, _ = unit_norm_forward(rng.standard_normal(cache))
    memory_keys, _ = unit_norm_forward(rng.standard_normal(memory))
    values = rng.standard_normal(cache)
    memory_values = rng.standard_normal(memory)
    return State(keys, values, memory_keys, memory_values)
