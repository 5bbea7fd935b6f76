"""Compressive Transformer, the reference: gradients against finite differences, operations against their definitions."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference import compressive as ref
from reference import memformer
from tests.helpers.comparison import assert_agree, named
from tests.helpers.gradients import check_directions, check_operation, draw, flat, movable
from tests.helpers.rollouts import filled
from tests.helpers.variants import PAPERS, compression_names

PAPER = PAPERS["compressive"]
SMALL, VARIANTS, variant = PAPER.small, PAPER.variants, PAPER.variant
random_params, random_state = PAPER.random_params, PAPER.random_state


# Gradients


def test_relative_shift_gradient():
    """Of the entries that the mask shows; the gradient's hidden entries are zeros."""
    mask = ref.causal_mask(3, 7)
    check_operation(
        lambda scores: (ref.relative_shift_forward(scores)[0] * mask, None),
        lambda dout, cache: {"scores": ref.relative_shift_backward(dout * mask, cache)},
        {"scores": draw(2, 2, 3, 7)},
        "relative_shift",
    )


@pytest.mark.parametrize("in_values", [False, True])
@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_relative_attention_gradient(rate, in_values):
    names = ("query", "key", "value", "distance_key", "content_bias", "distance_bias")
    shapes = ((2, 2, 3, 5), (2, 2, 7, 5), (2, 2, 7, 5), (2, 7, 5), (2, 5), (2, 5))
    check_operation(
        lambda **inputs: ref.relative_attention_forward(*(inputs[n] for n in names), rate, np.random.default_rng(8), in_values),
        lambda dout, cache: flat(ref.relative_attention_backward(dout, cache), names[:4]),
        {name: draw(*shape) for name, shape in zip(names, shapes, strict=True)},
        "relative_attention",
    )


@pytest.mark.parametrize("positions,clipped", [("transformer_xl", 64), ("simplified", 4), ("simplified", 8)])
def test_layer_gradient(positions, clipped):
    """Attention, projections, both norms, the feed-forward and its biases, the input and what is remembered: seven keys."""
    config = dataclasses.replace(SMALL, segment=3, compressed_memory=0, positions=positions, max_distance=clipped)
    rng = np.random.default_rng(1)
    p = {k.replace(".", "__"): v + 0.3 * rng.standard_normal(v.shape) for k, v in ref.init_layer(config, rng).items()}

    def forward(h, remembered, **params):
        y, _, cache = ref.layer_forward({k.replace("__", "."): v for k, v in (p | params).items()}, config, h, remembered, None)
        return y, cache

    def backward(dout, cache):
        dh, dremembered, grads = ref.layer_backward(config, dout, cache)
        assert {name.replace(".", "__") for name in grads} == p.keys()
        return {"h": dh, "remembered": dremembered} | {k.replace(".", "__"): v for k, v in grads.items()}

    check_operation(forward, backward, {"h": draw(2, 3, 6), "remembered": draw(2, 4, 6)} | movable(p), "layer")


@pytest.mark.parametrize("name", ref.COMPRESSIONS)
def test_compression_gradient(name):
    config = dataclasses.replace(SMALL, compression=name, dilations=(1, 3), compression_rate=2, segment=6)
    p = ref.init_compression(config, np.random.default_rng(1))
    usage = np.random.default_rng(2).random((2, 6))
    check_operation(
        lambda evicted, **params: ref.COMPRESSIONS[name][0](params, config, evicted, usage),
        lambda dout, cache: flat(ref.COMPRESSIONS[name][1](dout, cache), ["evicted"]),
        {"evicted": draw(2, 6, 6)} | p,
        name,
    )


def test_attention_reconstruction_gradient():
    p = {name: draw(10, 6) for name in ("query", "key", "value")}
    h, evicted = draw(2, 4, 6), draw(2, 8, 6)
    check_operation(
        lambda new: ref.attention_reconstruction_forward(p, SMALL, h, evicted, new),
        lambda dout, cache: {"new": ref.attention_reconstruction_backward(dout, cache)[0]},
        {"new": draw(2, 2, 6)},
        "attention_reconstruction",
    )


def test_auto_encoding_gradient():
    h, evicted = draw(2, 4, 6), draw(2, 8, 6)
    check_operation(
        lambda new, decoder: ref.auto_encoding_forward({"compression.decoder": decoder}, SMALL, h, evicted, new),
        lambda dout, cache: flat(ref.auto_encoding_backward(dout, cache), ["new"]),
        {"new": draw(2, 2, 6), "decoder": draw(24, 6)},
        "auto_encoding",
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_model_gradient(name):
    """Random directions of the logits through parameters and both memories, and of the next compressed memory under bptt.

    What is stopped is data, so each side of a stop is differenced by itself: the next compressed memory with respect to the
    incoming one and the compression's parameters, with evicted rows that do not depend on either.
    """
    config, rng = variant(name), np.random.default_rng(5)
    params, state = random_params(config, rng), random_state(config, rng, 2)
    tokens = rng.integers(config.vocabulary, size=(2, config.segment))
    logits, after, cache = ref.forward(params, config, tokens, state)
    dlogits, dnext = rng.standard_normal(logits.shape), ref.State(*(rng.standard_normal(field.shape) for field in after))
    carried = config.compression_loss == "bptt" and config.memory >= config.segment and config.compressed_memory
    read = None if config.compression_loss == "bptt" and not carried else dnext  # else the gradient must not depend on it
    grads, dstate = ref.backward(params, config, cache, dlogits, read)
    assert grads.keys() == params.keys()
    grads |= named("state", dstate)

    def objective(inputs, through_state):
        logits, after, _ = ref.forward(inputs, config, tokens, ref.State(inputs["state.memory"], inputs["state.compressed"]))
        return (logits * dlogits).sum() + (after.compressed * dnext.compressed).sum() * bool(through_state)

    inputs = params | named("state", state)
    below = compression_names(params) | {"state.compressed"} if carried else set()
    for names, through_state in ((inputs.keys() - below, False), (below, True)):
        moving = filled(movable({k: inputs[k] for k in sorted(names) if carried or ".compression." not in k}))
        if moving:
            check_directions(lambda s, t=through_state: objective(inputs | s, t), moving, grads, rng, name)


@pytest.mark.parametrize("positions", ref.POSITIONS)
def test_model_gradient_with_dropout(positions):
    config = dataclasses.replace(SMALL, dropout=0.3, positions=positions, max_distance=9)
    params, rng = random_params(config, np.random.default_rng(5)), np.random.default_rng(6)
    tokens, state = rng.integers(config.vocabulary, size=(2, 8)), random_state(config, rng, 2)
    logits, _, cache = ref.forward(params, config, tokens, state, np.random.default_rng(7))
    dlogits = rng.standard_normal(logits.shape)
    grads, _ = ref.backward(params, config, cache, dlogits)

    def objective(shifted):
        return (ref.forward(params | shifted, config, tokens, state, np.random.default_rng(7))[0] * dlogits).sum()

    moving = movable({k: v for k, v in params.items() if ".compression." not in k})
    check_directions(objective, moving, grads, rng, "dropout")


@pytest.mark.parametrize("compression", ["conv", "dilated_conv", "mean_pooling"])
@pytest.mark.parametrize("loss", ref.AUXILIARY)
def test_auxiliary_gradient(compression, loss):
    """Random directions of the summed compression losses through the compression's parameters."""
    config = dataclasses.replace(SMALL, compression=compression, compression_loss=loss)
    rng = np.random.default_rng(5)
    params, state = random_params(config, rng), random_state(config, rng, 2)
    tokens = rng.integers(11, size=(2, 8))

    def losses(inputs):
        return ref.auxiliary_forward(inputs, config, ref.forward(inputs, config, tokens, state)[2])

    found, caches = losses(params)
    assert list(found) == [f"layers.{layer}.compression" for layer in range(3)] and all(v > 0 for v in found.values())
    grads = ref.auxiliary_backward(config, 0.7, caches)
    assert grads.keys() == compression_names(params)
    if grads:
        moving = {name: params[name] for name in grads}
        check_directions(lambda s: 0.7 * sum(losses(params | s)[0].values()), moving, grads, rng, loss)


# Definitions


@given(n=st.integers(1, 6), before=st.integers(0, 7), seed=st.integers(0, 99))
def test_relative_attention_equals_direct_indexing(n, before, seed):
    """Each query by itself, over the keys up to it, the distance's sinusoid made for each pair: no shift, no matrix of scores."""
    rng, k, width, heads, e = np.random.default_rng(seed), before + n, 6, 2, 3
    query, (key, value) = rng.standard_normal((2, heads, n, e)), rng.standard_normal((2, 2, heads, k, e))
    u, v, weight = rng.standard_normal((heads, e)), rng.standard_normal((heads, e)), rng.standard_normal((heads, e, width))
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
        exps = [math.exp(score) for score in scores]
        for j, weight_j in enumerate(exps):
            expected[b, h, i] += weight_j / sum(exps) * value[b, h, j]
            usage[b, j] += weight_j / sum(exps) / (heads * n)
    distance_key = np.einsum("kd,hed->hke", ref.distance_sinusoids(k, width), weight)
    actual, cache = ref.relative_attention_forward(query, key, value, distance_key, u, v)
    assert_agree({"out": expected, "usage": usage}, {"out": actual, "usage": cache.weights.mean((1, 2))}, 1e-10)


@given(n=st.integers(1, 6), before=st.integers(0, 7), clipped=st.integers(1, 14), seed=st.integers(0, 99))
def test_simplified_positions_equal_direct_indexing(n, before, clipped, seed):
    """Memformer's Eqs. 2-4, each query by itself: biases, and one clipped R for keys and values of all heads."""
    rng, width, heads, e = np.random.default_rng(seed), 6, 2, 3
    sizes = {"width": width, "heads": heads, "head_width": e, "segment": n, "memory": before, "compressed_memory": 0}
    config = ref.Config(**sizes, positions="simplified", max_distance=clipped)
    p = {name: rng.standard_normal(value.shape) for name, value in ref.init_layer(config, rng).items()}
    h, remembered = rng.standard_normal((2, n, width)), rng.standard_normal((2, before, width))
    source, expected = np.concatenate([remembered, h], axis=1), np.zeros((2, n, heads, e))
    for b, i, head in np.ndindex(2, n, heads):
        own = slice(head * e, (head + 1) * e)
        query = p["query"][own] @ h[b, i] + p["query_bias"][head]
        scores, values = [], []
        for j in range(before + i + 1):
            position = p["positions"][min(before + i - j, clipped)]
            key, value = (p[name][own] @ source[b, j] + p[f"{name}_bias"][head] for name in ("key", "value"))
            scores.append(query @ key + query @ position)
            values.append(value + position)
        weights = np.exp(np.array(scores) / math.sqrt(e))
        expected[b, i, head] = weights / weights.sum() @ np.array(values)
    out, _, _ = ref.attend_forward(p | {"output": np.eye(heads * e)}, config, h, remembered, None)
    assert_agree({"out": expected.reshape(2, n, -1)}, {"out": out}, 1e-10)


@given(n=st.integers(1, 7), clipped=st.integers(1, 8), seed=st.integers(0, 99))
def test_simplified_positions_are_memformers(n, clipped, seed):
    """Without a memory, output and gradients are those of Memformer's own attention."""
    rng = np.random.default_rng(seed)
    query, key, value, dout = rng.standard_normal((4, 2, 3, n, 5))
    table, zeros, distances = rng.standard_normal((clipped + 1, 5)), np.zeros((3, 5)), np.arange(clipped + 1)
    mask = memformer.self_attention_mask(n, 0, True, None)
    arguments = ({"positions": table}, query, key, value, distances, mask, 0.0, None)
    expected, cache = memformer.simplified_attention_forward(*arguments)
    *gradients, dtable = memformer.simplified_attention_backward(dout, cache)
    config = ref.Config(heads=3, head_width=5, positions="simplified", max_distance=clipped)
    r, r_cache = ref.distance_keys_forward({"positions": table}, config, n)
    out, cache = ref.relative_attention_forward(query, key, value, r, zeros, zeros, in_values=True)
    *actual, dr, _ = ref.relative_attention_backward(dout, cache)
    names = ("out", "query", "key", "value", "positions")
    actual = (out, *actual, ref.distance_keys_backward(config, dr, r_cache)["positions"])
    expected = (expected, *gradients, dtable["positions"])
    assert_agree(dict(zip(names, expected, strict=True)), dict(zip(names, actual, strict=True)), 1e-12)


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


def test_the_width_may_be_odd_without_sinusoids():
    assert dataclasses.replace(SMALL, width=7, positions="simplified").width == 7
