"""Block-Recurrent: what its tests must know, by the names of tests/helpers/variants.py."""

import itertools

from reference.block_recurrent import State, unit_norm_forward

GATES = ("fixed", "lstm")
CONFIGURATIONS = ("skip", "dual", "single")

VARIANTS = {}
for gate, configuration, feedback in itertools.product(GATES, CONFIGURATIONS, (False, True)):
    variant = f"{gate}-{configuration}-feedback" if feedback else f"{gate}-{configuration}"
    VARIANTS[variant] = {"gate": gate, "configuration": configuration, "feedback": feedback}

VARIANTS |= {
    "two-recurrent": {"recurrent_layers": (1, 3)},
    "adjacent-recurrent-lstm": {
        "recurrent_layers": (2, 3),
        "gate": "lstm",
        "configuration": "dual",
    },
    "last-recurrent": {"recurrent_layers": (3,)},
    "feedback-of-two": {"recurrent_layers": (1, 3), "feedback": True},
    "output-dropout": {"output_dropout": True},
    "slide": {"recurrent_layers": ()},
    "xl": {"recurrent_layers": (), "segment": 4},
    "xl-recurrent": {"segment": 4},
    "one-layer-feedback": {"layers": 1, "recurrent_layers": (1,), "feedback": True},
    "states-outnumber-window": {"states": 5, "window": 3, "segment": 9},
}
KINDS = ("fixed-skip",)
MORE_KINDS = ("slide", "lstm-dual-feedback")
OTHER_TYPES = ("fixed-single", "lstm-single")

CARRIED = ("states", "keys", "values")
LONG_LIVED = ("states",)
WRONG_LENGTHS = {
    length: f"{length} tokens is not a positive multiple of window 4" for length in (0, 3, 13)
}
DESCRIBED = {
    "fixed-skip": (
        12,
        "3 layers x 4 = 12 tokens back; 3 recurrent states on layer 2 carry the rest",
    ),
}


def random_state(config, rng, batch):
    """A random state with keys of unit length."""
    shape = (batch, config.layers, config.heads, config.window, config.head_width)
    keys, _ = unit_norm_forward(rng.standard_normal(shape))
    states = rng.standard_normal((batch, len(config.recurrent_layers), config.states, config.width))
    values = rng.standard_normal(shape)
    return State(states, keys, values)
