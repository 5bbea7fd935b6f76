"""The Memorizing Transformer, the reference: operations against finite differences, the lookup and its memory by definition."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference import block_recurrent
from reference import memorizing as ref
from reference.rollout import Segment, rollout_backward, rollout_forward
from tests.helpers.comparison import assert_agree
from tests.helpers.finite_differences import check_operation, draw
from tests.helpers.variants import PAPERS

PAPER = PAPERS["memorizing"]
SMALL, VARIANTS = PAPER.small, PAPER.variants


KEYS, VALUES = ref.unit_norm_forward(draw(2, 3, 6, 5))[0], draw(2, 3, 6, 5)
OPERATIONS = {  # forward, backward, inputs
    "retrieval": (
        lambda query, scale: ref.retrieval_forward(query, KEYS, VALUES, scale, 4),
        ref.retrieval_backward,
        {"query": draw(2, 3, 2, 5), "scale": 1 + abs(draw(3))},
    ),
    "memory_gate": (
        ref.memory_gate_forward,
        ref.memory_gate_backward,
        {"local": draw(2, 3, 4, 5), "found": draw(2, 3, 4, 5), "bias": draw(3)},
    ),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_gradient(name):
    check_operation(*OPERATIONS[name], name)


def unit(*shape, rng):
    """Random rows of unit length."""
    return ref.unit_norm_forward(rng.standard_normal(shape))[0]


def found_by_sorting(query, keys, values, scale, retrieved):
    """What one query (E,) finds among keys and values (M, E), with one head's scale."""
    similarity = keys @ query
    best = sorted(range(len(keys)), key=lambda j: (not keys[j].any(), -similarity[j]))[:retrieved]  # empty rows last
    weights = np.exp(scale * (similarity[best] - similarity[best].max()))
    return (weights / weights.sum()) @ values[best]


# The lookup


@given(
    sizes=st.tuples(*[st.integers(1, 3)] * 2, st.integers(1, 5), st.integers(1, 12), st.integers(1, 4)),
    share=st.floats(0, 1),
    filled=st.floats(0, 1),
    size=st.sampled_from([0.0, 3.0, 300.0]),  # of scales: all that is found counts alike, as usual, the nearest alone
    seed=st.integers(0, 2**31),
)
def test_a_query_attends_to_its_nearest_keys_alone(sizes, share, filled, size, seed):
    (batch, heads, n, m, e), rng = sizes, np.random.default_rng(seed)
    retrieved, young = max(1, round(share * m)), round((1 - filled) * m)
    query, keys = unit(batch, heads, n, e, rng=rng), unit(batch, heads, m, e, rng=rng)
    values, scale = rng.standard_normal((batch, heads, m, e)), size * rng.random(heads)
    keys[:, :, :young], values[:, :, :young] = 0, 0  # rows that are empty yet
    out, _ = ref.retrieval_forward(query, keys, values, scale, retrieved)
    expected = np.zeros(query.shape)
    for b, h, i in np.ndindex(batch, heads, n):
        expected[b, h, i] = found_by_sorting(query[b, h, i], keys[b, h], values[b, h], scale[h], retrieved)
    np.testing.assert_allclose(out, expected, rtol=1e-11, atol=1e-12)


def test_looking_up_all_of_the_memory_is_attention_to_it():
    rng = np.random.default_rng(1)
    query, keys, values, scale = unit(2, 3, 4, 5, rng=rng), unit(2, 3, 7, 5, rng=rng), draw(2, 3, 7, 5), draw(3)
    out, _ = ref.retrieval_forward(query, keys, values, scale, 7)
    np.testing.assert_allclose(out, ref.attention_forward(query, keys, values, scale)[0], rtol=1e-12)


def test_empty_rows_are_found_last_and_add_nothing():
    """Decision 6: of two keys one points away from the query; the empty rows are behind it, and take part of the softmax."""
    query = np.array([1.0, 0.0])[None, None, None]
    keys = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 0.0], [-1.0, 0.0]])[None, None]
    values = np.array([[0.0, 0.0], [5.0, 1.0], [0.0, 0.0], [7.0, 7.0]])[None, None]
    assert set(ref.nearest_keys(query, keys, 2).flat) == {1, 3}
    found, _ = ref.retrieval_forward(query, keys, values, np.array([np.log(3)]), 3)
    np.testing.assert_allclose(found.ravel(), (3 * values[0, 0, 1] + values[0, 0, 3] / 3) / (3 + 1 + 1 / 3))


def test_a_gate_is_one_number_for_a_head():
    local, found = np.zeros((2, 3, 4, 5)), np.ones((2, 3, 4, 5))
    out, _ = ref.memory_gate_forward(local, found, np.array([0.0, np.log(3), -np.log(3)]))
    np.testing.assert_allclose(out, np.broadcast_to(np.array([0.5, 0.75, 0.25])[:, None, None], out.shape))


# The memory


def newest(m, parts):
    """The last m rows of parts (B, H, n, E) put after one another."""
    rows = np.concatenate(parts, axis=2)
    return rows[:, :, rows.shape[2] - m :]


@given(m=st.integers(0, 11), n=st.integers(1, 5), count=st.integers(1, 4))
def test_the_memory_is_a_queue_of_rows(m, n, count):
    empty, rows = np.zeros((2, 3, m, 1)), 1.0 + np.arange(2 * 3 * n * count).reshape(2, 3, n * count, 1)
    memory = empty
    for at in range(0, n * count, n):
        memory = ref.remember(memory, rows[:, :, at : at + n])
    np.testing.assert_array_equal(memory, newest(m, [empty, rows]))


@pytest.mark.parametrize("name", VARIANTS)
def test_the_memory_holds_what_the_memory_layer_saw_before_the_segment(name):
    """From a document's start on, decision 5: a segment reads what earlier segments left, and joins it afterwards."""
    config, rng = PAPER.variant(name), np.random.default_rng(5)
    params = PAPER.random_params(config, rng)
    state = ref.initial_state(params, config, 2)
    assert not any(field.any() for field in state), "decision 6"
    keys, values = [state.memory_keys], [state.memory_values]
    for _ in range(4):
        _, state, _ = ref.forward(params, config, rng.integers(config.vocabulary, size=(2, config.segment)), state)
        keys.append(state.keys[:, config.memory_layer - 1])
        values.append(state.values[:, config.memory_layer - 1])
        np.testing.assert_array_equal(state.memory_keys, newest(config.memory, keys))
        np.testing.assert_array_equal(state.memory_values, newest(config.memory, values))


@pytest.mark.parametrize("memory", [0, 13])
def test_without_a_memory_it_is_the_xl_of_the_block_recurrent_paper(memory):
    """Equal logits and gradients from equal weights (4.6); a closed gate leaves them too, and an open one does not."""
    config, rng = dataclasses.replace(SMALL, memory=memory), np.random.default_rng(6)
    same = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if hasattr(block_recurrent.Config, f.name)}
    xl = block_recurrent.Config(**same, window=config.segment, recurrent_layers=())
    params, state = PAPER.random_params(config, rng), PAPER.random_state(config, rng, 2)
    tokens, gate = rng.integers(config.vocabulary, size=(2, config.segment)), f"layers.{config.memory_layer - 1}.memory_gate"
    cache = block_recurrent.State(np.zeros((2, 0, xl.states, xl.width)), state.keys, state.values)
    expected, _, own_cache = block_recurrent.forward({n: v for n, v in params.items() if n != gate}, xl, tokens, cache)
    dlogits = rng.standard_normal(expected.shape)
    grads, _ = block_recurrent.backward({n: v for n, v in params.items() if n != gate}, xl, own_cache, dlogits)
    closed = params | ({gate: np.full(config.heads, -60.0)} if memory else {})
    logits, _, cache = ref.forward(closed, config, tokens, state)
    found, _ = ref.backward(closed, config, cache, dlogits)
    assert_agree({"logits": expected} | grads, {"logits": logits} | {n: found[n] for n in grads}, 1e-12)
    if memory:
        assert np.abs(ref.forward(params, config, tokens, state)[0] - expected).max() > 1e-3


# The model


def test_initialisation():
    """Matrices 1 / sqrt(fan in), cut; every head's gate at half, its scale at the config's."""
    sizes = {"width": 300, "head_width": 60, "heads": 5, "feed_forward": 400, "vocabulary": 500, "buckets": 64}
    config = dataclasses.replace(SMALL, max_distance=128, **sizes)
    params = ref.init_params(config, np.random.default_rng(0))
    fan_ins = dict.fromkeys(("query", "key", "value", "output", "mlp_hidden"), 300) | {"mlp_output": 400}
    for name, fan_in in fan_ins.items():
        weight = params[f"layers.2.{name}"]
        assert weight.std() == pytest.approx(fan_in**-0.5, rel=0.02) and weight.shape[1] == fan_in
        assert np.abs(weight).max() < 2.3 * fan_in**-0.5, "not truncated"
    assert params["embedding"].std() == pytest.approx(1, rel=0.02)
    assert params["layers.0.position_bias"].std() == pytest.approx(1 / 8, rel=0.1)
    assert [name for name in params if "gate" in name] == ["layers.1.memory_gate"] and not params["layers.1.memory_gate"].any()
    ones = [name for name in params if name.endswith("norm.scale")]
    assert len(ones) == 7 and all((params[name] == 1).all() for name in ones)
    assert all((params[f"layers.{layer}.scale"] == config.attention_scale).all() for layer in range(3))
    assert not any(params[name].any() for name in params if name.endswith("norm.bias"))


def test_a_documents_loss_and_gradients_are_those_of_a_rollout():
    """The gradient passes from segment to segment through the cached keys and values (decision 10)."""
    config, rng = SMALL, np.random.default_rng(8)
    params, count = PAPER.random_params(config, rng), 3
    tokens, targets = rng.integers(config.vocabulary, size=(2, count, 2, config.segment))
    segments = [
        Segment(t, y, np.ones(y.shape, bool), np.full(2, k == 0)) for k, (t, y) in enumerate(zip(tokens, targets, strict=True))
    ]
    rows, caches, _ = rollout_forward(ref, params, config, segments, ref.initial_state(params, config, 2))
    expected, _ = rollout_backward(ref, params, config, caches)
    loss, grads, _ = ref.loss_and_gradients(params, config, list(zip(tokens, targets, strict=True)))
    nats = sum(
        ref.cross_entropy_forward(rows[f"{k}/logits"], targets[k], np.ones(targets[k].shape, bool))[0] for k in range(count)
    )
    assert loss == pytest.approx(nats / targets.size, rel=1e-12)
    assert_agree(expected, grads, 1e-12)


@pytest.mark.parametrize(
    "change,words",
    [
        ({"memory_layer": 4}, "memory_layer is 4; it must lie in 1..3"),
        ({"memory_layer": 0}, "memory_layer is 0"),
        ({"memory": -1}, "memory is -1; it must be at least 0"),
        ({"memory": 9}, "retrieved is 10; it must be at most memory, 9"),
        ({"retrieved": 0}, "retrieved is 0; it must be at least 1"),
        ({"segment": 0}, "segment is 0; it must be at least 1"),
        ({"buckets": 3}, "buckets is 3; it must be even"),
        ({"max_distance": 3}, "max_distance 3 must exceed half of buckets 6"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"attention_scale": 0.0}, "attention_scale is 0.0"),
    ],
)
def test_what_cannot_work_is_refused(change, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(SMALL, **change)
