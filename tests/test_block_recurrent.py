"""Block-Recurrent Transformer: the paper's claims, for the reference and the accelerated model."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accelerated.block_recurrent as fast
from accelerated.attention.sliding_window import position_bucket, tile_distance, window_mask
from accelerated.block_recurrent import BlockRecurrent
from accelerated.protocol import computing_in
from reference import block_recurrent as ref
from tests.helpers.comparison import assert_agree, named
from tests.helpers.definitions import slow_bucket
from tests.helpers.rollouts import filled
from tests.helpers.variants import PAPERS

PAPER = PAPERS["block_recurrent"]
SMALL, VARIANTS, variant = PAPER.small, PAPER.variants, PAPER.variant
random_state = PAPER.random_state
to_torch = PAPER.to_torch


# Definitions


@given(window=st.integers(1, 9))
def test_masks_equal_the_definition(window):
    expected = np.zeros((window, 2 * window), bool)
    for i in range(window):
        for j in range(2 * window):
            distance = (window + i) - j  # both counted from the first token of the previous block
            expected[i, j] = 1 <= distance <= window
    assert (ref.tile_mask(window) == expected).all()
    assert (window_mask(tile_distance(window), window).numpy() == expected).all()
    assert (expected.sum(1) == window).all()


@given(half=st.integers(1, 20), extra=st.integers(1, 200))
def test_position_buckets_equal_the_rule(half, extra):
    buckets, furthest = 2 * half, half + extra
    distances = np.arange(0, 3 * furthest)
    expected = [slow_bucket(d, buckets, furthest) for d in distances.tolist()]
    bucket = ref.position_bucket(distances, buckets, furthest)
    assert (np.abs(bucket - expected) <= (distances % furthest != 0)).all()  # the logarithm may round at a bucket's edge
    assert (np.diff(bucket) >= 0).all() and bucket[0] == 0 and bucket[-1] == buckets - 1
    assert (position_bucket(torch.tensor(distances), buckets, furthest).numpy() == bucket).all()


@given(values=st.lists(st.floats(-4, 4), min_size=6, max_size=6))
def test_gates_equal_their_equations(values):
    """One state of width 1, computed with scalars, for both sides."""
    c, h, w, bias, w2, b2 = values
    sigmoid = lambda x: 1 / (1 + math.exp(-x))  # noqa: E731
    carry, hidden = np.full((1, 1, 1), c), np.full((1, 1, 1), h)
    fixed = {"weight_z": np.array([[w]]), "bias_z": np.array([bias]), "bias_g": np.array([b2])}
    z, g = w * h + bias, sigmoid(b2)
    check_gate("fixed", fixed, carry, hidden, c * g + z * (1 - g))
    lstm = {
        "weight_z": np.array([[w]]),
        "bias_z": np.array([bias]),
        "weight_i": np.array([[w2]]),
        "bias_i": np.array([b2]),
        "weight_f": np.array([[b2]]),
        "bias_f": np.array([w2]),
    }
    z, i, f = math.tanh(w * h + bias), sigmoid(w2 * h + b2 - 1), sigmoid(b2 * h + w2 + 1)
    check_gate("lstm", lstm, carry, hidden, c * f + z * i)


def check_gate(kind, p, carry, hidden, expected):
    actual = ref.GATES[kind][0](p, carry, hidden)[0].item()
    gate = fast.GATES[kind](width=1, fan_in=1)
    gate.load_state_dict({name: torch.tensor(value) for name, value in p.items()})
    torch_actual = gate(torch.tensor(carry), torch.tensor(hidden)).item()
    assert math.isclose(actual, expected, rel_tol=1e-12, abs_tol=1e-12)
    assert math.isclose(torch_actual, expected, rel_tol=1e-12, abs_tol=1e-12)


def test_a_step_from_a_state_that_does_not_fit_is_refused():
    """Another window, other states, other lanes inside a block."""
    model, token = BlockRecurrent(SMALL).eval(), torch.zeros(1, dtype=torch.long)
    for change, words in (
        ({"window": 3}, r"keys has shape \(1, 3, 2, 3, 5\), expected \(1, 3, 2, 4, 5\)"),
        ({"states": 4}, r"states has shape \(1, 1, 4, 6\), expected \(1, 1, 3, 6\)"),
    ):
        other = BlockRecurrent(dataclasses.replace(SMALL, **change)).eval()
        for state in (other.initial_state(1), other.step(token, other.initial_state(1))[1]):
            with pytest.raises(ValueError, match=words):
                model.step(token, state)
    _, stream = model.step(token, model.initial_state(1))
    with pytest.raises(ValueError, match="1 lanes, expected 2"):
        model.step(token.repeat(2), stream)


# Half precision


def test_a_forget_gate_near_one_forgets_over_hundreds_of_blocks_in_bfloat16():
    """Gates of 0.99909 and 0.00091, from inputs that bfloat16 holds exactly, agree with float64 after 500 blocks."""
    torch.set_default_dtype(torch.float32)
    gate, carry, expected = fast.LSTMGate(width=2, fan_in=3), torch.tensor([[[1.0, -2.0]]]), np.array([1.0, -2.0])
    values = {"bias_f": [6.0, 6.0], "bias_i": [-6.0, -6.0], "bias_z": [0.5, 0.5]}
    zeros = {name: torch.zeros_like(value) for name, value in gate.state_dict().items()}
    gate.load_state_dict(zeros | {name: torch.tensor(value) for name, value in values.items()})
    forget, write = 1 / (1 + math.exp(-7)), 1 / (1 + math.exp(7))
    with torch.no_grad(), computing_in(gate, torch.bfloat16):
        for _ in range(500):
            carry, expected = gate(carry, torch.ones(1, 1, 3, dtype=torch.bfloat16)), expected * forget + math.tanh(0.5) * write
    assert carry.dtype == torch.float32
    assert_agree({"carry": expected}, {"carry": carry[0, 0]}, 1e-4)


# Behaviour


@pytest.mark.parametrize("name", VARIANTS)
def test_segmented_run_equals_one_long_run(name):
    config, rng = variant(name), np.random.default_rng(5)
    params, model = ref.init_params(config, rng), BlockRecurrent(config).eval()
    w, state = config.window, random_state(config, rng, 2)
    tokens = rng.integers(config.vocabulary, size=(2, 5 * w))
    whole, after, _ = ref.forward(params, config, tokens, state)
    parts, carried = [], state
    for start, stop in ((0, w), (w, 3 * w), (3 * w, 5 * w)):
        part, carried, _ = ref.forward(params, config, tokens[:, start:stop], carried)
        parts.append(part)
    rows = filled({"logits": np.concatenate(parts, 1)} | named("state", carried))
    assert_agree(filled({"logits": whole} | named("state", after)), rows, 1e-12)
    torch_tokens = torch.tensor(tokens)
    long = model(torch_tokens, to_torch(state))
    first = model(torch_tokens[:, : 2 * w], to_torch(state))
    second = model(torch_tokens[:, 2 * w :], first.state)
    assert_agree({"logits": long.logits}, {"logits": torch.cat([first.logits, second.logits], 1)}, 1e-12)


def test_slide_forgets_beyond_its_reach_and_recurrence_does_not():
    """Slide reaches back W tokens per layer; the recurrent model's state reaches further."""
    for layers, recurrent, remembers in (((), (), False), ((), (2,), True)):
        config = dataclasses.replace(SMALL, layers=2, recurrent_layers=recurrent or layers, segment=24)
        model = BlockRecurrent(config, seed=9).eval()
        tokens = torch.randint(11, (1, 24))
        other = tokens.clone()
        other[0, 0] = (other[0, 0] + 1) % 11
        a, b = (model(t, model.initial_state(1)).logits for t in (tokens, other))
        beyond = 2 * config.window + 1
        assert torch.equal(a[:, beyond:], b[:, beyond:]) is not remembers
        assert not torch.allclose(a[:, beyond - 1], b[:, beyond - 1])
