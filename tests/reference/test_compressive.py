"""Compressive Transformer, the reference: operations against finite differences and against their definitions."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference import compressive as ref
from tests.helpers.comparison import assert_agree
from tests.helpers.definitions import SIZES, brute_force_softmax
from tests.helpers.finite_differences import check_operation, draw
from tests.helpers.variants import PAPERS

PAPER = PAPERS["compressive"]
SMALL, variant = PAPER.small, PAPER.variant
random_params, random_state = PAPER.random_params, PAPER.random_state
CONFIG = dataclasses.replace(SMALL, dilations=(1, 3), compression_rate=2, segment=6)
USAGE = np.random.default_rng(2).random((2, 6))
HIDDEN, EVICTED = draw(2, 4, 6), draw(2, 8, 6)  # what the compression losses read as data
HEADS = {name: draw(10, 6) for name in ("query", "key", "value")}
SHAPES = {"query": (2, 2, 3, 5), "key": (2, 2, 7, 5), "value": (2, 2, 7, 5), "distance_key": (2, 7, 5)}
SHAPES |= {"content_bias": (2, 5), "distance_bias": (2, 5)}


def relative_attention(in_values):
    """(forward, backward, inputs) with dropout."""
    forward = lambda **inputs: ref.relative_attention_forward(  # noqa: E731
        *inputs.values(), 0.4, np.random.default_rng(8), in_values
    )
    return forward, ref.relative_attention_backward, {name: draw(*shape) for name, shape in SHAPES.items()}


def compression(name):
    """(forward, backward, inputs) of a compression."""
    forward = lambda evicted, **p: ref.COMPRESSIONS[name][0](p, CONFIG, evicted, USAGE)  # noqa: E731
    p = ref.init_compression(dataclasses.replace(CONFIG, compression=name), np.random.default_rng(1))
    return forward, ref.COMPRESSIONS[name][1], {"evicted": draw(2, 6, 6)} | p


OPERATIONS = {  # forward, backward, inputs
    "relative_attention": relative_attention(False),
    "relative_attention in values": relative_attention(True),
    "attention_reconstruction": (
        lambda new: ref.attention_reconstruction_forward(HEADS, SMALL, HIDDEN, EVICTED, new),
        lambda dout, cache: ref.attention_reconstruction_backward(dout, cache)[0],
        {"new": draw(2, 2, 6)},
    ),
    "auto_encoding": (
        lambda new, decoder: ref.auto_encoding_forward({"compression.decoder": decoder}, SMALL, HIDDEN, EVICTED, new),
        ref.auto_encoding_backward,
        {"new": draw(2, 2, 6), "decoder": draw(24, 6)},
    ),
} | {f"compression {name}": compression(name) for name in ref.COMPRESSIONS}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_gradient(name):
    check_operation(*OPERATIONS[name], name)


# Definitions


@given(n=st.integers(1, 6), before=st.integers(0, 7), size=SIZES, seed=st.integers(0, 2**31))
def test_relative_attention_equals_direct_indexing(n, before, size, seed):
    """Each query by itself, over the keys up to it, the distance's sinusoid made for each pair: no shift, no matrix of scores."""
    rng, k, width, heads, e = np.random.default_rng(seed), before + n, 6, 2, 3
    query, (key, value) = size * rng.standard_normal((2, heads, n, e)), rng.standard_normal((2, 2, heads, k, e))
    u, v, weight = (size * rng.standard_normal(shape) for shape in ((heads, e), (heads, e), (heads, e, width)))
    expected = np.zeros(query.shape)
    usage = np.zeros((2, k))
    for b, h, i in np.ndindex(2, heads, n):
        scores = []
        for j in range(before + i + 1):
            distance = before + i - j
            sinusoid = [math.sin(distance / 10_000 ** (2 * f / width)) for f in range(width // 2)]
            sinusoid += [math.cos(distance / 10_000 ** (2 * f / width)) for f in range(width // 2)]
            r = weight[h] @ sinusoid
            scores.append(((query[b, h, i] + u[h]) @ key[b, h, j] + (query[b, h, i] + v[h]) @ r) / math.sqrt(e))
        for j, share in enumerate(brute_force_softmax(scores)):
            expected[b, h, i] += share * value[b, h, j]
            usage[b, j] += share / (heads * n)
    distance_key = np.einsum("kd,hed->hke", ref.distance_sinusoids(k, width), weight)
    actual, cache = ref.relative_attention_forward(query, key, value, distance_key, u, v)
    assert_agree({"out": expected, "usage": usage}, {"out": actual, "usage": cache.weights.mean((1, 2))}, 1e-10)


@given(n=st.integers(1, 6), before=st.integers(0, 6), seed=st.integers(0, 99))
def test_the_backward_shift_is_the_adjoint(n, before, seed):
    """<shift x, y> = <x, shift' y> for y that is zero where the mask hides; row 0 of the gradient begins with n - 1 zeros."""
    rng = np.random.default_rng(seed)
    x, y = rng.standard_normal((2, 1, 1, n, before + n))
    y = y * ref.causal_mask(n, before + n)
    shifted, back = ref.relative_shift_forward(x)[0], ref.relative_shift_backward(y, None)
    assert math.isclose((shifted * y).sum(), (x * back).sum(), rel_tol=1e-12, abs_tol=1e-12)
    for i in range(n):
        assert not back[0, 0, i, : n - 1 - i].any()


def test_usage_is_the_mean_attention_at_eviction():
    """The rows that most_used keeps are those with the largest column sums of this segment's own attention."""
    config, rng = dataclasses.replace(variant("most_used-none"), layers=1), np.random.default_rng(4)
    params, state = random_params(config, rng), random_state(config, rng, 2)
    tokens = rng.integers(11, size=(2, 8))
    _, after, (_, caches, _) = ref.forward(params, config, tokens, state)
    (attend_cache, *_), *_ = caches[0]
    weights = attend_cache[1].weights  # (B, H, N, K)
    assert weights.shape == (2, 2, 8, 25)
    for b in range(2):
        sums = [sum(weights[b, h, i, 5 + row] for h in range(2) for i in range(8)) for row in range(8)]
        kept = sorted(sorted(range(8), key=lambda row: -sums[row])[:2])
        assert (after.compressed[b, 0, -2:] == state.memory[b, 0, kept]).all()


# Configs


def test_initialisation():
    config = dataclasses.replace(SMALL, width=300, head_width=60, feed_forward=400, heads=5, compression="dilated_conv")
    config = dataclasses.replace(config, compression_loss="auto_encoding")
    params = ref.init_params(config, np.random.default_rng(0))
    fan_ins = dict.fromkeys(("query", "key", "value", "distance_key", "output", "mlp_hidden", "compression.decoder"), 300)
    fan_ins |= {"mlp_output": 400, "compression.weight": 1200, "compression.dilated_2": 600}
    for name, fan_in in fan_ins.items():
        weight = params[f"layers.1.{name}"]
        assert weight.std() == pytest.approx(fan_in**-0.5, rel=0.02) and weight.shape[1] == fan_in
        assert np.abs(weight).max() < 2.3 * fan_in**-0.5, "not truncated"
    for name in ("content_bias", "distance_bias"):
        assert params[f"layers.1.{name}"].std() == pytest.approx(0.02, rel=0.15)
    assert params["embedding"].std() == pytest.approx(1, rel=0.05)
    simplified = dataclasses.replace(config, positions="simplified", max_distance=99)
    simplified = ref.subtree(ref.init_params(simplified, np.random.default_rng(0)), "layers.2.")
    assert simplified["positions"].shape == (100, 60) and simplified["positions"].std() == pytest.approx(1, rel=0.05)
    assert not any(simplified[f"{name}_bias"].any() for name in ("query", "key", "value"))
    assert not params["layers.0.mlp_hidden_bias"].any() and (params["layers.0.norm.scale"] == 1).all()


@pytest.mark.parametrize(
    "change,words",
    [
        ({"segment": 10}, "compression_rate 4 does not divide segment 10; 5 does"),
        ({"memory": -1}, "memory is -1"),
        ({"compressed_memory": -2}, "compressed_memory is -2"),
        ({"width": 7}, "width 7 is odd"),
        ({"compression": "zip"}, "compression is 'zip'"),
        ({"compression_loss": "l1"}, "compression_loss is 'l1'"),
        ({"dilations": (0, 1)}, "dilations"),
        ({"dilations": (2, 1)}, "ascending"),
        ({"dilations": (1, 1)}, "each rate once"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"layers": 0}, "layers is 0"),
        ({"compression_rate": 0}, "compression_rate is 0"),
        ({"positions": "rotary"}, "positions is 'rotary'; it must be one of simplified, transformer_xl"),
        ({"max_distance": 0}, "max_distance is 0"),
    ],
)
def test_impossible_configs_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(SMALL, **change)
    assert dataclasses.replace(SMALL, width=7, positions="simplified").width == 7, "sinusoids alone need an even one"
