"""The Memorizing Transformer's reference: the lookup by its definition, the memory's queue, gradients by finite differences."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference import block_recurrent
from reference import memorizing as ref
from reference.rollout import Segment, rollout_backward, rollout_forward
from tests.conftest import examples
from tests.helpers.comparison import assert_agree
from tests.helpers.gradients import check_directions, check_operation, draw
from tests.helpers.variants import PAPERS

PAPER = PAPERS["memorizing"]
SMALL, VARIANTS = PAPER.small, PAPER.variants


def unit(*shape, rng):
    """Random rows of unit length."""
    return ref.unit_norm_forward(rng.standard_normal(shape))[0]


def found_by_sorting(query, keys, values, scale, retrieved):
    """What one query (E,) finds among keys and values (M, E), with one head's scale."""
    similarity = keys @ query
    best = sorted(range(len(keys)), key=lambda j: (not keys[j].any(), -similarity[j]))[:retrieved]  # empty rows last
    weights = np.exp(scale * (similarity[best] - similarity.max()))
    return (weights / weights.sum()) @ values[best]


# The lookup


@examples(60)
@given(
    sizes=st.tuples(*[st.integers(1, 3)] * 2, st.integers(1, 5), st.integers(1, 12), st.integers(1, 4)),
    share=st.floats(0, 1),
    filled=st.floats(0, 1),
    seed=st.integers(0, 2**31),
)
def test_a_query_attends_to_its_nearest_keys_alone(sizes, share, filled, seed):
    (batch, heads, n, m, e), rng = sizes, np.random.default_rng(seed)
    retrieved, young = max(1, round(share * m)), round((1 - filled) * m)
    query, keys = unit(batch, heads, n, e, rng=rng), unit(batch, heads, m, e, rng=rng)
    values, scale = rng.standard_normal((batch, heads, m, e)), 3 * rng.random(heads)
    keys[:, :, :young], values[:, :, :young] = 0, 0  # rows that are empty yet
    out, _ = ref.retrieval_forward(query, keys, values, scale, retrieved)
    expected = np.array(
        [
            [[found_by_sorting(q, keys[b, h], values[b, h], scale[h], retrieved) for q in query[b, h]] for h in range(heads)]
            for b in range(batch)
        ]
    )
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


def test_retrieval_gradient():
    rng = np.random.default_rng(4)
    keys, values = unit(2, 3, 6, 5, rng=rng), rng.standard_normal((2, 3, 6, 5))
    check_operation(
        lambda query, scale: ref.retrieval_forward(query, keys, values, scale, 4),
        lambda dout, cache: dict(zip(("query", "scale"), ref.retrieval_backward(dout, cache), strict=True)),
        {"query": unit(2, 3, 2, 5, rng=rng), "scale": 1 + rng.random(3)},
        "retrieval",
    )


def test_memory_gate_gradient():
    check_operation(
        ref.memory_gate_forward,
        lambda dout, cache: dict(zip(("local", "found", "bias"), ref.memory_gate_backward(dout, cache), strict=True)),
        {"local": draw(2, 3, 4, 5), "found": draw(2, 3, 4, 5), "bias": draw(3)},
        "memory gate",
    )


def test_a_gate_is_one_number_for_a_head():
    local, found = np.zeros((2, 3, 4, 5)), np.ones((2, 3, 4, 5))
    out, _ = ref.memory_gate_forward(local, found, np.array([0.0, np.log(3), -np.log(3)]))
    np.testing.assert_allclose(out, np.broadcast_to(np.array([0.5, 0.75, 0.25])[:, None, None], out.shape))


# The memory


def newest(m, parts):
    """The last m rows of parts (B, H, n, E) put after one another."""
    rows = np.concatenate(parts, axis=2)
    return rows[:, :, rows.shape[2] - m :]


@examples(30)
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


def directions_of(config, dropout_seed=None):
    """Check the model's backward along random directions of all parameters and of what the state lets gradient into."""
    rng = np.random.default_rng(5)
    params, state = PAPER.random_params(config, rng), PAPER.random_state(config, rng, 2)
    tokens = rng.integers(config.vocabulary, size=(2, config.segment))

    def dropout():
        return None if dropout_seed is None else np.random.default_rng(dropout_seed)

    logits, next_state, cache = ref.forward(params, config, tokens, state, dropout())
    dlogits = rng.standard_normal(logits.shape)
    dnext = ref.State(*(rng.standard_normal(field.shape) for field in next_state))
    grads, dstate = ref.backward(params, config, cache, dlogits, dnext)
    assert grads.keys() == params.keys()
    assert not dstate.memory_keys.any() and not dstate.memory_values.any(), "no gradient reaches the memory"

    def objective(inputs):
        own = state._replace(keys=inputs["state.keys"], values=inputs["state.values"])
        logits, after, _ = ref.forward(inputs, config, tokens, own, dropout())
        kept = zip(after[:2], dnext[:2], strict=True)  # what goes into the memory has no gradient
        return (logits * dlogits).sum() + sum((a * b).sum() for a, b in kept)

    given_of = {"state.keys": state.keys, "state.values": state.values}
    check_directions(
        objective, params | given_of, grads | {"state.keys": dstate.keys, "state.values": dstate.values}, rng, "model"
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_model_gradient(name):
    directions_of(PAPER.variant(name))


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


def test_model_gradient_with_dropout():
    directions_of(dataclasses.replace(SMALL, dropout=0.3), dropout_seed=7)


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
