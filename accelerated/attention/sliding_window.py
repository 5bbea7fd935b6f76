"""The Block-Recurrent Transformer's sliding-window attention with T5's position biases.

It also has the attention of and to recurrent states, which have no positions.

A segment is cut into blocks of W tokens. The queries of a block and the keys of the previous block
and its own make a tile of scores, W x 2W (section 3.1). Whatever depends on the distance i - j
alone is first made once for each of the 3W - 1 distances of a tile, from far to near.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from accelerated.attention.content import fold_tiles, sdpa, unfold_tiles
from accelerated.attention.heads import (
    at_least_float32,
    by_query_and_key,
    takes_sdpa,
    with_fast_path,
)

# What is added to the scores, by distance


def position_bucket(distance: Tensor, buckets: int, max_distance: int) -> Tensor:
    """T5's causal bucket of each distance.

    Half of the buckets hold one distance each, the others grow logarithmically.
    """
    exact = buckets // 2
    far = distance.clamp(min=exact).double()
    ratio = torch.log(far / exact) / math.log(max_distance / exact)
    coarse = exact + (ratio * (buckets - exact)).long()
    coarse = coarse.clamp(max=buckets - 1)
    return torch.where(distance < exact, distance.clamp(min=0), coarse)


def tables_by_distance(window: int, buckets: int, max_distance: int) -> tuple[Tensor, Tensor]:
    """Two tables by a tile's distances, far to near.

    The first is a distance's bucket, one-hot (3W - 1, buckets). The second says whether a query
    sees a key at that distance (3W - 1,): it sees exactly the previous W tokens.
    """
    distance = torch.arange(2 * window - 1, -window, -1)
    bucket = position_bucket(distance, buckets, max_distance)
    in_bucket = bucket[:, None] == torch.arange(buckets)
    seen = (distance >= 1) & (distance <= window)
    return in_bucket, seen


def score_offset(
    position_bias: Tensor,  # (..., buckets)
    scale: Tensor,  # (...)
    in_bucket: Tensor,  # (3W - 1, buckets)
    seen: Tensor,  # (3W - 1,)
) -> Tensor:
    """What is added to a tile's scores by distance, (..., 3W - 1): the scaled bias, or -inf.

    The scores are (q.k + bias) scale = (q scale).k + bias scale, so both terms are scaled before
    the sum. The bias is looked up by a product with in_bucket, so that its gradient is a product
    too, not a sum by index.
    """
    by_bucket = position_bias * scale[..., None]
    by_distance = by_bucket @ in_bucket.T.to(by_bucket.dtype)
    return at_least_float32(by_distance).masked_fill(~seen, -math.inf)


def offsets_by_distance(layers: Iterable[Any], in_bucket: Tensor, seen: Tensor) -> Tensor:
    """score_offset of all layers at once, (L, H, 3W - 1).

    Each has a position_bias (H, buckets) and a scale (H,).
    """
    bias = torch.stack([layer.position_bias for layer in layers])  # (L, H, buckets)
    scale = torch.stack([layer.scale for layer in layers])  # (L, H)
    return score_offset(bias, scale, in_bucket, seen)


# From distances to pairs of a query and a key


def offset_of_tile(by_distance: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to a tile's scores, (H, W, 2W) in dtype, from (H, 3W - 1) by distance."""
    pairs = by_query_and_key(by_distance, window_of(by_distance))
    # SDPA's fused kernels need contiguous rows; `to` leaves a tensor of this dtype as it is
    return pairs.to(dtype, memory_format=torch.contiguous_format).contiguous()


def window_of(by_distance: Tensor) -> int:
    """W of what stands by a tile's distances, (..., 3W - 1)."""
    return (by_distance.shape[-1] + 1) // 3


# Attention


def sliding_attention_plain(
    query: Tensor,  # (B, H, N, E), already scaled
    keys: Tensor,  # (B, H, W + N, E), which begin with the previous segment's last block
    values: Tensor,  # (B, H, W + N, E)
    offset: Tensor,  # (H, W, 2W)
    dropout: float = 0.0,
) -> Tensor:
    """Attention (B, H, N, E) of each block to the previous block and itself, all tiles at once."""
    batch, heads, length, width = query.shape
    window = offset.shape[1]
    tiles = query.view(batch, heads, length // window, window, width)  # (B, H, N/W, W, E)
    near_keys = keys.unfold(2, 2 * window, window)  # (B, H, N/W, E, 2W)
    near_values = values.unfold(2, 2 * window, window).mT  # (B, H, N/W, 2W, E)
    scores = tiles @ near_keys + offset[:, None]  # (B, H, N/W, W, 2W)
    weights = functional.dropout(scores.softmax(-1), dropout)
    attended = weights @ near_values
    return attended.reshape(query.shape)


def sliding_attention_sdpa(
    query: Tensor, keys: Tensor, values: Tensor, offset: Tensor, dropout: float = 0.0
) -> Tensor:
    """The same as sliding_attention_plain by SDPA: the tiles are its batch."""
    window = offset.shape[1]
    tiles = fold_tiles(query.unflatten(2, (-1, window)))  # (B N/W, H, W, E)
    near_keys = fold_tiles(keys.unfold(2, 2 * window, window).mT)  # (B N/W, H, 2W, E)
    near_values = fold_tiles(values.unfold(2, 2 * window, window).mT)
    attended = sdpa(tiles, near_keys, near_values, offset, dropout, scale=1.0)
    return unfold_tiles(attended, query.shape[0]).flatten(2, 3)


@with_fast_path
def sliding_attention(
    query: Tensor,  # (B, H, N, E), already scaled
    keys: Tensor,  # (B, H, W + N, E), which begin with the previous segment's last block
    values: Tensor,  # (B, H, W + N, E)
    by_distance: Tensor,  # (H, 3W - 1), as score_offset has it
    dropout: float = 0.0,
) -> Tensor:
    """Attention (B, H, N, E) of each block to the previous block and itself, on a GPU by SDPA."""
    offset = offset_of_tile(by_distance, query.dtype)
    attend = sliding_attention_sdpa if takes_sdpa(query, keys) else sliding_attention_plain
    return attend(query, keys, values, offset, dropout)


def scaled_attention(query: Tensor, key: Tensor, value: Tensor, scale: Tensor) -> Tensor:
    """softmax((q.k) scale) v without a mask: attention among states, or of states and tokens.

    query (B, H, ..., N, E), key and value (B, H, ..., K, E), with at most one more axis, of tiles;
    scale (H, ...).
    """
    query = query * scale[..., None, None]
    if not takes_sdpa(query, key):
        scores = query @ key.mT  # (B, H, ..., N, K)
        return scores.softmax(-1) @ value
    if query.dim() == 4:
        return sdpa(query, key, value, scale=1.0)
    attended = sdpa(fold_tiles(query), fold_tiles(key), fold_tiles(value), scale=1.0)
    return unfold_tiles(attended, query.shape[0])
