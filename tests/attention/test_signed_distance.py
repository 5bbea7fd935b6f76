"""Self-attention by signed distances: both kinds of positions equal the reference and the paper's
equations.
"""

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
from tests.helpers.comparison import SIZES, assert_agree, brute_force_softmax


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
    """One query and head at a time, R looked up by the clipped distance of each pair; by both
    sides.
    """
    rng = np.random.default_rng(seed)
    distances = np.arange(0 if causal else -reach, reach + 1)
    query, table = (
        size * rng.standard_normal((2, 3, n, 4)),
        rng.standard_normal((len(distances), 4)),
    )
    key, value = rng.standard_normal((2, 2, 3, before + n, 4))
    readable = None
    if padded and not causal:
        readable = rng.random((2, n)) < 0.6
        readable[:, 0] = True
    mask = ref.self_attention_mask(n, before, causal, readable)
    expected = np.zeros(query.shape)
    for b, h, i in np.ndindex(2, 3, n):
        seen = [
            j for j in range(before + n) if np.broadcast_to(mask, (2, 1, n, before + n))[b, 0, i, j]
        ]
        rows = [
            table[int(np.clip(i - j + before, *distances[[0, -1]]) - distances[0])]
            if j >= before
            else 0
            for j in seen
        ]
        weights = brute_force_softmax(
            [query[b, h, i] @ (k + r) / 2 for k, r in zip(key[b, h, seen], rows, strict=True)]
        )
        expected[b, h, i] = sum(
            w * (v + r) for w, v, r in zip(weights, value[b, h, seen], rows, strict=True)
        )
    out, _ = ref.simplified_attention_forward(
        {"positions": table}, query, key, value, distances, mask, 0.0, None
    )
    hidden = None if causal is False and readable is None else torch.tensor(~mask[..., before:])
    by_distance = far_to_near(int(distances[0]), int(distances[-1]), n) @ torch.tensor(table)
    actual = simplified_attention(*map(torch.tensor, (query, key, value)), by_distance, hidden)
    assert_agree({"numpy": expected, "torch": expected}, {"numpy": out, "torch": actual}, 1e-11)


@given(
    n=st.integers(1, 5),
    before=st.integers(0, 3),
    causal=st.booleans(),
    size=SIZES,
    seed=st.integers(0, 2**31),
)
def test_transformer_xl_attention_is_equation_1(n, before, causal, size, seed):
    """The terms (a) to (d) of each pair, one query and head at a time, equal the reference and the
    accelerated path.
    """
    rng, width = np.random.default_rng(seed), 8
    query, (u, v) = size * rng.standard_normal((2, 2, n, 3)), size * rng.standard_normal((2, 2, 3))
    (key, value), weight = (
        rng.standard_normal((2, 2, 2, before + n, 3)),
        rng.standard_normal((2, 3, width)),
    )
    expected = np.zeros(query.shape)
    for b, h, i in np.ndindex(2, 2, n):
        scores, values = [], []
        for j in range(-before, i + 1 if causal else n):
            k, q = key[b, h, before + j], query[b, h, i]
            score = q @ k + u[h] @ k
            if j >= 0:
                angles = [(i - j) / 10_000 ** (2 * f / width) for f in range(width // 2)]
                r = weight[h] @ [*map(math.sin, angles), *map(math.cos, angles)]
                score += q @ r + v[h] @ r
            scores.append(score / math.sqrt(3))
            values.append(value[b, h, before + j])
        expected[b, h, i] = brute_force_softmax(scores) @ np.array(values)
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
    assert_agree({"numpy": expected, "torch": expected}, {"numpy": out, "torch": actual}, 1e-11)
