"""The Block-Recurrent Transformer's sliding-window attention with T5's position biases: plain, by SDPA, and for a CPU."""

import math

import torch
from torch import Tensor
from torch.nn import ModuleList, functional

from accelerated.attention.content import fold_tiles, sdpa, takes_sdpa, unfold_tiles
from accelerated.attention.heads import at_least_float32, on_plain_cpu
from accelerated.attention.on_a_cpu import SlidingAttention
from accelerated.attention.relative_shift import by_query_and_key, columns_of_query


def position_bucket(distance: Tensor, buckets: int, max_distance: int) -> Tensor:
    """T5's causal bucket of each distance: half of the buckets hold one distance each, the others grow logarithmically."""
    exact = buckets // 2
    ratio = torch.log(distance.clamp(min=exact).double() / exact) / math.log(max_distance / exact)
    coarse = (exact + (ratio * (buckets - exact)).long()).clamp(max=buckets - 1)
    return torch.where(distance < exact, distance.clamp(min=0), coarse)


def tables_by_distance(window: int, buckets: int, max_distance: int) -> tuple[Tensor, Tensor]:
    """Two tables by the distance i - j of a block's W queries and the 2W keys of the previous block and its own, far to near:

    its bucket, one-hot (3W - 1, buckets), and whether a query sees it (3W - 1,): it sees exactly the previous W tokens.
    """
    distance = torch.arange(2 * window - 1, -window, -1)
    in_bucket = position_bucket(distance, buckets, max_distance)[:, None] == torch.arange(buckets)
    return in_bucket, (distance >= 1) & (distance <= window)


def score_offset(position_bias: Tensor, scale: Tensor, in_bucket: Tensor, mask: Tensor) -> Tensor:
    """The addition to a tile's scores by distance, (..., 3W - 1): the scaled bias of a table (..., buckets), or -inf if masked.

    in_bucket (3W - 1, buckets) says which bucket a distance is in. A product picks it: its gradient adds up nothing by an index.
    (q.k + bias) scale = (q scale).k + bias scale, so both terms are scaled before the sum.
    """
    by_bucket = position_bias * scale[..., None]
    return at_least_float32(by_bucket @ in_bucket.T.to(by_bucket.dtype)).masked_fill(
        ~mask, -math.inf
    )


def offsets_of(layers: ModuleList, in_bucket: Tensor, mask: Tensor) -> Tensor:
    """score_offset of all layers at once, (L, H, 3W - 1)."""
    bias, scale = (
        torch.stack([getattr(layer, name) for layer in layers])
        for name in ("position_bias", "scale")
    )
    return score_offset(bias, scale, in_bucket, mask)


def offsets_by_pair(by_distance: Tensor, window: int, dtype: torch.dtype) -> Tensor:
    """by_query_and_key(by_distance, W) in a type (..., W, 2W), in dense rows: SDPA's fused kernels take no others."""
    return (
        by_query_and_key(by_distance, window)
        .to(dtype, memory_format=torch.contiguous_format)
        .contiguous()
    )


def of_query(by_distance: Tensor, position: Tensor) -> Tensor:
    """Row `position` (1,) of by_query_and_key(by_distance, W), (..., 1, 2W) of (..., 3W - 1)."""
    window = (by_distance.shape[-1] + 1) // 3
    return by_distance.index_select(-1, columns_of_query(position, window, 2 * window))[
        ..., None, :
    ]


def sliding_attention_plain(
    query: Tensor, keys: Tensor, values: Tensor, offset: Tensor, dropout: float = 0.0
) -> Tensor:
    """Attention of each block to the keys of the previous block and its own, all tiles at once.

    query (B, H, N, E) already scaled, keys and values (B, H, W + N, E), offset (H, W, 2W). Returns (B, H, N, E).
    """
    batch, heads, length, width = query.shape
    window = offset.shape[1]
    tiles = query.view(batch, heads, length // window, window, width)
    near_keys = keys.unfold(2, 2 * window, window)  # (B, H, N/W, E, 2W)
    near_values = values.unfold(2, 2 * window, window).transpose(-1, -2)
    weights = (tiles @ near_keys + offset[:, None]).softmax(-1)  # (B, H, N/W, W, 2W)
    return (functional.dropout(weights, dropout) @ near_values).reshape(query.shape)


def sliding_attention_sdpa(
    query: Tensor, keys: Tensor, values: Tensor, offset: Tensor, dropout: float = 0.0
) -> Tensor:
    """The same as sliding_attention_plain by SDPA: the tiles are its batch."""
    window = offset.shape[1]
    tiles = fold_tiles(query.unflatten(2, (-1, window)))  # (B N/W, H, W, E)
    near = (
        fold_tiles(rows.unfold(2, 2 * window, window).transpose(-1, -2)) for rows in (keys, values)
    )  # (B N/W, H, 2W, E)
    return unfold_tiles(sdpa(tiles, *near, offset, dropout, scale=1.0), len(query)).flatten(2, 3)


def sliding_attention(
    query: Tensor, keys: Tensor, values: Tensor, offset: Tensor, dropout: float = 0.0
) -> Tensor:
    """The same as sliding_attention_plain, by the fastest path for these arguments."""
    if takes_sdpa(query, keys):
        return sliding_attention_sdpa(query, keys, values, offset, dropout)
    if on_plain_cpu(query) and dropout == 0:
        return SlidingAttention.apply(query, keys, values, offset)
    return sliding_attention_plain(query, keys, values, offset, dropout)
