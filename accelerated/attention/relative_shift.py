"""The Compressive Transformer's causal attention with Transformer-XL's shift: plain, by SDPA, and for a CPU.

Positions are Transformer-XL's, or Memformer's simplified ones: these are clipped, and added to the values too (in_values).
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

from accelerated.attention.content import causal_mask, sdpa, takes_sdpa
from accelerated.attention.heads import on_plain_cpu
from accelerated.attention.on_a_cpu import RelativeAttention


def distance_sinusoids(length: int, width: int, lowest: int = 0) -> Tensor:
    """Transformer-XL's R (length, D) for the distances lowest + length - 1 .. lowest: from far to near, as keys stand."""
    distance = torch.arange(lowest + length - 1, lowest - 1, -1, dtype=torch.float64)
    frequency = 10_000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angle = distance[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=-1).to(torch.get_default_dtype())


def relative_shift(by_distance: Tensor) -> Tensor:
    """Turn scores by distance into scores by key, both (..., N, K): out[i, j] = by_distance[i, j + N - 1 - i].

    Entries under the causal mask are meaningless: they come from other rows.
    """
    *batch, n, k = by_distance.shape
    padded = functional.pad(by_distance, (1, 0))  # (..., N, K + 1)
    return padded.reshape(*batch, n * (k + 1))[..., n:].view(*batch, n, k)


def by_query_and_key(by_distance: Tensor, queries: int) -> Tensor:
    """Spread what depends on the distance alone over n queries and K keys, (..., n + K - 1) -> (..., n, K).

    out[i, j] = by_distance[n - 1 - i + j]. The gradient adds up diagonals; that of an index matrix is slow on a GPU.
    """
    return by_distance.unfold(-1, by_distance.shape[-1] + 1 - queries, 1).flip(-2)


def columns_of_query(position: Tensor, queries: int, keys: int) -> Tensor:
    """Where row `position` (1,) of by_query_and_key(by_distance, queries) stands in by_distance, (keys,)."""
    return torch.arange(queries - 1, queries - 1 + keys, device=position.device) - position


def relative_unshift(by_key: Tensor) -> Tensor:
    """Turn weights by key into weights by distance, both (..., N, K); weights under the causal mask must be zero."""
    *batch, n, k = by_key.shape
    return functional.pad(by_key.reshape(*batch, n * k), (n, 0)).view(*batch, n, k + 1)[..., 1:]


def relative_attention_plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    distance_key: Tensor,
    content_bias: Tensor,
    distance_bias: Tensor,
    dropout: float = 0.0,
    measure: bool = False,
    in_values: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """softmax(((q + u).k_j + (q + v).r_{i-j}) / sqrt(E)) x_j and, if measure, the mean weight of each key (B, K).

    query (B, H, N, E), key and value x (B, H, K, E), distance_key r (H, R, E), biases (H, E). Row t of the distance keys is for
    distance R - 1 - t, row 0 for all beyond too. in_values: the value is x_j + r_{i-j}.
    """
    beyond = distance_key[:, :1].expand(-1, key.shape[2] - distance_key.shape[1], -1)
    distance_key = torch.cat([beyond, distance_key], 1)  # (H, K, E)
    content = (query + content_bias[:, None]) @ key.transpose(-1, -2)  # (B, H, N, K)
    by_distance = (query + distance_bias[:, None]) @ distance_key.transpose(-1, -2)
    scores = (content + relative_shift(by_distance)) * query.shape[-1] ** -0.5
    weights = scores.masked_fill(causal_mask(*scores.shape[-2:], scores.device), -math.inf).softmax(
        -1
    )
    usage = (
        weights.detach().mean((1, 2), dtype=torch.promote_types(weights.dtype, torch.float32))
        if measure
        else None
    )
    if dropout:
        weights = functional.dropout(weights, dropout)
    out = weights @ value
    return out + relative_unshift(weights) @ distance_key if in_values else out, usage


def relative_attention_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    distance_key: Tensor,
    content_bias: Tensor,
    distance_bias: Tensor,
    count: int,
    mask: Tensor | None,
    dropout: float = 0.0,
) -> Tensor:
    """Transformer-XL's attention by SDPA: scores by distance are an offset, of the last `count` keys; see the plain paths.

    mask, true if a query must not see one of those keys, broadcasts to (B, H, N, count).
    """
    scale = query.shape[-1] ** -0.5
    # not a product of matrices: it would copy distance_key for every lane
    by_distance = torch.einsum(
        "bhne,hre->bhnr", (query + distance_bias[:, None]) * scale, distance_key
    )
    offset = relative_shift(by_distance)[..., :count]
    if mask is not None:
        offset = offset.masked_fill(mask, -math.inf)
    if before := key.shape[2] - count:  # keys without a position: nothing to add
        offset = functional.pad(offset, (before, 0))
    return sdpa(query + content_bias[:, None], key, value, offset, dropout, scale=scale)


def relative_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    distance_key: Tensor,
    content_bias: Tensor,
    distance_bias: Tensor,
    dropout: float = 0.0,
    measure: bool = False,
    in_values: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The same as relative_attention_plain, by the fastest path for these arguments. SDPA returns no weights for in_values."""
    if takes_sdpa(query, key) and not measure and not in_values:
        count, mask = key.shape[2], causal_mask(query.shape[2], key.shape[2], query.device)
        return relative_attention_sdpa(
            query, key, value, distance_key, content_bias, distance_bias, count, mask, dropout
        ), None
    if on_plain_cpu(query) and dropout == 0:
        return RelativeAttention.apply(
            query, key, value, distance_key, content_bias, distance_bias, measure, in_values
        )
    return relative_attention_plain(
        query, key, value, distance_key, content_bias, distance_bias, dropout, measure, in_values
    )
