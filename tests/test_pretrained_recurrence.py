"""Recurrence added to GPT-2: the paper's claims, for the reference.

tests/test_contract.py shows that the accelerated model computes the same.
"""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelerated.generation.continuation import Sampling, continue_text
from reference import pretrained_recurrence as ref
from reference.variants import pretrained_recurrence as variants
from tests.helpers.comparison import SEEDS, assert_agree, draw, mixture
from tests.helpers.rollouts import both_sides
from tests.helpers.variants import PAPERS

PAPER = PAPERS["pretrained_recurrence"]
SMALL = PAPER.small
V = SMALL.vocabulary  # 11
D = SMALL.width  # 10
T = SMALL.segment  # 6


@pytest.mark.parametrize("pooling", variants.POOLINGS)
@given(rows=st.integers(1, 6), seed=SEEDS)
def test_pooling_is_equation_1(pooling, rows, seed):
    """Written out by positions and layers; the alternatives by their definitions."""
    rng = np.random.default_rng(seed)
    config = dataclasses.replace(SMALL, pooling=pooling)
    outputs = rng.standard_normal((SMALL.layers, 2, rows, D))
    alpha = rng.standard_normal(SMALL.layers)
    key = rng.standard_normal(D)
    expected = []
    for lane in range(2):
        mixed = np.stack([mixture(alpha, outputs[:, lane, i]) for i in range(rows)])
        pools = {
            "mean": sum(mixed) / rows,
            "max": mixed.max(axis=0),
            "attention": mixture([row @ key / math.sqrt(D) for row in mixed], mixed),
        }
        expected.append(pools[pooling])
    z, _ = ref.pool_forward(
        {"module.layer_scores": alpha, "module.fixed_key": key}, config, outputs
    )
    assert_agree(np.stack(expected), z, 1e-12, "z")


@pytest.mark.parametrize("length", [1, 2, 6, 11])
@pytest.mark.parametrize("name", ["overlapping", "disjoint", "all-but-one-shared", "plain"])
def test_a_greedy_continuation_in_a_new_window_is_the_references(name, length):
    config = PAPER.variant(name)
    rng = np.random.default_rng(length)
    params = PAPER.random_params(config, rng)
    # Larger, so that what is read changes the likeliest token
    for key in ("layers.1.value", "layers.1.output"):
        params[key] = 8 * params[key]
    model = PAPER.model_with(params, config).eval()
    count = config.segment + 1 - max(1, config.overlap)
    prompt = rng.integers(V, size=(2, length))
    expected = variants.greedy_continuation(params, config, prompt, count)
    tokens = continue_text(model, torch.tensor(prompt), count, Sampling(0.0), None, new_window=True)
    assert np.stack([*tokens], 1).tolist() == expected.tolist(), "not the reference's greedy text"
    assert expected.shape == (2, count)


@pytest.mark.parametrize("name", ["overlapping", "several-vectors", "at-every-layer"])
def test_a_first_window_is_plain_gpt2s(name):
    """Whatever the state holds, it has no slot; a zero vector that is present is one."""
    config, rng, params, *_ = both_sides("pretrained_recurrence", name)
    plain = dataclasses.replace(config, vectors=0)
    gpt2 = {key: value for key, value in params.items() if not key.startswith("module.")}
    tokens = rng.integers(V, size=(1, T))
    expected, _, _ = ref.forward(gpt2, plain, tokens, ref.initial_state(gpt2, plain, 1))

    absent = np.zeros(1, bool)
    zero = np.zeros((1, D))
    start = ref.initial_state(params, config, 1)
    for state in (start, ref.State(zero, absent), ref.State(draw(1, D), absent)):
        logits, _, _ = ref.forward(params, config, tokens, state)
        assert_agree(expected, logits, 1e-13, "logits")
    logits, _, _ = ref.forward(params, config, tokens, ref.State(zero, ~absent))
    assert np.abs(logits - expected).max() > 1e-4, "a vector that is present is not seen"


@pytest.mark.parametrize("pool", variants.POOLS)
@pytest.mark.parametrize("overlap", [1, 2, 4])
def test_the_leak_is_where_nothing_is_scored(pool, overlap):
    """With pool all, z includes the o tokens that the next window reads again.

    Predictions there can see their targets. In each window o - 1 do (the last one's target comes
    after those tokens); scored predictions never do. With pool advance nothing leaks.
    """
    config = dataclasses.replace(SMALL, overlap=overlap, pool=pool)
    rng = np.random.default_rng(overlap)
    params = PAPER.random_params(config, rng)
    stride = config.segment - config.overlap
    document = rng.integers(V, size=(1, T + 2 * stride + 1))

    def logits_of(text):
        """The logits (N, V) of each window."""
        state = ref.initial_state(params, config, 1)
        found = []
        for window in ref.windows_of(config, text):
            logits, state, _ = ref.forward(params, config, window.tokens, state)
            found.append(logits[0])
        return found

    windows = ref.windows_of(config, document)
    before = logits_of(document)
    leaks = 0
    for at in range(1, document.shape[1]):
        changed = document.copy()
        changed[0, at] = (changed[0, at] + 1 + rng.integers(V - 1)) % V
        after = logits_of(changed)
        for k, window in enumerate(windows):
            target = k * stride + 1 + np.arange(len(before[k]))  # of each prediction
            scored = window.scored[0]
            differs = (before[k] != after[k]).any(-1)
            saw = differs & scored & (target <= at)
            assert not saw.any(), f"window {k}: scored predictions of {target[saw]} see token {at}"
            leaks += (differs & ~scored & (target == at)).sum()
    two_windows = 2 * (overlap - 1)  # those after the first
    assert leaks == (two_windows if pool == "all" else 0), "unscored predictions see targets"


@pytest.mark.parametrize("name", ["overlapping", "several-vectors", "advance-fixed-key", "plain"])
def test_checkpointing_at_the_bottleneck_is_exact(name):
    """Section 3.2 in the reference: the z's are all that is stored, with dropout."""
    config, rng, params, *_ = both_sides("pretrained_recurrence", name, dropout=0.3)
    windows = ref.windows_of(config, rng.integers(V, size=(2, 16)))
    loss, grads = ref.loss_and_gradients(params, config, windows, seed=4)
    again, replayed = variants.checkpointed(params, config, windows, seed=4)
    assert again == pytest.approx(loss, rel=1e-14), "the loss by checkpoints"
    assert_agree(grads, replayed, 1e-12)
    other, _ = ref.loss_and_gradients(params, config, windows, seed=5)
    assert other != loss, "nothing is dropped"


def test_what_advance_pools_is_what_the_next_window_does_not_read():
    """Full windows and short ones, whatever their length: all but the overlap."""
    config = dataclasses.replace(SMALL, pool="advance")
    assert [variants.pooled_rows(config, length) for length in (6, 5, 3, 2, 1)] == [
        4,
        3,
        1,
        1,
        1,
    ], "rows that attention pools: pooled_rows"
    assert [variants.pooled_rows(SMALL, length) for length in (6, 3)] == [6, 3]
