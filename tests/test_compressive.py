"""Compressive Transformer: the paper's claims, for the reference and the accelerated model."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from torch.nn import functional

from accelerated.compressive import Compressive
from reference import compressive as ref
from tests.helpers.comparison import assert_agree, brute_force_softmax
from tests.helpers.rollouts import gradients
from tests.helpers.variants import PAPERS
from tests.models.compressive import SIMPLIFIED

PAPER = PAPERS["compressive"]
SMALL, variant = PAPER.small, PAPER.variant
random_params, random_state = PAPER.random_params, PAPER.random_state
to_torch, model_with = PAPER.to_torch, PAPER.model_with
SIMPLIFIED_XL = SIMPLIFIED | {"compressed_memory": 0}


def test_the_decoder_of_auto_encoding_is_torchs_transposed_convolution():
    rng, d, rate = np.random.default_rng(0), 3, 4
    evicted, new, decoder = (
        rng.standard_normal(shape) for shape in ((2, 2 * rate, d), (2, 2, d), (rate * d, d))
    )
    kernel = torch.tensor(decoder).view(rate, d, d).permute(2, 1, 0)  # (in, out, c)
    decoded = functional.conv_transpose1d(torch.tensor(new).mT, kernel, stride=rate).mT
    loss, _ = ref.auto_encoding_forward({"compression.decoder": decoder}, SMALL, None, evicted, new)
    assert loss == pytest.approx(((decoded.numpy() - evicted) ** 2).mean(), rel=1e-10)


def slow_attention(p, config, seen, place, head):
    """What one head of the input at `place` finds in itself and in all inputs before it."""
    rows = slice(head * config.head_width, (head + 1) * config.head_width)
    inputs, distances = np.array(seen[: place + 1]), np.arange(place, -1, -1)
    query, keys, values = (
        p["query"][rows] @ seen[place],
        inputs @ p["key"][rows].T,
        inputs @ p["value"][rows].T,
    )
    if config.positions == "simplified":  # Memformer's Eqs. 2-4
        positions = p["positions"][np.minimum(distances, config.max_distance)]
        scores = (keys + p["key_bias"][head] + positions) @ (query + p["query_bias"][head])
        values = values + p["value_bias"][head] + positions
    else:
        of_distances = (
            np.array([ref.distance_sinusoids(d + 1, config.width)[0] for d in distances])
            @ p["distance_key"][rows].T
        )
        scores = keys @ (query + p["content_bias"][head]) + of_distances @ (
            query + p["distance_bias"][head]
        )
    return np.array(brute_force_softmax(scores / math.sqrt(config.head_width))) @ values


def slow_forward(params, config, segments):
    """Algorithm 1 for one lane (row of a batch), one position at a time, from the list of all past inputs of a layer."""

    def norm(x, name):
        return (x - x.mean()) / math.sqrt(x.var() + ref.NORM_EPSILON) * p[f"{name}.scale"] + p[
            f"{name}.bias"
        ]

    memories = [[np.zeros(config.width)] * config.memory for _ in range(config.layers)]
    compresseds = [
        [np.zeros(config.width)] * config.compressed_memory for _ in range(config.layers)
    ]
    logits, rate = [], config.compression_rate
    for tokens in segments:
        h = [params["embedding"][token] for token in tokens]
        for layer in range(config.layers):
            p = ref.subtree(params, f"layers.{layer}.")
            seen, outs = compresseds[layer] + memories[layer] + h, []
            for place in range(len(seen) - len(h), len(seen)):
                attended = [
                    slow_attention(p, config, seen, place, head) for head in range(config.heads)
                ]
                a = norm(seen[place] + p["output"] @ np.concatenate(attended), "norm")
                hidden = np.maximum(p["mlp_hidden"] @ a + p["mlp_hidden_bias"], 0)
                outs.append(norm(a + p["mlp_output"] @ hidden + p["mlp_output_bias"], "mlp_norm"))
            queue = memories[layer] + h
            evicted, memories[layer] = queue[: len(h)], queue[len(h) :]
            if config.compressed_memory:
                new = [np.mean(evicted[at : at + rate], axis=0) for at in range(0, len(h), rate)]
                compresseds[layer] = (compresseds[layer] + new)[-config.compressed_memory :]
            h = outs
        logits.append(np.stack([params["embedding"] @ x / math.sqrt(config.width) for x in h]))
    return np.stack(logits)


@pytest.mark.parametrize(
    "change",
    [
        {"compressed_memory": 0},
        {},
        {"memory": 3},
        {"memory": 0},
        SIMPLIFIED,
        SIMPLIFIED | {"memory": 3},
        SIMPLIFIED_XL,
    ],
)
def test_forward_is_algorithm_1_and_transformer_xl_without_compressed_memory(change):
    """From a document's start over four segments, on both sides; with C = 0 the slow model is Transformer-XL."""
    config = dataclasses.replace(
        SMALL, compression="mean_pooling", compression_loss="none", layers=2, **change
    )
    rng = np.random.default_rng(3)
    params, tokens = random_params(config, rng), rng.integers(11, size=(4, 8))
    model, state = model_with(params, config), ref.initial_state(params, config, 1)
    carried = to_torch(state)
    for segment, expected in zip(tokens, slow_forward(params, config, tokens), strict=True):
        logits, state, _ = ref.forward(params, config, segment[None], state)
        actual, carried, _ = model(torch.tensor(segment)[None], carried)
        assert_agree(
            {"numpy": expected, "torch": expected}, {"numpy": logits[0], "torch": actual[0]}, 1e-10
        )


def test_without_compressed_memory_the_compression_options_change_nothing():
    """Transformer-XL has no compression parameters, no auxiliary loss, and the same weights from the same seed."""
    plain = ref.init_params(variant("transformer-xl"), np.random.default_rng(0))
    for compression, loss in itertools.product(ref.COMPRESSIONS, ref.COMPRESSION_LOSSES):
        config = dataclasses.replace(
            SMALL, compressed_memory=0, compression=compression, compression_loss=loss
        )
        params = ref.init_params(config, np.random.default_rng(0))
        assert params.keys() == plain.keys() and all((params[k] == plain[k]).all() for k in plain)
        output = Compressive(config)(
            torch.zeros(1, 8, dtype=torch.long), Compressive(config).initial_state(1)
        )
        assert output.auxiliary == {} and output.state.compressed.shape == (1, 3, 0, 6)


@pytest.mark.parametrize("loss", ref.AUXILIARY)
@pytest.mark.parametrize("compression", ref.COMPRESSIONS)
def test_the_loss_at_a_documents_start_is_exactly_zero(compression, loss):
    """Zeros are evicted and reconstructed as zeros: loss and gradient are 0.0; with a norm they would be NaN.

    Learned biases of simplified positions are no part of the reconstruction.
    """
    config = dataclasses.replace(
        SMALL, compression=compression, compression_loss=loss, **SIMPLIFIED
    )
    params, tokens = (
        random_params(config, np.random.default_rng(0)),
        np.arange(16).reshape(2, 8) % 11,
    )
    state = ref.initial_state(params, config, 2)
    assert not any(field.any() for field in state)
    losses, caches = ref.auxiliary_forward(
        params, config, ref.forward(params, config, tokens, state)[2]
    )
    assert list(losses.values()) == [0.0] * 3 and not any(
        g.any() for g in ref.auxiliary_backward(config, 1.0, caches).values()
    )
    model = model_with(params, config)
    output = model(torch.tensor(tokens), model.initial_state(2))
    assert [v.item() for v in output.auxiliary.values()] == [0.0] * 3
    if (total := sum(output.auxiliary.values())).requires_grad:
        total.backward()
    assert not any(gradient.any() for gradient in gradients(model).values())


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
            new = evicted.reshape(2, -1) @ p["compression.weight"].T
            query, found = p["query"][rows] @ h[b, i], []
            for memories in (evicted, new):
                shares = np.array(
                    brute_force_softmax(memories @ p["key"][rows].T @ query / math.sqrt(5))
                )
                found.append(shares @ memories @ p["value"][rows].T)
            squares += list((found[0] - found[1]) ** 2)
        expected[f"layers.{layer}.compression"] = np.array([np.mean(squares)])
    losses, _ = ref.auxiliary_forward(params, config, cache)
    assert_agree(expected, {name: np.array([loss]) for name, loss in losses.items()}, 1e-10)
    output = model_with(params, config)(torch.tensor(tokens), to_torch(state))
    assert_agree(expected, {name: loss[None] for name, loss in output.auxiliary.items()}, 1e-10)


def test_memory_sizes_can_change_after_training():
    """No parameter's shape depends on them; so a model of other sizes reads the same weights."""
    shapes = {name: value.shape for name, value in Compressive(SMALL).state_dict().items()}
    for memory, compressed in ((12, 9), (3, 5), (20, 1), (0, 5)):
        other = Compressive(dataclasses.replace(SMALL, memory=memory, compressed_memory=compressed))
        assert {name: value.shape for name, value in other.state_dict().items()} == shapes


def test_usage_is_the_mean_attention_at_eviction():
    """most_used keeps the evicted rows that this segment attends to most; `usage` of a model is that mean for every key."""
    config, rng = variant("most_used-none"), np.random.default_rng(4)
    params, state = random_params(config, rng), random_state(config, rng, 2)
    tokens = rng.integers(11, size=(2, 8))
    _, after, (_, caches, _) = ref.forward(params, config, tokens, state)
    softmaxes = [
        attend_cache[1].weights for (attend_cache, *_), *_ in caches
    ]  # of each layer (B, H, N, K)
    assert softmaxes[0].shape == (2, 2, 8, 5 + 12 + 8), (
        "keys: compressed memory, memory, this segment"
    )
    oldest = softmaxes[0].sum((1, 2))[
        :, 5 : 5 + 8
    ]  # (B, 8): of the memory's first rows, which this segment evicts
    for b in range(2):
        kept = sorted(
            sorted(range(8), key=lambda row: -oldest[b, row])[:2]
        )  # 8 / rate 4, in their order
        assert (after.compressed[b, 0, -2:] == state.memory[b, 0, kept]).all()
    usage = model_with(params, config).usage(torch.tensor(tokens), to_torch(state)).detach()
    np.testing.assert_allclose(
        usage, np.stack([weights.mean((1, 2)) for weights in softmaxes], 1), rtol=1e-12
    )
