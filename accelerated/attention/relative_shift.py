"""The Compressive Transformer's causal attention with Transformer-XL's relative shift.

Positions are Transformer-XL's, or Memformer's simplified ones: these are clipped, and added to the
values too (in_values). Rows by distance stand from far to near, as keys do. Memformer's Eq. 1 takes
the shift and the SDPA path from here.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from accelerated.attention.content import future_keys, sdpa
from accelerated.attention.heads import takes_sdpa, with_fast_path


def distance_sinusoids(length: int, width: int, lowest: int = 0) -> Tensor:
    """Transformer-XL's R (length, D) for the distances lowest + length - 1 .. lowest."""
    highest = lowest + length - 1
    distance = torch.arange(highest, lowest - 1, -1, dtype=torch.float64)
    exponent = torch.arange(0, width, 2, dtype=torch.float64) / width
    angle = distance[:, None] * 10_000.0**-exponent  # (length, D/2)
    sinusoids = torch.cat([angle.sin(), angle.cos()], dim=-1)
    return sinusoids.to(torch.get_default_dtype())


def relative_shift(by_distance: Tensor) -> Tensor:
    """Turn scores by distance into scores by key, both (..., N, K).

    out[i, j] = by_distance[i, j + N - 1 - i]. Entries under the causal mask are meaningless: they
    come from other rows.
    """
    *batch, n, k = by_distance.shape
    padded = functional.pad(by_distance, (1, 0))  # (..., N, K + 1)
    flat = padded.reshape(*batch, n * (k + 1))
    return flat[..., n:].view(*batch, n, k)


def relative_unshift(by_key: Tensor) -> Tensor:
    """Turn weights by key into weights by distance, both (..., N, K).

    Weights under the causal mask must be zero.
    """
    *batch, n, k = by_key.shape
    flat = by_key.reshape(*batch, n * k)
    padded = functional.pad(flat, (n, 0)).view(*batch, n, k + 1)
    return padded[..., 1:]


class AttentionInputs(NamedTuple):
    """What Transformer-XL's attention takes."""

    query: Tensor  # q, (B, H, N, E)
    key: Tensor  # k, (B, H, K, E)
    value: Tensor  # x, (B, H, K, E)
    distance_key: Tensor  # r from far to near, (H, R, E)
    content_bias: Tensor  # u, (H, E)
    distance_bias: Tensor  # v, (H, E)


def relative_attention_plain(
    heads: AttentionInputs,
    dropout: float = 0.0,
    measure: bool = False,
    in_values: bool = False,
    compressed: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """softmax(((q + u).k_j + (q + v).r_{i-j}) / sqrt(E)) x_j, and the mean weight of each key.

    heads: row t of r stands for the distance R - 1 - t; row 0 also for all larger distances
    measure: return the weights' mean over heads and queries, (B, K), instead of None
    in_values: add r_{i-j} to the value x_j
    compressed: distance_key (H, C + N, E) and distance_bias (H, E) of the first C keys, if others

    The first result is (B, H, N, E).
    """
    query, key, value, distance_key, content_bias, distance_bias = heads
    content = (query + content_bias[:, None]) @ key.mT  # (B, H, N, K)
    if compressed is None:
        missing = key.shape[2] - distance_key.shape[1]
        beyond = distance_key[:, :1].expand(-1, missing, -1)
        distance_key = torch.cat([beyond, distance_key], 1)  # (H, K, E)
    by_key = scores_by_key(query, distance_key, distance_bias, compressed)
    scores = content * query.shape[-1] ** -0.5 + by_key
    future = future_keys(query.shape[2], key.shape[2], query.device)
    weights = scores.masked_fill(future, -math.inf).softmax(-1)

    usage = None
    if measure:
        exact = torch.promote_types(weights.dtype, torch.float32)
        usage = weights.detach().mean((1, 2), dtype=exact)  # (B, K)

    if dropout:
        weights = functional.dropout(weights, dropout)
    out = weights @ value
    if in_values:
        out = out + relative_unshift(weights) @ distance_key
    return out, usage


def relative_attention_sdpa(
    heads: AttentionInputs,
    positioned: int,
    masked_keys: Tensor | None = None,
    dropout: float = 0.0,
    compressed: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Transformer-XL's attention (B, H, N, E) by SDPA, with the scores by distance as attn_mask.

    positioned: how many keys have a position; they are the last ones
    masked_keys: true if a query must not see one of those keys; broadcasts to (B, H, N, positioned)
    """
    query, key, value, distance_key, content_bias, distance_bias = heads
    offset = scores_by_key(query, distance_key, distance_bias, compressed)[..., :positioned]
    if masked_keys is not None:
        offset = offset.masked_fill(masked_keys, -math.inf)

    before = key.shape[2] - positioned  # keys without a position: nothing to add
    if before:
        offset = functional.pad(offset, (before, 0))
    return sdpa(query + content_bias[:, None], key, value, offset, dropout)


def distance_query_of(query: Tensor, distance_bias: Tensor) -> Tensor:
    """(q + v) / sqrt(E), (B, H, N, E), of query (B, H, N, E) and v (H, E)."""
    return (query + distance_bias[:, None]) * query.shape[-1] ** -0.5


def scores_by_distance(query: Tensor, distance_key: Tensor, distance_bias: Tensor) -> Tensor:
    """(q + v).r / sqrt(E) of each query and row of distance_key (H, R, E), (B, H, N, R)."""
    distance_query = distance_query_of(query, distance_bias)
    # not a product of matrices: it would copy distance_key for every lane
    return torch.einsum("bhne,hre->bhnr", distance_query, distance_key)


def scores_by_key(
    query: Tensor,
    distance_key: Tensor,
    distance_bias: Tensor,
    compressed: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Position scores of each query and key: (B, H, N, R), with `own` (B, H, N, C + R).

    distance_key: (H, R, E), from far to near
    compressed: distance_key (H, C + N, E) and distance_bias (H, E) of the first C keys
    """
    by_key = relative_shift(scores_by_distance(query, distance_key, distance_bias))
    if compressed is None:
        return by_key
    of_own = relative_shift(scores_by_distance(query, *compressed))
    count = of_own.shape[-1] - query.shape[2]  # C
    return torch.cat([of_own[..., :count], by_key], -1)


@with_fast_path
def relative_attention(
    heads: AttentionInputs,
    dropout: float = 0.0,
    measure: bool = False,
    in_values: bool = False,
    compressed: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The same as relative_attention_plain, on a GPU by SDPA.

    SDPA returns no weights, which both `measure` and `in_values` need.
    """
    query = heads.query
    if takes_sdpa(query, heads.key) and not (measure or in_values):
        positioned = heads.key.shape[2]
        future = future_keys(query.shape[2], positioned, query.device)
        return relative_attention_sdpa(heads, positioned, future, dropout, compressed), None
    return relative_attention_plain(heads, dropout, measure, in_values, compressed)
