"""Block-Recurrent Transformer: the paper's claims, for the reference, and where it has its own code for the accelerated model."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelerated.attention.sliding_window import position_bucket
from reference import block_recurrent as ref
from tests.helpers.comparison import (
    SIZES,
    assert_agree,
    brute_force_softmax,
    draw,
    named,
    slow_bucket,
)
from tests.helpers.rollouts import filled
from tests.helpers.variants import PAPERS

PAPER = PAPERS["block_recurrent"]
SMALL, VARIANTS, variant, random_state = (
    PAPER.small,
    PAPER.variants,
    PAPER.variant,
    PAPER.random_state,
)


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


def test_queries_and_keys_have_unit_length_and_values_have_not():
    p = {name: draw(6, 5) for name in ("key", "value")}
    projected, _ = ref.head_projections_forward(p, ("key", "value"), 2, draw(2, 4, 5))
    assert np.allclose((projected["key"] ** 2).sum(-1), 1, atol=1e-4)
    assert not np.isclose((projected["value"] ** 2).sum(-1), 1).any()


@given(
    window=st.integers(1, 5),
    blocks=st.integers(1, 3),
    heads=st.integers(1, 3),
    width=st.integers(1, 4),
    size=SIZES,
    seed=st.integers(0, 2**31),
)
def test_sliding_attention_equals_direct_indexing(window, blocks, heads, width, size, seed):
    """Each token by itself, over the W keys before it, indexed in the whole sequence with no tiles."""
    rng, length = np.random.default_rng(seed), window * blocks
    config = dataclasses.replace(SMALL, window=window, segment=length, heads=heads)
    p = {"scale": rng.standard_normal(heads) + 2, "position_bias": rng.standard_normal((heads, 6))}
    query = size * rng.standard_normal((2, heads, length, width))
    keys, values = rng.standard_normal((2, 2, heads, window + length, width))
    expected = np.zeros((2, heads, length, width))
    for b, h, i in np.ndindex(2, heads, length):
        seen = range(i, i + window)  # key j stands window tokens earlier than its index
        biases = [p["position_bias"][h, slow_bucket(i + window - j, 6, 5)] for j in seen]
        scores = [
            (query[b, h, i] @ keys[b, h, j] + bias) * p["scale"][h]
            for j, bias in zip(seen, biases, strict=True)
        ]
        expected[b, h, i] = sum(
            w * values[b, h, j] for w, j in zip(brute_force_softmax(scores), seen, strict=True)
        )
    actual, _ = ref.sliding_attention_forward(p, config, query, keys, values, None)
    assert_agree({"out": expected}, {"out": actual}, 1e-10)


def test_state_update_equals_direct_attention():
    """One head and one state at a time: S states and all 2W token keys, no mask, no bias, then the fixed gate (3.2, 3.4)."""
    p = ref.init_recurrence(SMALL, np.random.default_rng(2))
    p |= {"scale": np.array([2.0, 3.0]), "cross_scale": np.array([4.0, 5.0])}
    states, (keys, values) = draw(1, 3, 6), draw(2, 1, 2, 8, 5)
    seen = [
        ref.layer_norm_forward(p, "norm", c)[0] + identity
        for c, identity in zip(states[0], p["ids"], strict=True)
    ]
    head = lambda name, x, h: (p[name] @ x).reshape(2, 5)[h]  # noqa: E731
    unit = lambda x: x / math.sqrt((x**2).sum() + ref.NORM_EPSILON)  # noqa: E731

    def read(scores, rows):
        return sum(w * row for w, row in zip(brute_force_softmax(scores), rows, strict=True))

    expected = np.zeros((1, 3, 6))
    for s in range(3):
        own, cross = [], []
        for h in range(2):
            query, cross_query = (
                unit(head("query", seen[s], h)),
                unit(head("cross_query", seen[s], h)),
            )
            scores = [query @ unit(head("key", x, h)) * p["scale"][h] for x in seen]
            own.append(read(scores, [head("value", x, h) for x in seen]))
            cross.append(
                read([cross_query @ key * p["cross_scale"][h] for key in keys[0, h]], values[0, h])
            )
        z = (
            p["attention_gate.weight_z"] @ np.concatenate([*own, *cross])
            + p["attention_gate.bias_z"]
        )
        g = 1 / (1 + np.exp(-p["attention_gate.bias_g"]))
        expected[0, s] = states[0, s] * g + z * (1 - g)
    projected, _ = ref.state_projection_forward(p, SMALL, states)
    actual, _ = ref.state_update_forward(p, SMALL, states, projected, keys, values)
    assert_agree({"next states": expected}, {"next states": actual}, 1e-12)


def test_states_read_both_blocks_and_tokens_read_states_before_their_update():
    """The next state depends on the layer's previous block; a block's logits on the incoming state, not on its own update."""
    params, rng = ref.init_params(SMALL, np.random.default_rng(0)), np.random.default_rng(1)
    tokens, state = rng.integers(11, size=(1, 4)), random_state(SMALL, rng, 1)
    logits, after, _ = ref.forward(params, SMALL, tokens, state)
    moved = state._replace(
        values=state.values + np.array([0, 1, 0])[:, None, None, None]
    )  # layer 2's alone, the recurrent one
    assert not np.isclose(ref.forward(params, SMALL, tokens, moved)[1].states, after.states).all()
    gate = "layers.1.state.attention_gate.bias_z"
    changed, changed_after, _ = ref.forward(params | {gate: params[gate] + 1}, SMALL, tokens, state)
    assert (changed == logits).all() and not np.isclose(changed_after.states, after.states).any()


@pytest.mark.parametrize("feedback", [True, False])
def test_feedback_lets_the_first_layer_read_the_last_blocks_state(feedback):
    """With feedback the keys of layer 2, below which only layer 1 stands, depend on the states; without, they do not."""
    config = dataclasses.replace(SMALL, feedback=feedback, recurrent_layers=(3,), segment=4)
    params, rng = ref.init_params(config, np.random.default_rng(0)), np.random.default_rng(1)
    tokens, state = rng.integers(11, size=(1, 4)), random_state(config, rng, 1)
    moved = state._replace(states=state.states + rng.random((3, 6)))
    keys = [ref.forward(params, config, tokens, each)[1].keys[:, 1] for each in (state, moved)]
    assert np.allclose(*keys) is not feedback


def test_a_document_starts_with_zero_keys_that_take_softmax_mass():
    """The first token of a document attends to W zero values; of W equal weights, those of the zeros are lost."""
    state = ref.initial_state(ref.init_params(SMALL, np.random.default_rng(0)), SMALL, 1)
    assert not state.keys.any() and not state.values.any()
    p, block = {"scale": np.ones(2), "position_bias": np.zeros((2, 6))}, np.ones((1, 2, 4, 5))
    keys, values = (
        np.concatenate([start[:, 0], block], axis=2) for start in (state.keys, state.values)
    )
    attended, _ = ref.sliding_attention_forward(p, SMALL, 0 * block, keys, values, None)
    assert np.allclose(attended[0, 0, :, 0], [0, 1 / 4, 2 / 4, 3 / 4])


def test_unreachable_buckets_get_exactly_zero_gradient():
    """Distances run from 1 to W, so bucket 0 and those past W's get none."""
    config, rng = dataclasses.replace(SMALL, buckets=12, max_distance=30), np.random.default_rng(1)
    params, state = ref.init_params(config, rng), random_state(config, rng, 2)
    logits, _, cache = ref.forward(params, config, rng.integers(11, size=(2, 12)), state)
    grads, _ = ref.backward(params, config, cache, rng.standard_normal(logits.shape))
    bias = grads["layers.0.position_bias"]
    assert not bias[:, 0].any() and not bias[:, 5:].any() and bias[:, 1:5].all()
