"""How a memory is written: the gates of Block-Recurrent and the slots of Memformer.

Each formula is written out here for one number at a time. NumPy's and PyTorch's functions, which
compute all numbers at once, must give the same. test_gradients.py shows that the gradients written
by hand in NumPy are the derivatives. All numbers are float64.

Block-Recurrent, section 3.4: a gate decides how much of a state c stays, and how much is written of
h, which attention has found.

    fixed gate   z = W_z h + b_z         (1)    LSTM gate   z = tanh(W_z h + b_z)         (4)
                 g = sigmoid(b_g)        (2)                i = sigmoid(W_i h + b_i - 1)  (5)
                 c' = c g + z (1 - g)    (3)                f = sigmoid(W_f h + b_f + 1)  (6)
                                                            c' = c f + z i                (7)

Memformer, section 2.2.3 and Figure 2c: a slot attends to itself and to the tokens of a segment,
never to another slot. The softmax of the scores says how much of the slot stays as it is, and how
much of each token's value is written.
"""

from itertools import product
from math import exp, sqrt, tanh
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelerated.block_recurrent import FixedGate, LSTMGate, Recurrence
from accelerated.memformer import Writer
from reference import block_recurrent as blocks
from reference import memformer
from reference.variants import block_recurrent as variants
from reference.variants.memformer import CHOICES
from tests.conftest import examples
from tests.start_here.strategies import compare, configs


class Shape(NamedTuple):
    """Sizes, of which no two are equal, so that no axis is taken for another."""

    B: int  # lanes: documents side by side
    S: int  # states or slots
    D: int  # their width
    I: int  # width of h
    N: int  # tokens


SHAPES = st.permutations(range(1, 9)).map(lambda sizes: Shape(*sizes[:5]))
# What a failure means
KEPT = "the gate would keep or write another share of a state than the equations say"
ATTENDED = "the slot would keep another share of itself than the softmax of its scores"
SEEDS = st.integers(0, 2**32 - 1)


def sigmoid(x):
    return 1 / (1 + exp(-x))


def affine(p, name, h, d):
    """Number d of W h + b, with the matrix and the bias of a name."""
    return p[f"weight_{name}"][d] @ h + p[f"bias_{name}"][d]


# ----------------------------------------------------------------------------
# the gates of Block-Recurrent
def fixed_gate(p, c, h, d):
    """Number d of the next state, of a state c (D,) and h (I,)."""
    z = affine(p, "z", h, d)  # (1)
    g = sigmoid(p["bias_g"][d])  # (2): the same whatever is read
    return c[d] * g + z * (1 - g)  # (3)


def lstm_gate(p, c, h, d):
    """Number d of the next state, of a state c (D,) and h (I,)."""
    z = tanh(affine(p, "z", h, d))  # (4)
    i = sigmoid(affine(p, "i", h, d) - 1)  # (5)
    f = sigmoid(affine(p, "f", h, d) + 1)  # (6)
    return c[d] * f + z * i  # (7)


class Gate(NamedTuple):
    by_hand: object  # the function above
    forward: object  # NumPy's
    module: type  # PyTorch's
    matrices: str  # the letters of its matrices
    biases: str

    def by_both(self, p, c, h):
        """{side: next states (B, S, D)}."""
        by_numpy, _ = self.forward(p, c, h)
        module = loaded(self.module(c.shape[-1], h.shape[-1]), p)
        return {"NumPy": by_numpy, "PyTorch": module(torch.tensor(c), torch.tensor(h))}


FIXED = Gate(fixed_gate, blocks.fixed_gate_forward, FixedGate, "z", "zg")
LSTM = Gate(lstm_gate, variants.lstm_gate_forward, LSTMGate, "zif", "zif")
both_gates = pytest.mark.parametrize("gate", [FIXED, LSTM], ids=["fixed", "LSTM"])
on_random_inputs = given(
    shape=SHAPES,
    seed=SEEDS,
    size=st.floats(0.1, 5),  # 5 saturates the sigmoids
)


def draw(gate, shape, seed, size):
    """(parameters, states c (B, S, D), what attention found h (B, S, I)), all random."""
    rng = np.random.default_rng(seed)
    p = {f"weight_{letter}": rng.standard_normal((shape.D, shape.I)) for letter in gate.matrices}
    p |= {f"bias_{letter}": rng.standard_normal(shape.D) for letter in gate.biases}
    c = size * rng.standard_normal((shape.B, shape.S, shape.D))
    h = size * rng.standard_normal((shape.B, shape.S, shape.I))
    return p, c, h


@both_gates
@on_random_inputs
def test_a_gate_is_its_equations(gate, shape, seed, size):
    """Section 3.4, Eqs. 1-3 and Eqs. 4-7."""
    p, c, h = draw(gate, shape, seed, size)
    expected = np.empty(c.shape)
    for b, s, d in np.ndindex(c.shape):
        expected[b, s, d] = gate.by_hand(p, c[b, s], h[b, s], d)
    for side, found in gate.by_both(p, c, h).items():
        compare(f"{side}'s next state", found, expected, 1e-12, KEPT, 1e-12)


@both_gates
@on_random_inputs
def test_a_gate_keeps_its_bound(gate, shape, seed, size):
    """A fixed gate mixes each number of a state with z; an LSTM gate adds at most 1 to it."""
    p, c, h = draw(gate, shape, seed, size)
    lowest = -np.abs(c) - 1
    highest = np.abs(c) + 1
    if gate is FIXED:
        z = h @ p["weight_z"].T + p["bias_z"]
        lowest = np.minimum(c, z)
        highest = np.maximum(c, z)
    for side, found in gate.by_both(p, c, h).items():
        within = np.clip(torch.as_tensor(found).detach().numpy(), lowest, highest)
        compare(
            f"{side}'s next state", found, within, 1e-12, "a state could grow without limit", 1e-12
        )


@both_gates
@pytest.mark.parametrize("configuration", variants.CONFIGURATIONS)
@examples(5)
@given(data=st.data(), seed=SEEDS)
def test_a_configuration_is_its_gates_and_its_mlp(gate, configuration, data, seed):
    """Section 3.6: skip has one gate, single one after an MLP, dual one for each residual."""
    kind = "fixed" if gate is FIXED else "lstm"
    config = data.draw(configs("block_recurrent", gate=kind, configuration=configuration))
    rng = np.random.default_rng(seed)
    p = {}
    for name, value in config.operations.init_gating(config, rng).items():
        p[name] = value + rng.standard_normal(value.shape)
    c = rng.standard_normal((2, 3, config.width))
    h = rng.standard_normal((2, 3, 2 * config.heads * config.head_width))
    expected = np.empty(c.shape)
    for b, s in np.ndindex(2, 3):
        expected[b, s] = configured(gate, configuration, p, c[b, s], h[b, s])

    by_numpy, _ = config.operations.gating_forward(p, config, c, h)
    compare("NumPy's next state", by_numpy, expected, 1e-9, KEPT, 1e-9)
    module = Recurrence(config)
    tensors = {name: torch.tensor(array) for name, array in p.items()}
    names = module.load_state_dict(tensors, strict=False)
    assert not names.unexpected_keys, f"PyTorch's cell has no {names.unexpected_keys}"
    by_torch = module.gated(torch.tensor(c), torch.tensor(h))
    compare("PyTorch's next state", by_torch, expected, 1e-9, KEPT, 1e-9)


def configured(gate, configuration, p, c, h):
    """The next state (D,) of a state c (D,) and h (2HE,)."""

    def gated(name, c, x):
        own = {key.removeprefix(f"{name}."): array for key, array in p.items()}
        return np.array([gate.by_hand(own, c, x, d) for d in range(len(c))])

    if configuration == "single":
        return gated("mlp_gate", c, np.maximum(p["mlp_hidden"] @ h, 0))
    middle = gated("attention_gate", c, h)
    if configuration == "skip":
        return middle
    normal, _ = blocks.layer_norm_forward(p, "mlp_norm", middle[None, None])
    return gated("mlp_gate", middle, np.maximum(p["mlp_hidden"] @ normal[0, 0], 0))


# ----------------------------------------------------------------------------
# the slots of Memformer
def next_slot(config, p, own_value, normal_slot, normal_tokens, head):
    """One head's part (D/H,) of a slot's next value; the slot attends to itself and to tokens."""
    width = config.head_width
    rows = slice(width * head, width * (head + 1))  # the head's part of queries and keys
    width = config.width // config.heads
    part = slice(width * head, width * (head + 1))  # and of values
    query = p["query"][rows] @ normal_slot + p["query_bias"][rows]

    def score(normal):
        key = p["key"][rows] @ normal + p["key_bias"][rows]  # one key matrix for slots and tokens
        return query @ key / sqrt(config.head_width)

    def value(token):
        return p["value"][part] @ token + p["value_bias"][part]

    scores = [score(normal_slot), *(score(token) for token in normal_tokens)]
    values = [own_value[part], *(value(token) for token in normal_tokens)]
    weights = [exp(score) / sum(map(exp, scores)) for score in scores]  # softmax
    return sum(weight * value for weight, value in zip(weights, values, strict=True))


@pytest.mark.parametrize("slot_value", CHOICES["slot_value"])
@examples(6)
@given(data=st.data(), shape=SHAPES, seed=SEEDS)
def test_a_slot_keeps_as_much_of_itself_as_the_softmax_says(slot_value, data, shape, seed):
    """Section 2.2.3: if a slot attends only to itself, its information does not change.

    So its own value is the slot; or it is projected, which the same section says too.
    """
    config = data.draw(configs("memformer", slot_value=slot_value))
    rng = np.random.default_rng(seed)
    writer = Writer(config)
    p = {name: rng.standard_normal(tuple(x.shape)) for name, x in writer.named_parameters()}
    slots = rng.standard_normal((shape.B, shape.S, config.width))
    tokens = rng.standard_normal((shape.B, shape.N, config.width))
    normal_slots, _ = memformer.layer_norm_forward(p, "memory_norm", slots)
    normal_tokens, _ = memformer.layer_norm_forward(p, "norm", tokens)
    heads = range(config.heads)
    expected = np.empty((shape.B, shape.S, config.heads, config.width // config.heads))
    for b, s, head in product(range(shape.B), range(shape.S), heads):
        normal = normal_slots[b, s]
        own_value = slots[b, s]
        if slot_value == "projected":
            own_value = p["value"] @ normal + p["value_bias"]
        expected[b, s, head] = next_slot(config, p, own_value, normal, normal_tokens[b], head)
    expected = expected.reshape(slots.shape)  # heads beside each other

    by_numpy, _ = config.operations.slot_attention_forward(p, config, slots, tokens)
    compare("NumPy's next slot", by_numpy, expected, 1e-9, ATTENDED, 1e-9)
    by_torch = loaded(writer, p)(torch.tensor(slots), torch.tensor(tokens))
    compare("PyTorch's next slot", by_torch, expected, 1e-9, ATTENDED, 1e-9)


# ----------------------------------------------------------------------------
def loaded(module, p):
    """PyTorch's module with these parameters, in float64."""
    module.load_state_dict({name: torch.tensor(array) for name, array in p.items()})
    return module
