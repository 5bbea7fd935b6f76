"""Block-Recurrent: what its tests must know, by the names of tests/helpers/variants.py."""

from reference.block_recurrent import State, unit_norm_forward

LONG_LIVED = ("states",)


def random_state(config, rng, batch):
    """A random state with keys of unit length."""
    shape = (batch, config.layers, config.heads, config.window, config.head_width)
    keys, _ = unit_norm_forward(rng.standard_normal(shape))
    states = rng.standard_normal((batch, len(config.recurrent_layers), config.states, config.width))
    values = rng.standard_normal(shape)
    return State(states, keys, values)
