"""Operations for a CPU with a backward pass written by hand, because autograd's own are slower.

    ProjectUnitHeads    equals heads.project_unit_heads_plain
    SlidingAttention    equals sliding_window.sliding_attention_plain
    RelativeAttention   equals relative_shift.relative_attention_plain

Sums over many rows or tiles are made in float32 or better. B lanes, H heads, E width of a head, N
queries, K keys, T queries of a tile.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

TILE = 128  # queries that RelativeAttention computes at a time


class ProjectUnitHeads(torch.autograd.Function):
    """The same as project_unit_heads_plain; backward writes each gradient once, into one buffer."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, heads: int, parts: int, epsilon: float):
        batch, length = x.shape[:2]
        y = functional.linear(x, weight).view(batch, length, parts, heads, -1)  # (B, N, m, H, E)
        vectors = y[:, :, :-1]

        # their lengths in one pass, without the squares of y
        exact = torch.promote_types(y.dtype, torch.float32)
        norm = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True, dtype=exact)
        inverse = norm.square_().add_(epsilon).rsqrt_().to(y.dtype)  # (B, N, m - 1, H, 1)
        vectors.mul_(inverse)

        outs = [part.transpose(1, 2).contiguous() for part in y.unbind(2)]
        ctx.save_for_backward(x, weight, inverse, *outs[:-1])
        return tuple(outs)  # (B, H, N, E) each

    @staticmethod
    @once_differentiable
    def backward(ctx, *douts: Tensor):
        x, weight, inverse, *units = ctx.saved_tensors
        *dunits, dvalue = douts
        batch, heads, length, width = dvalue.shape
        dy = x.new_empty(batch, length, len(douts), heads, width)  # (B, N, m, H, E)
        for part, (unit, dunit) in enumerate(zip(units, dunits, strict=True)):
            # of u = y / |y|: dy = (du - u (u.du)) / |y|
            along = (dunit * unit).sum(-1, keepdim=True)  # (B, H, N, 1)
            across = torch.addcmul(dunit, unit, along, value=-1).transpose(1, 2)
            torch.mul(across, inverse[:, :, part], out=dy[:, :, part])
        dy[:, :, -1] = dvalue.transpose(1, 2)

        rows = dy.view(-1, weight.shape[0])  # (BN, m HE)
        dx = rows @ weight
        dweight = rows.T @ x.view(dx.shape)
        return dx.view(x.shape), dweight, None, None, None


def slices_of(tile: int, window: int, height: int) -> tuple[slice, slice, slice, slice]:
    """Slices of a tile's queries, of its keys, and of its rows and columns in the offset."""
    start = tile * height
    row = start % window
    reach = window + height
    queries = slice(start, start + height)
    near = slice(start, start + reach)
    rows = slice(row, row + height)
    columns = slice(row, row + reach)
    return queries, near, rows, columns


class SlidingAttention(torch.autograd.Function):
    """The same as sliding_attention_plain without dropout, one tile at a time.

    The scores of a tile stay in the CPU's cache. A tile of T queries takes only the W + T keys that
    any of them sees, so T < W computes fewer masked scores than W x 2W. Gradients that several
    tiles add to are summed in float32 or better.
    """

    @staticmethod
    def forward(ctx, query: Tensor, keys: Tensor, values: Tensor, offset: Tensor):
        batch, heads, length, width = query.shape
        window = offset.shape[1]
        height = window // 2 if window % 2 == 0 else window  # T
        q = query.flatten(0, 1)  # (BH, N, E)
        k = keys.flatten(0, 1)  # (BH, W + N, E)
        v = values.flatten(0, 1)

        out = heads_last(query)
        weights = q.new_empty(length // height, batch * heads, height, window + height)
        scores = torch.empty_like(weights[0])  # (BH, T, W + T)
        attended = q.new_empty(batch * heads, height, width)
        for tile, tile_weights in enumerate(weights):
            queries, near, rows, columns = slices_of(tile, window, height)
            scores.view(batch, heads, height, -1).copy_(offset[:, rows, columns])
            scores.baddbmm_(q[:, queries], k[:, near].mT)
            torch.softmax(scores, -1, out=tile_weights)
            torch.bmm(tile_weights, v[:, near], out=attended)
            out[:, :, queries] = attended.view(batch, heads, height, width)

        ctx.save_for_backward(q, k, v, weights)
        ctx.shape = query.shape
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: Tensor):
        q, k, v, weights = ctx.saved_tensors
        batch, heads, length, width = ctx.shape
        height = weights.shape[2]
        window = weights.shape[3] - height
        dout = dout.reshape(batch * heads, length, width)

        exact = torch.promote_types(q.dtype, torch.float32)  # of sums over tiles
        dquery = torch.empty_like(q)
        dkeys = torch.zeros_like(k, dtype=exact)
        dvalues = torch.zeros_like(v, dtype=exact)
        doffset = q.new_zeros(heads, window, 2 * window, dtype=exact)

        dweights = torch.empty_like(weights[0])  # (BH, T, W + T)
        dscores = torch.empty_like(weights[0])
        dnear = q.new_empty(batch * heads, window + height, width)
        dtile = q.new_empty(batch * heads, height, width)
        for tile, tile_weights in enumerate(weights):
            queries, near, rows, columns = slices_of(tile, window, height)
            tile_dout = dout[:, queries]
            torch.bmm(tile_dout, v[:, near].mT, out=dweights)
            softmax_backward(dweights, tile_weights, out=dscores)

            by_lane = dscores.view(batch, heads, height, -1)
            doffset[:, rows, columns] += by_lane.sum(0, dtype=exact)
            dquery[:, queries] = torch.bmm(dscores, k[:, near], out=dtile)
            dkeys[:, near] += torch.bmm(dscores.mT, q[:, queries], out=dnear)
            dvalues[:, near] += torch.bmm(tile_weights.mT, tile_dout, out=dnear)

        shape = (batch, heads, -1, width)
        dkeys = dkeys.to(q.dtype).view(shape)
        dvalues = dvalues.to(q.dtype).view(shape)
        return dquery.view(shape), dkeys, dvalues, doffset.to(q.dtype)


def heads_last(query: Tensor) -> Tensor:
    """An empty (B, H, N, E), in memory (B, N, H, E): the output matrix reads it so."""
    batch, heads, length, width = query.shape
    return query.new_empty(batch, length, heads, width).transpose(1, 2)


def softmax_backward(dweights: Tensor, weights: Tensor, out: Tensor) -> None:
    """Fill out with the gradient of the scores, of which weights are the softmax."""
    backward = torch.ops.aten._softmax_backward_data.out
    backward(dweights, weights, -1, weights.dtype, grad_input=out)


class RelativeAttention(torch.autograd.Function):
    """The same as relative_attention_plain without dropout, a tile of queries at a time.

    The scores of a tile stay in the CPU's cache, and the keys after its last query are left out.
    What is computed by distance is written into one flat buffer, for one tile after another.
    """

    @staticmethod
    def forward(
        ctx,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        distance_key: Tensor,
        content_bias: Tensor,
        distance_bias: Tensor,
        measure: bool,
    ):
        batch, heads, length, width = query.shape
        total = key.shape[2]
        k = key.flatten(0, 1)  # (BH, K, E)
        v = value.flatten(0, 1)
        content_query, distance_query = biased_queries(query, content_bias, distance_bias)

        out = heads_last(query)
        exact = torch.promote_types(query.dtype, torch.float32)
        usage = query.new_zeros(batch, total, dtype=exact) if measure else None
        highest = min(TILE, length)
        mask = query.new_full((highest, highest), -math.inf).triu_(1)
        buffer = query.new_empty(batch * heads * highest * total)

        all_weights = []
        for rows, reach in tiles_of(length, total):
            shape = (batch, heads, rows.stop - rows.start, reach)
            near = distance_key[:, -reach:]  # (H, K', E), the distances that occur
            tile_query = distance_query[:, :, rows].flatten(1, 2)  # (H, BT, E)
            by_key = shifted_products(tile_query, near, buffer, shape)
            weights = softmax_of_tile(by_key, content_query[:, rows], k[:, :reach], mask)
            all_weights.append(weights)

            attended = torch.bmm(weights, v[:, :reach])  # (BH, T, E)
            out[:, :, rows] = attended.view(batch, heads, -1, width)
            if usage is not None:
                summed = weights.view(shape).sum((1, 2), dtype=exact)
                usage[:, :reach] += summed / (heads * length)

        ctx.save_for_backward(content_query, distance_query, k, v, distance_key, *all_weights)
        ctx.shape = query.shape
        if usage is not None:
            ctx.mark_non_differentiable(usage)
        return out, usage

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: Tensor, _):
        content_query, distance_query, k, v, distance_key, *all_weights = ctx.saved_tensors
        batch, heads, length, width = ctx.shape
        total = k.shape[1]
        dout = dout.reshape(batch * heads, length, width)

        exact = torch.promote_types(k.dtype, torch.float32)  # of sums over tiles
        dk = torch.zeros_like(k, dtype=exact)
        dv = torch.zeros_like(v, dtype=exact)
        ddistance_key = torch.zeros_like(distance_key, dtype=exact)
        dcontent = torch.empty_like(content_query)
        ddistance = torch.empty_like(distance_query)
        largest = max(weights.numel() for weights in all_weights)
        buffer = k.new_empty(largest)
        dweights_buffer = k.new_empty(largest)
        dscores_buffer = k.new_empty(largest)

        for (rows, reach), weights in zip(tiles_of(length, total), all_weights, strict=True):
            shape = (batch, heads, *weights.shape[1:])
            near = distance_key[:, -reach:]
            dnear = ddistance_key[:, -reach:]

            tile_dout = dout[:, rows]
            dweights = in_shape(dweights_buffer, weights.shape)
            torch.bmm(tile_dout, v[:, :reach].mT, out=dweights)
            dscores = in_shape(dscores_buffer, weights.shape)
            softmax_backward(dweights, weights, out=dscores)

            dcontent[:, rows] = torch.bmm(dscores, k[:, :reach])
            dk[:, :reach] += torch.bmm(dscores.mT, content_query[:, rows])
            dv[:, :reach] += torch.bmm(weights.mT, tile_dout)
            by_distance = unshifted(dscores.view(shape), buffer)  # (H, BT, K')
            dtile = torch.bmm(by_distance, near)  # (H, BT, E)
            ddistance[:, :, rows] = dtile.view(heads, batch, -1, width)
            tile_query = distance_query[:, :, rows].flatten(1, 2)
            dnear += torch.bmm(by_distance.mT, tile_query)

        dquery, *dbiases = biased_queries_backward(dcontent.view(ctx.shape), ddistance)
        dkey = dk.to(k.dtype).view(batch, heads, total, width)
        dvalue = dv.to(k.dtype).view(batch, heads, total, width)
        return dquery, dkey, dvalue, ddistance_key.to(k.dtype), *dbiases, None


def tiles_of(length: int, total: int) -> list[tuple[slice, int]]:
    """Of each tile the slice of its queries, and the number of keys that its last query sees."""
    tiles = []
    for start in range(0, length, TILE):
        stop = min(start + TILE, length)
        tiles.append((slice(start, stop), total - length + stop))
    return tiles


def in_shape(buffer: Tensor, shape: Sequence[int]) -> Tensor:
    """The first numbers of a flat buffer, seen in a shape."""
    return buffer[: math.prod(shape)].view(shape)


def biased_queries(
    query: Tensor, content_bias: Tensor, distance_bias: Tensor
) -> tuple[Tensor, Tensor]:
    """(q + u) / sqrt(E), (BH, N, E), and (q + v) / sqrt(E), (H, B, N, E), of query (B, H, N, E).

    The second has heads first, because all lanes share the distances' rows.
    """
    scale = query.shape[-1] ** -0.5
    content_query = query.new_empty(query.shape)
    torch.add(query, content_bias[:, None], out=content_query).mul_(scale)
    by_head = query.transpose(0, 1)
    distance_query = query.new_empty(by_head.shape)
    torch.add(by_head, distance_bias[:, None, None], out=distance_query).mul_(scale)
    return content_query.flatten(0, 1), distance_query


def biased_queries_backward(dcontent: Tensor, ddistance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query (B, H, N, E), u and v (H, E).

    dcontent (B, H, N, E) is the gradient of (q + u) / sqrt(E), ddistance (H, B, N, E) of the other.
    """
    scale = dcontent.shape[-1] ** -0.5
    ddistance = ddistance.transpose(0, 1)
    dcontent_bias = dcontent.sum((0, 2)).mul_(scale)
    ddistance_bias = ddistance.sum((0, 2)).mul_(scale)
    dquery = dcontent.add_(ddistance).mul_(scale)
    return dquery, dcontent_bias, ddistance_bias


def softmax_of_tile(
    by_key: Tensor,  # (B, H, T, K), the scores by distance
    content_query: Tensor,  # (BH, T, E)
    key: Tensor,  # (BH, K, E)
    mask: Tensor,  # at least (T, T), -inf above the diagonal
) -> Tensor:
    """The weights of a tile, (BH, T, K)."""
    batch, heads, height, reach = by_key.shape
    scores = content_query.new_empty(batch * heads, height, reach)
    scores.view(by_key.shape).copy_(by_key)
    scores.baddbmm_(content_query, key.mT)
    own = scores[:, :, reach - height :]  # of the tile's own keys, (BH, T, T)
    own.add_(mask[:height, :height])
    return torch.softmax(scores, -1, out=scores)


def shifted_products(
    by_head: Tensor,  # (H, BT, E)
    near: Tensor,  # (H, K, E)
    buffer: Tensor,
    shape: Sequence[int],  # B, H, T, K
) -> Tensor:
    """Products of queries and the distances' rows by key, (B, H, T, K): a view of the buffer."""
    batch, heads, height, reach = shape
    torch.bmm(by_head, near.mT, out=in_shape(buffer, (heads, batch * height, reach)))
    return shift(buffer, shape, reach)


def shift(buffer: Tensor, shape: Sequence[int], columns: int) -> Tensor:
    """The relative shift: a view (B, H, T, columns) of scores by distance, stored as (H, B, T, K).

    In the flat buffer the score of query i and key j is at i K + (T - 1 - i) + j =
    (T - 1) + i (K - 1) + j, so the view's rows are K - 1 apart.
    """
    batch, heads, height, reach = shape
    size = (heads, batch, height, columns)
    strides = (batch * height * reach, height * reach, reach - 1, 1)
    return buffer.as_strided(size, strides, height - 1).transpose(0, 1)


def unshifted(by_key: Tensor, buffer: Tensor) -> Tensor:
    """The backward pass of shift: by_key (B, H, T, K) by distance, (H, BT, K).

    Rows of length K that begin K - 1 apart would overlap in the buffer; in the last key's column
    only the last query's entry is not masked.
    """
    batch, heads, height, reach = by_key.shape
    rows = in_shape(buffer, (heads, batch, height * reach))
    rows[:, :, : height - 1] = 0  # distances at which the first query has no key
    if reach > 1:
        shift(buffer, by_key.shape, reach - 1).copy_(by_key[..., :-1])
    last = by_key[:, :, -1, -1]  # (B, H)
    rows[:, :, -1] = last.T
    return in_shape(buffer, (heads, batch * height, reach))
