"""Memformer: the reference against finite differences and definitions, the accelerated against it, in all tasks."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from agreement import assert_agree, named
from gradients import check_directions, check_operation, dotted, draw, movable, nested
from hypothesis import given
from hypothesis import strategies as st
from rollouts import (
    check_causality,
    check_evaluation,
    check_gpu,
    check_length_refused,
    check_rollout,
    dropout_from,
    filled,
    random_segments,
)
from tolerances import TOLERANCE

import accelerated.attention.content as attentions
import accelerated.memformer as fast
from accelerated import replay
from accelerated.data.lanes import Segment
from accelerated.data.tasks import Task, TaskConfig, mask_spans
from accelerated.memformer import Memformer
from reference import memformer as ref

LADDER_TOLERANCE = 1e-9  # float64, relative; the worst measured is 1.5e-14

SMALL = ref.Config(
    vocabulary=11,
    width=10,
    encoder_layers=2,
    decoder_layers=3,
    heads=2,
    head_width=3,
    feed_forward=7,
    segment=6,
    slots=4,
    max_distance=9,
)
VARIANTS = {
    "encoder-decoder": {},
    "encoder-decoder-clipped": {"max_distance": 2},
    "encoder-decoder-xl": {"positions": "transformer_xl"},
    "encoder-decoder-retentive": {"retention": 1.5},
    "decoder-only": {"encoder_layers": 0},
    "decoder-only-clipped": {"encoder_layers": 0, "max_distance": 1},
    "decoder-only-xl": {"encoder_layers": 0, "positions": "transformer_xl", "decoder_layers": 2},
    "one-token": {"segment": 1},
    "one-slot": {"slots": 1, "encoder_layers": 1, "decoder_layers": 1},
    "one-head": {"heads": 1, "width": 5},
}
WITH_TASKS = [name for name, change in VARIANTS.items() if change.get("encoder_layers") != 0]


def variant(name):
    return dataclasses.replace(SMALL, **VARIANTS[name])


def random_params(config, rng):
    """Parameters with nothing at zero or one, so that no term hides."""
    params = ref.init_params(config, rng)
    return {name: value + 0.3 * rng.standard_normal(value.shape) for name, value in params.items()}


def random_state(config, rng, batch):
    """A state as no document starts with it."""
    memory = rng.standard_normal((batch, config.memories, config.slots, config.width))
    width = config.segment if config.encoder_layers else 0
    return ref.State(memory, rng.integers(config.vocabulary, size=(batch, width)))


def random_task(config, rng, kinds):
    """A Task of these kinds, infilling lanes with padding, texts at random."""
    batch, n = len(kinds), config.segment
    reading, prompt = rng.integers(config.vocabulary, size=(2, batch, n))
    readable = np.ones((batch, n), bool)
    for lane in np.flatnonzero(np.array(kinds) == 1):
        reading[lane, n // 2] = config.special("mask")
        readable[lane, n // 2 + 1 + lane % 2 :] = False
    return ref.Task(np.array(kinds), reading, readable, prompt)


def segments_with_tasks(config, rng):
    """Three segments of two lanes, between them every pair of tasks that differ."""
    segments = random_segments(config, rng)
    return [
        (*segment, random_task(config, rng, kinds)) for segment, kinds in zip(segments, ([0, 1], [1, 2], [2, 0]), strict=True)
    ]


def to_torch(arrays):
    kind = {"State": fast.State, "Task": Task}[type(arrays).__name__]
    return kind(*(torch.tensor(field) for field in arrays))


# Rung 1: every operation's backward against its full Jacobian


def test_by_key_gradient():
    index = ref.distance_index(4, np.arange(-2, 3))
    check_operation(
        lambda by_distance: ref.by_key_forward(by_distance, index),
        lambda dout, cache: {"by_distance": ref.by_key_backward(dout, cache)},
        {"by_distance": draw(2, 3, 4, 5)},
        "by_key",
    )


def test_by_distance_gradient():
    index = ref.distance_index(4, np.arange(3))
    check_operation(
        lambda by_key: ref.by_distance_forward(by_key, index, 3),
        lambda dout, cache: {"by_key": ref.by_distance_backward(dout, cache)},
        {"by_key": draw(2, 3, 4, 4)},
        "by_distance",
    )


def attention_inputs(distances, before, length=4):
    shapes = {"query": (2, 2, length, 3), "key": (2, 2, before + length, 3), "value": (2, 2, before + length, 3)}
    return {name: draw(*shape) for name, shape in shapes.items()}, ref.distance_index(length, distances)


@pytest.mark.parametrize("rate", [0.0, 0.4])
@pytest.mark.parametrize("distances,before,causal", [(np.arange(-2, 3), 0, False), (np.arange(4), 2, True)])
def test_simplified_attention_gradient(distances, before, causal, rate):
    inputs, index = attention_inputs(distances, before)
    readable = None if causal else np.array([[True, True, False, False], [True] * 4])
    seen = ref.seen_keys(4, before, causal, readable)

    def forward(query, key, value, positions):
        rng = np.random.default_rng(8)
        return ref.simplified_attention_forward({"positions": positions}, query, key, value, index, seen, rate, rng)

    def backward(dout, cache):
        *leading, params = ref.simplified_attention_backward(dout, cache)
        return dict(zip(("query", "key", "value"), leading, strict=True)) | params

    check_operation(forward, backward, inputs | {"positions": draw(len(distances), 3)}, "simplified")


@pytest.mark.parametrize("rate", [0.0, 0.4])
@pytest.mark.parametrize("distances,before,causal", [(np.arange(-3, 4), 0, False), (np.arange(4), 2, True)])
def test_transformer_xl_attention_gradient(distances, before, causal, rate):
    inputs, index = attention_inputs(distances, before)
    seen = ref.seen_keys(4, before, causal, None)
    inputs |= {"distance_key": draw(6, 8), "content_bias": draw(2, 3), "distance_bias": draw(2, 3)}
    rows = ref.sinusoids(distances, 8)

    def forward(query, key, value, **p):
        rng = np.random.default_rng(8)
        return ref.transformer_xl_attention_forward(p | {"rows": rows}, query, key, value, index, seen, rate, rng)

    def backward(dout, cache):
        *leading, params = ref.transformer_xl_attention_backward(dout, cache)
        return dict(zip(("query", "key", "value"), leading, strict=True)) | params

    check_operation(forward, backward, inputs, "transformer_xl")


def shaken(params):
    return {name: value + 0.3 * draw(*value.shape) for name, value in params.items()}


def check_sublayer(forward, backward, arrays, params, title, dropout=0.0):
    """forward(p, config, **arrays, rng), and backward(config, dout, cache) -> ({array: gradient}, all parameters' gradients)."""
    config = dataclasses.replace(SMALL, width=6, segment=3, slots=2, dropout=dropout)
    p = shaken(params(config, np.random.default_rng(1)))

    def run(**inputs):
        given_arrays = {name: inputs.pop(name) for name in arrays}
        return forward(dotted(inputs), config, **given_arrays, rng=np.random.default_rng(8))

    def back(dout, cache):
        found, grads = backward(config, dout, cache)
        assert grads.keys() == p.keys()
        return found | nested(grads)

    fixed = nested({name: value for name, value in p.items() if name not in movable(p)})
    check_operation(lambda **inputs: run(**inputs, **fixed), back, arrays | nested(movable(p)), title)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("causal,before", [(False, None), (True, None), (True, 2)])
@pytest.mark.parametrize("positions", ref.POSITIONS)
def test_self_attention_gradient(positions, causal, before, dropout):
    arrays = {"x": draw(2, 3, 6)} | ({"memory": draw(2, before, 6)} if before else {})
    readable = None if causal else np.array([[True, True, False], [True] * 3])

    def forward(p, config, x, rng, memory=None):
        config = dataclasses.replace(config, positions=positions)
        return ref.self_attention_forward(p, config, x, memory, causal, readable, rng)

    def backward(config, dout, cache):
        config = dataclasses.replace(config, positions=positions)
        dx, dmemory, grads = ref.self_attention_backward(config, dout, cache)
        return {"x": dx} | ({"memory": dmemory} if before else {}), grads

    def params(config, rng):
        return ref.init_attention(dataclasses.replace(config, positions=positions), rng, causal, before is not None)

    check_sublayer(forward, backward, arrays, params, positions, dropout)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("readable", [None, np.array([[True, False, True, False], [True] * 4])])
def test_cross_attention_gradient(readable, dropout):
    def backward(config, dout, cache):
        dx, dsource, grads = ref.cross_attention_backward(config, dout, cache)
        return {"x": dx, "source": dsource}, grads

    check_sublayer(
        lambda p, config, x, source, rng: ref.cross_attention_forward(p, config, x, source, readable, rng),
        backward,
        {"x": draw(2, 3, 6), "source": draw(2, 4, 6)},
        ref.init_cross_attention,
        "cross",
        dropout,
    )


@pytest.mark.parametrize("readable", [None, np.array([[True, False, True], [True] * 3])])
def test_slot_attention_gradient(readable):
    def backward(config, dout, cache):
        dmemory, dencoded, grads = ref.slot_attention_backward(config, dout, cache)
        return {"memory": dmemory, "encoded": dencoded}, grads

    check_sublayer(
        lambda p, config, memory, encoded, rng: ref.slot_attention_forward(p, config, memory, encoded, readable),
        backward,
        {"memory": draw(2, 2, 6), "encoded": draw(2, 3, 6)},
        ref.init_writer,
        "slot attention",
    )


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_feed_forward_gradient(dropout):
    def backward(config, dout, cache):
        dx, grads = ref.feed_forward_backward(dout, cache)
        return {"x": dx}, grads

    check_sublayer(ref.feed_forward_forward, backward, {"x": draw(2, 3, 6)}, ref.init_mlp, "feed-forward", dropout)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("tasks", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_model_gradient(name, tasks, dropout):
    """Random directions through every parameter and the memory, of the logits and of the next memory."""
    config, rng = dataclasses.replace(variant(name), dropout=dropout), np.random.default_rng(6)
    if tasks and name not in WITH_TASKS:
        pytest.skip("the decoder-only model has no tasks")
    params, state = random_params(config, rng), random_state(config, rng, 3)
    tokens, task = (
        rng.integers(config.vocabulary, size=(3, config.segment)),
        random_task(config, rng, [1, 0, 2]) if tasks else None,
    )

    def run(inputs):
        read = state._replace(memory=inputs["state.memory"])
        return ref.forward(inputs, config, tokens, read, np.random.default_rng(8) if dropout else None, task)

    inputs = params | {"state.memory": state.memory}
    logits, after, cache = run(inputs)
    dlogits, dnext = rng.standard_normal(logits.shape), ref.State(rng.standard_normal(after.memory.shape), None)
    grads, dstate = ref.backward(params, config, cache, dlogits, dnext)
    assert grads.keys() == params.keys() and not dstate.previous.any()

    def objective(shifted):
        logits, after, _ = run(inputs | shifted)
        return (logits * dlogits).sum() + (after.memory * dnext.memory).sum()

    check_directions(objective, movable(inputs), grads | {"state.memory": dstate.memory}, rng, name)
    alone, _ = ref.backward(params, config, run(inputs)[2], dlogits)  # the next state's gradient is optional
    zero, _ = ref.backward(params, config, run(inputs)[2], dlogits, dnext._replace(memory=np.zeros_like(dnext.memory)))
    assert_agree(zero, alone, 1e-15, "no next state")


def test_key_biases_have_exactly_no_gradient():
    """They add the same to all scores of a query, which softmax does not notice: on both sides."""
    for name in VARIANTS:
        config, rng = variant(name), np.random.default_rng(5)
        params, state = random_params(config, rng), random_state(config, rng, 2)
        tokens = rng.integers(config.vocabulary, size=(2, config.segment))
        logits, _, cache = ref.forward(params, config, tokens, state)
        grads, _ = ref.backward(params, config, cache, rng.standard_normal(logits.shape))
        biases = [n for n in params if n.endswith("key_bias")]
        assert biases and not any(grads[n].any() for n in biases)
        shifted, _, _ = ref.forward(params | {n: params[n] + 1.0 for n in biases}, config, tokens, state)
        assert np.allclose(shifted, logits, rtol=0, atol=1e-11)
        model = Memformer(config)
        model(torch.tensor(tokens), to_torch(state)).logits.square().sum().backward()
        assert all(p.grad is None for n, p in model.named_parameters() if n in biases)


def test_arguments_are_not_changed():
    for name in ("encoder-decoder", "decoder-only"):
        config, rng = variant(name), np.random.default_rng(5)
        params, state = random_params(config, rng), random_state(config, rng, 2)
        tokens = rng.integers(config.vocabulary, size=(2, config.segment))
        before = {k: v.copy() for k, v in (params | named("s", state)).items()}
        logits, after, cache = ref.forward(params, config, tokens, state)
        dlogits, dnext = rng.standard_normal(logits.shape), random_state(config, rng, 2)
        kept = [dlogits.copy(), *(field.copy() for field in dnext)]
        ref.backward(params, config, cache, dlogits, dnext)
        after.memory[:] = 0
        assert all((before[k] == v).all() for k, v in (params | named("s", state)).items())
        assert all((a == b).all() for a, b in zip(kept, (dlogits, *dnext), strict=True))


# Rung 2: accelerated against reference


def both_models(name, seed=9):
    config = variant(name)
    params, model = ref.init_params(config, np.random.default_rng(seed)), Memformer(config, seed=seed).train()
    return config, params, model


@pytest.mark.parametrize("name", VARIANTS)
def test_accelerated_equals_reference(name):
    """Logits, states and gradients over three segments with a document start in the second, then five steps."""
    config, params, model = both_models(name)
    assert_agree(params, dict(model.state_dict()), 1e-15, "initialisation")
    state = random_state(config, np.random.default_rng(5), 2)
    check_rollout(ref, params, model, config, state, to_torch, LADDER_TOLERANCE, name)


@pytest.mark.parametrize("name", WITH_TASKS)
def test_accelerated_equals_reference_in_every_task(name):
    config, params, model = both_models(name)
    rng = np.random.default_rng(5)
    state, segments = random_state(config, rng, 2), segments_with_tasks(config, rng)
    check_rollout(ref, params, model, config, state, to_torch, LADDER_TOLERANCE, name, segments)


@pytest.mark.parametrize("name", VARIANTS)
def test_dropout_acts_where_the_reference_has_it(monkeypatch, name):
    """With the reference's random numbers in place of torch's, training mode gives the reference's logits and state."""
    config = dataclasses.replace(variant(name), dropout=0.3)
    model = Memformer(config, seed=9).train()

    monkeypatch.setattr(torch.nn.functional, "dropout", dropout_from(np.random.default_rng(7)))
    tokens = np.random.default_rng(1).integers(11, size=(2, config.segment))
    state = random_state(config, np.random.default_rng(2), 2)
    params = ref.init_params(config, np.random.default_rng(9))
    expected, after, _ = ref.forward(params, config, tokens, state, np.random.default_rng(7))
    output = model(torch.tensor(tokens), to_torch(state))
    rows = filled({"logits": output.logits} | named("state", output.state))
    assert_agree(filled({"logits": expected} | named("state", after)), rows, LADDER_TOLERANCE, "dropout")


@given(
    n=st.integers(1, 6), before=st.integers(0, 3), reach=st.integers(1, 7), causal=st.booleans(), padded=st.booleans(),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_attentions_of_both_sides_agree(n, before, reach, causal, padded, seed):
    """Outputs and gradients of simplified relative attention in every shape."""
    rng = np.random.default_rng(seed)
    distances = np.arange(0 if causal else -reach, reach + 1)
    shapes = {"query": n, "key": before + n, "value": before + n}
    arrays = {name: rng.standard_normal((2, 3, rows, 4)) for name, rows in shapes.items()}
    dout, table = rng.standard_normal((2, 3, n, 4)), rng.standard_normal((len(distances), 4))
    readable = None
    if padded and not causal:
        readable = rng.random((2, n)) < 0.6
        readable[:, 0] = True
    index, seen = ref.distance_index(n, distances), ref.seen_keys(n, before, causal, readable)
    out, cache = ref.simplified_attention_forward({"positions": table}, *arrays.values(), index, seen, 0.0, None)
    *leading, grads = ref.simplified_attention_backward(dout, cache)
    expected = {"out": out} | dict(zip(arrays, leading, strict=True)) | grads
    hidden = None if causal is False and readable is None else torch.tensor(~seen[..., before:])
    assert torch.equal(attentions.distance_index(n, *map(int, distances[[0, -1]])), torch.tensor(index))
    leaves = {name: torch.tensor(value, requires_grad=True) for name, value in (arrays | {"positions": table}).items()}
    actual = attentions.simplified_attention(*leaves.values(), torch.tensor(index), hidden)
    actual.backward(torch.tensor(dout))
    assert_agree(expected, {"out": actual} | {name: leaf.grad for name, leaf in leaves.items()}, 1e-12)


@given(n=st.integers(1, 5), k=st.integers(1, 5), padded=st.booleans(), seed=st.integers(0, 99))
def test_content_attention_equals_its_plain_path(n, k, padded, seed):
    """Outputs and gradients of torch's attention against the softmax written out."""
    rng = np.random.default_rng(seed)
    arrays = [rng.standard_normal((2, 3, rows, 4)) for rows in (n, k, k)]
    hidden = torch.tensor(rng.random((2, 1, 1, k)) < 0.4) if padded else None
    if padded:
        hidden[..., 0] = False
    rows = []
    for attend in (attentions.content_attention_plain, attentions.content_attention):
        leaves = [torch.tensor(array, requires_grad=True) for array in arrays]
        out = attend(*leaves, hidden)
        (out**3).sum().backward()
        rows.append({"out": out} | {f"gradient {i}": leaf.grad for i, leaf in enumerate(leaves)})
    assert_agree(*rows, 1e-12)


# Definitions


def brute_force_softmax(scores):
    exps = [math.exp(score) for score in scores]
    return [value / sum(exps) for value in exps]


@given(n=st.integers(1, 5), reach=st.integers(1, 6), before=st.integers(0, 3), causal=st.booleans(), seed=st.integers(0, 99))
def test_simplified_attention_is_equations_3_and_4(n, reach, before, causal, seed):
    """One query and one head at a time, R looked up by the clipped distance of each pair."""
    rng = np.random.default_rng(seed)
    query = rng.standard_normal((2, 2, n, 3))
    key, value = rng.standard_normal((2, 2, 2, before + n, 3))
    table = {d: rng.standard_normal(3) for d in range(0 if causal else -reach, reach + 1)}
    expected = np.zeros(query.shape)
    for b, h, i in np.ndindex(2, 2, n):
        keys = [(key[b, h, j], value[b, h, j], np.zeros(3)) for j in range(before)]
        for j in range(i + 1 if causal else n):
            keys.append((key[b, h, before + j], value[b, h, before + j], table[max(-reach, min(reach, i - j))]))
        weights = brute_force_softmax([query[b, h, i] @ (k + r) / math.sqrt(3) for k, _, r in keys])
        expected[b, h, i] = sum(w * (v + r) for w, (_, v, r) in zip(weights, keys, strict=True))
    rows, distances = np.stack(list(table.values())), np.array(list(table))
    seen = ref.seen_keys(n, before, causal, None)
    index = ref.distance_index(n, distances)
    out, _ = ref.simplified_attention_forward({"positions": rows}, query, key, value, index, seen, 0.0, None)
    assert_agree({"out": expected}, {"out": out}, 1e-10)


@given(n=st.integers(1, 5), before=st.integers(0, 3), causal=st.booleans(), seed=st.integers(0, 99))
def test_transformer_xl_attention_is_equation_1(n, before, causal, seed):
    """The four terms (a) to (d) of each pair, and the accelerated one beside it."""
    rng, width = np.random.default_rng(seed), 8
    query = rng.standard_normal((2, 2, n, 3))
    key, value = rng.standard_normal((2, 2, 2, before + n, 3))
    u, v, weight = rng.standard_normal((2, 3)), rng.standard_normal((2, 3)), rng.standard_normal((2, 3, width))
    expected = np.zeros(query.shape)
    for b, h, i in np.ndindex(2, 2, n):
        scores, values = [], []
        for j in range(-before, i + 1 if causal else n):
            k, q = key[b, h, before + j], query[b, h, i]
            score = q @ k + u[h] @ k
            if j >= 0:
                angles = [(i - j) / 10_000 ** (2 * f / width) for f in range(width // 2)]
                r = weight[h] @ [*map(math.sin, angles), *map(math.cos, angles)]
                score += q @ r + v[h] @ r
            scores.append(score / math.sqrt(3))
            values.append(value[b, h, before + j])
        weights = brute_force_softmax(scores)
        expected[b, h, i] = sum(w * x for w, x in zip(weights, values, strict=True))
    distances = np.arange(0 if causal else 1 - n, n)
    p = {"distance_key": weight.reshape(6, width), "content_bias": u, "distance_bias": v}
    p["rows"] = ref.sinusoids(distances, width)
    index, seen = ref.distance_index(n, distances), ref.seen_keys(n, before, causal, None)
    out, _ = ref.transformer_xl_attention_forward(p, query, key, value, index, seen, 0.0, None)
    rows = attentions.signed_sinusoids(int(distances[0]), int(distances[-1]), width)
    distance_key = torch.einsum("hed,rd->hre", torch.tensor(weight), rows)
    arrays = (torch.tensor(a) for a in (query, key, value))
    hidden = torch.tensor(~seen[..., before:])
    actual = attentions.transformer_xl_attention(
        *arrays, distance_key, torch.tensor(u), torch.tensor(v), torch.tensor(index), hidden
    )
    assert_agree({"out": expected, "rows": p["rows"]}, {"out": out, "rows": rows}, 1e-10)
    assert_agree({"out": expected}, {"out": actual}, 1e-10)


def writer_of(rng, **changes):
    config = dataclasses.replace(SMALL, **changes)
    return config, {name: value + 0.3 * rng.standard_normal(value.shape) for name, value in ref.init_writer(config, rng).items()}


def both_writes(p, config, memory, encoded, readable=None):
    """slot_attention of both sides, which must agree."""
    new, _ = ref.slot_attention_forward(p, config, memory, encoded, readable)
    model = Memformer(config)
    model.load_state_dict(model.state_dict() | {f"writer.{k}": torch.tensor(v) for k, v in p.items()})
    mask = None if readable is None else torch.tensor(readable)
    with torch.no_grad():
        actual = fast.slot_attention(model.writer, config.heads, torch.tensor(memory), torch.tensor(encoded), mask)
    assert_agree({"new": new}, {"new": actual}, 1e-12)
    return new, actual.numpy()


@given(slots=st.integers(1, 5), n=st.integers(1, 5), padded=st.booleans(), seed=st.integers(0, 99))
def test_slot_attention_is_masked_attention_over_slots_and_encodings(slots, n, padded, seed):
    """The sparse pattern of Figure 2c by brute force: S x (S + N) scores, of which a mask leaves each slot its own."""
    rng = np.random.default_rng(seed)
    config, p = writer_of(rng, slots=slots)
    memory, encoded = rng.standard_normal((2, slots, 10)), rng.standard_normal((2, n, 10))
    readable = np.ones((2, n), bool)
    if padded:
        readable[0, n // 2 :] = False  # a slot with nothing to read keeps what it has
    new, _ = both_writes(p, config, memory, encoded, readable)

    def norm(x, name):
        x = x - x.mean()
        return x / math.sqrt((x**2).mean() + 1e-6) * p[f"{name}.scale"] + p[f"{name}.bias"]

    for b, h, s in np.ndindex(2, 2, slots):
        own, cut = slice(3 * h, 3 * h + 3), slice(5 * h, 5 * h + 5)
        keyed = [norm(m, "memory_norm") for m in memory[b]] + [norm(x, "norm") for x in encoded[b]]
        query = (p["query"] @ keyed[s] + p["query_bias"])[own]
        scores = [query @ (p["key"] @ row + p["key_bias"])[own] / math.sqrt(3) for row in keyed]
        scores[s] += p["retention"][h]
        mask = [other == s for other in range(slots)] + readable[b].tolist()
        weights = brute_force_softmax([score if seen else -math.inf for score, seen in zip(scores, mask, strict=True)])
        values = [m[cut] for m in memory[b]] + [(p["value"] @ row + p["value_bias"])[cut] for row in keyed[slots:]]
        assert np.allclose(new[b, s, cut], sum(w * v for w, v in zip(weights, values, strict=True)), rtol=0, atol=1e-12)


@given(slots=st.integers(2, 5), changed=st.integers(0, 4), seed=st.integers(0, 99))
def test_slots_never_mix(slots, changed, seed):
    """Another content of one slot changes that slot's next content and no other's, bit for bit."""
    rng = np.random.default_rng(seed)
    config, p = writer_of(rng, slots=slots)
    memory, encoded = rng.standard_normal((1, slots, 10)), rng.standard_normal((1, 6, 10))
    other = memory.copy()
    other[0, changed % slots] += rng.standard_normal(10)
    for before, after in zip(both_writes(p, config, memory, encoded), both_writes(p, config, other, encoded), strict=True):
        same = (before == after).all(-1)[0]
        assert same.sum() == slots - 1 and not same[changed % slots]


def test_a_slot_that_attends_only_to_itself_does_not_change():
    """Bit for bit, in one segment and after a hundred (2.2.3)."""
    rng = np.random.default_rng(0)
    config, p = writer_of(rng)
    p["retention"] = np.full(2, 1000.0)
    memory = rng.standard_normal((2, 4, 10))
    news = [memory, memory]
    for _ in range(100):
        encoded = rng.standard_normal((2, 6, 10))
        news = [both_writes(p, config, new, encoded)[side] for side, new in enumerate(news)]
        assert all((new == memory).all() for new in news)
    p["retention"] = np.full(2, 1.0)
    assert not (both_writes(p, config, memory, encoded)[0] == memory).any()


def test_retention_starts_where_the_config_says():
    params = ref.init_params(variant("encoder-decoder-retentive"), np.random.default_rng(0))
    assert (params["writer.retention"] == 1.5).all() and params["writer.retention"].shape == (2,)
    assert (ref.init_params(variant("decoder-only"), np.random.default_rng(0))["decoder.layers.1.writer.retention"] == 0).all()


@pytest.mark.parametrize("seed", range(3))
def test_the_model_is_equations_5_to_7(seed):
    """M_t = Encoder(s_t, M_{t-1}); s_{t+1} from what the encoder made of s_t: written out segment by segment."""
    config, rng = SMALL, np.random.default_rng(seed)
    params = random_params(config, rng)
    document = rng.integers(11, size=(2, 19))
    segments = [document[:, at : at + 6] for at in (0, 6, 12)]
    memory, reading = np.tile(params["initial_memory"][0], (2, 1, 1)), np.full((2, 6), config.special("begin"))
    state = ref.initial_state(params, config, 2)
    model = Memformer(config)
    model.load_state_dict({name: torch.tensor(value) for name, value in params.items()})
    carried = model.initial_state(2)
    for tokens in segments:
        encoded, memory, _ = ref.encoder_forward(params, config, reading, memory, None, None)
        prompt = np.concatenate([np.full((2, 1), config.special("continuation")), tokens], axis=1)
        hidden, _ = ref.decoder_forward(params, config, prompt, encoded, None, None)
        expected = hidden[:, 1:] @ params["embedding"][:11].T / math.sqrt(10)
        logits, state, _ = ref.forward(params, config, tokens, state)
        output = model(torch.tensor(tokens), carried)
        carried, reading = output.state, tokens
        assert_agree({"logits": expected, "memory": memory[:, None]}, {"logits": logits, "memory": state.memory}, 1e-12)
        assert_agree({"logits": expected, "memory": memory[:, None]}, {"logits": output.logits, "memory": carried.memory}, 1e-11)
        assert (state.previous == tokens).all() and (carried.previous.numpy() == tokens).all()


def test_a_segment_is_written_to_memory_when_the_next_one_is_read():
    """In the encoder-decoder a segment's tokens change its own logits at once and the memory one segment later."""
    _, _, model = both_models("encoder-decoder")
    tokens, state = torch.randint(11, (1, 6)), model.initial_state(1)
    other = (tokens + 1) % 11
    first, second = (model(t, state) for t in (tokens, other))
    assert torch.equal(first.state.memory, second.state.memory) and not torch.equal(first.logits, second.logits)
    later = [model(tokens, output.state).state.memory for output in (first, second)]
    assert (later[0] != later[1]).any(-1).all(), "every slot sees the segment"


def test_memory_is_read_by_every_layer_that_should():
    """Each encoder layer of the one, each layer of the other, gets gradient from what memory holds."""
    for name, count in (("encoder-decoder", 2), ("decoder-only", 3)):
        config, _, model = both_models(name)
        state = to_torch(random_state(config, np.random.default_rng(0), 2))
        model(torch.randint(11, (2, 6)), state).logits.square().sum().backward()
        norms = [p.grad for n, p in model.named_parameters() if n.endswith("memory_norm.scale") and ".layers." in n]
        norms = [g for g in norms if g is not None]
        assert len(norms) == count and all(g.any() for g in norms)


# Tasks (2.3)


@pytest.mark.parametrize("kind", range(3))
def test_task_tokens_and_rows(kind):
    """Which special token starts the decoder, and that row i predicts token i + 1 in continuation and token i otherwise."""
    config, params, model = both_models("encoder-decoder")
    rng = np.random.default_rng(0)
    state, tokens, task = random_state(config, rng, 2), rng.integers(11, size=(2, 6)), random_task(config, rng, [kind, kind])
    encoded, memory, _ = ref.encoder_forward(params, config, task.reading, state.memory[:, 0], task.readable, None)
    prompt = np.concatenate([np.full((2, 1), 11 + 2 + kind), task.prompt], axis=1)
    hidden, _ = ref.decoder_forward(params, config, prompt, encoded, task.readable, None)
    rows = hidden[:, 1:] if kind == 0 else hidden[:, :-1]
    expected = {"logits": rows @ params["embedding"][:11].T / math.sqrt(10), "memory": memory[:, None]}
    logits, after, _ = ref.forward(params, config, tokens, state, None, task)
    assert_agree(expected, {"logits": logits, "memory": after.memory}, 1e-12)
    output = model(torch.tensor(tokens), to_torch(state), to_torch(task))
    assert_agree(expected, {"logits": output.logits, "memory": output.state.memory}, 1e-11)
    assert (after.previous == tokens).all() and torch.equal(output.state.previous, torch.tensor(tokens))


def test_special_tokens_are_apart_and_never_predicted():
    names = ("begin", "mask", "continuation", "infilling", "recall")
    assert [SMALL.special(name) for name in names] == [11, 12, 13, 14, 15]
    params = ref.init_params(SMALL, np.random.default_rng(0))
    assert params["embedding"].shape == (16, 10)
    logits, _, _ = ref.forward(params, SMALL, np.zeros((1, 6), int), ref.initial_state(params, SMALL, 1))
    assert logits.shape == (1, 6, 11)
    assert ref.init_params(variant("decoder-only"), np.random.default_rng(0))["embedding"].shape == (11, 10)


@pytest.mark.parametrize("place", [0, 3, 5])
def test_padding_is_seen_by_nobody(place):
    """Whatever stands where the encoder's input is padding: logits and memory are the same, bit for bit."""
    config, params, model = both_models("encoder-decoder")
    rng = np.random.default_rng(0)
    state, tokens, task = random_state(config, rng, 2), rng.integers(11, size=(2, 6)), random_task(config, rng, [1, 1])
    readable = np.ones((2, 6), bool)
    readable[:, place] = False
    reading = task.reading.copy()
    reading[:, place] = (reading[:, place] + 1) % 11
    tasks = [task._replace(readable=readable), task._replace(readable=readable, reading=reading)]
    (a, after_a, _), (b, after_b, _) = (ref.forward(params, config, tokens, state, None, t) for t in tasks)
    assert (a == b).all() and (after_a.memory == after_b.memory).all()
    first, second = (model(torch.tensor(tokens), to_torch(state), to_torch(t)) for t in tasks)
    assert torch.equal(first.logits, second.logits) and torch.equal(first.state.memory, second.state.memory)
    shown = ref.forward(params, config, tokens, state, None, task._replace(readable=np.ones((2, 6), bool)))
    assert not (shown[0] == a).all() and not (shown[1].memory == after_a.memory).all()


def test_the_decoder_only_model_refuses_tasks():
    config, params, model = both_models("decoder-only")
    task = random_task(config, np.random.default_rng(0), [0])
    with pytest.raises(ValueError, match="no tasks but continuation"):
        ref.forward(params, config, np.zeros((1, 6), int), ref.initial_state(params, config, 1), None, task)
    with pytest.raises(ValueError, match="no tasks but continuation"):
        ref.advance(params, config, np.zeros((1, 6), int), ref.initial_state(params, config, 1), None, task)
    for read in (model, model.advance):
        with pytest.raises(ValueError, match="no tasks but continuation"):
            read(torch.zeros(1, 6, dtype=torch.long), model.initial_state(1), to_torch(task))


def test_the_references_tasks_are_the_lanes_tasks():
    """What infilling and recall of the reference ask for, field by field, and that they agree with MultiTask's."""
    rng = np.random.default_rng(0)
    previous, earlier = rng.integers(11, size=(2, 3, 6))
    filled_in, recalled = ref.infilling(SMALL, previous, 0.5, 2.0, np.random.default_rng(1)), ref.recall(previous, earlier)
    again = np.random.default_rng(1)
    for lane in range(3):
        text = mask_spans(previous[lane], 12, TaskConfig(masked=0.5, span=2.0), again).tolist()
        assert filled_in.reading[lane][filled_in.readable[lane]].tolist() == text
        assert filled_in.readable[lane].tolist() == [place < len(text) for place in range(6)]
    assert (filled_in.kind == 1).all() and (filled_in.prompt == previous).all()
    assert (recalled.kind == 2).all() and (recalled.prompt == earlier).all()
    assert (recalled.reading == previous).all() and recalled.readable.all()
    document = rng.integers(11, size=(2, 37))
    segments = ref.rollout_of(SMALL, document, rng)
    asked = [document[:, 1:7], document[:, 0:6], document[:, 0:6], document[:, 19:25], document[:, 18:24], document[:, 18:24]]
    assert all((segment.targets == targets).all() for segment, targets in zip(segments, asked, strict=True))
    assert [segment.starts.all() for segment in segments] == [True] + [False] * 5


# The layers, written out independently of the reference's sublayers


def oracle_norm(p, name, x):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6) * p[f"{name}.scale"] + p[f"{name}.bias"]


def oracle_attention(p, prefix, x, keyed, distances=None, causal=False):
    """Output of heads of 3, one query and head at a time; keyed (K, D), the last len(x) of which have positions if distances."""
    before, out = len(keyed) - len(x) if distances is not None else 0, np.zeros((len(x), 6))
    query, key, value = (rows @ p[f"{prefix}{n}"].T + p[f"{prefix}{n}_bias"]
                         for n, rows in (("query", x), ("key", keyed), ("value", keyed)))  # fmt: skip
    for i, h in np.ndindex(len(x), 2):
        cut = slice(3 * h, 3 * h + 3)
        seen = [j for j in range(len(keyed)) if not causal or j - before <= i]
        r = [np.zeros(3) if distances is None or j < before
             else p[f"{prefix}positions"][np.clip(i - (j - before), *distances) - distances[0]] for j in seen]  # fmt: skip
        weights = brute_force_softmax([query[i, cut] @ (key[j, cut] + r[n]) / math.sqrt(3) for n, j in enumerate(seen)])
        out[i, cut] = sum(w * (value[j, cut] + r[n]) for n, (w, j) in enumerate(zip(weights, seen, strict=True)))
    return out @ p[f"{prefix}output"].T + p[f"{prefix}output_bias"]


def oracle_mlp(p, x):
    hidden = np.maximum(oracle_norm(p, "mlp_norm", x) @ p["mlp_hidden"].T + p["mlp_hidden_bias"], 0)
    return hidden @ p["mlp_output"].T + p["mlp_output_bias"]


def test_layers_are_figures_1_and_2():
    """Order, norms and residuals of an encoder layer (2a), a decoder layer and a layer with memory (1b)."""
    rng = np.random.default_rng(0)
    for name, distances in (("encoder-decoder", (-5, 5)), ("decoder-only", (0, 5))):
        params = random_params(variant(name), rng)
        x, memory, source = (rng.standard_normal((rows, 10)) for rows in (6, 4, 6))
        if name == "encoder-decoder":
            p = ref.subtree(params, "encoder.layers.1.")
            normal = oracle_norm(p, "attention.norm", x)
            y = x + oracle_attention(p, "attention.", normal, normal, distances)
            y = y + oracle_attention(p, "read.", oracle_norm(p, "read.norm", y), oracle_norm(p, "read.memory_norm", memory))
            expected = {"encoder layer": y + oracle_mlp(p, y)}
            actual = {"encoder layer": ref.encoder_layer_forward(p, SMALL, x[None], memory[None], None, None)[0][0]}
            p = ref.subtree(params, "decoder.layers.2.")
            normal = oracle_norm(p, "attention.norm", x)
            y = x + oracle_attention(p, "attention.", normal, normal, (0, 6), causal=True)
            y = y + oracle_attention(p, "cross.", oracle_norm(p, "cross.norm", y), source)
            expected["decoder layer"] = y + oracle_mlp(p, y)
            actual["decoder layer"] = ref.decoder_layer_forward(p, SMALL, x[None], source[None], None, None)[0][0]
        else:
            p, config = ref.subtree(params, "decoder.layers.1."), variant(name)
            normal = oracle_norm(p, "attention.norm", x)
            keyed = np.concatenate([oracle_norm(p, "attention.memory_norm", memory), normal])
            y = x + oracle_attention(p, "attention.", normal, keyed, distances, causal=True)
            y = y + oracle_mlp(p, y)
            written, _ = ref.slot_attention_forward(ref.subtree(p, "writer."), config, memory[None], y[None], None)
            out, new, _ = ref.memory_layer_forward(p, config, x[None], memory[None], None)
            expected, actual = {"memory layer": y, "memory": written}, {"memory layer": out[0], "memory": new}
        assert_agree(expected, actual, 1e-10, name)


def test_stacks_end_in_a_norm():
    config, rng = SMALL, np.random.default_rng(0)
    params = random_params(config, rng)
    memory, tokens = rng.standard_normal((2, 4, 10)), rng.integers(11, size=(2, 6))
    x = params["embedding"][tokens]
    for layer in range(2):
        x, _ = ref.encoder_layer_forward(ref.subtree(params, f"encoder.layers.{layer}."), config, x, memory, None, None)
    encoded, _, _ = ref.encoder_forward(params, config, tokens, memory, None, None)
    y = params["embedding"][tokens]
    for layer in range(3):
        y, _ = ref.decoder_layer_forward(ref.subtree(params, f"decoder.layers.{layer}."), config, y, encoded, None, None)
    hidden, _ = ref.decoder_forward(params, config, tokens, encoded, None, None)
    expected = {"encoded": oracle_norm(params, "encoder.norm", x), "hidden": oracle_norm(params, "decoder.norm", y)}
    assert_agree(expected, {"encoded": encoded, "hidden": hidden}, 1e-10)


# Memory replay in NumPy


def test_every_segment_has_random_numbers_of_its_own():
    draws = [ref.segment_rng(seed, t).random() for seed, t in ((1, 0), (1, 1), (2, 0), (1, 0))]
    assert draws[0] == draws[3] and len(set(draws)) == 3 and ref.segment_rng(None, 0) is None


def test_a_numpy_rollout_without_scored_tokens_has_zero_loss():
    rng = np.random.default_rng(0)
    params, state = random_params(SMALL, rng), random_state(SMALL, rng, 3)
    segments = [segment._replace(scored=np.zeros((3, 6), bool)) for segment in numpy_segments(SMALL, rng, 2)]
    for method in (ref.through_time, ref.memory_replay):
        loss, grads, _, _ = method(params, SMALL, segments, state)
        assert loss == 0 and not any(grad.any() for grad in grads.values())


def numpy_segments(config, rng, horizon, lanes=3):
    segments = []
    for _ in range(horizon):
        tokens, targets = rng.integers(config.vocabulary, size=(2, lanes, config.segment))
        scored, starts = rng.random((lanes, config.segment)) < 0.7, rng.random(lanes) < 0.3
        task = random_task(config, rng, rng.integers(3, size=lanes)) if config.encoder_layers and rng.random() < 0.6 else None
        segments.append(ref.Segment(tokens, targets, scored, starts, task))
    return segments


@given(
    name=st.sampled_from(sorted(VARIANTS)),
    horizon=st.integers(1, 5),
    dropout=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 99),
)
def test_numpy_memory_replay_equals_back_propagation_through_time(name, horizon, dropout, seed):
    """Loss, every gradient, the gradient of the state that the rollout began with, and the next state."""
    config, rng = dataclasses.replace(variant(name), dropout=dropout), np.random.default_rng(seed)
    params, state, segments = random_params(config, rng), random_state(config, rng, 3), numpy_segments(config, rng, horizon)
    rows = []
    for method in (ref.through_time, ref.memory_replay):
        loss, grads, dstate, after = method(params, config, segments, state, seed)
        rows.append(filled({"loss": np.array([loss])} | grads | named("gradient", dstate) | named("state", after)))
    assert_agree(*rows, 1e-12, name)


@pytest.mark.parametrize("name", ["encoder-decoder", "decoder-only"])
def test_numpy_rollouts_have_the_gradients_of_their_loss(name):
    """Both methods' one loss, against finite differences, with document starts and tasks inside."""
    config, rng = variant(name), np.random.default_rng(3)
    params, state, segments = random_params(config, rng), random_state(config, rng, 3), numpy_segments(config, rng, 3)
    assert any(segment.starts.any() for segment in segments)
    _, grads, dstate, _ = ref.memory_replay(params, config, segments, state)
    inputs = params | {"state.memory": state.memory}

    def objective(shifted):
        inputs_now = inputs | shifted
        return ref.through_time(inputs_now, config, segments, state._replace(memory=inputs_now["state.memory"]))[0]

    check_directions(objective, movable(inputs), grads | {"state.memory": dstate.memory}, rng, name)


@pytest.mark.parametrize("method", ["through_time", "memory_replay"])
@pytest.mark.parametrize("name", ["encoder-decoder", "decoder-only"])
def test_rollouts_of_both_sides_agree(name, method):
    """The reference's rollout functions against those of accelerated/replay.py: loss, gradients, next state."""
    config, params, model = both_models(name)
    rng = np.random.default_rng(4)
    state, segments = random_state(config, rng, 3), numpy_segments(config, rng, 4)
    loss, grads, _, after = getattr(ref, method)(params, config, segments, state)
    torches = [
        Segment(*(torch.tensor(field) for field in segment[:4]), None if segment.task is None else to_torch(segment.task))
        for segment in segments
    ]
    found, carried = replay.BACKPROP[method](model, torches, to_torch(state))
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    expected = filled({"loss": np.array([loss])} | grads | named("state", after))
    assert_agree(expected, filled({"loss": found[None]} | gradients | named("state", carried)), LADDER_TOLERANCE, method)


# Behaviour


@pytest.mark.parametrize("name", VARIANTS)
def test_step_and_advance_equal_forward(name):
    """From a state in mid-document, over three segments; also taking up `step` from a state that forward returned."""
    config, rng = variant(name), np.random.default_rng(5)
    model, state, whole = Memformer(config, seed=9).eval(), to_torch(random_state(config, rng, 2)), []
    segments, carried = torch.tensor(rng.integers(config.vocabulary, size=(3, 2, config.segment))), state
    for tokens in segments:
        output = model(tokens, carried)
        advanced = model.advance(tokens, carried)
        assert_agree(filled(named("state", output.state)), filled(named("state", advanced)), 1e-12)
        whole.append(output.logits)
        carried = output.state
    for start in (0, 1):
        stream = state if start == 0 else model.advance(segments[0], state)
        logits = []
        for token in torch.cat(list(segments[start:]), 1).unbind(1):
            out, stream = model.step(token, stream)
            logits.append(out)
        assert_agree({"logits": torch.cat(whole[start:], 1)}, {"logits": torch.stack(logits, 1)}, 1e-11)
        opened = carried if config.encoder_layers == 0 else model.advance(segments[0], carried)  # a stream has encoded already
        assert_agree({"memory": opened.memory}, {"memory": stream.memory}, 1e-11)


def test_advance_reads_a_task_as_forward_does():
    config, _, model = both_models("encoder-decoder")
    rng = np.random.default_rng(0)
    tokens, state, task = torch.randint(11, (3, 6)), to_torch(random_state(config, rng, 3)), random_task(config, rng, [2, 1, 0])
    expected, actual = model(tokens, state, to_torch(task)).state, model.advance(tokens, state, to_torch(task))
    assert_agree(named("state", expected), named("state", actual), 1e-12)
    assert not torch.equal(actual.memory, model.advance(tokens, state).memory)


@pytest.mark.parametrize("name", ["encoder-decoder", "decoder-only"])
def test_a_step_costs_the_same_however_much_was_read(name):
    """What a stream holds does not grow from one segment's start to the next."""
    model = Memformer(variant(name)).eval()
    stream, sizes = model.initial_state(1), []
    for at in range(30):
        _, stream = model.step(torch.tensor([at % 11]), stream)
        parts = (
            stream.memory,
            stream.tokens,
            stream.hidden,
            *stream.keys,
            *stream.values,
            *(t for p in stream.encoded for t in p),
        )
        sizes.append(sum(t.numel() for t in parts))
    assert sizes[:6] == sizes[6:12] == sizes[24:30] and max(sizes) == sizes[4]


@given(name=st.sampled_from(sorted(VARIANTS)), at=st.integers(0, 5), seed=st.integers(0, 99))
def test_a_token_changes_no_logit_before_it(name, at, seed):
    config, rng = variant(name), np.random.default_rng(seed)
    params, model = random_params(config, rng), Memformer(config).eval()
    model.load_state_dict({name: torch.tensor(value) for name, value in params.items()})
    check_causality(ref, params, model, config, random_state(config, rng, 1), to_torch, at % config.segment, rng)


@pytest.mark.parametrize("name", ["encoder-decoder", "decoder-only"])
def test_a_token_counts_in_every_later_segment(name):
    """No end to the temporal range (2.5)."""
    model, segments = Memformer(variant(name), seed=9).eval(), torch.randint(11, (12, 1, 6))
    other = segments.clone()
    other[0, 0, 2] = (other[0, 0, 2] + 1) % 11
    logits = []
    for run in (segments, other):
        state, outs = model.initial_state(1), []
        for tokens in run:
            out, state, _ = model(tokens, state)
            outs.append(out)
        logits.append(outs)
    assert all(not torch.equal(a, b) for a, b in zip(*logits, strict=True))


@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in ("one-token", "one-slot")])
def test_every_parameter_gets_gradient_from_a_rollout(name):
    """Four segments from a document's start, in every task; all but the key biases."""
    config, params, model = both_models(name)
    state, total = model.initial_state(3), 0.0
    for segment in numpy_segments(config, np.random.default_rng(0), 4):
        logits, state, _ = model(torch.tensor(segment.tokens), state, *([] if segment.task is None else [to_torch(segment.task)]))
        total = total + logits.log_softmax(-1)[..., 0].sum()
    total.backward()
    silent = {n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    assert silent == params.keys() - movable(params).keys()


def test_initialisation():
    config = dataclasses.replace(SMALL, width=300, head_width=60, feed_forward=400, heads=5, max_distance=50, segment=60)
    params = ref.init_params(config, np.random.default_rng(0))
    for name, fan_in in (
        ("encoder.layers.1.attention.query", 300), ("encoder.layers.0.attention.output", 300), ("encoder.layers.1.read.key", 300),
        ("decoder.layers.2.cross.value", 300), ("decoder.layers.1.mlp_hidden", 300), ("decoder.layers.1.mlp_output", 400),
        ("writer.query", 300), ("writer.value", 300),
    ):  # fmt: skip
        weight = params[name]
        assert weight.std() == pytest.approx(fan_in**-0.5, rel=0.02) and weight.shape[1] == fan_in
        assert np.abs(weight).max() < 2.3 * fan_in**-0.5, "not truncated"
    assert params["encoder.layers.0.attention.positions"].shape == (101, 60)
    assert params["decoder.layers.0.attention.positions"].shape == (51, 60)
    assert params["decoder.layers.0.attention.positions"].std() == pytest.approx(0.5, rel=0.1)
    assert params["embedding"].std() == pytest.approx(1, rel=0.05)
    assert params["initial_memory"].std() == pytest.approx(1, rel=0.05)
    assert not params["writer.value_bias"].any() and (params["encoder.norm.scale"] == 1).all()
    xl = ref.init_params(dataclasses.replace(config, positions="transformer_xl"), np.random.default_rng(0))
    assert xl["decoder.layers.0.attention.content_bias"].std() == pytest.approx(0.02, rel=0.15)
    assert "decoder.layers.0.attention.query_bias" not in xl and "decoder.layers.0.cross.query_bias" in xl


@pytest.mark.parametrize("reach,encoder,decoder", [(3, 7, 4), (5, 11, 6), (6, 11, 7), (50, 11, 7)])
def test_distances_have_rows_as_far_as_they_occur(reach, encoder, decoder):
    config = dataclasses.replace(SMALL, max_distance=reach)
    assert len(config.distances(False)) == encoder and len(config.distances(True)) == decoder
    alone = dataclasses.replace(config, encoder_layers=0)
    assert len(alone.distances(True)) == min(reach, 5) + 1


def test_parameters_of_table_2():
    """One self-attention of width 512 with 8 heads of 64: 1.05M parameters simplified, 1.32M in Transformer-XL's scheme."""
    config = ref.Config(width=512, heads=8, head_width=64, segment=64)
    counts = {}
    for positions in ref.POSITIONS:
        p = ref.init_attention(dataclasses.replace(config, positions=positions), np.random.default_rng(0), True, False)
        counts[positions] = sum(v.size for name, v in p.items() if not name.startswith("norm"))
    assert counts["simplified"] == pytest.approx(1.05e6, rel=0.01) and counts["transformer_xl"] == pytest.approx(1.32e6, rel=0.01)


@pytest.mark.parametrize(
    "change,words",
    [
        ({"slots": 0}, "slots is 0"),
        ({"segment": 0}, "segment is 0"),
        ({"decoder_layers": 0}, "decoder_layers is 0"),
        ({"encoder_layers": -1}, "encoder_layers is -1"),
        ({"width": 9}, "width 9 is not a multiple of heads 2; the nearest is 8"),
        ({"positions": "sine"}, "positions is 'sine'"),
        ({"positions": "transformer_xl", "width": 5, "heads": 1}, "width 5 is odd"),
        ({"max_distance": 0}, "max_distance is 0"),
        ({"retention": math.inf}, "retention is inf"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"heads": 0}, "heads is 0"),
    ],
)
def test_impossible_configs_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(SMALL, **change)


@pytest.mark.parametrize("length", [0, 5, 7])
@pytest.mark.parametrize("name", ["encoder-decoder", "decoder-only"])
def test_segments_of_other_lengths_are_refused(name, length):
    check_length_refused(ref, Memformer, variant(name), length, f"{length} tokens is not one of 6")


@pytest.mark.parametrize("name", ["encoder-decoder", "decoder-only"])
def test_evaluation_drops_nothing_out(name):
    config = variant(name)
    check_evaluation(Memformer, config, to_torch(random_state(config, np.random.default_rng(0), 2)))


def test_description():
    assert "4 memory slots (encoder-decoder)" in Memformer(SMALL).describe()
    assert "4 memory slots (decoder-only, in each of its layers)" in Memformer(variant("decoder-only")).describe()


@pytest.mark.parametrize("name", VARIANTS)
def test_float32_stays_float32(name):
    torch.set_default_dtype(torch.float32)
    model = Memformer(variant(name))
    output = model(torch.zeros(1, model.config.segment, dtype=torch.long), model.initial_state(1))
    assert output.state.previous.dtype == torch.int64 and output.state.memory.dtype == output.logits.dtype == torch.float32


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", VARIANTS)
def test_a_gpu_gives_what_the_cpu_gives(name):
    check_gpu(Memformer, variant(name), TOLERANCE["cuda", torch.float32], name)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_gpu_does_tasks_and_replay_as_the_cpu_does(dropout):
    """Padding, every kind of task, and memory replay against full BPTT on the GPU, with dropout."""
    torch.set_default_dtype(torch.float32)
    config = dataclasses.replace(SMALL, dropout=dropout)
    rng, rows = np.random.default_rng(0), {}
    state, parts = random_state(config, rng, 3), numpy_segments(config, rng, 4)
    state = state._replace(memory=state.memory.astype(np.float32))
    for device, method in (("cpu", "memory_replay"), ("cuda", "memory_replay"), ("cuda", "through_time")):
        model = Memformer(config, seed=9).to(device).train()
        segments = [
            Segment(*(torch.tensor(field) for field in s[:4]), None if s.task is None else to_torch(s.task)).to(device)
            for s in parts
        ]
        torch.manual_seed(3)
        loss, after = replay.BACKPROP[method](model, segments, fast.State(*(field.to(device) for field in to_torch(state))))
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        rows[device, method] = {"loss": loss[None]} | grads | named("state", after)
    assert_agree(rows["cuda", "through_time"], rows["cuda", "memory_replay"], TOLERANCE["cuda", torch.float32], "methods")
    if dropout == 0:
        assert_agree(rows["cpu", "memory_replay"], rows["cuda", "memory_replay"], TOLERANCE["cuda", torch.float32], "devices")
