"""Recurrence added to GPT-2: the paper's claims, for the reference and the accelerated model."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelerated import replay
from accelerated.data.lanes import Lanes
from accelerated.generation.continuation import Sampling, continue_text
from reference import pretrained_recurrence as ref
from tests.helpers.comparison import LADDER, SIZES, assert_agree, brute_force_softmax, draw
from tests.helpers.texts import documents_of
from tests.helpers.variants import PAPERS, shaken

PAPER = PAPERS["pretrained_recurrence"]
SMALL, variant = PAPER.small, PAPER.variant
random_params, to_torch, model_with = PAPER.random_params, PAPER.to_torch, PAPER.model_with
RECURRENT = [
    "overlapping",
    "several-vectors",
    "at-every-layer",
    "at-the-last-layer",
    "fixed-key",
    "linear-module",
]


@given(
    batch=st.integers(1, 3),
    length=st.integers(1, 5),
    vectors=st.integers(0, 3),
    size=SIZES,
    seed=st.integers(0, 2**31),
)
def test_attention_is_over_inserted_vectors_and_earlier_tokens(batch, length, vectors, size, seed):
    """One query and one head at a time (Figure 2): h_prev is normed, a key and a value, and nothing else."""
    rng = np.random.default_rng(seed)
    config, present = SMALL, rng.random(batch) < 0.6
    p = shaken(ref.init_layer(config, rng), rng)
    p["query"], p["query_bias"] = size * p["query"], size * p["query_bias"]
    x, inserted = (
        rng.standard_normal((batch, length, 10)),
        rng.standard_normal((batch, vectors, 10)),
    )

    def norm(row):
        row = row - row.mean()
        return row / math.sqrt((row**2).mean() + 1e-5) * p["norm.scale"] + p["norm.bias"]

    expected = np.zeros_like(x)
    for b, i in np.ndindex(batch, length):
        rows = [norm(row) for row in ([*inserted[b]] if present[b] else []) + [*x[b, : i + 1]]]
        heads = []
        for own in (slice(0, 5), slice(5, 10)):
            query = (p["query"] @ norm(x[b, i]) + p["query_bias"])[own]
            shares = brute_force_softmax(
                [query @ (p["key"] @ row + p["key_bias"])[own] / math.sqrt(5) for row in rows]
            )
            values = [(p["value"] @ row + p["value_bias"])[own] for row in rows]
            heads.append(sum(share * v for share, v in zip(shares, values, strict=True)))
        expected[b, i] = x[b, i] + p["output"] @ np.concatenate(heads) + p["output_bias"]
    out, _ = ref.window_attention_forward(
        p, config, x, inserted if vectors else None, present, None
    )
    assert_agree({"out": expected}, {"out": out}, 1e-11)


@given(
    rows=st.integers(1, 6),
    seed=st.integers(0, 2**31),
    pooling=st.sampled_from(sorted(ref.POOLINGS)),
)
def test_pooling_is_equation_1(rows, seed, pooling):
    """Written out position by position and layer by layer; the alternatives by their definitions."""
    rng = np.random.default_rng(seed)
    config = dataclasses.replace(SMALL, pooling=pooling)
    outputs, alpha, key = (
        rng.standard_normal((3, 2, rows, 10)),
        rng.standard_normal(3),
        rng.standard_normal(10),
    )
    shares = brute_force_softmax(alpha)
    mixed = [
        [sum(shares[l] * outputs[l, b, i] for l in range(3)) for i in range(rows)] for b in range(2)
    ]
    if pooling == "mean":
        expected = [sum(lane) / rows for lane in mixed]
    elif pooling == "max":
        expected = [np.max(lane, axis=0) for lane in mixed]
    else:
        weights = [
            brute_force_softmax([row @ key / math.sqrt(10) for row in lane]) for lane in mixed
        ]
        expected = [
            sum(w * row for w, row in zip(ws, lane, strict=True))
            for ws, lane in zip(weights, mixed, strict=True)
        ]
    p = {"layer_scores": alpha, "fixed_key": key}
    assert_agree({"z": np.stack(expected)}, {"z": ref.pool_forward(p, config, outputs)[0]}, 1e-12)


@pytest.mark.parametrize(
    "name",
    ["overlapping", "disjoint", "all-but-one-shared", "advance-fixed-key", "plain", "one-token"],
)
def test_a_greedy_continuation_in_a_new_window_is_the_references(name):
    config, rng = variant(name), np.random.default_rng(9)
    params = random_params(config, rng)
    for key in (
        "layers.1.value",
        "layers.1.output",
    ):  # larger, so that what is read changes the likeliest token
        params[key] = 8 * params[key]
    model, count = model_with(params, config).eval(), config.segment + 1 - max(1, config.overlap)
    for length in (1, 2, 6, 11):
        prompt = rng.integers(11, size=(2, length))
        expected = ref.greedy_continuation(params, config, prompt, count)
        found = torch.stack(
            [
                *continue_text(
                    model, torch.tensor(prompt), count, Sampling(0.0), None, new_window=True
                )
            ],
            1,
        )
        assert expected.shape == (2, count) and (found.numpy() == expected).all()
        if length <= config.overlap:  # nothing comes before the new window: it is a first window
            logits, _, _ = ref.forward(params, config, prompt, ref.initial_state(params, config, 2))
            assert (expected[:, 0] == logits[:, -1].argmax(-1)).all()


@pytest.mark.parametrize("name", RECURRENT)
def test_a_first_window_is_plain_gpt2s(name):
    """Whatever the state holds, it has no slot; a zero vector that is present is one."""
    config, rng = variant(name), np.random.default_rng(4)
    params, plain = random_params(config, rng), dataclasses.replace(config, vectors=0)
    gpt2, model = (
        {key: value for key, value in params.items() if not key.startswith("module.")},
        model_with(params, config),
    )
    tokens = rng.integers(11, size=(1, config.segment))
    expected = ref.forward(gpt2, plain, tokens, ref.initial_state(gpt2, plain, 1))[0]
    zero, other = (
        ref.State(pooled, np.zeros(1, bool))
        for pooled in (np.zeros((1, config.width)), draw(1, config.width))
    )
    for state in (ref.initial_state(params, config, 1), zero, other):
        assert_agree(
            {"logits": expected}, {"logits": ref.forward(params, config, tokens, state)[0]}, 1e-13
        )
        assert_agree(
            {"logits": expected},
            {"logits": model(torch.tensor(tokens), to_torch(state)).logits},
            1e-12,
        )
    present = zero._replace(present=np.ones(1, bool))
    for logits in (
        ref.forward(params, config, tokens, present)[0],
        model(torch.tensor(tokens), to_torch(present)).logits,
    ):
        assert np.abs(np.asarray(logits.tolist()) - expected).max() > 1e-4


@pytest.mark.parametrize("pool", ref.POOLS)
@pytest.mark.parametrize("overlap", [1, 2, 4])
def test_the_leak_is_where_nothing_is_scored(pool, overlap):
    """With pool all, z includes the o tokens that the next window reads again: predictions there can see their targets.

    In each window o - 1 predictions do (the last one's target comes after those tokens); scored predictions never do. With
    pool advance nothing leaks.
    """
    config = dataclasses.replace(SMALL, overlap=overlap, pool=pool)
    rng = np.random.default_rng(overlap)
    params = random_params(config, rng)
    model = model_with(params, config).eval()
    document = rng.integers(11, size=(1, 6 + 2 * config.stride + 1))

    def logits_of(text):
        """The logits of each window, after checking that both sides agree."""
        found, state, carried = [], ref.initial_state(params, config, 1), model.initial_state(1)
        for window in ref.windows_of(config, text):
            logits, state, _ = ref.forward(params, config, window.tokens, state)
            actual, carried, _ = model(torch.tensor(window.tokens), carried)
            assert_agree({"logits": logits}, {"logits": actual}, 1e-10)
            found.append(logits[0])
        return found

    windows, before, leaks = ref.windows_of(config, document), logits_of(document), 0
    for at in range(1, document.shape[1]):
        changed = document.copy()
        changed[0, at] = (changed[0, at] + 1 + rng.integers(10)) % 11
        for k, (window, old, new) in enumerate(
            zip(windows, before, logits_of(changed), strict=True)
        ):
            target, scored, differs = (
                k * config.stride + 1 + np.arange(len(old)),
                window.scored[0],
                (old != new).any(-1),
            )
            assert not differs[scored & (target <= at)].any(), "a scored prediction saw its target"
            leaks += differs[~scored & (target == at)].sum()
    assert leaks == (2 * (overlap - 1) if pool == "all" else 0), (
        "in each of the two windows after the first"
    )


@pytest.mark.parametrize(
    "name", ["overlapping", "advance", "all-but-one-shared", "plain", "several-vectors"]
)
def test_training_from_lanes_is_training_on_the_document(name):
    """Overlapping segments from Lanes, padded and with starts, give the gradients of the reference's own windows."""
    config = dataclasses.replace(variant(name), vocabulary=256)
    params = random_params(config, np.random.default_rng(4))
    [document] = documents_of([17])
    windows = ref.windows_of(
        config, np.append(document.inputs, document.targets[-1])[None].astype(int)
    )
    loss, grads, _ = ref.loss_and_gradients(params, config, windows)
    model = model_with(params, config).train()
    segments = list(Lanes([document], 2, config.segment, overlap=config.overlap))
    assert len(segments) == len(windows) and [bool(s.starts[0]) for s in segments] == [True] + [
        False
    ] * (len(windows) - 1)
    for propagate in replay.BACKPROP.values():
        model.zero_grad()
        actual, _, _ = propagate(model, segments, model.initial_state(2))
        assert actual.item() == pytest.approx(loss, rel=1e-12)
        found = {
            key: torch.zeros_like(p) if p.grad is None else p.grad
            for key, p in model.named_parameters()
        }
        assert_agree(grads, found, LADDER, name)


@pytest.mark.parametrize(
    "name", ["overlapping", "several-vectors", "at-every-layer", "advance-fixed-key", "plain"]
)
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


def test_what_advance_pools_is_what_the_next_window_does_not_read():
    """Full windows and short ones, whatever their length: all but the overlap."""
    config = dataclasses.replace(SMALL, pool="advance")
    assert [ref.pooled_rows(config, length) for length in (6, 5, 3, 2, 1)] == [4, 3, 1, 1, 1]
    assert [ref.pooled_rows(SMALL, length) for length in (6, 3)] == [6, 3]
