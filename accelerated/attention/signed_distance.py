"""Memformer's self-attention by signed distances, with simplified positions (Eqs. 2-4) or Transformer-XL's (Eq. 1).

Simplified positions take the plain path on a GPU too: SDPA does not return the weights by which they are added to values.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

from accelerated.attention.content import takes_sdpa
from accelerated.attention.heads import at_least_float32
from accelerated.attention.relative_shift import (
    by_query_and_key,
    relative_attention_sdpa,
    relative_shift,
)


def far_to_near(lowest: int, highest: int, length: int) -> Tensor:
    """Which row of a table of lowest .. highest (R,) the distances length - 1 .. 1 - length take, clipped: (2 length - 1, R).

    A one in each row. Its product with the table is the lookup, whose gradient adds up nothing by an index.
    """
    row = torch.arange(length - 1, -length, -1).clamp(lowest, highest) - lowest
    return functional.one_hot(row, highest - lowest + 1).to(torch.get_default_dtype())


def attention_weights(
    scores: Tensor, by_key: Tensor, mask: Tensor | None, dropout: float
) -> Tensor:
    """softmax(scores + by_key) without masked keys, then dropout; by_key (B, H, N, N') is for the last N' of the K keys.

    Changes scores in place.
    """
    placed = scores[..., scores.shape[-1] - by_key.shape[-1] :]
    placed += by_key
    if mask is not None:
        placed.masked_fill_(mask, -math.inf)
    return functional.dropout(scores.softmax(-1), dropout)


def simplified_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """softmax(q.(k_j + R_{i-j}) / sqrt(E)) (v_j + R_{i-j}).

    query (B, H, N, E); key and value (B, H, K, E), where only the last N' have positions; rows (N + N' - 1, E) are R from far to
    near, query i and key j take row N - 1 - i + j; mask, true if a query must not see one of those N' keys, broadcasts to
    (B, H, N, N'). Returns (B, H, N, E).
    """
    positions = (
        by_query_and_key(at_least_float32(rows).T, query.shape[2]).movedim(0, -1).to(query.dtype)
    )  # (N, N', E)
    query = query * query.shape[-1] ** -0.5
    by_key = torch.einsum("bhne,nke->bhnk", query, positions)
    weights = attention_weights(query @ key.transpose(-1, -2), by_key, mask, dropout)
    placed = weights[..., weights.shape[-1] - positions.shape[1] :]
    return weights @ value + torch.einsum("bhnk,nke->bhne", placed, positions)


def transformer_xl_attention_plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    distance_key: Tensor,
    content_bias: Tensor,
    distance_bias: Tensor,
    count: int,
    mask: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """softmax(((q + u).k_j + (q + v).r_{i-j}) / sqrt(E)) v_j; the last `count` keys have positions; biases (H, E).

    distance_key (H, R, E) is r from far to near: query i and key j take row N - 1 - i + j, a key that is masked may have none.
    """
    scale = query.shape[-1] ** -0.5
    content = (query + content_bias[:, None]) * scale @ key.transpose(-1, -2)
    by_distance = (
        (query + distance_bias[:, None]) * scale @ distance_key.transpose(-1, -2)
    )  # (B, H, N, R)
    by_key = relative_shift(by_distance)[..., :count]
    return attention_weights(content, by_key, mask, dropout) @ value


def transformer_xl_attention(
    query: Tensor, key: Tensor, *others: Tensor | int | float | None
) -> Tensor:
    """The same as transformer_xl_attention_plain, which has the same arguments, by the fastest path."""
    attend = relative_attention_sdpa if takes_sdpa(query, key) else transformer_xl_attention_plain
    return attend(query, key, *others)
