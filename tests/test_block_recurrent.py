"""Block-Recurrent Transformer: the paper's claims, for the reference.

For the accelerated model, where it has its own code.
"""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from reference import block_recurrent as ref
from tests.helpers.comparison import (
    SEEDS,
    SIZES,
    assert_agree,
    draw,
    named,
    slow_bucket,
)
from tests.helpers.variants import PAPERS

PAPER = PAPERS["block_recurrent"]
SMALL = PAPER.small
V = SMALL.vocabulary  # 11
D = SMALL.width  # 6
H = SMALL.heads  # 2
E = SMALL.head_width  # 5
W = SMALL.window  # 4
S = SMALL.states  # 3


def setting(config, lanes, length):
    """(parameters, tokens (lanes, length), a state) of a config, all random."""
    params = ref.init_params(config, np.random.default_rng(0))
    rng = np.random.default_rng(1)
    tokens = rng.integers(V, size=(lanes, length))
    return params, tokens, PAPER.random_state(config, rng, lanes)


@pytest.mark.parametrize("name", PAPER.variants)
def test_segmented_run_equals_one_long_run(name):
    """The reference; a rollout of segments is compared with the accelerated model elsewhere."""
    config = PAPER.variant(name)
    w = config.window
    params, tokens, state = setting(config, 2, 5 * w)
    logits, after, _ = ref.forward(params, config, tokens, state)
    expected = {"logits": logits} | named("state", after)
    parts = []
    for segment in np.split(tokens, [w, 3 * w], axis=1):  # of one block, two and two
        part, state, _ = ref.forward(params, config, segment, state)
        parts.append(part)
    found = {"logits": np.concatenate(parts, 1)} | named("state", state)
    assert_agree(expected, found, 1e-12)


@given(
    window=st.integers(1, 5),
    blocks=st.integers(1, 3),
    heads=st.integers(1, 3),
    width=st.integers(1, 4),
    size=SIZES,
    seed=SEEDS,
)
def test_sliding_attention_equals_direct_indexing(window, blocks, heads, width, size, seed):
    """By torch's attention over the whole sequence: the W keys before a token, with no tiles."""
    rng = np.random.default_rng(seed)
    length = window * blocks
    config = dataclasses.replace(SMALL, window=window, segment=length, heads=heads)
    p = {"scale": rng.standard_normal(heads) + 2}
    p["position_bias"] = rng.standard_normal((heads, config.buckets))
    query = size * rng.standard_normal((2, heads, length, width))
    keys, values = rng.standard_normal((2, 2, heads, window + length, width))
    offset = np.full((heads, length, window + length), -np.inf)
    for i in range(length):
        for j in range(i, i + window):  # key j stands window tokens earlier than its index
            bucket = slow_bucket(i + window - j, config.buckets, config.max_distance)
            offset[:, i, j] = p["position_bias"][:, bucket] * p["scale"]
    scaled = query * p["scale"][:, None, None]
    given = [torch.tensor(array) for array in (scaled, keys, values, offset)]
    expected = functional.scaled_dot_product_attention(*given, scale=1.0)
    actual, _ = ref.sliding_attention_forward(p, config, query, keys, values, None)
    assert_agree(expected, actual, 1e-10)


def test_state_update_equals_direct_attention():
    """By torch's attention, to S states and all 2W token keys, without mask and bias (3.2, 3.4).

    Queries and keys have unit length; then the fixed gate.
    """
    p = ref.init_recurrence(SMALL, np.random.default_rng(2))
    p |= {"scale": np.array([2.0, 3.0]), "cross_scale": np.array([4.0, 5.0])}
    states = draw(1, S, D)
    keys, values = draw(2, 1, H, 2 * W, E)
    normal, _ = ref.layer_norm_forward(p, "norm", states)
    seen = normal + p["ids"]  # (1, S, D)

    def heads(name):
        rows = (seen @ p[name].T).reshape(S, H, E).swapaxes(0, 1)[None]  # (1, H, S, E)
        if name == "value":
            return rows
        return rows / np.sqrt((rows**2).sum(-1, keepdims=True) + ref.NORM_EPSILON)

    found = []
    for query, scale, key, value in (
        ("query", "scale", heads("key"), heads("value")),
        ("cross_query", "cross_scale", keys, values),
    ):
        scaled = heads(query) * p[scale][:, None, None]
        given = [torch.tensor(array) for array in (scaled, key, value)]
        attended = functional.scaled_dot_product_attention(*given, scale=1.0)
        found.append(attended.transpose(1, 2).flatten(2).numpy())  # (1, S, H E)
    z = np.concatenate(found, -1) @ p["attention_gate.weight_z"].T + p["attention_gate.bias_z"]
    g = 1 / (1 + np.exp(-p["attention_gate.bias_g"]))
    projected, _ = ref.state_projection_forward(p, SMALL, states)
    actual, _ = ref.state_update_forward(p, SMALL, states, projected, keys, values)
    assert_agree(states * g + z * (1 - g), actual, 1e-12, "next states")


def test_tokens_read_states_before_their_update():
    """A block's logits depend on the incoming state, not on its own update."""
    params, tokens, state = setting(SMALL, 1, W)
    logits, after, _ = ref.forward(params, SMALL, tokens, state)
    gate = "layers.1.state.attention_gate.bias_z"
    moved = params | {gate: params[gate] + 1}
    moved_logits, moved_after, _ = ref.forward(moved, SMALL, tokens, state)
    kept = np.isclose(moved_after.states, after.states)
    assert not kept.any(), "the gate's bias moves no next state: the comparison below says nothing"
    assert (moved_logits == logits).all(), "tokens read the state that they have just written"


def layers_that_read(recurrent_layer, config):
    """The layers, from 1, that read the states of one of the recurrent layers, from 0.

    The keys of the layer above show it: they are made of what a layer has found.
    """
    params, tokens, state = setting(config, 1, W)
    states = state.states.copy()
    states[:, recurrent_layer] += draw(S, D)
    _, before, _ = ref.forward(params, config, tokens, state)
    _, after, _ = ref.forward(params, config, tokens, state._replace(states=states))
    apart = np.abs(after.keys - before.keys).max((0, 2, 3, 4))
    return [number for number in range(1, config.layers) if apart[number] > 1e-9]


@pytest.mark.parametrize(
    "feedback,recurrent,expected",
    [(True, (3,), [1, 2]), (False, (3,), []), (True, (1, 3), [2])],
)
def test_feedback_lets_the_first_layer_read_the_last_blocks_state(feedback, recurrent, expected):
    """The state is that of layer 3: with feedback layers 1 and 2 read it, without none does.

    As in the authors' code (decision 12) a layer with a state of its own reads that alone.
    """
    config = dataclasses.replace(SMALL, feedback=feedback, recurrent_layers=recurrent, segment=W)
    found = layers_that_read(len(recurrent) - 1, config)
    assert found == expected, f"layers {found} read the state of layer 3, expected {expected}"


def test_a_document_starts_with_zero_keys_that_take_softmax_mass():
    """Its first token attends to W zero values: of W equal weights, those of the zeros are lost."""
    state = ref.initial_state(ref.init_params(SMALL, np.random.default_rng(0)), SMALL, 1)
    assert not state.keys.any(), "the keys of the window before the first are not zero"
    p = {"scale": np.ones(H), "position_bias": np.zeros((H, SMALL.buckets))}
    block = np.ones((1, H, W, E))
    keys = np.concatenate([state.keys[:, 0], block], axis=2)
    values = np.concatenate([state.values[:, 0], block], axis=2)
    attended, _ = ref.sliding_attention_forward(p, SMALL, 0 * block, keys, values, None)
    np.testing.assert_allclose(attended[0, 0, :, 0], [0, 1 / 4, 2 / 4, 3 / 4])


def test_unreachable_buckets_get_exactly_zero_gradient():
    """Distances run from 1 to W, so bucket 0 and those past W's get none."""
    config = dataclasses.replace(SMALL, buckets=12, max_distance=30)
    params, tokens, state = setting(config, 2, config.segment)
    logits, _, cache = ref.forward(params, config, tokens, state)
    dlogits = np.random.default_rng(2).standard_normal(logits.shape)
    grads, _ = ref.backward(params, config, cache, dlogits)
    bias = grads["layers.0.position_bias"]  # (H, buckets)
    for of_head in bias:
        assert np.flatnonzero(of_head).tolist() == [1, 2, 3, 4]
