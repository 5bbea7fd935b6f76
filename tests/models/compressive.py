"""Compressive: what its tests must know, by the names of tests/helpers/variants.py."""

from reference.compressive import State


def random_state(config, rng, batch):
    """A random state of both memories."""
    memory = rng.standard_normal((batch, config.layers, config.memory, config.width))
    compressed = rng.standard_normal((batch, config.layers, config.compressed_memory, config.width))
    return State(memory, compressed)
