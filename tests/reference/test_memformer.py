"""Memformer, the reference: gradients against finite differences, operations against their definitions."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference import memformer as ref
from tests.helpers.comparison import assert_agree, named
from tests.helpers.definitions import brute_force_softmax
from tests.helpers.gradients import check_directions, check_operation, dotted, draw, movable, nested
from tests.helpers.rollouts import filled, memformer_segments
from tests.helpers.variants import PAPERS, random_task, shaken

PAPER = PAPERS["memformer"]
SMALL, VARIANTS, variant = PAPER.small, PAPER.variants, PAPER.variant
random_params, random_state = PAPER.random_params, PAPER.random_state


# Gradients


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
        lambda by_key: (ref.by_key_backward(by_key, (index, 3)), None),
        lambda dout, _: {"by_key": ref.by_key_forward(dout, index)[0]},
        {"by_key": draw(2, 3, 4, 4)},
        "by_distance",
    )


def attention_inputs(before, length=4):
    shapes = {"query": (2, 2, length, 3), "key": (2, 2, before + length, 3), "value": (2, 2, before + length, 3)}
    return {name: draw(*shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_relative_weights_gradient(rate):
    index = ref.distance_index(4, np.arange(3))
    mask = ref.self_attention_mask(4, 2, True, None)

    def forward(query, key, by_distance):
        return ref.relative_weights_forward(query, key, by_distance, index, mask, rate, np.random.default_rng(8))

    def backward(dout, cache):
        return dict(zip(("query", "key", "by_distance"), ref.relative_weights_backward(dout, cache), strict=True))

    inputs = {"query": draw(2, 2, 4, 3), "key": draw(2, 2, 6, 3), "by_distance": draw(2, 2, 4, 3)}
    check_operation(forward, backward, inputs, "relative weights")


@pytest.mark.parametrize("rate", [0.0, 0.4])
@pytest.mark.parametrize("distances,before,causal", [(np.arange(-2, 3), 0, False), (np.arange(4), 2, True)])
def test_simplified_attention_gradient(distances, before, causal, rate):
    inputs = attention_inputs(before)
    readable = None if causal else np.array([[True, True, False, False], [True] * 4])
    mask = ref.self_attention_mask(4, before, causal, readable)

    def forward(query, key, value, positions):
        rng = np.random.default_rng(8)
        return ref.simplified_attention_forward({"positions": positions}, query, key, value, distances, mask, rate, rng)

    def backward(dout, cache):
        *leading, params = ref.simplified_attention_backward(dout, cache)
        return dict(zip(("query", "key", "value"), leading, strict=True)) | params

    check_operation(forward, backward, inputs | {"positions": draw(len(distances), 3)}, "simplified")


@pytest.mark.parametrize("rate", [0.0, 0.4])
@pytest.mark.parametrize("distances,before,causal", [(np.arange(-3, 4), 0, False), (np.arange(4), 2, True)])
def test_transformer_xl_attention_gradient(distances, before, causal, rate):
    inputs, mask = attention_inputs(before), ref.self_attention_mask(4, before, causal, None)
    inputs |= {"distance_key": draw(6, 8), "content_bias": draw(2, 3), "distance_bias": draw(2, 3)}

    def forward(query, key, value, **p):
        rng = np.random.default_rng(8)
        return ref.transformer_xl_attention_forward(p, query, key, value, distances, mask, rate, rng)

    def backward(dout, cache):
        *leading, params = ref.transformer_xl_attention_backward(dout, cache)
        return dict(zip(("query", "key", "value"), leading, strict=True)) | params

    check_operation(forward, backward, inputs, "transformer_xl")


@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_masked_attention_gradient(rate):
    mask = ref.readable_mask(np.array([[True, True, False], [True] * 3]))

    def backward(dout, cache):
        return dict(zip(("query", "key", "value"), ref.masked_attention_backward(dout, cache), strict=True))

    check_operation(
        lambda query, key, value: ref.masked_attention_forward(query, key, value, mask, rate, np.random.default_rng(8)),
        backward,
        {"query": draw(2, 2, 4, 3), "key": draw(2, 2, 3, 3), "value": draw(2, 2, 3, 3)},
        "masked attention",
    )


def test_projections_gradient():
    rng = np.random.default_rng(1)
    p = {name: value for part in ("query", "key", "value") for name, value in ref.init_affine(rng, part, 6, 5).items()}
    key_bias = p.pop("key_bias")

    def forward(x, source, **p):
        parts, cache = ref.projections_forward(p | {"key_bias": key_bias}, 2, x, source)
        return np.concatenate(parts, axis=2), cache

    def backward(dout, cache):
        dx, dsource, grads = ref.projections_backward(dout[:, :, :3], dout[:, :, 3:7], dout[:, :, 7:], cache)
        return {"x": dx, "source": dsource} | grads

    check_operation(forward, backward, p | {"x": draw(2, 3, 5), "source": draw(2, 4, 5)}, "projections")


def test_slot_scores_gradient():
    mask = ref.readable_mask(np.array([[True, False, True, True], [True] * 4]))

    def forward(query, self_key, key, retention):
        scores, cache = ref.slot_scores_forward(query, self_key, key, retention, mask)
        return np.where(np.isinf(scores), 0.0, scores), cache

    def backward(dout, cache):
        dscores = dout * np.concatenate([np.ones((2, 1, 1, 1), bool), mask], axis=-1)  # as softmax hands them back
        return dict(zip(("query", "self_key", "key", "retention"), ref.slot_scores_backward(dscores, cache), strict=True))

    inputs = {"query": draw(2, 3, 2, 5), "self_key": draw(2, 3, 2, 5), "key": draw(2, 3, 4, 5), "retention": draw(3)}
    check_operation(forward, backward, inputs, "slot scores")


def test_slot_mean_gradient():
    check_operation(
        ref.slot_mean_forward,
        lambda dout, cache: dict(zip(("scores", "slots", "value"), ref.slot_mean_backward(dout, cache), strict=True)),
        {"scores": draw(2, 3, 2, 5), "slots": draw(2, 3, 2, 6), "value": draw(2, 3, 4, 6)},
        "slot mean",
    )


def check_sublayer(forward, backward, arrays, params, title, dropout=0.0):
    """forward(p, config, **arrays, rng), and backward(config, dout, cache) -> ({array: gradient}, all parameters' gradients)."""
    config = dataclasses.replace(SMALL, width=6, segment=3, slots=2, dropout=dropout)
    rng = np.random.default_rng(1)
    p = shaken(params(config, rng), rng)

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
        return ref.init_attention(dataclasses.replace(config, positions=positions), rng, causal, memory=False)

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
        ref.init_attention,
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

    def init_mlp(config, rng):
        return {name: value for name, value in ref.init_layer(config, rng, "read").items() if name.startswith("mlp_")}

    check_sublayer(ref.feed_forward_forward, backward, {"x": draw(2, 3, 6)}, init_mlp, "feed-forward", dropout)


@pytest.mark.parametrize(
    "name,tasks,dropout",
    [*((name, name in PAPER.tasks, 0.3) for name in VARIANTS), ("encoder-decoder", False, 0.0), ("decoder-only", False, 0.0)],
)
def test_model_gradient(name, tasks, dropout):
    """Random directions through every parameter and the memory, of the logits and of the next memory."""
    config, rng = dataclasses.replace(variant(name), dropout=dropout), np.random.default_rng(6)
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


# Definitions


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
    mask = ref.self_attention_mask(n, before, causal, None)
    out, _ = ref.simplified_attention_forward({"positions": rows}, query, key, value, distances, mask, 0.0, None)
    assert_agree({"out": expected}, {"out": out}, 1e-10)


def test_retention_starts_where_the_config_says():
    params = ref.init_params(variant("encoder-decoder-retentive"), np.random.default_rng(0))
    assert (params["writer.retention"] == 1.5).all() and params["writer.retention"].shape == (2,)
    assert (ref.init_params(variant("decoder-only"), np.random.default_rng(0))["decoder.layers.1.writer.retention"] == 0).all()


def test_special_tokens_are_apart_and_never_predicted():
    names = ("begin", "mask", "continuation", "infilling", "recall")
    assert [SMALL.special(name) for name in names] == [11, 12, 13, 14, 15]
    params = ref.init_params(SMALL, np.random.default_rng(0))
    assert params["embedding"].shape == (16, 10)
    logits, _, _ = ref.forward(params, SMALL, np.zeros((1, 6), int), ref.initial_state(params, SMALL, 1))
    assert logits.shape == (1, 6, 11)
    assert ref.init_params(variant("decoder-only"), np.random.default_rng(0))["embedding"].shape == (11, 10)


# The layers, written out independently of the reference's sublayers


def oracle_norm(p, name, x):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6) * p[f"{name}.scale"] + p[f"{name}.bias"]


def oracle_attention(p, prefix, x, keyed, distances=None, causal=False):
    """Output of heads of 3, one query and head at a time; keyed (K, D), the last len(x) of which have positions if distances."""
    before, out = len(keyed) - len(x) if distances is not None else 0, np.zeros((len(x), 6))
    places = (("query", x), ("key", keyed), ("value", keyed))
    query, key, value = (rows @ p[f"{prefix}{name}"].T + p[f"{prefix}{name}_bias"] for name, rows in places)
    for i, h in np.ndindex(len(x), 2):
        cut = slice(3 * h, 3 * h + 3)
        seen = [j for j in range(len(keyed)) if not causal or j - before <= i]
        r = [np.zeros(3)] * len(seen)
        if distances is not None:
            at = [np.clip(i - (j - before), *distances) - distances[0] for j in seen]
            r = [p[f"{prefix}positions"][row] if j >= before else np.zeros(3) for j, row in zip(seen, at, strict=True)]
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
    segments = [segment._replace(scored=np.zeros((3, 6), bool)) for segment in memformer_segments(SMALL, rng, 2)]
    for method in (ref.through_time, ref.memory_replay):
        loss, grads, _, _ = method(params, SMALL, segments, state)
        assert loss == 0 and not any(grad.any() for grad in grads.values())


@given(
    name=st.sampled_from(sorted(VARIANTS)),
    horizon=st.integers(1, 5),
    dropout=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 99),
)
def test_numpy_memory_replay_equals_back_propagation_through_time(name, horizon, dropout, seed):
    """Loss, every gradient, the gradient of the state that the rollout began with, and the next state."""
    config, rng = dataclasses.replace(variant(name), dropout=dropout), np.random.default_rng(seed)
    params, state, segments = random_params(config, rng), random_state(config, rng, 3), memformer_segments(config, rng, horizon)
    rows = []
    for method in (ref.through_time, ref.memory_replay):
        loss, grads, dstate, after = method(params, config, segments, state, seed)
        rows.append(filled({"loss": np.array([loss])} | grads | named("gradient", dstate) | named("state", after)))
    assert_agree(*rows, 1e-12, name)


@pytest.mark.parametrize("name", ["encoder-decoder", "decoder-only"])
def test_numpy_rollouts_have_the_gradients_of_their_loss(name):
    """Both methods' one loss, against finite differences, with document starts and tasks inside."""
    layers = {"encoder_layers": min(1, variant(name).encoder_layers), "decoder_layers": 1}
    config, rng = dataclasses.replace(variant(name), **layers), np.random.default_rng(3)
    params, state, segments = random_params(config, rng), random_state(config, rng, 3), memformer_segments(config, rng, 3)
    assert any(segment.starts.any() for segment in segments)
    _, grads, dstate, _ = ref.memory_replay(params, config, segments, state)
    inputs = params | {"state.memory": state.memory}

    def objective(shifted):
        inputs_now = inputs | shifted
        return ref.through_time(inputs_now, config, segments, state._replace(memory=inputs_now["state.memory"]))[0]

    check_directions(objective, movable(inputs), grads | {"state.memory": dstate.memory}, rng, name)


# Configs


def test_initialisation():
    config = dataclasses.replace(SMALL, width=300, head_width=60, feed_forward=400, heads=5, max_distance=50, segment=60)
    params = ref.init_params(config, np.random.default_rng(0))
    names = (
        "encoder.layers.1.attention.query encoder.layers.0.attention.output encoder.layers.1.read.key writer.query writer.value "
    )
    names += "decoder.layers.2.cross.value decoder.layers.1.mlp_hidden decoder.layers.1.mlp_output"
    for name in names.split():
        fan_in = 400 if name.endswith("mlp_output") else 300
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
