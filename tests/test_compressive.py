"""Compressive Transformer: the paper's claims, for the reference.

tests/test_contract.py shows that the accelerated model computes the same.
"""

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch.nn import functional

from accelerated.compressive import Compressive
from reference import compressive as ref
from reference.variants import compressive as variants
from tests.helpers.comparison import assert_agree, mixture
from tests.helpers.rollouts import both_sides
from tests.helpers.variants import PAPERS

PAPER = PAPERS["compressive"]
SMALL = PAPER.small
V = SMALL.vocabulary  # 11
D = SMALL.width  # 6
H = SMALL.heads  # 2
E = SMALL.head_width  # 5
N = SMALL.segment  # 8
M = SMALL.memory  # 12
C = SMALL.compressed_memory  # 5
RATE = SMALL.compression_rate  # 4
SIMPLIFIED = {"positions": "simplified", "max_distance": 9}  # less than the distances of 25 keys


def changed(**fields):
    """SMALL with other fields."""
    return dataclasses.replace(SMALL, **fields)


def test_the_decoder_of_auto_encoding_is_torchs_transposed_convolution():
    rng = np.random.default_rng(0)
    width = 3
    evicted = rng.standard_normal((2, 2 * RATE, width))
    new = rng.standard_normal((2, 2, width))
    decoder = rng.standard_normal((RATE * width, width))
    kernel = torch.tensor(decoder).view(RATE, width, width).permute(2, 1, 0)  # (in, out, c)
    decoded = functional.conv_transpose1d(torch.tensor(new).mT, kernel, stride=RATE).mT
    expected = ((decoded.numpy() - evicted) ** 2).mean()
    loss, _ = variants.auto_encoding_forward(
        {"compression.decoder": decoder}, SMALL, None, evicted, new
    )
    assert loss == pytest.approx(expected, rel=1e-10), "transposed convolution: auto_encoding"


# Algorithm 1


def slow_attention(p, config, seen, place, head):
    """What one head of the input at `place` finds in itself and in all inputs before it."""
    rows = slice(head * config.head_width, (head + 1) * config.head_width)
    inputs = np.array(seen[: place + 1])
    distances = np.arange(place, -1, -1)
    query = p["query"][rows] @ seen[place]
    keys = inputs @ p["key"][rows].T
    values = inputs @ p["value"][rows].T
    if config.positions == "simplified":  # Memformer's Eqs. 2-4
        positions = p["positions"][np.minimum(distances, config.max_distance)]
        scores = (keys + p["key_bias"][head] + positions) @ (query + p["query_bias"][head])
        values = values + p["value_bias"][head] + positions
    else:
        content_bias = p["content_bias"][head]
        distance_bias = p["distance_bias"][head]
        if config.authors_code:  # they add biases to queries that are already scaled
            content_bias = content_bias * math.sqrt(config.head_width)
            distance_bias = distance_bias * math.sqrt(config.head_width)
        scores = keys @ (query + content_bias)
        for j, distance in enumerate(distances):
            matrix = p["distance_key"][rows]
            bias = distance_bias
            if config.authors_code and j < config.compressed_memory:
                distance = distance - config.memory  # as if memory were not in between
                matrix = p["compressed_distance_key"][rows]
                bias = p["compressed_distance_bias"][head] * math.sqrt(config.head_width)
            of_distance = matrix @ ref.distance_sinusoids(distance + 1, config.width)[0]
            scores[j] += of_distance @ (query + bias)
    return mixture(scores / math.sqrt(config.head_width), values)


def slow_layer(p, config, seen, place):
    """A layer's output at `place`, from the list of all that it sees."""

    def norm(x, name):
        epsilon = 1e-5 if config.authors_code else ref.NORM_EPSILON
        normal = (x - x.mean()) / math.sqrt(x.var() + epsilon)
        return normal * p[f"{name}.scale"] + p[f"{name}.bias"]

    attended = [slow_attention(p, config, seen, place, head) for head in range(config.heads)]
    out = p["output"] @ np.concatenate(attended) + p.get("output_bias", 0.0)
    a = norm(seen[place] + out, "norm")  # line 7
    hidden = np.maximum(p["mlp_hidden"] @ a + p["mlp_hidden_bias"], 0)
    return norm(a + p["mlp_output"] @ hidden + p["mlp_output_bias"], "mlp_norm")  # line 12


def slow_forward(params, config, segments):
    """Algorithm 1 for one lane (row of a batch), one position at a time, from lists of inputs."""
    zero = np.zeros(config.width)
    memories = [[zero] * config.memory for _ in range(config.layers)]
    compresseds = [[zero] * config.compressed_memory for _ in range(config.layers)]
    logits = []
    for tokens in segments:
        h = [params["embedding"][token] for token in tokens]
        for layer in range(config.layers):
            p = ref.subtree(params, f"layers.{layer}.")
            before = compresseds[layer] + memories[layer]
            places = range(len(before), len(before) + len(h))
            outs = [slow_layer(p, config, before + h, place) for place in places]
            queue = memories[layer] + h
            evicted = queue[: len(h)]
            memories[layer] = queue[len(h) :]
            if config.compressed_memory:
                c = config.compression_rate
                firsts = range(0, len(evicted) - c + 1, c)  # what is left over is cut off
                new = [np.mean(evicted[at : at + c], axis=0) for at in firsts]
                compresseds[layer] = (compresseds[layer] + new)[-config.compressed_memory :]
            h = outs
        logits.append(np.stack([params["embedding"] @ x / math.sqrt(config.width) for x in h]))
    return np.stack(logits)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"compressed_memory": 0},
        {"memory": 3},
        {"memory": 0},
        {"compression_rate": 3},
        SIMPLIFIED | {"memory": 3},
        SIMPLIFIED | {"compressed_memory": 0},
        {"authors_code": True, "memory": 3},
        {"authors_code": True, "compressed_memory": 0},
    ],
    ids=str,
)
def test_forward_is_algorithm_1_and_transformer_xl_without_compressed_memory(change):
    """From a document's start over four segments; with C = 0 the slow model is Transformer-XL."""
    config = changed(compression="mean_pooling", compression_loss="none", layers=2, **change)
    rng = np.random.default_rng(3)
    params = PAPER.random_params(config, rng)
    tokens = rng.integers(V, size=(4, N))
    state = ref.initial_state(params, config, 1)
    for segment, expected in zip(tokens, slow_forward(params, config, tokens), strict=True):
        logits, state, _ = ref.forward(params, config, segment[None], state)
        assert_agree(expected, logits[0], 1e-10, "logits")


# The losses of the compression


@pytest.mark.parametrize("loss", [*variants.AUXILIARY, *variants.NORMS])
@pytest.mark.parametrize("compression", variants.COMPRESSIONS)
def test_the_loss_at_a_documents_start_is_exactly_zero(compression, loss):
    """Zeros are evicted and reconstructed as zeros: loss and gradient are 0.0.

    The norm has no derivative there, and its gradient is taken as 0. Learned biases of simplified
    positions are no part of the reconstruction.
    """
    config = changed(compression=compression, compression_loss=loss, **SIMPLIFIED)
    params = PAPER.random_params(config, np.random.default_rng(0))
    tokens = np.arange(2 * N).reshape(2, N) % V
    state = ref.initial_state(params, config, 2)
    for field, value in state._asdict().items():
        assert not value.any(), f"{field} of a document's first state is not zero"
    _, _, cache = ref.forward(params, config, tokens, state)
    losses, caches = ref.auxiliary_forward(params, config, cache)
    assert list(losses.values()) == [0.0] * config.layers, "evicted zeros lose nothing"
    for name, grad in ref.auxiliary_backward(config, 1.0, caches).items():
        assert not grad.any(), f"{name} gets a gradient"


def attended(p, query, memories, rows):
    """What a head's query finds in memories (n, D) by content alone."""
    scores = memories @ p["key"][rows].T @ query / math.sqrt(E)
    return mixture(scores, memories @ p["value"][rows].T)


@pytest.mark.parametrize(
    "change",
    [
        {"compression_rate": 3},
        {"compression_loss": "attention_reconstruction_norm"},
        SIMPLIFIED,
        {"authors_code": True},
    ],
    ids=str,
)
def test_attention_reconstruction_equals_algorithm_2(change):
    """One query at a time: no positions, mask, biases or output projection.

    Squares are averaged over lanes, heads, queries and E. The norm is that of a lane, over heads,
    queries and E; lanes are averaged.
    """
    name = "conv-attention_reconstruction"
    config, rng, params, state, *_ = both_sides("compressive", name, **change)
    tokens = rng.integers(V, size=(2, N))
    _, _, cache = ref.forward(params, config, tokens, state)
    expected = {}
    for layer in range(config.layers):
        p = ref.subtree(params, f"layers.{layer}.")
        h = cache[1][layer][2]
        squares = np.zeros((2, H, N, E))
        for b, head, i in np.ndindex(2, H, N):
            rows = slice(E * head, E * (head + 1))
            evicted = state.memory[b, layer, :N]
            rate = config.compression_rate
            grouped = evicted[: N // rate * rate].reshape(N // rate, -1)
            new = grouped @ p["compression.weight"].T
            query = p["query"][rows] @ h[b, i]
            difference = attended(p, query, evicted, rows) - attended(p, query, new, rows)
            squares[b, head, i] = difference**2
        loss = squares.mean()
        if config.compression_loss.endswith("norm"):
            loss = np.sqrt(squares.sum((1, 2, 3))).mean()
        expected[f"layers.{layer}.compression"] = loss

    losses, _ = ref.auxiliary_forward(params, config, cache)
    assert_agree(expected, losses, 1e-10)


def test_memories_are_those_of_the_layers_in_their_order():
    """The first layer's rows stand first, then those of compressed memory."""
    config = PAPER.variant("rows-by-layer")
    found = [config.rows_of(layer) for layer in range(config.layers)]
    assert found == [(3, 5), (12, 0), (0, 2)], f"(M, C) of {config.memories} by layer are {found}"


def test_memory_sizes_can_change_after_training():
    """No parameter's shape depends on them; so a model of other sizes reads the same weights."""
    weights = Compressive(SMALL).state_dict()
    for memory, compressed in ((12, 9), (3, 5), (20, 1), (0, 5)):
        other = Compressive(changed(memory=memory, compressed_memory=compressed))
        other.load_state_dict(weights)


def test_usage_is_the_mean_attention_at_eviction():
    """most_used keeps the evicted rows that this segment attends to most."""
    config, rng, params, state, _, _ = both_sides("compressive", "most_used-none")
    tokens = rng.integers(V, size=(2, N))
    _, after, (_, caches, _) = ref.forward(params, config, tokens, state)
    layer_cache, *_ = caches[0]  # of the first layer
    attend_cache, *_ = layer_cache
    _, _, attention_cache, *_ = attend_cache
    weights = attention_cache[1]  # after no dropout
    assert weights.shape == (2, H, N, C + M + N)
    to_oldest = weights.sum((1, 2))[:, C : C + N]  # the memory's first rows, which are evicted
    for b in range(2):
        by_usage = np.argsort(-to_oldest[b])
        kept = sorted(by_usage[: N // RATE])
        found = after.compressed[b, 0, -len(kept) :]
        assert (found == state.memory[b, 0, kept]).all(), f"lane {b}: rows {kept} are used most"
