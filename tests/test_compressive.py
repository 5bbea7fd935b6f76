"""Compressive Transformer: the paper's claims, for the reference and the accelerated model."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accelerated.compressive as fast
from accelerated.compressive import Compressive
from reference import compressive as ref
from tests.helpers.comparison import assert_agree, named
from tests.helpers.definitions import brute_force_softmax
from tests.helpers.finite_differences import draw
from tests.helpers.rollouts import filled
from tests.helpers.variants import PAPERS, SIMPLIFIED

PAPER = PAPERS["compressive"]
SMALL, variant = PAPER.small, PAPER.variant
random_params, random_state = PAPER.random_params, PAPER.random_state
to_torch, model_with = PAPER.to_torch, PAPER.model_with
SIMPLIFIED_XL = SIMPLIFIED | {"compressed_memory": 0}


# Definitions


@pytest.mark.parametrize("name", ["max_pooling", "mean_pooling"])
@given(rate=st.integers(1, 4), parts=st.integers(1, 4), seed=st.integers(0, 2**31))
def test_pooling_equals_a_loop(name, rate, parts, seed):
    evicted = np.random.default_rng(seed).standard_normal((2, rate * parts, 3))
    expected = np.zeros((2, parts, 3))
    for b, i, d in np.ndindex(2, parts, 3):
        rows = [evicted[b, i * rate + offset, d] for offset in range(rate)]
        expected[b, i, d] = max(rows) if name == "max_pooling" else sum(rows) / rate
    assert_agree({"new": expected}, {"new": both_compress({}, name, rate, evicted)}, 1e-12)


def compression_with(p, config):
    """The accelerated compression with these parameters."""
    compression = fast.COMPRESSIONS[config.compression](config)
    for name, value in p.items():
        setattr(compression, name, torch.nn.Parameter(torch.tensor(value)))
    return compression


def both_compress(p, name, rate, evicted, usage=None, **changes):
    """Compress with the reference, and compare with the accelerated compression."""
    config = dataclasses.replace(
        SMALL, compression=name, compression_rate=rate, width=2 * evicted.shape[2], segment=evicted.shape[1], **changes
    )
    new, _ = ref.COMPRESSIONS[name][0](p, config, evicted, usage)
    actual = compression_with(p, config)(torch.tensor(evicted), None if usage is None else torch.tensor(usage))
    assert_agree({"new": new}, {"new": actual}, 1e-12)
    assert new.shape[1] == evicted.shape[1] // rate
    return new


@given(rate=st.integers(1, 4), parts=st.integers(1, 4), levels=st.integers(1, 9), seed=st.integers(0, 2**31))
def test_most_used_keeps_the_most_used_in_order(rate, parts, levels, seed):
    """Compared with sorting by usage, then age; few levels of usage make many ties."""
    rng = np.random.default_rng(seed)
    evicted, usage = rng.standard_normal((2, rate * parts, 3)), rng.integers(levels, size=(2, rate * parts)) / 10
    new = both_compress({}, "most_used", rate, evicted, usage)
    for b in range(2):
        ranked = sorted(range(rate * parts), key=lambda i: (-usage[b, i], i))[:parts]
        assert (new[b] == evicted[b, sorted(ranked)]).all()


@given(rate=st.integers(1, 4), parts=st.integers(1, 3), seed=st.integers(0, 2**31))
def test_convolutions_equal_torchs(rate, parts, seed):
    """conv is Conv1d with kernel and stride c, its decoder ConvTranspose1d, a dilated layer Conv1d with kernel 2 and padding."""
    rng, d = np.random.default_rng(seed), 3
    evicted, weight, pair = (
        rng.standard_normal((2, rate * parts, d)),
        rng.standard_normal((d, rate * d)),
        rng.standard_normal((d, 2 * d)),
    )
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
    n=st.integers(1, 4),
    memory=st.integers(0, 14),  # below a segment, as long, and longer
    compressed=st.integers(1, 6),
    rate=st.integers(1, 3),
    name=st.sampled_from(sorted(ref.COMPRESSIONS)),
    seed=st.integers(0, 2**31),
)
def test_memories_are_queues_of_the_whole_history(n, memory, compressed, rate, name, seed):
    """Compared with lists of all past rows: memory is the last M rows, compressed memory the last C compressed rows."""
    length = n * rate
    config = dataclasses.replace(
        SMALL, layers=1, segment=length, memory=memory, compressed_memory=compressed, compression_rate=rate, compression=name
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
        left = len(history) - memory - length  # rows evicted before this segment
        evicted = np.stack(history[left : left + length], axis=1)
        usage = weights[..., compressed : compressed + length].mean((1, 2))
        compressions += list(ref.COMPRESSIONS[name][0](p, config, evicted, usage)[0].transpose(1, 0, 2))
        torch_memories = [torch.tensor(x) for x in (h, old, old_compressed, weights.mean((1, 2)))]
        actual = model.layers[0].remember(*torch_memories)
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
    """Algorithm 1 for one lane (row of a batch), one position at a time, from the list of all past inputs of a layer."""
    simplified = config.positions == "simplified"
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
                    scores, values = [], []
                    for j in range(place + 1):
                        key, value = p["key"][rows] @ seen[j], p["value"][rows] @ seen[j]
                        if simplified:  # Memformer's Eqs. 2-4
                            position = p["positions"][min(place - j, config.max_distance)]
                            score = (query + p["query_bias"][head]) @ (key + p["key_bias"][head] + position)
                            value = value + p["value_bias"][head] + position
                        else:
                            sinusoid = ref.distance_sinusoids(place - j + 1, config.width)[0]
                            score = (query + p["content_bias"][head]) @ key
                            score += (query + p["distance_bias"][head]) @ (p["distance_key"][rows] @ sinusoid)
                        scores.append(score / math.sqrt(e))
                        values.append(value)
                    attended.append(sum(w * value for w, value in zip(brute_force_softmax(scores), values, strict=True)))
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


@pytest.mark.parametrize(
    "change", [{"compressed_memory": 0}, {}, {"memory": 3}, {"memory": 0}, SIMPLIFIED, SIMPLIFIED | {"memory": 3}, SIMPLIFIED_XL]
)
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
    odd = dataclasses.replace(SMALL, compressed_memory=0, compression_rate=3)  # 3 does not divide 8, and does not have to
    assert odd.temporal_range == 3 * 12


@pytest.mark.parametrize("compression", ref.COMPRESSIONS)
def test_zeros_compress_to_zeros(compression):
    config = dataclasses.replace(SMALL, compression=compression)
    p, zeros, usage = ref.init_compression(config, np.random.default_rng(0)), np.zeros((2, 8, 6)), np.full((2, 8), 0.1)
    assert not ref.COMPRESSIONS[compression][0](p, config, zeros, usage)[0].any()
    assert not compression_with(p, config)(torch.tensor(zeros), torch.tensor(usage)).any()


@pytest.mark.parametrize("loss", ref.AUXILIARY)
@pytest.mark.parametrize("compression", ref.COMPRESSIONS)
def test_the_loss_at_a_documents_start_is_exactly_zero(compression, loss):
    """Zeros are evicted and reconstructed as zeros: loss and gradient are 0.0; with a norm they would be NaN.

    Learned biases of simplified positions are no part of the reconstruction.
    """
    config = dataclasses.replace(SMALL, compression=compression, compression_loss=loss, **SIMPLIFIED)
    params, tokens = random_params(config, np.random.default_rng(0)), np.arange(16).reshape(2, 8) % 11
    state = ref.initial_state(params, config, 2)
    assert not any(field.any() for field in state)
    losses, caches = ref.auxiliary_forward(params, config, ref.forward(params, config, tokens, state)[2])
    assert list(losses.values()) == [0.0] * 3
    assert all((g == 0).all() for g in ref.auxiliary_backward(config, 1.0, caches).values())
    model = model_with(params, config)
    output = model(torch.tensor(tokens), model.initial_state(2))
    assert [v.item() for v in output.auxiliary.values()] == [0.0] * 3
    total = sum(output.auxiliary.values())
    if total.requires_grad:
        total.backward()
    assert all(p.grad is None or (p.grad == 0).all() for p in model.parameters())


@pytest.mark.parametrize("change", [{}, SIMPLIFIED])
def test_attention_reconstruction_equals_algorithm_2(change):
    """One query at a time: no positions, mask, biases or output projection; squares averaged over lanes, heads, queries, E."""
    config, rng = dataclasses.replace(SMALL, **change), np.random.default_rng(4)
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
                shares = brute_force_softmax([query @ (p["key"][rows] @ m) / math.sqrt(5) for m in memories])
                return sum(share * (p["value"][rows] @ m) for share, m in zip(shares, memories, strict=True))

            squares += list((read(evicted) - read(new)) ** 2)
        expected[f"layers.{layer}.compression"] = np.array([np.mean(squares)])
    losses, _ = ref.auxiliary_forward(params, config, cache)
    assert_agree(expected, {name: np.array([loss]) for name, loss in losses.items()}, 1e-10)
    output = model_with(params, config)(torch.tensor(tokens), to_torch(state))
    assert_agree(expected, {name: loss[None] for name, loss in output.auxiliary.items()}, 1e-10)


# Behaviour


@pytest.mark.parametrize("change,counts", [({"compressed_memory": 0}, 2), ({}, 5)])
def test_how_many_segments_later_a_token_still_counts(change, counts):
    """One layer, N = M = 8: a token is in its segment, then in memory, then in compressed memory (5 rows, two new per segment).

    A segment's last token is in the newer of two compressed rows, which is row 5, then 3, then 1, and then evicted.
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


@pytest.mark.parametrize("memory,compressed,positions", [(12, 9, "simplified"), (3, 5, "transformer_xl"), (20, 0, "simplified")])
def test_memory_sizes_can_change_after_training(memory, compressed, positions):
    """With the same weights, the model at other sizes equals the reference at those sizes."""
    small = dataclasses.replace(SMALL, positions=positions, max_distance=20)
    trained, rng = Compressive(small, seed=3).eval(), np.random.default_rng(1)
    config = dataclasses.replace(small, memory=memory, compressed_memory=compressed)
    model = Compressive(config).eval()
    model.load_state_dict({k: v for k, v in trained.state_dict().items() if k in model.state_dict()})
    params = {name: value.numpy() for name, value in model.state_dict().items()}
    state, tokens = random_state(config, rng, 2), rng.integers(11, size=(2, 8))
    expected, after, _ = ref.forward(params, config, tokens, state)
    output = model(torch.tensor(tokens), to_torch(state))
    rows = filled({"logits": output.logits} | named("state", output.state))
    assert_agree(filled({"logits": expected} | named("state", after)), rows, 1e-10)


@pytest.mark.parametrize("name", ["conv-none", "transformer-xl", "short-memory-most-used", "simplified-conv-bptt"])
def test_usage_is_each_keys_share(name):
    """It sums to one over keys and equals the reference's mean weights."""
    config, rng = variant(name), np.random.default_rng(5)
    params, model = ref.init_params(config, np.random.default_rng(9)), Compressive(config, seed=9).eval()
    state, tokens = random_state(config, rng, 2), rng.integers(11, size=(2, 8))
    usage = model.usage(torch.tensor(tokens), to_torch(state))
    _, caches, _ = ref.forward(params, config, tokens, state)[2]
    attention = [attend_cache[1] for (attend_cache, *_), *_ in caches]
    expected = np.stack([cache.weights.mean((1, 2)) for cache in attention], axis=1)
    assert_agree({"usage": expected, "sum": np.ones((2, config.layers))}, {"usage": usage, "sum": usage.sum(-1)}, 1e-12)
