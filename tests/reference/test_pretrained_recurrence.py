"""Recurrence added to GPT-2, the reference: gradients against finite differences, operations against their definitions."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reference import pretrained_recurrence as ref
from tests.helpers.comparison import assert_agree
from tests.helpers.gradients import check_directions, check_operation, dotted, draw, flat, movable, nested
from tests.helpers.rollouts import filled
from tests.helpers.variants import PAPERS

PAPER = PAPERS["pretrained_recurrence"]
SMALL, VARIANTS, variant = PAPER.small, PAPER.variants, PAPER.variant
random_params, random_state = PAPER.random_params, PAPER.random_state


# Gradients


def test_gelu_gradient():
    check_operation(ref.gelu_forward, lambda dout, cache: {"x": ref.gelu_backward(dout, cache)}, {"x": draw(3, 4)}, "gelu")


def test_gelu_is_gpt2s():
    x = np.linspace(-4, 4, 81)
    expected = torch.nn.functional.gelu(torch.tensor(x), approximate="tanh")
    assert_agree({"y": expected}, {"y": ref.gelu_forward(x)[0]}, 1e-14)


@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_masked_attention_gradient(rate):
    mask = ref.window_mask(4, 2, np.array([True, False]))
    inputs = {"query": draw(2, 3, 4, 5), "key": draw(2, 3, 6, 5), "value": draw(2, 3, 6, 5)}
    check_operation(
        lambda query, key, value: ref.masked_attention_forward(query, key, value, mask, rate, np.random.default_rng(8)),
        lambda dout, cache: dict(zip(inputs, ref.masked_attention_backward(dout, cache), strict=True)),
        inputs,
        "attention",
    )


def layer_inputs(config):
    """A layer's parameters, shaken, but key biases apart."""
    p = {name: value + 0.3 * draw(*value.shape) for name, value in ref.init_layer(config, np.random.default_rng(1)).items()}
    return nested(movable(p)), nested({name: value for name, value in p.items() if name not in movable(p)})


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("vectors", [0, 2])
def test_layer_gradient(vectors, dropout):
    """Attention to inserted vectors, in one lane absent, and feed-forward."""
    config = dataclasses.replace(SMALL, width=6, dropout=dropout)
    moving, fixed = layer_inputs(config)
    arrays, present = {"x": draw(2, 3, 6)} | ({"inserted": draw(2, vectors, 6)} if vectors else {}), np.array([True, False])

    def forward(x, inserted=None, **p):
        return ref.layer_forward(dotted(p | fixed), config, x, inserted, present, np.random.default_rng(8))

    def backward(dout, cache):
        dx, dinserted, grads = ref.layer_backward(config, dout, cache)
        assert nested(grads).keys() == (moving | fixed).keys() and dinserted.shape == (2, vectors, 6)
        return {"x": dx, "inserted": dinserted} | nested(grads)

    check_operation(forward, backward, arrays | moving, "layer")


def test_mix_gradient():
    check_operation(
        ref.mix_forward,
        lambda dout, cache: dict(zip(("layer_scores", "outputs"), ref.mix_backward(dout, cache), strict=True)),
        {"layer_scores": draw(3), "outputs": draw(3, 2, 4, 5)},
        "mix",
    )


@pytest.mark.parametrize("pool", ref.POOLS)
@pytest.mark.parametrize("pooling", ref.POOLINGS)
@pytest.mark.parametrize("length", [6, 3])
def test_pool_gradient(pooling, pool, length):
    config = dataclasses.replace(SMALL, pooling=pooling, pool=pool)
    inputs = {"outputs": draw(3, 2, length, 10), "layer_scores": draw(3)}
    inputs |= {"fixed_key": draw(10)} if pooling == "attention" else {}
    check_operation(
        lambda outputs, **p: ref.pool_forward(p, config, outputs),
        lambda dout, cache: flat(ref.pool_backward(config, dout, cache), ["outputs"]),
        inputs,
        pooling,
    )


@pytest.mark.parametrize("vectors,layers", [(1, 3), (2, 1), (3, 0)])
def test_module_gradient(vectors, layers):
    config = dataclasses.replace(SMALL, width=4, vectors=vectors, module_layers=layers)
    p = ref.init_module(config, np.random.default_rng(0))
    p = {name: value + 0.3 * draw(*value.shape) for name, value in p.items() if name != "layer_scores"}
    check_operation(
        lambda pooled, **p: ref.module_forward(p, config, pooled),
        lambda dout, cache: flat(ref.module_backward(dout, cache), ["pooled"]),
        {"pooled": draw(2, 4)} | p,
        "module",
    )


@pytest.mark.parametrize("short,dropout", [(False, 0.0), (True, 0.3)])
@pytest.mark.parametrize("name", VARIANTS)
def test_model_gradient(name, short, dropout):
    """Random directions through every parameter and the incoming z, of the logits and of the next z."""
    config, rng = dataclasses.replace(variant(name), dropout=dropout), np.random.default_rng(6)
    params, state = random_params(config, rng), random_state(config, rng, 3)
    tokens = rng.integers(config.vocabulary, size=(3, max(1, config.segment - (2 if short else 0))))

    def run(inputs):
        read = state._replace(pooled=inputs["state.pooled"])
        return ref.forward(inputs, config, tokens, read, np.random.default_rng(8) if dropout else None)

    inputs = params | {"state.pooled": state.pooled}
    logits, after, cache = run(inputs)
    dlogits, dnext = rng.standard_normal(logits.shape), ref.State(rng.standard_normal(after.pooled.shape), None)
    grads, dstate = ref.backward(params, config, cache, dlogits, dnext)
    assert grads.keys() == params.keys() and not dstate.present.any()

    def objective(shifted):
        logits, after, _ = run(inputs | shifted)
        return (logits * dlogits).sum() + (after.pooled * dnext.pooled).sum()

    check_directions(objective, filled(movable(inputs)), grads | {"state.pooled": dstate.pooled}, rng, name)
    alone, _ = ref.backward(params, config, cache, dlogits)  # the next state's gradient is optional
    zero, _ = ref.backward(params, config, cache, dlogits, ref.State(np.zeros_like(after.pooled), None))
    assert_agree(zero, alone, 1e-15, "no next state")


# Definitions


@given(batch=st.integers(1, 3), length=st.integers(1, 5), vectors=st.integers(0, 3), seed=st.integers(0, 99))
def test_attention_is_over_inserted_vectors_and_earlier_tokens(batch, length, vectors, seed):
    """One query and one head at a time (Figure 2): h_prev is normed, a key and a value, and nothing else."""
    rng = np.random.default_rng(seed)
    config, present = SMALL, rng.random(batch) < 0.6
    p = {name: value + 0.3 * rng.standard_normal(value.shape) for name, value in ref.init_layer(config, rng).items()}
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
            exps = [math.exp(query @ (p["key"] @ row + p["key_bias"])[own] / math.sqrt(5)) for row in rows]
            values = [(p["value"] @ row + p["value_bias"])[own] for row in rows]
            heads.append(sum(e * v for e, v in zip(exps, values, strict=True)) / sum(exps))
        expected[b, i] = x[b, i] + p["output"] @ np.concatenate(heads) + p["output_bias"]
    out, _ = ref.window_attention_forward(p, config, x, inserted if vectors else None, present, None)
    assert_agree({"out": expected}, {"out": out}, 1e-11)


@given(rows=st.integers(1, 6), seed=st.integers(0, 99), pooling=st.sampled_from(sorted(ref.POOLINGS)))
def test_pooling_is_equation_1(rows, seed, pooling):
    """Written out position by position and layer by layer; the alternatives by their definitions."""
    rng = np.random.default_rng(seed)
    config = dataclasses.replace(SMALL, pooling=pooling)
    outputs, alpha, key = rng.standard_normal((3, 2, rows, 10)), rng.standard_normal(3), rng.standard_normal(10)
    shares = [math.exp(a) / sum(math.exp(other) for other in alpha) for a in alpha]
    mixed = [[sum(shares[l] * outputs[l, b, i] for l in range(3)) for i in range(rows)] for b in range(2)]
    if pooling == "mean":
        expected = [sum(lane) / rows for lane in mixed]
    elif pooling == "max":
        expected = [np.max(lane, axis=0) for lane in mixed]
    else:
        exps = [[math.exp(row @ key / math.sqrt(10)) for row in lane] for lane in mixed]
        expected = [sum(e * row for e, row in zip(es, lane, strict=True)) / sum(es) for es, lane in zip(exps, mixed, strict=True)]
    p = {"layer_scores": alpha, "fixed_key": key}
    assert_agree({"z": np.stack(expected)}, {"z": ref.pool_forward(p, config, outputs)[0]}, 1e-12)


def test_layer_scores_start_equal_and_the_module_apart_from_gpt2s_scale():
    params = ref.init_params(ref.Config(pooling="attention"), np.random.default_rng(0))
    assert not params["module.layer_scores"].any() and not params["module.fixed_key"].any()
    deviation = {name: params[name].std() for name in params if params[name].ndim == 2}
    expected = {"embedding": 0.02, "positions": 0.01, "layers.0.query": 0.02, "layers.3.mlp_hidden": 0.02}
    expected |= {"layers.1.output": 0.02 / math.sqrt(8), "layers.2.mlp_output": 0.02 / math.sqrt(8)}
    expected |= {"module.hidden_1": 128**-0.5, "module.hidden_2": 200**-0.5, "module.inserted": 200**-0.5}
    for name, value in expected.items():
        assert deviation[name] == pytest.approx(value, rel=0.05), name


# What the state means


@pytest.mark.parametrize("name", VARIANTS)
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


@pytest.mark.parametrize("name,dropout", [*((name, 0.3) for name in VARIANTS), ("overlapping", 0.0)])
def test_gradient_through_all_windows_of_a_document(name, dropout):
    """The whole of what is trained against finite differences: two windows and a short third, z's and all."""
    config, rng = dataclasses.replace(variant(name), dropout=dropout), np.random.default_rng(8)
    params = random_params(config, rng)
    windows = ref.windows_of(config, rng.integers(11, size=(2, 2 * config.stride + config.overlap + 2)))
    seed = 3 if dropout else None
    _, grads, states = ref.loss_and_gradients(params, config, windows, seed)
    assert len(states) == len(windows) == 3

    def objective(shifted):
        return ref.loss_and_gradients(params | shifted, config, windows, seed)[0]

    check_directions(objective, movable(params), grads, rng, name)


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


# Configs


@pytest.mark.parametrize(
    "changes,words",
    [
        ({"width": 0}, "width is 0; it must be at least 1"),
        ({"vectors": -1}, "vectors is -1; it must be at least 0"),
        ({"width": 11}, "width 11 is not a multiple of heads 2; the nearest is"),
        ({"segment": 10}, "segment 10 is longer than the position table; max_positions is 9"),
        ({"overlap": 6}, r"overlap is 6; it must lie in 0..5 for segment 6"),
        ({"overlap": -1}, r"overlap is -1; it must lie in 0..5"),
        ({"insertion_layers": (4,)}, r"insertion_layers \(4,\) must lie in 1..3"),
        ({"insertion_layers": (0, 1)}, r"must lie in 1..3"),
        ({"insertion_layers": (2, 1)}, "ascending"),
        ({"insertion_layers": ()}, "at least one"),
        ({"insertion_layers": 2}, "insertion_layers 2 must be a tuple"),
        ({"pooling": "median"}, "pooling is 'median'; it must be one of mean, max, attention"),
        ({"pool": "some"}, "pool is 'some'; it must be one of all, advance"),
        ({"dropout": 1.0}, "dropout is 1.0"),
    ],
)
def test_impossible_configs_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(SMALL, **changes)
    assert dataclasses.replace(SMALL, vectors=0, insertion_layers=(9,)).vectors == 0, "nothing is inserted into plain GPT-2"
