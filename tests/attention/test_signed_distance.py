"""Self-attention by signed distances: both kinds of positions, by the paper's equations."""

import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelerated.attention.relative_shift import distance_sinusoids
from accelerated.attention.signed_distance import (
    far_to_near,
    simplified_attention,
    transformer_xl_attention,
)
from reference import memformer as ref
from tests.helpers.comparison import SIZES, assert_agree, mixture


@given(
    n=st.integers(1, 6),
    before=st.integers(0, 3),
    reach=st.integers(1, 7),
    causal=st.booleans(),
    padded=st.booleans(),
    size=SIZES,
    seed=st.integers(0, 2**31),
)
def test_simplified_attention_is_equations_3_and_4(n, before, reach, causal, padded, size, seed):
    """One query and head at a time, R looked up by the clipped distance of each pair."""
    rng = np.random.default_rng(seed)
    distances = np.arange(0 if causal else -reach, reach + 1)
    query = size * rng.standard_normal((2, 3, n, 4))
    table = rng.standard_normal((len(distances), 4))
    key, value = rng.standard_normal((2, 2, 3, before + n, 4))
    readable = None
    if padded and not causal:
        readable = rng.random((2, n)) < 0.6
        readable[:, 0] = True
    mask = ref.self_attention_mask(n, before, causal, readable)
    is_seen = np.broadcast_to(mask, (2, 1, n, before + n))
    expected = np.zeros(query.shape)
    for b, h, i in np.ndindex(2, 3, n):
        scores = []
        values = []
        for j in np.flatnonzero(is_seen[b, 0, i]):
            row = np.zeros(4)
            if j >= before:  # a slot has no position
                distance = np.clip(i + before - j, distances[0], distances[-1])
                row = table[distance - distances[0]]
            scores.append(query[b, h, i] @ (key[b, h, j] + row) / 2)
            values.append(value[b, h, j] + row)
        expected[b, h, i] = mixture(scores, values)
    p = {"positions": table}
    out, _ = ref.simplified_attention_forward(p, query, key, value, distances, mask, 0.0, None)
    hidden = None if causal is False and readable is None else torch.tensor(~mask[..., before:])
    by_distance = far_to_near(int(distances[0]), int(distances[-1]), n) @ torch.tensor(table)
    actual = simplified_attention(*map(torch.tensor, (query, key, value)), by_distance, hidden)
    assert_agree({"out": expected}, {"out": out}, 1e-11, "NumPy")
    assert_agree({"out": expected}, {"out": actual}, 1e-11, "PyTorch")


@given(
    n=st.integers(1, 5),
    before=st.integers(0, 3),
    causal=st.booleans(),
    size=SIZES,
    seed=st.integers(0, 2**31),
)
def test_transformer_xl_attention_is_equation_1(n, before, causal, size, seed):
    """The terms (a) to (d) of each pair, one query and head at a time."""
    rng = np.random.default_rng(seed)
    width = 8
    query = size * rng.standard_normal((2, 2, n, 3))
    u, v = size * rng.standard_normal((2, 2, 3))
    key, value = rng.standard_normal((2, 2, 2, before + n, 3))
    weight = rng.standard_normal((2, 3, width))
    expected = np.zeros(query.shape)
    for b, h, i in np.ndindex(2, 2, n):
        q = query[b, h, i]
        scores = []
        values = []
        for j in range(-before, i + 1 if causal else n):
            k = key[b, h, before + j]
            score = q @ k + u[h] @ k
            if j >= 0:
                angles = [(i - j) / 10_000 ** (2 * f / width) for f in range(width // 2)]
                r = weight[h] @ [*map(math.sin, angles), *map(math.cos, angles)]
                score += q @ r + v[h] @ r
            scores.append(score / math.sqrt(3))
            values.append(value[b, h, before + j])
        expected[b, h, i] = mixture(scores, values)
    distances = np.arange(0 if causal else 1 - n, n)
    p = {"distance_key": weight.reshape(6, width), "content_bias": u, "distance_bias": v}
    mask = ref.self_attention_mask(n, before, causal, None)
    out, _ = ref.transformer_xl_attention_forward(p, query, key, value, distances, mask, 0.0, None)
    rows = distance_sinusoids(len(distances), width, int(distances[0]))
    distance_key = torch.einsum("hed,rd->hre", torch.tensor(weight), rows)
    arrays = (torch.tensor(a) for a in (query, key, value))
    hidden = torch.tensor(~mask[..., before:])
    actual = transformer_xl_attention(
        *arrays, distance_key, torch.tensor(u), torch.tensor(v), n, hidden
    )
    assert_agree({"out": expected}, {"out": out}, 1e-11, "NumPy")
    assert_agree({"out": expected}, {"out": actual}, 1e-11, "PyTorch")
