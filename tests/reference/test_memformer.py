"""Memformer, the reference: operations against finite differences and against their definitions; memory replay in NumPy."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference import memformer as ref
from tests.helpers.comparison import assert_agree, brute_force_softmax, check_directions, named
from tests.helpers.rollouts import filled, memformer_segments
from tests.helpers.variants import PAPERS

PAPER = PAPERS["memformer"]
SMALL, VARIANTS, variant = PAPER.small, PAPER.variants, PAPER.variant
random_params, random_state = PAPER.random_params, PAPER.random_state


# Definitions


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


# Memory replay in NumPy


def test_every_segment_has_random_numbers_of_its_own():
    draws = [ref.segment_rng(seed, t).random() for seed, t in ((1, 0), (1, 1), (2, 0), (1, 0))]
    assert draws[0] == draws[3] and len(set(draws)) == 3 and ref.segment_rng(None, 0) is None


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
