"""Memformer, the reference: operations against finite differences and against their definitions; memory replay in NumPy."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference import memformer as ref
from tests.helpers.comparison import assert_agree, named
from tests.helpers.definitions import SIZES, brute_force_softmax
from tests.helpers.finite_differences import check_directions, check_operation, draw
from tests.helpers.rollouts import filled, memformer_segments
from tests.helpers.variants import PAPERS

PAPER = PAPERS["memformer"]
SMALL, VARIANTS, variant = PAPER.small, PAPER.variants, PAPER.variant
random_params, random_state = PAPER.random_params, PAPER.random_state
WHOLE, CAUSAL = np.arange(-2, 3), np.arange(4)  # distances
READABLE = np.array([[True, True, False, False], [True] * 4])
SLOT_MASK = ref.readable_mask(np.array([[True, False, True, True], [True] * 4]))
ROWS = ("query", "key", "value")


def self_attention(forward, backward, distances, before, parameters):
    """(forward, backward, inputs) of an attention by distances, with dropout; causal after a memory, or with padding."""
    mask = ref.self_attention_mask(4, before, before > 0, None if before else READABLE)
    inputs = {name: draw(2, 2, 4 + (before if name != "query" else 0), 3) for name in ROWS}
    run = lambda query, key, value, **p: forward(  # noqa: E731
        p, query, key, value, distances, mask, 0.4, np.random.default_rng(8)
    )
    return run, backward, inputs | {name: draw(*shape) for name, shape in parameters.items()}


SIMPLIFIED = ref.simplified_attention_forward, ref.simplified_attention_backward
XL = ref.transformer_xl_attention_forward, ref.transformer_xl_attention_backward
XL_PARAMETERS = {"distance_key": (6, 8), "content_bias": (2, 3), "distance_bias": (2, 3)}


def slot_scores(query, self_key, key, retention):
    """Scores with zeros for what is hidden, whose gradient softmax hands back as zero."""
    scores, cache = ref.slot_scores_forward(query, self_key, key, retention, SLOT_MASK)
    return np.where(np.isinf(scores), 0.0, scores), cache


def slot_scores_backward(dout, cache):
    return ref.slot_scores_backward(dout * np.concatenate([np.ones((2, 1, 1, 1), bool), SLOT_MASK], axis=-1), cache)


OPERATIONS = {  # forward, backward, inputs
    "simplified with padding": self_attention(*SIMPLIFIED, WHOLE, 0, {"positions": (5, 3)}),
    "simplified after a memory": self_attention(*SIMPLIFIED, CAUSAL, 2, {"positions": (4, 3)}),
    "transformer_xl with padding": self_attention(*XL, WHOLE, 0, XL_PARAMETERS),
    "transformer_xl after a memory": self_attention(*XL, CAUSAL, 2, XL_PARAMETERS),
    "masked_attention": (
        lambda query, key, value: ref.masked_attention_forward(
            query, key, value, ref.readable_mask(READABLE), 0.4, np.random.default_rng(8)
        ),
        ref.masked_attention_backward,
        {name: draw(2, 2, 4, 3) for name in ROWS},
    ),
    "slot_scores": (
        slot_scores,
        slot_scores_backward,
        {"query": draw(2, 3, 2, 5), "self_key": draw(2, 3, 2, 5), "key": draw(2, 3, 4, 5), "retention": draw(3)},
    ),
    "slot_mean": (
        ref.slot_mean_forward,
        ref.slot_mean_backward,
        {"scores": draw(2, 3, 2, 5), "slots": draw(2, 3, 2, 6), "value": draw(2, 3, 4, 6)},
    ),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_gradient(name):
    check_operation(*OPERATIONS[name], name)


# Definitions


@given(
    n=st.integers(1, 5),
    reach=st.integers(1, 6),
    before=st.integers(0, 3),
    causal=st.booleans(),
    size=SIZES,
    seed=st.integers(0, 2**31),
)
def test_simplified_attention_is_equations_3_and_4(n, reach, before, causal, size, seed):
    """One query and one head at a time, R looked up by the clipped distance of each pair."""
    rng = np.random.default_rng(seed)
    query = size * rng.standard_normal((2, 2, n, 3))
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
    x, memory, source = (rng.standard_normal((rows, 10)) for rows in (6, 4, 6))
    params, alone = random_params(SMALL, rng), random_params(variant("decoder-only"), rng)

    p = ref.subtree(params, "encoder.layers.1.")
    normal = oracle_norm(p, "attention.norm", x)
    y = x + oracle_attention(p, "attention.", normal, normal, (-5, 5))
    y = y + oracle_attention(p, "read.", oracle_norm(p, "read.norm", y), oracle_norm(p, "read.memory_norm", memory))
    expected = {"encoder layer": y + oracle_mlp(p, y)}
    actual = {"encoder layer": ref.encoder_layer_forward(p, SMALL, x[None], memory[None], None, None)[0][0]}

    p = ref.subtree(params, "decoder.layers.2.")
    normal = oracle_norm(p, "attention.norm", x)
    y = x + oracle_attention(p, "attention.", normal, normal, (0, 6), causal=True)
    y = y + oracle_attention(p, "cross.", oracle_norm(p, "cross.norm", y), source)
    expected["decoder layer"] = y + oracle_mlp(p, y)
    actual["decoder layer"] = ref.decoder_layer_forward(p, SMALL, x[None], source[None], None, None)[0][0]

    p, config = ref.subtree(alone, "decoder.layers.1."), variant("decoder-only")
    normal = oracle_norm(p, "attention.norm", x)
    keyed = np.concatenate([oracle_norm(p, "attention.memory_norm", memory), normal])
    y = x + oracle_attention(p, "attention.", normal, keyed, (0, 5), causal=True)
    expected["memory layer"] = y + oracle_mlp(p, y)
    expected["memory"], _ = ref.slot_attention_forward(
        ref.subtree(p, "writer."), config, memory[None], expected["memory layer"][None], None
    )
    out, actual["memory"], _ = ref.memory_layer_forward(p, config, x[None], memory[None], None)
    assert_agree(expected, actual | {"memory layer": out[0]}, 1e-10)


def test_stacks_end_in_a_norm():
    rng = np.random.default_rng(0)
    params, memory, tokens = random_params(SMALL, rng), rng.standard_normal((2, 4, 10)), rng.integers(11, size=(2, 6))
    x = y = params["embedding"][tokens]
    encoded, _, _ = ref.encoder_forward(params, SMALL, tokens, memory, None, None)
    for layer in range(2):
        x, _ = ref.encoder_layer_forward(ref.subtree(params, f"encoder.layers.{layer}."), SMALL, x, memory, None, None)
    for layer in range(3):
        y, _ = ref.decoder_layer_forward(ref.subtree(params, f"decoder.layers.{layer}."), SMALL, y, encoded, None, None)
    hidden, _ = ref.decoder_forward(params, SMALL, tokens, encoded, None, None)
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
    horizon=st.integers(1, 3),
    dropout=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 2**31),
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
    """Both methods' one loss, against finite differences, with dropout, document starts and tasks inside."""
    config, rng = dataclasses.replace(variant(name), dropout=0.3), np.random.default_rng(3)
    params, state, segments = random_params(config, rng), random_state(config, rng, 3), memformer_segments(config, rng, 3)
    assert any(segment.starts.any() for segment in segments)
    _, grads, dstate, _ = ref.memory_replay(params, config, segments, state, seed=4)

    def objective(inputs):
        return ref.through_time(inputs, config, segments, state._replace(memory=inputs["state.memory"]), seed=4)[0]

    inputs = params | {"state.memory": state.memory}
    check_directions(objective, inputs, grads | {"state.memory": dstate.memory}, rng, name)


# Configs


def test_initialisation():
    config = dataclasses.replace(SMALL, width=300, head_width=60, feed_forward=400, heads=5, max_distance=50, segment=60)
    params = ref.init_params(config, np.random.default_rng(0))
    names = "encoder.layers.1.attention.query encoder.layers.0.attention.output encoder.layers.1.read.key writer.query "
    names += "writer.value decoder.layers.2.cross.value decoder.layers.1.mlp_hidden decoder.layers.1.mlp_output"
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
