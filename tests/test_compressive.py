"""Compressive Transformer: the reference against finite differences and definitions, the accelerated against it."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from agreement import assert_agree, named
from gradients import check_directions, check_operation, draw, flat
from hypothesis import given
from hypothesis import strategies as st
from rollouts import (
    check_causality,
    check_evaluation,
    check_float32,
    check_gpu,
    check_length_refused,
    check_rollout,
    dropout_from,
    filled,
)
from tolerances import TOLERANCE

import accelerated.compressive as fast
from accelerated.compressive import Compressive
from reference import compressive as ref

LADDER_TOLERANCE = 1e-9  # float64, relative; the worst measured is 9e-15

SMALL = ref.Config(
    vocabulary=11,
    width=6,
    layers=3,
    heads=2,
    head_width=5,
    feed_forward=7,
    segment=8,
    memory=12,
    compressed_memory=5,
    compression_rate=4,
)
VARIANTS = {
    f"{compression}-{loss}": {"compression": compression, "compression_loss": loss}
    for compression, loss in itertools.product(ref.COMPRESSIONS, ref.COMPRESSION_LOSSES)
} | {
    "transformer-xl": {"compressed_memory": 0},
    "transformer-xl-short": {"compressed_memory": 0, "memory": 3},
    "no-memory": {"memory": 0},
    "nothing-remembered": {"memory": 0, "compressed_memory": 0},
    "short-memory": {"memory": 3},
    "short-memory-most-used": {"memory": 3, "compression": "most_used"},
    "short-memory-bptt": {"memory": 3, "compression_loss": "bptt"},
    "compressed-holds-half-a-segment": {"compressed_memory": 1, "compression_loss": "bptt"},
    "compressed-holds-three": {"compressed_memory": 6, "compression_rate": 4, "compression_loss": "bptt"},
    "rate-one": {"compression_rate": 1},
    "rate-of-a-segment": {"compression_rate": 8, "compression_loss": "auto_encoding"},
    "wide-dilations": {"compression": "dilated_conv", "dilations": (3, 11)},
    "one-layer": {"layers": 1},
}


def variant(name):
    return dataclasses.replace(SMALL, **VARIANTS[name])


def random_state(config, rng, batch):
    """A state as no document starts with it."""
    shape = (batch, config.layers, config.memory, config.width)
    compressed = (batch, config.layers, config.compressed_memory, config.width)
    return ref.State(rng.standard_normal(shape), rng.standard_normal(compressed))


def random_params(config, rng):
    """Parameters with nothing at zero or one, so that no term hides."""
    params = ref.init_params(config, rng)
    return {name: value + 0.3 * rng.standard_normal(value.shape) for name, value in params.items()}


def to_torch(state):
    return fast.State(*(torch.tensor(field) for field in state))


def model_with(params, config):
    model = Compressive(config)
    model.load_state_dict({name: torch.tensor(value) for name, value in params.items()})
    return model.eval()


def rows_of_state(state):
    """Its fields as rows, and its sizes, so that a state without rows is compared too."""
    sizes = {f"rows of {name}": np.array([field.shape[2]]) for name, field in zip(state._fields, state, strict=True)}
    return filled(named("state", state)) | sizes


def compression_names(params):
    return {name for name in params if ".compression." in name}


# Rung 1: every operation's backward against its full Jacobian


def test_relative_shift_gradient():
    """Where the mask hides nothing; the hidden entries of the gradient are zeros."""
    mask = ref.causal_mask(3, 7)
    check_operation(
        lambda scores: (ref.relative_shift_forward(scores)[0] * mask, None),
        lambda dout, cache: {"scores": ref.relative_shift_backward(dout * mask, cache)},
        {"scores": draw(2, 2, 3, 7)},
        "relative_shift",
    )


@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_relative_attention_gradient(rate):
    names = ("query", "key", "value", "distance_key", "content_bias", "distance_bias")
    shapes = ((2, 2, 3, 5), (2, 2, 7, 5), (2, 2, 7, 5), (2, 7, 5), (2, 5), (2, 5))
    check_operation(
        lambda **inputs: ref.relative_attention_forward(*(inputs[n] for n in names), rate, np.random.default_rng(8)),
        lambda dout, cache: dict(zip(names, ref.relative_attention_backward(dout, cache), strict=True)),
        {name: draw(*shape) for name, shape in zip(names, shapes, strict=True)},
        "relative_attention",
    )


def test_layer_gradient():
    """Attention, projections, both norms, the feed-forward and its biases, the input and what is remembered."""
    config = dataclasses.replace(SMALL, segment=3, compressed_memory=0)
    rng = np.random.default_rng(1)
    p = {k.replace(".", "__"): v + 0.3 * rng.standard_normal(v.shape) for k, v in ref.init_layer(config, rng).items()}

    def forward(h, remembered, **params):
        y, _, cache = ref.layer_forward({k.replace("__", "."): v for k, v in params.items()}, config, h, remembered, None)
        return y, cache

    def backward(dout, cache):
        dh, dremembered, grads = ref.layer_backward(config, dout, cache)
        assert {name.replace(".", "__") for name in grads} == p.keys()
        return {"h": dh, "remembered": dremembered} | {k.replace(".", "__"): v for k, v in grads.items()}

    check_operation(forward, backward, {"h": draw(2, 3, 6), "remembered": draw(2, 4, 6)} | p, "layer")


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
    """Random directions of the logits through parameters and both memories, of the next compressed memory where it has one.

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
        moving = filled({k: inputs[k] for k in sorted(names) if carried or ".compression." not in k})
        if moving:
            check_directions(lambda s, t=through_state: objective(inputs | s, t), moving, grads, rng, name)


def test_model_gradient_with_dropout():
    config = dataclasses.replace(SMALL, dropout=0.3)
    params, rng = random_params(config, np.random.default_rng(5)), np.random.default_rng(6)
    tokens, state = rng.integers(config.vocabulary, size=(2, 8)), random_state(config, rng, 2)
    logits, _, cache = ref.forward(params, config, tokens, state, np.random.default_rng(7))
    dlogits = rng.standard_normal(logits.shape)
    grads, _ = ref.backward(params, config, cache, dlogits)

    def objective(shifted):
        return (ref.forward(params | shifted, config, tokens, state, np.random.default_rng(7))[0] * dlogits).sum()

    moving = {k: v for k, v in params.items() if ".compression." not in k}
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


def test_arguments_are_not_changed():
    config, rng = variant("conv-bptt"), np.random.default_rng(5)
    params, state = random_params(config, rng), random_state(config, rng, 2)
    tokens = rng.integers(config.vocabulary, size=(2, 8))
    before = {k: v.copy() for k, v in (params | named("s", state)).items()}
    logits, after, cache = ref.forward(params, config, tokens, state)
    dlogits, dnext = rng.standard_normal(logits.shape), random_state(config, rng, 2)
    kept = [dlogits.copy(), *(field.copy() for field in dnext)]
    ref.backward(params, config, cache, dlogits, dnext)
    after.memory[:] = 0
    after.compressed[:] = 0
    assert all((before[k] == v).all() for k, v in (params | named("s", state)).items())
    assert all((a == b).all() for a, b in zip(kept, (dlogits, *dnext), strict=True))


# Rung 2: accelerated against reference


@pytest.mark.parametrize("name", VARIANTS)
def test_accelerated_equals_reference(name, monkeypatch):
    """Logits, states, losses and gradients over three segments with a document start in the second, then five steps."""
    monkeypatch.setattr("accelerated.attention.relative_shift.TILE", 3)
    config, rng = variant(name), np.random.default_rng(5)
    params, model = ref.init_params(config, np.random.default_rng(9)), Compressive(config, seed=9).train()
    assert_agree(params, dict(model.state_dict()), 1e-15, "initialisation")
    check_rollout(ref, params, model, config, random_state(config, rng, 2), to_torch, LADDER_TOLERANCE, name)


@pytest.mark.parametrize("name", ["conv-attention_reconstruction", "most_used-none"])
def test_dropout_acts_where_the_reference_has_it(monkeypatch, name):
    """With the reference's random numbers in place of torch's, training mode gives the reference's logits, state and losses."""
    config = dataclasses.replace(variant(name), dropout=0.3)
    model = Compressive(config, seed=9).train()

    monkeypatch.setattr(torch.nn.functional, "dropout", dropout_from(np.random.default_rng(7)))
    tokens, state = np.random.default_rng(1).integers(11, size=(2, 8)), random_state(config, np.random.default_rng(2), 2)
    params = ref.init_params(config, np.random.default_rng(9))
    expected, after, cache = ref.forward(params, config, tokens, state, np.random.default_rng(7))
    losses, _ = ref.auxiliary_forward(params, config, cache)
    output = model(torch.tensor(tokens), to_torch(state))
    rows = {"logits": output.logits} | named("state", output.state) | {k: v[None] for k, v in output.auxiliary.items()}
    expected = {"logits": expected} | named("state", after) | {k: np.array([v]) for k, v in losses.items()}
    assert_agree(expected, rows, LADDER_TOLERANCE, "dropout")


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
    assert_agree({"out": expected, "usage": usage}, {"out": actual, "usage": cache[5].mean((1, 2))}, 1e-10)


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


@pytest.mark.parametrize("name", ["max_pooling", "mean_pooling"])
@given(rate=st.integers(1, 4), parts=st.integers(1, 4), seed=st.integers(0, 99))
def test_pooling_equals_a_loop(name, rate, parts, seed):
    evicted = np.random.default_rng(seed).standard_normal((2, rate * parts, 3))
    expected = np.zeros((2, parts, 3))
    for b, i, d in np.ndindex(2, parts, 3):
        rows = [evicted[b, i * rate + offset, d] for offset in range(rate)]
        expected[b, i, d] = max(rows) if name == "max_pooling" else sum(rows) / rate
    assert_agree({"new": expected}, {"new": both_compress({}, name, rate, evicted)}, 1e-12)


def both_compress(p, name, rate, evicted, usage=None, **changes):
    """compress by the reference, held against the accelerated one."""
    config = dataclasses.replace(
        SMALL, compression=name, compression_rate=rate, width=2 * evicted.shape[2], segment=evicted.shape[1], **changes
    )
    new, _ = ref.COMPRESSIONS[name][0](p, config, evicted, usage)
    tree = torch.nn.ParameterDict({key: torch.tensor(value) for key, value in p.items()})
    actual = fast.compress(tree, config, torch.tensor(evicted), None if usage is None else torch.tensor(usage))
    assert_agree({"new": new}, {"new": actual}, 1e-12)
    assert new.shape[1] == evicted.shape[1] // rate
    return new


@given(rate=st.integers(1, 4), parts=st.integers(1, 4), levels=st.integers(1, 9), seed=st.integers(0, 99))
def test_most_used_keeps_the_most_used_in_order(rate, parts, levels, seed):
    """Against sorting by (less used, younger) and cutting; few levels of usage make many ties."""
    rng = np.random.default_rng(seed)
    evicted, usage = rng.standard_normal((2, rate * parts, 3)), rng.integers(levels, size=(2, rate * parts)) / 10
    new = both_compress({}, "most_used", rate, evicted, usage)
    for b in range(2):
        ranked = sorted(range(rate * parts), key=lambda i: (-usage[b, i], i))[:parts]
        assert (new[b] == evicted[b, sorted(ranked)]).all()


def test_usage_is_the_mean_attention_at_eviction():
    """The rows that most_used keeps are those with the largest column sums of this segment's own attention."""
    config, rng = dataclasses.replace(variant("most_used-none"), layers=1), np.random.default_rng(4)
    params, state = random_params(config, rng), random_state(config, rng, 2)
    tokens = rng.integers(11, size=(2, 8))
    _, after, cache = ref.forward(params, config, tokens, state)
    weights = cache[1][0][0][0][4][5]  # (B, H, N, K)
    assert weights.shape == (2, 2, 8, 25)
    for b in range(2):
        sums = [sum(weights[b, h, i, 5 + row] for h in range(2) for i in range(8)) for row in range(8)]
        kept = sorted(sorted(range(8), key=lambda row: -sums[row])[:2])
        assert (after.compressed[b, 0, -2:] == state.memory[b, 0, kept]).all()


@given(rate=st.integers(1, 4), parts=st.integers(1, 3), seed=st.integers(0, 99))
def test_convolutions_equal_torchs(rate, parts, seed):
    """conv is Conv1d with kernel and stride c, its decoder ConvTranspose1d, a dilated layer Conv1d with kernel 2 and padding."""
    rng, d = np.random.default_rng(seed), 3
    evicted, weight, pair = (
        rng.standard_normal((2, rate * parts, d)), rng.standard_normal((d, rate * d)), rng.standard_normal((d, 2 * d)),
    )  # fmt: skip
    rows = torch.tensor(evicted).transpose(1, 2)  # (B, D, N)
    kernel = torch.tensor(weight).view(d, rate, d).transpose(1, 2)  # (out, in, c)
    expected = torch.nn.functional.conv1d(rows, kernel, stride=rate).transpose(1, 2)
    new = both_compress({"weight": weight}, "conv", rate, evicted)
    assert_agree({"new": expected}, {"new": new}, 1e-12)
    decoder = rng.standard_normal((rate * d, d))
    transposed = torch.tensor(decoder).view(rate, d, d).permute(2, 1, 0)  # (in, out, c)
    decoded = torch.nn.functional.conv_transpose1d(expected.transpose(1, 2), transposed, stride=rate).transpose(1, 2)
    loss, _ = ref.auto_encoding_forward({"compression.decoder": decoder}, SMALL, None, evicted, new)
    assert math.isclose(loss, ((decoded.numpy() - evicted) ** 2).mean(), rel_tol=1e-10)
    for dilation in (1, 2, 4):
        padded = torch.nn.functional.pad(rows, (dilation, 0))
        layer = torch.nn.functional.conv1d(padded, torch.tensor(pair).view(d, 2, d).transpose(1, 2), dilation=dilation).relu()
        actual, _ = ref.dilated_layer_forward(evicted, pair, dilation)
        assert_agree({"layer": layer.transpose(1, 2)}, {"layer": actual}, 1e-12)


def test_dilated_conv_is_its_layers_in_order():
    p = {"dilated_1": draw(3, 6), "dilated_3": draw(3, 6), "weight": draw(3, 6)}
    evicted = draw(2, 6, 3)
    x, _ = ref.dilated_layer_forward(evicted, p["dilated_1"], 1)
    x, _ = ref.dilated_layer_forward(x, p["dilated_3"], 3)
    expected = np.stack([np.concatenate([x[:, i], x[:, i + 1]], -1) @ p["weight"].T for i in (0, 2, 4)], axis=1)
    assert_agree({"new": expected}, {"new": both_compress(p, "dilated_conv", 2, evicted, dilations=(1, 3))}, 1e-12)


@given(
    n=st.integers(1, 4), memory=st.integers(0, 9), compressed=st.integers(1, 6), rate=st.integers(1, 3),
    name=st.sampled_from(sorted(ref.COMPRESSIONS)), seed=st.integers(0, 99),
)  # fmt: skip
def test_memories_are_queues_of_the_whole_history(n, memory, compressed, rate, name, seed):
    """Against lists of everything that ever happened: memory is its last M rows, compressed memory the last C of what left."""
    length = n * rate
    config = dataclasses.replace(
        SMALL, segment=length, memory=memory, compressed_memory=compressed, compression_rate=rate, compression=name
    )
    rng = np.random.default_rng(seed)
    p = ref.init_compression(config, rng)
    model, total = Compressive(config), compressed + memory + length
    model.load_state_dict(model.state_dict() | {f"layers.0.compression.{k}": torch.tensor(v) for k, v in p.items()})
    history, compressions = [np.zeros((1, 6))] * memory, [np.zeros((1, 6))] * compressed
    old, old_compressed = np.zeros((1, memory, 6)), np.zeros((1, compressed, 6))
    for _ in range(4):
        h, weights = rng.standard_normal((1, length, 6)), rng.random((1, 2, length, total))
        history += list(h.transpose(1, 0, 2))
        left = len(history) - memory - length  # rows that were gone before this segment
        evicted = np.stack(history[left : left + length], axis=1)
        usage = weights[..., compressed : compressed + length].mean((1, 2))
        compressions += list(ref.COMPRESSIONS[name][0](p, config, evicted, usage)[0].transpose(1, 0, 2))
        torch_memories = [torch.tensor(x) for x in (h, old, old_compressed, weights.mean((1, 2)))]
        actual = model._remember(model.layers[0], *torch_memories)
        old, old_compressed, pair, _ = ref.remember_forward(p, config, h, old, old_compressed, weights)
        expected = {
            "memory": np.stack([np.zeros((1, 6)), *history], axis=1)[:, len(history) + 1 - memory :],
            "compressed": np.stack(compressions[-compressed:], axis=1),
            "evicted": evicted,
        }
        rows = {"memory": old, "compressed": old_compressed, "evicted": pair[0]}
        assert_agree(filled(expected), filled(rows), 1e-12)
        rows = dict(zip(("memory", "compressed", "evicted"), actual, strict=False))
        assert_agree(filled(expected), filled(rows), 1e-12)
        assert pair[1].shape == (1, n, 6) and old.shape[1] == memory and old_compressed.shape[1] == compressed


def slow_forward(params, config, segments):
    """Algorithm 1 written out for one lane, one position at a time, from the list of all past inputs of a layer."""
    norm = lambda x, p: (x - x.mean()) / math.sqrt(x.var() + ref.NORM_EPSILON) * p[0] + p[1]  # noqa: E731
    memories = [[np.zeros(config.width)] * config.memory for _ in range(config.layers)]
    compresseds = [[np.zeros(config.width)] * config.compressed_memory for _ in range(config.layers)]
    heads, e, logits = config.heads, config.head_width, []
    for tokens in segments:
        h = [params["embedding"][token] for token in tokens]
        for layer in range(config.layers):
            p = ref.subtree(params, f"layers.{layer}.")
            seen, outs = compresseds[layer] + memories[layer] + h, []
            for i, x in enumerate(h):
                place = len(seen) - len(h) + i
                attended = []
                for head in range(heads):
                    rows = slice(head * e, (head + 1) * e)
                    query = p["query"][rows] @ x
                    scores = []
                    for j in range(place + 1):
                        sinusoid = ref.distance_sinusoids(place - j + 1, config.width)[0]
                        content = (query + p["content_bias"][head]) @ (p["key"][rows] @ seen[j])
                        distance = (query + p["distance_bias"][head]) @ (p["distance_key"][rows] @ sinusoid)
                        scores.append(math.exp((content + distance) / math.sqrt(e)))
                    attended.append(sum(s / sum(scores) * (p["value"][rows] @ seen[j]) for j, s in enumerate(scores)))
                a = norm(x + p["output"] @ np.concatenate(attended), (p["norm.scale"], p["norm.bias"]))
                hidden = np.maximum(p["mlp_hidden"] @ a + p["mlp_hidden_bias"], 0)
                y = a + p["mlp_output"] @ hidden + p["mlp_output_bias"]
                outs.append(norm(y, (p["mlp_norm.scale"], p["mlp_norm.bias"])))
            queue = memories[layer] + h
            evicted, memories[layer] = queue[: len(h)], queue[len(h) :]
            if config.compressed_memory:
                rate = config.compression_rate
                new = [np.mean(evicted[at : at + rate], axis=0) for at in range(0, len(h), rate)]
                compresseds[layer] = (compresseds[layer] + new)[-config.compressed_memory :]
            h = outs
        logits.append(np.stack([params["embedding"] @ x / math.sqrt(config.width) for x in h]))
    return np.stack(logits)


@pytest.mark.parametrize("change", [{"compressed_memory": 0}, {}, {"memory": 3}, {"memory": 0}])
def test_forward_is_algorithm_1_and_transformer_xl_without_compressed_memory(change):
    """From a document's start over four segments, on both sides; with C = 0 the slow model is Transformer-XL."""
    config = dataclasses.replace(SMALL, compression="mean_pooling", compression_loss="none", layers=2, **change)
    rng = np.random.default_rng(3)
    params, tokens = random_params(config, rng), rng.integers(11, size=(4, 8))
    model, state = model_with(params, config), ref.initial_state(params, config, 1)
    fast_state, logits, fast_logits = to_torch(state), [], []
    for segment in tokens:
        out, state, _ = ref.forward(params, config, segment[None], state)
        logits.append(out[0])
        output = model(torch.tensor(segment)[None], fast_state)
        fast_state = output.state
        fast_logits.append(output.logits[0])
    expected = {"logits": slow_forward(params, config, tokens)}
    assert_agree(expected, {"logits": np.stack(logits)}, 1e-10)
    assert_agree(expected, {"logits": torch.stack(fast_logits)}, 1e-10)


def test_without_compressed_memory_the_compression_options_change_nothing():
    """Transformer-XL has no compression parameters, no auxiliary loss, and the same weights from the same seed."""
    plain = ref.init_params(variant("transformer-xl"), np.random.default_rng(0))
    for compression, loss in itertools.product(ref.COMPRESSIONS, ref.COMPRESSION_LOSSES):
        config = dataclasses.replace(SMALL, compressed_memory=0, compression=compression, compression_loss=loss)
        params = ref.init_params(config, np.random.default_rng(0))
        assert params.keys() == plain.keys() and all((params[k] == plain[k]).all() for k in plain)
        output = Compressive(config)(torch.zeros(1, 8, dtype=torch.long), Compressive(config).initial_state(1))
        assert output.auxiliary == {} and output.state.compressed.shape == (1, 3, 0, 6)
    odd = dataclasses.replace(SMALL, compressed_memory=0, compression_rate=3)  # 3 does not divide 8, and need not
    assert odd.temporal_range == 3 * 12


@pytest.mark.parametrize("compression", ref.COMPRESSIONS)
def test_zeros_compress_to_zeros(compression):
    config = dataclasses.replace(SMALL, compression=compression)
    p, zeros, usage = ref.init_compression(config, np.random.default_rng(0)), np.zeros((2, 8, 6)), np.full((2, 8), 0.1)
    assert not ref.COMPRESSIONS[compression][0](p, config, zeros, usage)[0].any()
    tree = torch.nn.ParameterDict({key: torch.tensor(value) for key, value in p.items()})
    assert not fast.compress(tree, config, torch.tensor(zeros), torch.tensor(usage)).any()


@pytest.mark.parametrize("compression,loss", list(itertools.product(ref.COMPRESSIONS, ref.AUXILIARY)))
def test_the_loss_at_a_documents_start_is_exactly_zero(compression, loss):
    """Zeros are evicted and reconstructed as zeros: loss 0.0 and gradient 0.0, where a norm would give NaN."""
    config = dataclasses.replace(SMALL, compression=compression, compression_loss=loss)
    params, tokens = ref.init_params(config, np.random.default_rng(0)), np.arange(16).reshape(2, 8) % 11
    state = ref.initial_state(params, config, 2)
    assert not any(field.any() for field in state)
    losses, caches = ref.auxiliary_forward(params, config, ref.forward(params, config, tokens, state)[2])
    assert list(losses.values()) == [0.0] * 3
    assert all((g == 0).all() for g in ref.auxiliary_backward(config, 1.0, caches).values())
    model = Compressive(config, seed=0)
    output = model(torch.tensor(tokens), model.initial_state(2))
    assert [v.item() for v in output.auxiliary.values()] == [0.0] * 3
    total = sum(output.auxiliary.values())
    if total.requires_grad:
        total.backward()
    assert all(p.grad is None or (p.grad == 0).all() for p in model.parameters())


# Who learns from what (3.2)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_compression_loss_reaches_the_compression_and_nothing_else(name):
    config = variant(name)
    model, rng = Compressive(config, seed=1), np.random.default_rng(2)
    state = fast.State(*(field.requires_grad_() for field in to_torch(random_state(config, rng, 2))))
    auxiliary = model(torch.tensor(rng.integers(11, size=(2, 8))), state).auxiliary
    measured = config.compression_loss in ref.AUXILIARY and config.compressed_memory > 0
    assert len(auxiliary) == (config.layers if measured else 0)
    total = sum(auxiliary.values(), torch.zeros(()))
    if total.requires_grad:
        total.backward()
    reached = {n for n, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert reached == (compression_names(dict(model.named_parameters())) if measured else set())
    assert state.memory.grad is None and state.compressed.grad is None
    apart = {id(p) for p in model.auxiliary_parameters()}
    assert apart == {id(p) for n, p in model.named_parameters() if ".compression." in n and config.compression_loss != "bptt"}


@pytest.mark.parametrize("name", [name for name in VARIANTS if "conv" in name])
def test_the_task_loss_reaches_the_compression_only_under_bptt_and_across_segments(name):
    """Never within one segment; at horizon 2 in the BPTT variant alone, on both sides."""
    config, rng = variant(name), np.random.default_rng(2)
    params, model = ref.init_params(config, np.random.default_rng(1)), Compressive(config, seed=1)
    names, tokens = compression_names(params), rng.integers(11, size=(2, 2, 8))
    first, second = (ref.forward(params, config, t, random_state(config, rng, 2)) for t in tokens)
    second = ref.forward(params, config, tokens[1], first[1])
    one, _ = ref.backward(params, config, first[2], np.ones_like(first[0]))
    assert all((one[n] == 0).all() for n in names)
    _, dstate = ref.backward(params, config, second[2], rng.standard_normal(second[0].shape))
    assert dstate.compressed.any() and dstate.memory.any()
    two, before = ref.backward(params, config, first[2], np.zeros_like(first[0]), dstate)
    assert all(two[n].any() == (config.compression_loss == "bptt") for n in names)
    others = [n for n in params if n not in names]
    assert not any(two[n].any() for n in others) and not before.memory.any(), "memory is data"
    state = to_torch(random_state(config, rng, 2))
    for horizon in (1, 2):
        model.zero_grad()
        carried = state
        for segment in tokens[:horizon]:
            output = model(torch.tensor(segment), carried)
            carried = output.state
        (output.logits**3).sum().backward()
        reached = {n for n, p in model.named_parameters() if n in names and p.grad is not None and p.grad.any()}
        assert reached == (names if horizon == 2 and config.compression_loss == "bptt" else set())
    assert not output.state.memory.requires_grad
    assert output.state.compressed.requires_grad == (config.compression_loss == "bptt")


def test_attention_reconstruction_equals_algorithm_2():
    """One query at a time: content alone, no mask, no u, no output projection; squares averaged over lanes, heads, queries, E."""
    config, rng = SMALL, np.random.default_rng(4)
    params, state = random_params(config, rng), random_state(config, rng, 2)
    tokens = rng.integers(11, size=(2, 8))
    _, _, cache = ref.forward(params, config, tokens, state)
    expected = {}
    for layer in range(3):
        p, h = ref.subtree(params, f"layers.{layer}."), cache[1][layer][2]
        squares = []
        for b, head, i in np.ndindex(2, 2, 8):
            rows, evicted = slice(5 * head, 5 * head + 5), state.memory[b, layer, :8]
            new = [p["compression.weight"] @ evicted[at : at + 4].reshape(-1) for at in (0, 4)]
            query = p["query"][rows] @ h[b, i]

            def read(memories, p=p, rows=rows, query=query):
                scores = [math.exp(query @ (p["key"][rows] @ m) / math.sqrt(5)) for m in memories]
                return sum(s / sum(scores) * (p["value"][rows] @ m) for s, m in zip(scores, memories, strict=True))

            squares += list((read(evicted) - read(new)) ** 2)
        expected[f"layers.{layer}.compression"] = np.array([np.mean(squares)])
    losses, _ = ref.auxiliary_forward(params, config, cache)
    assert_agree(expected, {name: np.array([loss]) for name, loss in losses.items()}, 1e-10)
    output = model_with(params, config)(torch.tensor(tokens), to_torch(state))
    assert_agree(expected, {name: loss[None] for name, loss in output.auxiliary.items()}, 1e-10)


def test_initialisation():
    config = dataclasses.replace(SMALL, width=300, head_width=60, feed_forward=400, heads=5, compression="dilated_conv")
    config = dataclasses.replace(config, compression_loss="auto_encoding")
    params = ref.init_params(config, np.random.default_rng(0))
    for name, fan_in in (
        ("query", 300), ("key", 300), ("value", 300), ("distance_key", 300), ("output", 300), ("mlp_hidden", 300),
        ("mlp_output", 400), ("compression.weight", 1200), ("compression.dilated_2", 600), ("compression.decoder", 300),
    ):  # fmt: skip
        weight = params[f"layers.1.{name}"]
        assert weight.std() == pytest.approx(fan_in**-0.5, rel=0.02) and weight.shape[1] == fan_in
        assert np.abs(weight).max() < 2.3 * fan_in**-0.5, "not truncated"
    for name in ("content_bias", "distance_bias"):
        assert params[f"layers.1.{name}"].std() == pytest.approx(0.02, rel=0.15)
    assert params["embedding"].std() == pytest.approx(1, rel=0.05)
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
    ],
)
def test_impossible_configs_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(SMALL, **change)


@pytest.mark.parametrize("length", [0, 4, 9])
def test_segments_of_other_lengths_are_refused(length):
    check_length_refused(ref, Compressive, SMALL, length, f"{length} tokens is not one of 8")


def test_states_of_other_sizes_are_refused_with_both_numbers():
    tokens = torch.zeros(1, 8, dtype=torch.long)
    for change, words in (
        ({"memory": 9}, "9 rows of memory, the model 12"),
        ({"compressed_memory": 2}, "2 rows of compressed_memory, the model 5"),
    ):
        other = Compressive(dataclasses.replace(SMALL, **change)).initial_state(1)
        for read in (Compressive(SMALL), Compressive(SMALL).advance):
            with pytest.raises(ValueError, match=words):
                read(tokens, other)
        with pytest.raises(ValueError, match=words):
            Compressive(SMALL).step(tokens[:, 0], other)


# Behaviour


@pytest.mark.parametrize("name", VARIANTS)
def test_step_and_advance_equal_forward(name):
    """From a state in mid-document, over three segments; also taking up `step` from a state that forward returned."""
    config, rng = variant(name), np.random.default_rng(5)
    model, state = Compressive(config, seed=9).eval(), to_torch(random_state(config, rng, 2))
    segments, whole = torch.tensor(rng.integers(config.vocabulary, size=(3, 2, 8))), []
    carried = state
    for tokens in segments:
        output = model(tokens, carried)
        advanced = model.advance(tokens, carried)
        assert_agree(rows_of_state(output.state), rows_of_state(advanced), 1e-12)
        whole.append(output.logits)
        carried = output.state
    for start in (0, 1):
        stream = state if start == 0 else model.advance(segments[0], state)
        logits = []
        for token in torch.cat(list(segments[start:]), 1).unbind(1):
            out, stream = model.step(token, stream)
            logits.append(out)
        assert_agree({"logits": torch.cat(whole[start:], 1)}, {"logits": torch.stack(logits, 1)}, 1e-11)
        assert_agree(rows_of_state(carried), rows_of_state(stream.state), 1e-11)
        assert stream.hidden.shape[2] == 0


def test_a_step_costs_the_same_however_much_was_read():
    """What a stream holds does not grow from one segment's start to the next."""
    model = Compressive(SMALL).eval()
    stream, sizes = model.initial_state(1), []
    for at in range(40):
        _, stream = model.step(torch.tensor([at % 11]), stream)
        sizes.append(sum(t.numel() for t in (*stream.state, stream.hidden, *stream.keys, *stream.values, stream.usage)))
    assert sizes[:8] == sizes[8:16] == sizes[32:40] and max(sizes) == sizes[6]


@given(name=st.sampled_from(sorted(VARIANTS)), at=st.integers(0, 7), seed=st.integers(0, 99))
def test_a_token_changes_no_logit_before_it(name, at, seed):
    config, rng = variant(name), np.random.default_rng(seed)
    params, model = ref.init_params(config, np.random.default_rng(9)), Compressive(config, seed=9).eval()
    check_causality(ref, params, model, config, random_state(config, rng, 1), to_torch, at % config.segment, rng)


@pytest.mark.parametrize("change,counts", [({"compressed_memory": 0}, 2), ({}, 5)])
def test_how_many_segments_later_a_token_still_counts(change, counts):
    """One layer, N = M = 8: a token counts in its segment, then in memory, then in compressed memory: 5 rows, two new a segment.

    The last token of a segment is in the newer of its two compressed rows, which stands at 5, 3 and 1 of 5 before it is gone.
    """
    config = dataclasses.replace(SMALL, layers=1, memory=8, **change)
    model = Compressive(config, seed=9).eval()
    segments = torch.randint(11, (8, 1, 8))
    other = segments.clone()
    other[0, 0, -1] = (other[0, 0, -1] + 1) % 11
    logits = []
    for run in (segments, other):
        state, outs = model.initial_state(1), []
        for tokens in run:
            out, state, _ = model(tokens, state)
            outs.append(out)
        logits.append(outs)
    differs = [not torch.equal(a, b) for a, b in zip(*logits, strict=True)]
    assert differs == [True] * counts + [False] * (8 - counts)


def test_temporal_range_and_description():
    assert SMALL.temporal_range == 3 * (12 + 4 * 5)
    assert Compressive(SMALL).describe() == "temporal range 3 layers x (12 + 4 x 5) = 96 tokens, and segments of 8"
    assert "3 layers x (12) = 36 tokens" in Compressive(variant("transformer-xl")).describe()


@pytest.mark.parametrize("memory,compressed", [(12, 9), (3, 5), (20, 0), (0, 2)])
def test_memory_sizes_can_change_after_training(memory, compressed):
    """The same weights at other sizes are the reference's at those sizes."""
    trained, rng = Compressive(SMALL, seed=3).eval(), np.random.default_rng(1)
    config = dataclasses.replace(SMALL, memory=memory, compressed_memory=compressed)
    model = Compressive(config).eval()
    model.load_state_dict({k: v for k, v in trained.state_dict().items() if k in model.state_dict()})
    params = {name: value.numpy() for name, value in model.state_dict().items()}
    state, tokens = random_state(config, rng, 2), rng.integers(11, size=(2, 8))
    expected, after, _ = ref.forward(params, config, tokens, state)
    output = model(torch.tensor(tokens), to_torch(state))
    rows = filled({"logits": output.logits} | named("state", output.state))
    assert_agree(filled({"logits": expected} | named("state", after)), rows, 1e-10)


@pytest.mark.parametrize("name", VARIANTS)
def test_usage_is_each_keys_share(name):
    """Sums to one over keys, zero for the segment's last key but for its own query, the same as the reference's weights."""
    config, rng = variant(name), np.random.default_rng(5)
    params, model = ref.init_params(config, np.random.default_rng(9)), Compressive(config, seed=9).eval()
    state, tokens = random_state(config, rng, 2), rng.integers(11, size=(2, 8))
    usage, after = model.usage(torch.tensor(tokens), to_torch(state))
    cache = ref.forward(params, config, tokens, state)[2]
    expected = np.stack([layer[0][0][4][5].mean((1, 2)) for layer in cache[1]], axis=1)
    assert_agree({"usage": expected, "sum": np.ones((2, config.layers))}, {"usage": usage, "sum": usage.sum(-1)}, 1e-12)
    assert_agree(rows_of_state(model(torch.tensor(tokens), to_torch(state)).state), rows_of_state(after), 1e-12)


def test_every_parameter_gets_gradient_from_a_rollout():
    """Four segments from a document's start: every parameter of every variant, from task and compression losses together."""
    for name in VARIANTS:
        config = variant(name)
        if config.compression_loss == "none" and config.compression in ("conv", "dilated_conv"):
            continue  # nothing trains the compression
        model = Compressive(config)
        tokens, state, objective = torch.randint(11, (4, 2, 8)), model.initial_state(2), 0.0
        for segment in tokens:
            logits, state, auxiliary = model(segment, state)
            objective = objective + logits.log_softmax(-1)[..., 0].sum() + sum(auxiliary.values())
        objective.backward()
        silent = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
        assert not silent, (name, silent)


@pytest.mark.parametrize("name", ["conv-attention_reconstruction", "most_used-none"])
def test_evaluation_drops_nothing_out(name):
    config = variant(name)
    check_evaluation(Compressive, config, to_torch(random_state(config, np.random.default_rng(0), 2)))


def test_float32_stays_float32():
    torch.set_default_dtype(torch.float32)
    check_float32(Compressive(SMALL), SMALL)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", VARIANTS)
def test_a_gpu_gives_what_the_cpu_gives(name):
    check_gpu(Compressive, variant(name), TOLERANCE["cuda", torch.float32], name)
