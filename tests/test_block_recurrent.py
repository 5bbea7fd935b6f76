"""Block-Recurrent Transformer: the paper's claims, for the reference and the accelerated model."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accelerated.block_recurrent as fast
from accelerated.attention.relative_shift import by_query_and_key
from accelerated.attention.sliding_window import position_bucket, tables_by_distance
from accelerated.protocol import computing_in
from reference import block_recurrent as ref
from tests.helpers.comparison import assert_agree, named, slow_bucket
from tests.helpers.rollouts import filled
from tests.helpers.variants import PAPERS

PAPER = PAPERS["block_recurrent"]
VARIANTS, variant = PAPER.variants, PAPER.variant
random_state = PAPER.random_state


# Definitions


@given(window=st.integers(1, 9))
def test_masks_equal_the_definition(window):
    expected = np.zeros((window, 2 * window), bool)
    for i in range(window):
        for j in range(2 * window):
            distance = (window + i) - j  # both counted from the first token of the previous block
            expected[i, j] = 1 <= distance <= window
    assert (ref.tile_mask(window) == expected).all()
    assert (by_query_and_key(tables_by_distance(window, 4, 8)[1], window).numpy() == expected).all()
    assert (expected.sum(1) == window).all()


@given(half=st.integers(1, 20), extra=st.integers(1, 200))
def test_position_buckets_equal_the_rule(half, extra):
    """Exactly, except within 1e-9 of a bucket's edge, where a logarithm may round; on both sides alike."""
    buckets, furthest = 2 * half, half + extra
    distances = np.arange(3 * furthest)
    expected = np.array([slow_bucket(d, buckets, furthest) for d in distances.tolist()])
    bucket = ref.position_bucket(distances, buckets, furthest)
    steps = half * np.log(np.maximum(distances, half) / half) / math.log(furthest / half)
    edge = (np.abs(steps - np.round(steps)) < 1e-9) & (distances > half) & (distances < furthest)
    assert (bucket[~edge] == expected[~edge]).all() and (np.abs(bucket - expected) <= 1).all()
    assert (position_bucket(torch.tensor(distances), buckets, furthest).numpy() == bucket).all()


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
    """The reference; a rollout of segments is compared with the accelerated model elsewhere."""
    config, rng = variant(name), np.random.default_rng(5)
    params, w, state = ref.init_params(config, rng), config.window, random_state(config, rng, 2)
    tokens = rng.integers(config.vocabulary, size=(2, 5 * w))
    whole, after, _ = ref.forward(params, config, tokens, state)
    parts, carried = [], state
    for start, stop in ((0, w), (w, 3 * w), (3 * w, 5 * w)):
        part, carried, _ = ref.forward(params, config, tokens[:, start:stop], carried)
        parts.append(part)
    rows = filled({"logits": np.concatenate(parts, 1)} | named("state", carried))
    assert_agree(filled({"logits": whole} | named("state", after)), rows, 1e-12)
