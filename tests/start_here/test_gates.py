"""The gates' formulas, written out one number at a time, beside NumPy's and PyTorch's functions; float64 throughout.

Block-Recurrent: a gate decides how much of a state c stays, and how much of h, what attention found, is written (3.4).
    fixed   z = W_z h + b_z (1)         g = sigmoid(b_g) (2)               c' = c g + z (1 - g) (3)
    LSTM    z = tanh(W_z h + b_z) (4)   i = sigmoid(W_i h + b_i - 1) (5)   f = sigmoid(W_f h + b_f + 1) (6)   c' = c f + z i (7)
Memformer: a slot attends to itself and to N tokens, not to other slots (Figure 2c). Its next value is the mean, by the softmax
of the scores, of the slot and the tokens' values. `retention`, a bias on a slot's score of itself, says how slowly it forgets.
"""

import itertools
from math import exp, tanh

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelerated.attention.slots import Writer
from accelerated.block_recurrent import FixedGate, LSTMGate
from reference import block_recurrent, memformer

B, S, D, I, N, E = (
    2,
    3,
    4,
    5,
    6,
    7,
)  # lanes, states, their width, width of h, tokens, width of a head: no two are equal
GATES = {  # forward, backward, PyTorch's module, its matrices and biases
    "fixed": (
        block_recurrent.fixed_gate_forward,
        block_recurrent.fixed_gate_backward,
        FixedGate,
        "z",
        "zg",
    ),
    "lstm": (
        block_recurrent.lstm_gate_forward,
        block_recurrent.lstm_gate_backward,
        LSTMGate,
        "zif",
        "zif",
    ),
}


def one_number(kind, p, c, h, d):
    """The next value of feature d of a state c (D,) after h (I,), by Eqs. 1-3 or 4-7."""
    at = {name: float(p[f"weight_{name}"][d] @ h + p[f"bias_{name}"][d]) for name in GATES[kind][3]}
    if kind == "fixed":
        g = 1 / (1 + exp(-p["bias_g"][d]))  # the same whatever is read
        return c[d] * g + at["z"] * (1 - g)
    return c[d] / (1 + exp(-(at["f"] + 1))) + tanh(at["z"]) / (1 + exp(-(at["i"] - 1)))


@pytest.mark.parametrize("kind", GATES)
@given(seed=st.integers(0, 2**32 - 1), size=st.sampled_from([0.1, 1.0, 5.0]))
def test_a_gate_is_its_equations_and_its_gradient_is_their_derivative(kind, seed, size):
    forward, backward, module, matrices, biases = GATES[kind]
    rng = np.random.default_rng(seed)
    p = {f"weight_{m}": rng.standard_normal((D, I)) for m in matrices} | {
        f"bias_{b}": rng.standard_normal(D) for b in biases
    }
    c, h, dout = (size * rng.standard_normal((B, S, n)) for n in (D, I, D))
    by_hand = [
        [[one_number(kind, p, c[b, s], h[b, s], d) for d in range(D)] for s in range(S)]
        for b in range(B)
    ]
    gate, (out, cache) = module(D, I).double(), forward(p, c, h)
    gate.load_state_dict({name: torch.tensor(x) for name, x in p.items()})
    assert np.allclose(out, by_hand, rtol=1e-12, atol=1e-12)
    assert np.allclose(
        gate(torch.tensor(c), torch.tensor(h)).detach(), by_hand, rtol=1e-12, atol=1e-12
    )
    dc, dh, grads = backward(dout, cache)
    inputs = p | {"c": c, "h": h}
    for name, grad in (grads | {"c": dc, "h": dh}).items():
        direction, ends = rng.standard_normal(grad.shape), []
        for x in [inputs | {name: inputs[name] + step * direction} for step in (1e-6, -1e-6)]:
            ends.append((forward(x, x["c"], x["h"])[0] * dout).sum())
        assert np.isclose(
            (ends[0] - ends[1]) / 2e-6, (grad * direction).sum(), rtol=1e-6, atol=1e-6
        )


@given(seed=st.integers(0, 2**32 - 1))
def test_a_slot_keeps_as_much_of_itself_as_the_softmax_says(seed):
    rng, config, writer = (
        np.random.default_rng(seed),
        memformer.Config(width=D, heads=2, head_width=E),
        Writer(D, 2, E).double(),
    )
    p = {name: rng.standard_normal(tuple(x.shape)) for name, x in writer.named_parameters()}
    slots, tokens, dout, by_hand = (
        *(rng.standard_normal((B, rows, D)) for rows in (S, N, S)),
        np.empty((B, S, D)),
    )
    itself, others = (
        memformer.layer_norm_forward(p, name, x)[0]
        for name, x in (("memory_norm", slots), ("norm", tokens))
    )
    for b, s, head in itertools.product(range(B), range(S), range(2)):
        rows, part = (
            slice(E * head, E * (head + 1)),
            slice(D // 2 * head, D // 2 * (head + 1)),
        )  # this head's, of keys and values
        query = p["query"][rows] @ itself[b, s] + p["query_bias"][rows]
        scores = (
            np.stack([itself[b, s], *others[b]]) @ p["key"][rows].T @ query / E**0.5
        )  # (1 + N,), the slot's own first
        weights = np.exp(scores + p["retention"][head] * (np.arange(1 + N) == 0))
        values = np.stack(
            [slots[b, s, part], *(others[b] @ p["value"][part].T + p["value_bias"][part])]
        )
        by_hand[b, s, part] = weights @ values / weights.sum()
    writer.load_state_dict({name: torch.tensor(x) for name, x in p.items()})
    out, cache = memformer.slot_attention_forward(p, config, slots, tokens, None)
    assert np.allclose(out, by_hand, rtol=1e-9, atol=1e-9)
    assert np.allclose(
        writer(torch.tensor(slots), torch.tensor(tokens)).detach(), by_hand, rtol=1e-9, atol=1e-9
    )
    moved = [p | {"retention": p["retention"] + x} for x in (1e-6, -1e-6)]
    above, below = (
        memformer.slot_attention_forward(x, config, slots, tokens, None)[0] for x in moved
    )
    by_backward = memformer.slot_attention_backward(config, dout, cache)[2]["retention"].sum()
    assert np.isclose(((above - below) * dout).sum() / 2e-6, by_backward, rtol=1e-6, atol=1e-6)
