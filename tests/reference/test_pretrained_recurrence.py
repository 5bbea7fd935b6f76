"""Recurrence added to GPT-2, the reference: operations against finite differences and against their definitions."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reference import pretrained_recurrence as ref
from tests.helpers.comparison import SIZES, assert_agree, brute_force_softmax, check_directions
from tests.helpers.variants import PAPERS, shaken

PAPER = PAPERS["pretrained_recurrence"]
SMALL, variant, random_params = PAPER.small, PAPER.variant, PAPER.random_params


# Definitions


def test_gelu_is_gpt2s():
    x = np.linspace(-4, 4, 81)
    expected = torch.nn.functional.gelu(torch.tensor(x), approximate="tanh")
    assert_agree({"y": expected}, {"y": ref.gelu_forward(x)[0]}, 1e-14)


@given(batch=st.integers(1, 3), length=st.integers(1, 5), vectors=st.integers(0, 3), size=SIZES, seed=st.integers(0, 2**31))
def test_attention_is_over_inserted_vectors_and_earlier_tokens(batch, length, vectors, size, seed):
    """One query and one head at a time (Figure 2): h_prev is normed, a key and a value, and nothing else."""
    rng = np.random.default_rng(seed)
    config, present = SMALL, rng.random(batch) < 0.6
    p = shaken(ref.init_layer(config, rng), rng)
    p["query"], p["query_bias"] = size * p["query"], size * p["query_bias"]
    x, inserted = rng.standard_normal((batch, length, 10)), rng.standard_normal((batch, vectors, 10))

    def norm(row):
        row = row - row.mean()
        return row / math.sqrt((row**2).mean() + 1e-5) * p["norm.scale"] + p["norm.bias"]

    expected = np.zeros_like(x)
    for b, i in np.ndindex(batch, length):
        rows = [norm(row) for row in ([*inserted[b]] if present[b] else []) + [*x[b, : i + 1]]]
        heads = []
        for own in (slice(0, 5), slice(5, 10)):
            query = (p["query"] @ norm(x[b, i]) + p["query_bias"])[own]
            shares = brute_force_softmax([query @ (p["key"] @ row + p["key_bias"])[own] / math.sqrt(5) for row in rows])
            values = [(p["value"] @ row + p["value_bias"])[own] for row in rows]
            heads.append(sum(share * v for share, v in zip(shares, values, strict=True)))
        expected[b, i] = x[b, i] + p["output"] @ np.concatenate(heads) + p["output_bias"]
    out, _ = ref.window_attention_forward(p, config, x, inserted if vectors else None, present, None)
    assert_agree({"out": expected}, {"out": out}, 1e-11)


@given(rows=st.integers(1, 6), seed=st.integers(0, 2**31), pooling=st.sampled_from(sorted(ref.POOLINGS)))
def test_pooling_is_equation_1(rows, seed, pooling):
    """Written out position by position and layer by layer; the alternatives by their definitions."""
    rng = np.random.default_rng(seed)
    config = dataclasses.replace(SMALL, pooling=pooling)
    outputs, alpha, key = rng.standard_normal((3, 2, rows, 10)), rng.standard_normal(3), rng.standard_normal(10)
    shares = brute_force_softmax(alpha)
    mixed = [[sum(shares[l] * outputs[l, b, i] for l in range(3)) for i in range(rows)] for b in range(2)]
    if pooling == "mean":
        expected = [sum(lane) / rows for lane in mixed]
    elif pooling == "max":
        expected = [np.max(lane, axis=0) for lane in mixed]
    else:
        weights = [brute_force_softmax([row @ key / math.sqrt(10) for row in lane]) for lane in mixed]
        expected = [sum(w * row for w, row in zip(ws, lane, strict=True)) for ws, lane in zip(weights, mixed, strict=True)]
    p = {"layer_scores": alpha, "fixed_key": key}
    assert_agree({"z": np.stack(expected)}, {"z": ref.pool_forward(p, config, outputs)[0]}, 1e-12)


# What the state means


@pytest.mark.parametrize("name", ["overlapping", "several-vectors", "at-every-layer", "advance-fixed-key", "plain"])
def test_checkpointing_at_the_bottleneck_is_exact(name):
    """Section 3.2 in the reference: the z's are all that is stored, with dropout."""
    config, rng = dataclasses.replace(variant(name), dropout=0.3), np.random.default_rng(3)
    params = random_params(config, rng)
    windows = ref.windows_of(config, rng.integers(11, size=(2, 16)))
    loss, grads, _ = ref.loss_and_gradients(params, config, windows, seed=4)
    again, replayed = ref.checkpointed(params, config, windows, seed=4)
    assert again == pytest.approx(loss, rel=1e-14)
    assert_agree(grads, replayed, 1e-12)
    assert ref.loss_and_gradients(params, config, windows, seed=5)[0] != loss


@pytest.mark.parametrize("name", ["overlapping", "pooled-after-the-norm", "advance-fixed-key"])
def test_gradient_through_all_windows_of_a_document(name):
    """The whole of what is trained against finite differences: two windows and a short third, z's and dropout."""
    config, rng = dataclasses.replace(variant(name), dropout=0.3), np.random.default_rng(8)
    params = random_params(config, rng)
    windows = ref.windows_of(config, rng.integers(11, size=(2, 2 * config.stride + config.overlap + 2)))
    _, grads, states = ref.loss_and_gradients(params, config, windows, seed=3)
    assert len(states) == len(windows) == 3

    check_directions(lambda moved: ref.loss_and_gradients(moved, config, windows, seed=3)[0], params, grads, rng, name)


def test_what_advance_pools_is_what_the_next_window_does_not_read():
    """Full windows and the last one of a context, whatever its length: all but the overlap."""
    config = dataclasses.replace(SMALL, pool="advance")
    assert [ref.pooled_rows(config, length) for length in (6, 5, 3, 2, 1)] == [4, 3, 1, 1, 1]
    assert [ref.pooled_rows(SMALL, length) for length in (6, 3)] == [6, 3]
    params, rng = random_params(config, np.random.default_rng(0)), np.random.default_rng(1)
    for length in range(3, 14):
        context = rng.integers(11, size=(1, length))
        states, read = [], ref.forward

        def watch(params, config, tokens, state, read=read, states=states):
            states.append((tokens.shape[1], state))
            return read(params, config, tokens, state)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ref, "forward", watch)
            ref.greedy_continuation(params, config, context, 1)
        ends = np.cumsum([size - 2 for size, _ in states[:-1]])  # each window's first size - o tokens are pooled
        assert ends[-1] == length - 2 and states[-1][0] == 2 and states[-1][1].present.all()
