"""The Compressive Transformer's causal attention with Transformer-XL's shift: plain, by SDPA, and for a CPU.

Positions are Transformer-XL's, or Memformer's simplified ones: these are clipped, and added to the values too (in_values).
"""

import itertools
import math

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from accelerated.attention.content import causal_mask, sdpa, takes_sdpa
from accelerated.attention.heads import on_plain_cpu

TILE = 128  # queries in a tile, which the fast path computes at a time


def distance_sinusoids(length: int, width: int) -> torch.Tensor:
    """Transformer-XL's R (length, D); row t is for distance length - 1 - t, so rows run from far to near, as keys do."""
    distance = torch.arange(length - 1, -1, -1, dtype=torch.float64)
    frequency = 10_000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angle = distance[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=-1).to(torch.get_default_dtype())


def relative_shift(by_distance: torch.Tensor) -> torch.Tensor:
    """Turn scores by distance into scores by key, both (..., N, K): out[i, j] = by_distance[i, j + N - 1 - i].

    Entries under the causal mask are meaningless: they come from other rows.
    """
    *batch, n, k = by_distance.shape
    padded = functional.pad(by_distance, (1, 0))  # (..., N, K + 1)
    return padded.reshape(*batch, n * (k + 1))[..., n:].view(*batch, n, k)


def relative_unshift(by_key: torch.Tensor) -> torch.Tensor:
    """Turn weights by key into weights by distance, both (..., N, K); weights under the causal mask must be zero."""
    *batch, n, k = by_key.shape
    return functional.pad(by_key.reshape(*batch, n * k), (n, 0)).view(*batch, n, k + 1)[..., 1:]


def relative_attention_plain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    distance_key: torch.Tensor,
    content_bias: torch.Tensor,
    distance_bias: torch.Tensor,
    dropout: float = 0.0,
    measure: bool = False,
    in_values: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """softmax(((q + u).k_j + (q + v).r_{i-j}) / sqrt(E)) x_j and, if measure, the mean weight of each key (B, K).

    query (B, H, N, E), key and value x (B, H, K, E), distance_key r (H, R, E), biases (H, E). Row t of the distance keys is for
    distance R - 1 - t, row 0 for all beyond too. in_values: the value is x_j + r_{i-j}.
    """
    beyond = distance_key[:, :1].expand(-1, key.shape[2] - distance_key.shape[1], -1)
    distance_key = torch.cat([beyond, distance_key], 1)  # (H, K, E)
    content = (query + content_bias[:, None]) @ key.transpose(-1, -2)  # (B, H, N, K)
    by_distance = (query + distance_bias[:, None]) @ distance_key.transpose(-1, -2)
    scores = (content + relative_shift(by_distance)) * query.shape[-1] ** -0.5
    weights = scores.masked_fill(causal_mask(*scores.shape[-2:], scores.device), -math.inf).softmax(-1)
    usage = weights.detach().mean((1, 2), dtype=torch.promote_types(weights.dtype, torch.float32)) if measure else None
    if dropout:
        weights = functional.dropout(weights, dropout)
    out = weights @ value
    return out + relative_unshift(weights) @ distance_key if in_values else out, usage


def relative_attention_sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    distance_key: torch.Tensor,
    content_bias: torch.Tensor,
    distance_bias: torch.Tensor,
    dropout: float = 0.0,
) -> torch.Tensor:
    """The same as relative_attention_plain with R = K, by SDPA: scores by distance are an offset. Measures nothing."""
    scale = query.shape[-1] ** -0.5
    # not a product of matrices: it would copy distance_key for every lane
    by_distance = torch.einsum("bhne,hke->bhnk", (query + distance_bias[:, None]) * scale, distance_key)
    offset = relative_shift(by_distance)
    offset = offset.masked_fill(causal_mask(*offset.shape[-2:], offset.device), -math.inf)
    return sdpa(query + content_bias[:, None], key, value, offset, dropout, scale=scale)


class RelativeAttention(torch.autograd.Function):
    """The same without dropout, one tile of queries at a time: scores stay in the CPU cache, and keys after the tile are skipped.

    Distances that share a row of the distance keys are multiplied by it once.

    The relative shift is a view. In the flat array of scores by distance, for T queries and K keys, the score of query i and
    key j is at i K + (T - 1 - i) + j = (T - 1) + i (K - 1) + j: the view's rows are K - 1 apart.
    """

    @staticmethod
    def forward(ctx, query, key, value, distance_key, content_bias, distance_bias, measure, in_values):
        batch, heads, length, width = query.shape
        k, v, total = key.flatten(0, 1), value.flatten(0, 1), key.shape[2]
        scale = width**-0.5
        content_query = query.new_empty(batch, heads, length, width)  # (q + u) / sqrt(E)
        torch.add(query, content_bias[:, None], out=content_query).mul_(scale)
        distance_query = query.new_empty(heads, batch, length, width)  # (q + v) / sqrt(E), heads first: r is shared by lanes
        torch.add(query.transpose(0, 1), distance_bias[:, None, None], out=distance_query).mul_(scale)
        content_query = content_query.flatten(0, 1)
        out = query.new_empty(batch, length, heads, width)  # heads last, as the output matrix reads them
        exact = torch.promote_types(query.dtype, torch.float32)
        usage = query.new_zeros(batch, total, dtype=exact) if measure else None
        tiles, weights = RelativeAttention.tiles(length, total), []
        height = tiles[0][0].stop
        by_distance, scores = (query.new_empty(batch * heads * height * total) for _ in range(2))
        mask = torch.full((height, height), -math.inf, dtype=query.dtype).triu_(1)
        for rows, reach in tiles:
            shape = (batch, heads, rows.stop - rows.start, reach)
            shifted = RelativeAttention.shifted(by_distance, shape)
            own = distance_query[:, :, rows].flatten(1, 2)  # (H, BT, E)
            near = RelativeAttention.near(distance_key, reach)
            RelativeAttention.multiply(own, near, by_distance[: math.prod(shape)].view(heads, -1, reach))
            tile_scores = scores[: math.prod(shape)].view(-1, *shape[2:])
            tile_scores.view(shape).copy_(shifted)
            tile_scores.baddbmm_(content_query[:, rows], k[:, :reach].transpose(1, 2))
            tile_scores[:, :, reach - shape[2] :].add_(mask[: shape[2], : shape[2]])
            weights.append(torch.softmax(tile_scores, -1))
            out[:, rows] = torch.bmm(weights[-1], v[:, :reach]).view(batch, heads, -1, width).transpose(1, 2)
            if in_values:
                of_distances = RelativeAttention.unshift(by_distance[: math.prod(shape)], weights[-1].view(shape), near)
                out[:, rows] += torch.bmm(of_distances, near).view(heads, batch, -1, width).permute(1, 2, 0, 3)
            if measure:
                usage[:, :reach] += weights[-1].view(shape).sum((1, 2), dtype=exact) / (heads * length)
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
    def multiply(own, near, out):
        """Fill out (H, BT, K) with own (H, BT, E) times the distances' rows near (H, R', E)."""
        if beyond := out.shape[2] - near.shape[1]:
            out[..., beyond:] = torch.bmm(own, near.transpose(1, 2))
            out[..., :beyond] = out[..., beyond : beyond + 1]
        else:
            torch.bmm(own, near.transpose(1, 2), out=out)

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
        dby_distance, dweights, dscores = (k.new_empty(max(w.numel() for w in weights)) for _ in range(3))
        for (rows, reach), tile_weights in zip(RelativeAttention.tiles(length, total), weights, strict=True):
            shape = (batch, heads, *tile_weights.shape[1:])
            size = tile_weights.numel()
            tile_dweights, tile_dscores = (buffer[:size].view(tile_weights.shape) for buffer in (dweights, dscores))
            torch.bmm(dout[:, rows], v[:, :reach].transpose(1, 2), out=tile_dweights)
            near = RelativeAttention.near(distance_key, reach)
            dnear = ddistance_key[:, -near.shape[1] :]
            if ctx.in_values:
                own = dout.view(batch, heads, length, width)[:, :, rows].transpose(0, 1).flatten(1, 2)  # (H, BT, E)
                RelativeAttention.multiply(own, near, dby_distance[:size].view(heads, -1, reach))
                tile_dweights.view(shape).add_(RelativeAttention.shifted(dby_distance, shape))
                of_distances = RelativeAttention.unshift(dby_distance[:size], tile_weights.view(shape), near)
                dnear += torch.bmm(of_distances.transpose(1, 2), own)
            torch._softmax_backward_data(tile_dweights, tile_weights, -1, tile_dweights.dtype, grad_input=tile_dscores)
            dcontent[:, rows] = torch.bmm(tile_dscores, k[:, :reach])
            dk[:, :reach] += torch.bmm(tile_dscores.transpose(1, 2), content_query[:, rows])
            dv[:, :reach] += torch.bmm(tile_weights.transpose(1, 2), dout[:, rows])
            by_distance = RelativeAttention.unshift(dby_distance[:size], tile_dscores.view(shape), near)  # (H, BT, R')
            ddistance[:, :, rows] = torch.bmm(by_distance, near).view(heads, batch, -1, width)
            own = distance_query[:, :, rows].flatten(1, 2)
            dnear += torch.bmm(by_distance.transpose(1, 2), own)
        dcontent, ddistance = dcontent.view(ctx.shape), ddistance.transpose(0, 1)
        dbiases = (dcontent.sum((0, 2)).mul_(scale), ddistance.sum((0, 2)).mul_(scale))
        dquery = dcontent.add_(ddistance).mul_(scale)
        shape = (batch, heads, total, width)
        dk, dv, ddistance_key = (x.to(k.dtype) for x in (dk, dv, ddistance_key))
        return dquery, dk.view(shape), dv.view(shape), ddistance_key, *dbiases, None, None

    @staticmethod
    def unshift(by_distance, dscores, near):
        """The backward pass of the shift and of multiply: fills the flat by_distance from dscores (B, H, T, K).

        Returns (H, BT, R'), of the distances' rows near (H, R', E). Rows K - 1 apart would overlap if K long; in the last key's
        column only the last query's entry is not masked.
        """
        batch, heads, height, reach = dscores.shape
        rows = by_distance.view(heads, batch, height * reach)
        rows[:, :, : height - 1] = 0  # distances at which the first query has no key
        if reach > 1:
            RelativeAttention.shifted(by_distance, dscores.shape, reach - 1).copy_(dscores[..., :-1])
        rows[:, :, -1] = dscores[:, :, -1, -1].transpose(0, 1)
        by_distance, beyond = by_distance.view(heads, batch * height, reach), reach - near.shape[1]
        if beyond:
            by_distance[..., beyond] += by_distance[..., :beyond].sum(-1)
        return by_distance[..., beyond:]


def relative_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    distance_key: torch.Tensor,
    content_bias: torch.Tensor,
    distance_bias: torch.Tensor,
    dropout: float = 0.0,
    measure: bool = False,
    in_values: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The same as relative_attention_plain, by the fastest path for these arguments. SDPA returns no weights for in_values."""
    if takes_sdpa(query, key) and not measure and not in_values:
        return relative_attention_sdpa(query, key, value, distance_key, content_bias, distance_bias, dropout), None
    if on_plain_cpu(query) and dropout == 0:
        return RelativeAttention.apply(query, key, value, distance_key, content_bias, distance_bias, measure, in_values)
    return relative_attention_plain(query, key, value, distance_key, content_bias, distance_bias, dropout, measure, in_values)
