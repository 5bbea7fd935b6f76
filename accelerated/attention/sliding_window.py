"""The Block-Recurrent Transformer's sliding-window attention with T5's position biases: plain, by SDPA or flex, and for a CPU."""

import functools
import math

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from accelerated.attention.content import fold_tiles, sdpa, takes_sdpa, unfold_tiles
from accelerated.attention.heads import on_plain_cpu, to_be_indexed


def tile_distance(window: int) -> torch.Tensor:
    """i - j for a block's W queries and the 2W keys of the previous block and its own, (W, 2W)."""
    return torch.arange(window)[:, None] + window - torch.arange(2 * window)[None, :]


def window_mask(distance: torch.Tensor, window: int) -> torch.Tensor:
    """True if a token sees another: it sees exactly the previous W tokens, 1 <= i - j <= W."""
    return (distance >= 1) & (distance <= window)


def position_bucket(distance: torch.Tensor, buckets: int, max_distance: int) -> torch.Tensor:
    """T5's causal bucket of each distance: half of the buckets hold one distance each, the others grow logarithmically."""
    exact = buckets // 2
    ratio = torch.log(distance.clamp(min=exact).double() / exact) / math.log(max_distance / exact)
    coarse = (exact + (ratio * (buckets - exact)).long()).clamp(max=buckets - 1)
    return torch.where(distance < exact, distance.clamp(min=0), coarse)


def score_offset(position_bias: torch.Tensor, scale: torch.Tensor, bucket: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The addition to a tile's scores, (H, W, 2W): the scaled bias from a table (H, buckets), or -inf if masked.

    (q.k + bias) scale = (q scale).k + bias scale, so both terms are scaled before the sum.
    """
    by_bucket = to_be_indexed(position_bias * scale[:, None])
    return by_bucket[:, bucket].to(position_bias.dtype).masked_fill(~mask, -math.inf)


def sliding_attention_plain(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, offset: torch.Tensor, dropout: float = 0.0
) -> torch.Tensor:
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
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, offset: torch.Tensor, dropout: float = 0.0
) -> torch.Tensor:
    """The same as sliding_attention_plain by SDPA: the tiles are its batch."""
    window = offset.shape[1]
    tiles = fold_tiles(query.unflatten(2, (-1, window)))  # (B N/W, H, W, E)
    near = (fold_tiles(rows.unfold(2, 2 * window, window).transpose(-1, -2)) for rows in (keys, values))  # (B N/W, H, 2W, E)
    return unfold_tiles(sdpa(tiles, *near, offset, dropout, scale=1.0), len(query)).flatten(2, 3)


@functools.cache
def visible_blocks(length: int, window: int, device: torch.device) -> BlockMask:
    """The band 1 <= i - j <= W for flex_attention, N queries and W + N keys: the kernel skips blocks of it that are empty."""

    def visible(batch, head, query, key):
        return window_mask(query + window - key, window)

    return create_block_mask(visible, None, None, length, window + length, device=device)


def sliding_attention_flex(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, offset: torch.Tensor, blocks: BlockMask | None = None
) -> torch.Tensor:
    """The same as sliding_attention_plain by flex_attention, without dropout. On a CPU it has no backward pass.

    It is fast only if it is compiled. blocks is visible_blocks(N, W, device), which a compiled caller makes outside the graph.
    """
    length, window = query.shape[2], offset.shape[1]

    def biased(score, batch, head, query, key):
        row = query % window
        column = (key - (query - row)).clamp(0, 2 * window - 1)  # a block holds pairs outside of the band too
        return score + offset[head, row, column]

    return flex_attention(query, keys, values, biased, blocks or visible_blocks(length, window, query.device), scale=1.0)


def tile_height(window: int) -> int:
    """Queries in a tile of the fast path: half a window if it is even, so that fewer masked scores are computed."""
    return window // 2 if window % 2 == 0 else window


class SlidingAttention(torch.autograd.Function):
    """The same as sliding_attention_plain without dropout, one tile at a time so that scores stay in the CPU cache.

    A tile of T queries takes only the W + T keys that any of them sees, so T < W computes fewer masked scores than W x 2W.
    Gradients that several tiles add to are summed in float32 or better.
    """

    @staticmethod
    def forward(ctx, query, keys, values, offset):
        batch, heads, length, width = query.shape
        window, height = offset.shape[1], tile_height(offset.shape[1])
        q, k, v = query.flatten(0, 1), keys.flatten(0, 1), values.flatten(0, 1)  # (BH, N or W + N, E)
        out = q.new_empty(batch, length, heads, width)  # heads last, as the output matrix reads them
        weights = q.new_empty(length // height, batch * heads, height, window + height)
        scores, tile_out = torch.empty_like(weights[0]), q.new_empty(batch * heads, height, width)
        for tile, tile_weights in enumerate(weights):
            own, near, rows, columns = SlidingAttention.slices(tile, window, height)
            scores.view(batch, heads, height, -1).copy_(offset[:, rows, columns])
            scores.baddbmm_(q[:, own], k[:, near].transpose(1, 2))
            torch.softmax(scores, -1, out=tile_weights)
            torch.bmm(tile_weights, v[:, near], out=tile_out)
            out[:, own] = tile_out.view(batch, heads, height, width).transpose(1, 2)
        ctx.save_for_backward(q, k, v, weights)
        ctx.shape = query.shape
        return out.transpose(1, 2)

    @staticmethod
    def slices(tile, window, height):
        """Slices of the tile's queries, of its keys, and of its rows and columns in the W x 2W offset."""
        start = tile * height
        row = start % window
        reach = window + height
        return slice(start, start + height), slice(start, start + reach), slice(row, row + height), slice(row, row + reach)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        q, k, v, weights = ctx.saved_tensors
        batch, heads, length, width = ctx.shape
        height, window = weights.shape[2], weights.shape[3] - weights.shape[2]
        dout = dout.reshape(batch * heads, length, width)
        exact = torch.promote_types(q.dtype, torch.float32)  # of sums over tiles
        dquery, dkeys, dvalues = torch.empty_like(q), torch.zeros_like(k, dtype=exact), torch.zeros_like(v, dtype=exact)
        doffset = q.new_zeros(heads, window, 2 * window, dtype=exact)
        dweights, dscores = torch.empty_like(weights[0]), torch.empty_like(weights[0])
        dnear, dtile = q.new_empty(batch * heads, window + height, width), q.new_empty(batch * heads, height, width)
        for tile, tile_weights in enumerate(weights):
            own, near, rows, columns = SlidingAttention.slices(tile, window, height)
            torch.bmm(dout[:, own], v[:, near].transpose(1, 2), out=dweights)
            torch._softmax_backward_data(dweights, tile_weights, -1, dweights.dtype, grad_input=dscores)
            doffset[:, rows, columns] += dscores.view(batch, heads, height, -1).sum(0, dtype=exact)
            dquery[:, own] = torch.bmm(dscores, k[:, near], out=dtile)
            dkeys[:, near] += torch.bmm(dscores.transpose(1, 2), q[:, own], out=dnear)
            dvalues[:, near] += torch.bmm(tile_weights.transpose(1, 2), dout[:, own], out=dnear)
        shape = (batch, heads, -1, width)
        dkeys, dvalues, doffset = (x.to(q.dtype) for x in (dkeys, dvalues, doffset))
        return dquery.view(shape), dkeys.view(shape), dvalues.view(shape), doffset


def sliding_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, offset: torch.Tensor, dropout: float = 0.0
) -> torch.Tensor:
    """The same as sliding_attention_plain, by the fastest path for these arguments."""
    if takes_sdpa(query, keys):
        return sliding_attention_sdpa(query, keys, values, offset, dropout)
    if on_plain_cpu(query) and dropout == 0:
        return SlidingAttention.apply(query, keys, values, offset)
    return sliding_attention_plain(query, keys, values, offset, dropout)
