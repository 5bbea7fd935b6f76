"""The operations whose backward pass is written by hand. Each equals a plain path.

    ProjectHeads        heads.project_heads_plain
    SlidingAttention    sliding_window.sliding_attention_plain
    RelativeAttention   relative_shift.relative_attention_plain
    Copies              a copy of each tensor by `to`
    ChunkedNats         replay.summed_nats in one chunk

The first three are for a CPU, where autograd's own are slower. The last two run everywhere: they save operations and memory.
Sums over many rows or tiles are made in float32 or better. B lanes, H heads, E width of a head, N queries, K keys.
"""

import itertools
import math

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

TILE = 128  # queries that RelativeAttention computes at a time


class ProjectHeads(torch.autograd.Function):
    """The same as project_heads_plain; backward writes each gradient once, into one buffer."""

    @staticmethod
    def forward(ctx, x, weight, heads, parts, epsilon):
        y = functional.linear(x, weight).view(*x.shape[:2], parts, heads, -1)  # (B, N, m, H, E)
        exact = torch.promote_types(y.dtype, torch.float32)
        length = torch.linalg.vector_norm(
            y[:, :, :-1], dim=-1, keepdim=True, dtype=exact
        )  # one pass, without y's squares
        inverse = length.square_().add_(epsilon).rsqrt_().to(y.dtype)  # (B, N, m - 1, H, 1)
        y[:, :, :-1].mul_(inverse)
        outs = tuple(
            y[:, :, part].transpose(1, 2).contiguous() for part in range(parts)
        )  # (B, H, N, E) each
        ctx.save_for_backward(x, weight, inverse, *outs[:-1])
        return outs

    @staticmethod
    @once_differentiable
    def backward(ctx, *douts):
        x, weight, inverse, *units = ctx.saved_tensors
        dy = x.new_empty(*x.shape[:2], len(douts), *douts[-1].shape[1::2])  # (B, N, m, H, E)
        for part, unit in enumerate(units):
            dunit = douts[part]
            along = (dunit * unit).sum(-1, keepdim=True)
            dpart = torch.addcmul(dunit, unit, along, value=-1).transpose(1, 2)
            torch.mul(dpart, inverse[:, :, part], out=dy[:, :, part])
        dy[:, :, -1] = douts[-1].transpose(1, 2)
        rows = dy.view(-1, weight.shape[0])
        return (rows @ weight).view(x.shape), rows.t() @ x.view(-1, x.shape[-1]), None, None, None


class SlidingAttention(torch.autograd.Function):
    """The same as sliding_attention_plain without dropout, one tile at a time so that scores stay in the CPU cache.

    A tile of T queries takes only the W + T keys that any of them sees, so T < W computes fewer masked scores than W x 2W.
    Gradients that several tiles add to are summed in float32 or better.
    """

    @staticmethod
    def forward(ctx, query, keys, values, offset):
        batch, heads, length, width = query.shape
        window = offset.shape[1]
        height = window // 2 if window % 2 == 0 else window
        q, k, v = (
            query.flatten(0, 1),
            keys.flatten(0, 1),
            values.flatten(0, 1),
        )  # (BH, N or W + N, E)
        out = q.new_empty(
            batch, length, heads, width
        )  # heads last, as the output matrix reads them
        weights = q.new_empty(length // height, batch * heads, height, window + height)
        scores, tile_out = torch.empty_like(weights[0]), q.new_empty(batch * heads, height, width)
        for tile, tile_weights in enumerate(weights):
            queries, near, rows, columns = SlidingAttention.slices(tile, window, height)
            scores.view(batch, heads, height, -1).copy_(offset[:, rows, columns])
            scores.baddbmm_(q[:, queries], k[:, near].transpose(1, 2))
            torch.softmax(scores, -1, out=tile_weights)
            torch.bmm(tile_weights, v[:, near], out=tile_out)
            out[:, queries] = tile_out.view(batch, heads, height, width).transpose(1, 2)
        ctx.save_for_backward(q, k, v, weights)
        ctx.shape = query.shape
        return out.transpose(1, 2)

    @staticmethod
    def slices(tile, window, height):
        """Slices of the tile's queries, of its keys, and of its rows and columns in the W x 2W offset."""
        start = tile * height
        row = start % window
        reach = window + height
        return (
            slice(start, start + height),
            slice(start, start + reach),
            slice(row, row + height),
            slice(row, row + reach),
        )

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        q, k, v, weights = ctx.saved_tensors
        batch, heads, length, width = ctx.shape
        height, window = weights.shape[2], weights.shape[3] - weights.shape[2]
        dout = dout.reshape(batch * heads, length, width)
        exact = torch.promote_types(q.dtype, torch.float32)  # of sums over tiles
        dquery, dkeys, dvalues = (
            torch.empty_like(q),
            torch.zeros_like(k, dtype=exact),
            torch.zeros_like(v, dtype=exact),
        )
        doffset = q.new_zeros(heads, window, 2 * window, dtype=exact)
        dweights, dscores = torch.empty_like(weights[0]), torch.empty_like(weights[0])
        dnear, dtile = (
            q.new_empty(batch * heads, window + height, width),
            q.new_empty(batch * heads, height, width),
        )
        for tile, tile_weights in enumerate(weights):
            queries, near, rows, columns = SlidingAttention.slices(tile, window, height)
            torch.bmm(dout[:, queries], v[:, near].transpose(1, 2), out=dweights)
            torch._softmax_backward_data(
                dweights, tile_weights, -1, dweights.dtype, grad_input=dscores
            )
            doffset[:, rows, columns] += dscores.view(batch, heads, height, -1).sum(0, dtype=exact)
            dquery[:, queries] = torch.bmm(dscores, k[:, near], out=dtile)
            dkeys[:, near] += torch.bmm(dscores.transpose(1, 2), q[:, queries], out=dnear)
            dvalues[:, near] += torch.bmm(tile_weights.transpose(1, 2), dout[:, queries], out=dnear)
        shape = (batch, heads, -1, width)
        dkeys, dvalues, doffset = (x.to(q.dtype) for x in (dkeys, dvalues, doffset))
        return dquery.view(shape), dkeys.view(shape), dvalues.view(shape), doffset


class RelativeAttention(torch.autograd.Function):
    """relative_attention_plain without dropout, a tile of queries at a time: scores stay in the cache, later keys are skipped.

    Distances that share a row of the distance keys are multiplied by it once. The relative shift is a view: in the flat array of
    scores by distance, for T queries and K keys, the score of query i and key j is at i K + (T - 1 - i) + j = (T - 1) +
    i (K - 1) + j, so the view's rows are K - 1 apart.
    """

    @staticmethod
    def forward(
        ctx, query, key, value, distance_key, content_bias, distance_bias, measure, in_values
    ):
        batch, heads, length, width = query.shape
        k, v, total = key.flatten(0, 1), value.flatten(0, 1), key.shape[2]
        scale = width**-0.5
        content_query = query.new_empty(batch, heads, length, width)  # (q + u) / sqrt(E)
        torch.add(query, content_bias[:, None], out=content_query).mul_(scale)
        distance_query = query.new_empty(
            heads, batch, length, width
        )  # (q + v) / sqrt(E), heads first: r is shared by lanes
        torch.add(query.transpose(0, 1), distance_bias[:, None, None], out=distance_query).mul_(
            scale
        )
        content_query = content_query.flatten(0, 1)
        out = query.new_empty(
            batch, length, heads, width
        )  # heads last, as the output matrix reads them
        usage = (
            query.new_zeros(batch, total, dtype=torch.promote_types(query.dtype, torch.float32))
            if measure
            else None
        )
        tiles, weights = RelativeAttention.tiles(length, total), []
        height = tiles[0][0].stop
        by_distance = query.new_empty(batch * heads * height * total)
        mask = torch.full((height, height), -math.inf, dtype=query.dtype).triu_(1)
        for rows, reach in tiles:
            shape = (batch, heads, rows.stop - rows.start, reach)
            shifted = RelativeAttention.shifted(by_distance, shape)
            tile_query = distance_query[:, :, rows].flatten(1, 2)  # (H, BT, E)
            near = RelativeAttention.near(distance_key, reach)
            RelativeAttention.multiply(
                tile_query, near, by_distance[: math.prod(shape)].view(heads, -1, reach)
            )
            tile_scores = query.new_empty(batch * heads, *shape[2:])
            tile_scores.view(shape).copy_(shifted)
            tile_scores.baddbmm_(content_query[:, rows], k[:, :reach].transpose(1, 2))
            tile_scores[:, :, reach - shape[2] :].add_(mask[: shape[2], : shape[2]])
            weights.append(torch.softmax(tile_scores, -1, out=tile_scores))
            out[:, rows] = (
                torch.bmm(weights[-1], v[:, :reach]).view(batch, heads, -1, width).transpose(1, 2)
            )
            if in_values:
                of_distances = RelativeAttention.unshift(
                    by_distance[: math.prod(shape)], weights[-1].view(shape), near
                )
                out[:, rows] += (
                    torch.bmm(of_distances, near).view(heads, batch, -1, width).permute(1, 2, 0, 3)
                )
            if measure:
                usage[:, :reach] += weights[-1].view(shape).sum((1, 2), dtype=usage.dtype) / (
                    heads * length
                )
        ctx.save_for_backward(content_query, distance_query, k, v, distance_key, *weights)
        ctx.shape, ctx.in_values = query.shape, in_values
        if measure:
            ctx.mark_non_differentiable(usage)
        return out.transpose(1, 2), usage

    @staticmethod
    def tiles(length, total):
        """[(slice of the tile's queries, number of keys that its last query sees)]"""
        cuts = [*range(0, length, TILE), length]
        return [(slice(a, b), total - length + b) for a, b in itertools.pairwise(cuts)]

    @staticmethod
    def near(distance_key, reach):
        """The rows (H, R', E) of the distances that occur among `reach` keys."""
        return distance_key[:, max(0, distance_key.shape[1] - reach) :]

    @staticmethod
    def multiply(tile_query, near, out):
        """Fill out (H, BT, K) with tile_query (H, BT, E) times the distances' rows near (H, R', E)."""
        if beyond := out.shape[2] - near.shape[1]:
            out[..., beyond:] = torch.bmm(tile_query, near.transpose(1, 2))
            out[..., :beyond] = out[..., beyond : beyond + 1]
        else:
            torch.bmm(tile_query, near.transpose(1, 2), out=out)

    @staticmethod
    def shifted(by_distance, shape, columns=None):
        """A tile's scores by key (B, H, T, columns), as a view of its scores by distance, which are stored as (H, B, T, K)."""
        batch, heads, height, reach = shape
        size = (heads, batch, height, columns or reach)
        strides = (batch * height * reach, height * reach, reach - 1, 1)
        return by_distance.as_strided(size, strides, height - 1).transpose(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, _):
        content_query, distance_query, k, v, distance_key, *weights = ctx.saved_tensors
        batch, heads, length, width = ctx.shape
        total, scale = k.shape[1], width**-0.5
        dout = dout.reshape(batch * heads, length, width)
        dcontent, ddistance = torch.empty_like(content_query), torch.empty_like(distance_query)
        exact = torch.promote_types(k.dtype, torch.float32)  # of sums over tiles
        dk, dv, ddistance_key = (torch.zeros_like(x, dtype=exact) for x in (k, v, distance_key))
        dby_distance, dweights, dscores = (
            k.new_empty(max(w.numel() for w in weights)) for _ in range(3)
        )
        for (rows, reach), tile_weights in zip(
            RelativeAttention.tiles(length, total), weights, strict=True
        ):
            shape = (batch, heads, *tile_weights.shape[1:])
            size = tile_weights.numel()
            tile_dweights, tile_dscores = (
                buffer[:size].view(tile_weights.shape) for buffer in (dweights, dscores)
            )
            torch.bmm(dout[:, rows], v[:, :reach].transpose(1, 2), out=tile_dweights)
            near = RelativeAttention.near(distance_key, reach)
            dnear = ddistance_key[:, -near.shape[1] :]
            if ctx.in_values:
                tile_dout = (
                    dout.view(batch, heads, length, width)[:, :, rows].transpose(0, 1).flatten(1, 2)
                )  # (H, BT, E)
                RelativeAttention.multiply(
                    tile_dout, near, dby_distance[:size].view(heads, -1, reach)
                )
                tile_dweights.view(shape).add_(RelativeAttention.shifted(dby_distance, shape))
                of_distances = RelativeAttention.unshift(
                    dby_distance[:size], tile_weights.view(shape), near
                )
                dnear += torch.bmm(of_distances.transpose(1, 2), tile_dout)
            torch._softmax_backward_data(
                tile_dweights, tile_weights, -1, tile_dweights.dtype, grad_input=tile_dscores
            )
            dcontent[:, rows] = torch.bmm(tile_dscores, k[:, :reach])
            dk[:, :reach] += torch.bmm(tile_dscores.transpose(1, 2), content_query[:, rows])
            dv[:, :reach] += torch.bmm(tile_weights.transpose(1, 2), dout[:, rows])
            by_distance = RelativeAttention.unshift(
                dby_distance[:size], tile_dscores.view(shape), near
            )  # (H, BT, R')
            ddistance[:, :, rows] = torch.bmm(by_distance, near).view(heads, batch, -1, width)
            tile_query = distance_query[:, :, rows].flatten(1, 2)
            dnear += torch.bmm(by_distance.transpose(1, 2), tile_query)
        dcontent, ddistance = dcontent.view(ctx.shape), ddistance.transpose(0, 1)
        dbiases = (dcontent.sum((0, 2)).mul_(scale), ddistance.sum((0, 2)).mul_(scale))
        dquery = dcontent.add_(ddistance).mul_(scale)
        shape = (batch, heads, total, width)
        dk, dv, ddistance_key = (x.to(k.dtype) for x in (dk, dv, ddistance_key))
        return dquery, dk.view(shape), dv.view(shape), ddistance_key, *dbiases, None, None

    @staticmethod
    def unshift(by_distance, dscores, near):
        """The backward pass of the shift and of multiply: fills the flat by_distance from dscores (B, H, T, K).

        Returns (H, BT, R'), of the distances' rows near (H, R', E). Rows of length K that begin K - 1 apart would overlap; in the
        last key's column only the last query's entry is not masked.
        """
        batch, heads, height, reach = dscores.shape
        rows = by_distance.view(heads, batch, height * reach)
        rows[:, :, : height - 1] = 0  # distances at which the first query has no key
        if reach > 1:
            RelativeAttention.shifted(by_distance, dscores.shape, reach - 1).copy_(
                dscores[..., :-1]
            )
        rows[:, :, -1] = dscores[:, :, -1, -1].transpose(0, 1)
        by_distance, beyond = by_distance.view(heads, batch * height, reach), reach - near.shape[1]
        if beyond:
            by_distance[..., beyond] += by_distance[..., :beyond].sum(-1)
        return by_distance[..., beyond:]


class Copies(torch.autograd.Function):
    """Copies all tensors into `copies`, of another type, in one operation; a gradient comes back in its tensor's own type."""

    @staticmethod
    def forward(ctx, copies, *tensors):
        ctx.dtypes = [tensor.dtype for tensor in tensors]
        ctx.set_materialize_grads(False)  # what got no gradient keeps none
        torch._foreach_copy_(copies, tensors)
        return tuple(copy.detach() for copy in copies)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        arrived = [
            (number, gradient) for number, gradient in enumerate(gradients) if gradient is not None
        ]
        converted = {
            number: torch.empty_like(gradient, dtype=ctx.dtypes[number])
            for number, gradient in arrived
        }
        if converted:
            torch._foreach_copy_([*converted.values()], [gradient for _, gradient in arrived])
        return None, *(converted.get(number) for number in range(len(gradients)))


class ChunkedNats(torch.autograd.Function):
    """Summed -log p of targets (R,) from hidden (R, D) and the output matrix (V, D), some rows at a time; keeps no logits (R, V).

    Each chunk's logits give its gradients at once, so that they need not be made again; backward only scales the gradients.
    """

    @staticmethod
    def forward(ctx, hidden, matrix, targets, rows, ignored):
        exact = torch.promote_types(matrix.dtype, torch.float32)  # of sums over chunks
        total, dhidden, dmatrix = (
            0.0,
            torch.empty_like(hidden),
            torch.zeros_like(matrix, dtype=exact),
        )
        for chunk, aims, dchunk in zip(
            *(each.split(rows) for each in (hidden, targets, dhidden)), strict=True
        ):
            logs = functional.linear(chunk, matrix).to(exact).log_softmax(-1)
            total = total + functional.nll_loss(logs, aims, reduction="sum", ignore_index=ignored)
            dlogits = logs.exp_().scatter_add_(
                1, aims.clamp(min=0)[:, None], logs.new_full((len(logs), 1), -1.0)
            )
            dlogits = dlogits.mul_((aims != ignored)[:, None]).to(hidden.dtype)  # (n, V)
            torch.mm(dlogits, matrix, out=dchunk)
            dmatrix += dlogits.T @ chunk
        ctx.save_for_backward(dhidden, dmatrix.to(matrix.dtype))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, dnats):
        dhidden, dmatrix = ctx.saved_tensors
        return dhidden * dnats, dmatrix * dnats, None, None, None
