"""Self-attention by signed distances: both kinds of positions, by the paper's equations."""

import math
from unittest import mock

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelerated.attention.relative_shift import AttentionInputs, distance_sinusoids
from accelerated.attention.signed_distance import (
    far_to_near,
    simplified_attention,
    transformer_xl_attention,
)
from accelerated.fast import paths
from reference import memformer as ref
from reference.variants import memformer as variants
from tests.helpers.comparison import SEEDS, SIZES, assert_agree, mixture


def one_by_one(query, key, value, mask, before, pair):
    """The mixture of what each query and head sees, where mask (B, 1, N, K) is true.

    pair(h, q, k, v, distance) is (a score, what is read); the distance of one of the `before` slots
    is None.
    """
    batch, heads, n, _ = query.shape
    mask = np.broadcast_to(mask, (batch, 1, n, key.shape[2]))
    out = np.zeros(query.shape)
    for b, h, i in np.ndindex(batch, heads, n):
        scores = []
        values = []
        for j in np.flatnonzero(mask[b, 0, i]):
            distance = None if j < before else i + before - j
            score, read = pair(h, query[b, h, i], key[b, h, j], value[b, h, j], distance)
            scores.append(score)
            values.append(read)
        out[b, h, i] = mixture(scores, values)
    return out


@given(
    n=st.integers(1, 6),
    before=st.integers(0, 3),
    reach=st.integers(1, 7),
    causal=st.booleans(),
    padded=st.booleans(),
    size=SIZES,
    seed=SEEDS,
)
def test_simplified_attention_is_equations_3_and_4(n, before, reach, causal, padded, size, seed):
    """One query and head at a time, R looked up by the clipped distance of each pair."""
    rng = np.random.default_rng(seed)
    distances = np.arange(0 if causal else -reach, reach + 1)
    table = rng.standard_normal((len(distances), 4))
    query = size * rng.standard_normal((2, 3, n, 4))
    key, value = rng.standard_normal((2, 2, 3, before + n, 4))
    readable = None
    if padded and not causal:
        readable = rng.random((2, n)) < 0.6
        readable[:, 0] = True
    mask = variants.self_attention_mask(n, before, causal, readable)

    def pair(h, q, k, v, distance):
        row = np.zeros(4)  # a slot has no position
        if distance is not None:
            clipped = np.clip(distance, distances[0], distances[-1])
            row = table[clipped - distances[0]]
        return q @ (k + row) / 2, v + row

    expected = one_by_one(query, key, value, mask, before, pair)
    p = {"positions": table}
    out, _ = ref.simplified_attention_forward(p, query, key, value, distances, mask, 0.0, None)
    assert_agree(expected, out, 1e-11, "NumPy")

    all_seen = not causal and readable is None
    hidden = None if all_seen else torch.tensor(~mask[..., before:])
    by_distance = far_to_near(int(distances[0]), int(distances[-1]), n) @ torch.tensor(table)
    given = (*map(torch.tensor, (query, key, value)), by_distance, hidden)
    actual = simplified_attention(*given)
    assert_agree(expected, actual, 1e-11, "PyTorch")
    with mock.patch.object(paths, "padding_rows", lambda x, multiple: 5):
        actual = simplified_attention(*given)
    assert_agree(expected, actual, 1e-11, "with keys of zeros, as on a GPU")


@given(
    n=st.integers(1, 5),
    before=st.integers(0, 3),
    causal=st.booleans(),
    size=SIZES,
    seed=SEEDS,
)
def test_transformer_xl_attention_is_equation_1(n, before, causal, size, seed):
    """The terms (a) to (d) of each pair, one query and head at a time."""
    rng = np.random.default_rng(seed)
    width = 8
    query = size * rng.standard_normal((2, 2, n, 3))
    u, v = size * rng.standard_normal((2, 2, 3))
    key, value = rng.standard_normal((2, 2, 2, before + n, 3))
    weight = rng.standard_normal((2, 3, width))
    mask = variants.self_attention_mask(n, before, causal, None)

    def pair(h, q, k, read, distance):
        score = q @ k + u[h] @ k
        if distance is not None:  # a slot has no position
            angles = distance / 10_000 ** (2 * np.arange(width // 2) / width)
            r = weight[h] @ np.concatenate([np.sin(angles), np.cos(angles)])
            score += q @ r + v[h] @ r
        return score / math.sqrt(3), read

    expected = one_by_one(query, key, value, mask, before, pair)
    distances = np.arange(0 if causal else 1 - n, n)
    p = {"distance_key": weight.reshape(6, width), "content_bias": u, "distance_bias": v}
    out, _ = variants.transformer_xl_attention_forward(
        p, query, key, value, distances, mask, 0.0, None
    )
    assert_agree(expected, out, 1e-11, "NumPy")

    rows = distance_sinusoids(len(distances), width, int(distances[0]))
    distance_key = torch.einsum("hed,rd->hre", torch.tensor(weight), rows)
    query, key, value, u, v, hidden = map(torch.tensor, (query, key, value, u, v, ~mask))
    hidden = hidden[..., before:]
    heads = AttentionInputs(query, key, value, distance_key, u, v)
    actual = transformer_xl_attention(heads, n, hidden)
    assert_agree(expected, actual, 1e-11, "PyTorch")
