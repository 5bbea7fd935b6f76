"""Attention with an offset by distance as one kernel on a GPU, in Triton.

It replaces SDPA with tiles (sliding_window.py) and SDPA with an offset that is shifted, masked and
copied (relative_shift.py). No key is copied, and scores that no query sees are not computed. The
gradient of the offset is written once for each query, where the distance is, and not added up. A
layer of Block-Recurrent's preset `paper` takes 1.6 ms on an H200, forward and backward: by SDPA it
took 8.4 ms.

A key that query i sees has a column c = j - i + shift, 0 <= c < C. Columns go from far to near, as
keys do. If the first keys have distances of their own, their columns stand before the others': from
key j = split on, c is larger by skip. `products` writes both where they stay. B lanes, H heads, N
queries, K keys, E width of a head, C columns.

Triton comes with torch's builds for CUDA. Its interpreter runs these kernels on a CPU, as the tests
do (TRITON_INTERPRET=1).
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(1 / math.log(2))
FAR_BELOW = tl.constexpr(-1e30)  # where a maximum begins: finite, so that no difference is NaN

# Kernels. A program has one lane and head, and a block of queries or of keys. A tensor with rows is
# given as its address and the strides of its lanes, heads and rows (addressed). What a score costs
# beside its products decides how long they take. So a tile whose queries all see all of its keys
# (is_whole) has no masks, and an address is a number of a query plus one of a key


@triton.jit
def addresses(tensor, lane_head, heads, rows):
    """Where rows of one lane and head begin, in the shape of `rows`."""
    lane = (lane_head // heads).to(tl.int64)
    head = (lane_head % heads).to(tl.int64)
    first = tensor[0] + lane * tensor[1] + head * tensor[2]
    return first + tl.cast(rows, tl.int64) * tensor[3]


@triton.jit
def load_rows(tensor, lane_head, heads, rows, count, E: tl.constexpr):
    """Rows (rows, E) of one lane and head, zeros beyond its `count` rows."""
    place = addresses(tensor, lane_head, heads, rows[:, None]) + tl.arange(0, E)[None, :]
    return tl.load(place, mask=(rows < count)[:, None], other=0.0)


@triton.jit
def store_rows(tensor, values, lane_head, heads, rows, count, E: tl.constexpr):
    """Write values (rows, E), in the tensor's type, to rows of one lane and head."""
    place = addresses(tensor, lane_head, heads, rows[:, None]) + tl.arange(0, E)[None, :]
    tl.store(place, values.to(tensor[0].dtype.element_ty), mask=(rows < count)[:, None])


@triton.jit
def store_zeros(offsets, counts, most, is_row, KEYS: tl.constexpr):
    """Write zeros to the first `counts` columns from `offsets` on; `most` is the largest count.

    Their distance has no key.
    """
    for start in range(0, most, KEYS):
        column = start + tl.arange(0, KEYS)[None, :]
        zeros = tl.zeros([is_row.shape[0], KEYS], offsets.dtype.element_ty)
        tl.store(offsets + column, zeros, mask=(column < counts) & is_row)


@triton.jit
def store_unseen(
    offset, lane_head, heads, i, first, N, shift, split, skip, SPLITS: tl.constexpr,
    KEYS: tl.constexpr
):  # fmt: skip
    """Write zeros to the columns of queries i, from `first` on, that no key has.

    They stand before key 0's and, if the first keys have columns of their own, before key split's.
    """
    i = i[:, None]
    offsets = addresses(offset, lane_head, heads, i)
    before = shift - i
    store_zeros(offsets, before, shift - first, i < N, KEYS)
    if SPLITS:
        store_zeros(offsets + split + before, skip, skip, i < N, KEYS)


@triton.jit
def is_seen(i, j, N, K, reach, shift):
    """Which keys j the queries i see: those with 0 <= j - i + shift < reach = C - skip."""
    distance = j - i + shift
    return (distance >= 0) & (distance < reach) & (i < N) & (j < K)


@triton.jit
def seen_by_block(first, K, reach, shift, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """The first key of the tiles that a block of queries sees, and the first key after them."""
    begin = tl.maximum(first - shift, 0) // KEYS * KEYS
    return begin, tl.minimum(first + QUERIES - 1 - shift + reach, K)


@triton.jit
def that_see_block(start, N, reach, shift, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """The first query of the tiles that see a block of keys, and the first query after them."""
    begin = tl.maximum(start + shift - reach + 1, 0) // QUERIES * QUERIES
    return begin, tl.minimum(start + KEYS + shift, N)


@triton.jit
def is_whole(
    first, start, N, K, reach, shift, split, SPLITS: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr
):  # fmt: skip
    """Whether a tile from query `first` and key `start` on is seen whole, and keys stay together.

    Its last query sees its first key, its first query its last key, and none of the first keys
    with columns of their own stands beside others.
    """
    last = first + QUERIES - 1
    whole = is_seen(last, start, N, K, reach, shift)
    whole &= is_seen(first, start + KEYS - 1, N, K, reach, shift)
    if SPLITS:
        whole &= (start >= split) | (start + KEYS <= split)
    return whole


@triton.jit
def skipped(j, split, skip, SPLITS: tl.constexpr):
    """How many columns are skipped before that of key j."""
    if SPLITS:
        return tl.where(j >= split, skip, 0)
    else:
        return 0


@triton.jit
def places_of_key_0(offset, lane_head, heads, first, row, shift, SHARED: tl.constexpr):
    """Where queries first + row have the offset of key 0, if it has one, in the shape of `row`.

    SHARED: all lanes and queries have the same offsets
    """
    start = addresses(offset, lane_head, heads, first) + (shift - first)
    if SHARED:
        return start - row
    else:
        return start + row * (offset[3] - 1)


@triton.jit
def load_offsets(
    places, whole, i, start, j, N, K, reach, shift, split, skip, SPLITS: tl.constexpr
):  # fmt: skip
    """Offsets of a tile in float32, minus infinity where a query does not see a key.

    places: of the queries i, as places_of_key_0 has them
    start: the first of the keys j
    """
    if whole:
        offset = tl.load(places + skipped(start, split, skip, SPLITS) + j)
    else:
        place = places + (skipped(j, split, skip, SPLITS) + j)
        seen = is_seen(i, j, N, K, reach, shift)
        offset = tl.load(place, mask=seen, other=-float("inf"))
    return offset.to(tl.float32)


@triton.jit
def store_offsets(
    places, values, whole, i, start, j, N, K, reach, shift, split, skip, SPLITS: tl.constexpr
):  # fmt: skip
    """Write values where load_offsets reads offsets."""
    values = values.to(places.dtype.element_ty)
    if whole:
        tl.store(places + skipped(start, split, skip, SPLITS) + j, values)
    else:
        place = places + (skipped(j, split, skip, SPLITS) + j)
        tl.store(place, values, mask=is_seen(i, j, N, K, reach, shift))


@triton.jit
def load_drawn(drawn, lane_head, i, N, DROPS: tl.constexpr):
    """The random number of each query i; none without dropout."""
    if DROPS:
        return tl.load(drawn + lane_head * N + i, mask=i < N, other=0).to(tl.uint32, bitcast=True)
    else:
        return 0


@triton.jit
def kept_by_dropout(number, j, lowest):
    """Whether dropout keeps the weight of key j for a query, given the query's random number.

    Hashes the number and j, by squaring, to an int32 that is uniform from -2^31 to 2^31 - 1, and
    keeps the weight if it is at least `lowest`. All passes recompute the same hash. Philox, torch's
    own generator, would take longer than the attention.
    """
    mixed = number + j.to(tl.uint32)
    mixed = mixed * mixed + number
    mixed = (mixed << 16) | (mixed >> 16)
    mixed = mixed * mixed + mixed
    return mixed.to(tl.int32, bitcast=True) >= lowest


@triton.jit
def forward_kernel(
    query,  # (B, H, N, E)
    key,  # (B, H, K, E)
    value,  # (B, H, K, E)
    offset,  # (B, H, N, C)
    out,  # (B, H, N, E)
    drawn,  # (BH, N)
    log_sum,  # (BH, N)
    heads, N, K, reach, shift, split, skip, scale, rate, lowest,
    DROPS: tl.constexpr,
    SPLITS: tl.constexpr,
    SHARED: tl.constexpr,
    E: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Fill out (B, H, N, E) and log_sum (BH, N), the base-2 logarithm of each softmax's divisor."""
    first = tl.program_id(0) * QUERIES
    lane_head = tl.program_id(1)
    row = tl.arange(0, QUERIES)
    i = first + row
    q = load_rows(query, lane_head, heads, i, N, E)
    places = places_of_key_0(offset, lane_head, heads, first, row[:, None], shift, SHARED)
    number = load_drawn(drawn, lane_head, i[:, None], N, DROPS)

    highest = tl.full([QUERIES], FAR_BELOW, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    attended = tl.zeros([QUERIES, E], tl.float32)
    begin, end = seen_by_block(first, K, reach, shift, QUERIES, KEYS)
    for start in range(begin, end, KEYS):
        j = start + tl.arange(0, KEYS)
        k = load_rows(key, lane_head, heads, j, K, E)  # (KEYS, E)
        v = load_rows(value, lane_head, heads, j, K, E)
        whole = is_whole(first, start, N, K, reach, shift, split, SPLITS, QUERIES, KEYS)
        tile = (whole, i[:, None], start, j[None, :], N, K, reach, shift, split, skip)
        added = load_offsets(places, *tile, SPLITS)
        scores = tl.dot(q, tl.trans(k)) * scale + added
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        smaller = tl.exp2((highest - new_highest) * LOG2_E)
        weights = tl.exp2(scores * LOG2_E - (new_highest * LOG2_E)[:, None])
        total = total * smaller + tl.sum(weights, 1)
        highest = new_highest
        if DROPS:
            weights = tl.where(kept_by_dropout(number, j[None, :], lowest), weights, 0.0)
        attended = tl.dot(weights.to(v.dtype), v, attended * smaller[:, None])

    total = tl.where(total == 0, 1.0, total)  # of rows after the last query
    attended /= (total * (1 - rate))[:, None]
    store_rows(out, attended, lane_head, heads, i, N, E)
    tl.store(log_sum + lane_head * N + i, highest * LOG2_E + tl.log2(total), mask=i < N)


@triton.jit
def store_delta(delta, out, do, lane_head, heads, i, N, E: tl.constexpr):
    """Write the sums of out dout of queries i to delta (BH, N), and return them."""
    o = load_rows(out, lane_head, heads, i, N, E)
    along = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(delta + lane_head * N + i, along, mask=i < N)
    return along


@triton.jit
def query_kernel(
    query,  # (B, H, N, E)
    key,  # (B, H, K, E)
    value,  # (B, H, K, E)
    offset,  # (B, H, N, C)
    out,  # (B, H, N, E)
    dout,  # (B, H, N, E)
    dquery,  # (B, H, N, E)
    doffset,  # (B, H, N, C)
    drawn,  # (BH, N)
    log_sum,  # (BH, N)
    delta,  # (BH, N)
    heads, N, K, reach, shift, split, skip, scale, rate, lowest,
    DROPS: tl.constexpr,
    SPLITS: tl.constexpr,
    SHARED: tl.constexpr,
    E: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Fill dquery, doffset (B, H, N, C) and delta (BH, N), the sum of out dout."""
    first = tl.program_id(0) * QUERIES
    lane_head = tl.program_id(1)
    row = tl.arange(0, QUERIES)
    i = first + row
    q = load_rows(query, lane_head, heads, i, N, E)
    do = load_rows(dout, lane_head, heads, i, N, E)
    along = store_delta(delta, out, do, lane_head, heads, i, N, E)
    divisor = tl.load(log_sum + lane_head * N + i, mask=i < N, other=0.0)
    places = places_of_key_0(offset, lane_head, heads, first, row[:, None], shift, SHARED)
    dplaces = places_of_key_0(doffset, lane_head, heads, first, row[:, None], shift, False)
    number = load_drawn(drawn, lane_head, i[:, None], N, DROPS)

    store_unseen(doffset, lane_head, heads, i, first, N, shift, split, skip, SPLITS, KEYS)
    dq = tl.zeros([QUERIES, E], tl.float32)
    begin, end = seen_by_block(first, K, reach, shift, QUERIES, KEYS)
    for start in range(begin, end, KEYS):
        j = start + tl.arange(0, KEYS)
        k = load_rows(key, lane_head, heads, j, K, E)  # (KEYS, E)
        v = load_rows(value, lane_head, heads, j, K, E)
        whole = is_whole(first, start, N, K, reach, shift, split, SPLITS, QUERIES, KEYS)
        tile = (whole, i[:, None], start, j[None, :], N, K, reach, shift, split, skip)
        added = load_offsets(places, *tile, SPLITS)
        scores = tl.dot(q, tl.trans(k)) * scale + added
        weights = tl.exp2(scores * LOG2_E - divisor[:, None])
        dweights = tl.dot(do, tl.trans(v))
        if DROPS:
            kept = kept_by_dropout(number, j[None, :], lowest)
            dweights = tl.where(kept, dweights * (1 / (1 - rate)), 0.0)
        dscores = weights * (dweights - along[:, None])
        store_offsets(dplaces, dscores, *tile, SPLITS)
        dq = tl.dot(dscores.to(k.dtype), k, dq)
    store_rows(dquery, dq * scale, lane_head, heads, i, N, E)


@triton.jit
def key_kernel(
    query,  # (B, H, N, E)
    key,  # (B, H, K, E)
    value,  # (B, H, K, E)
    offset,  # (B, H, N, C)
    dout,  # (B, H, N, E)
    dkey,  # (B, H, K, E)
    dvalue,  # (B, H, K, E)
    drawn,  # (BH, N)
    log_sum,  # (BH, N)
    delta,  # (BH, N)
    heads, N, K, reach, shift, split, skip, scale, rate, lowest,
    DROPS: tl.constexpr,
    SPLITS: tl.constexpr,
    SHARED: tl.constexpr,
    E: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Fill dkey and dvalue. Scores are made transposed, (KEYS, QUERIES)."""
    start = tl.program_id(0) * KEYS
    lane_head = tl.program_id(1)
    j = start + tl.arange(0, KEYS)
    k = load_rows(key, lane_head, heads, j, K, E)  # (KEYS, E)
    v = load_rows(value, lane_head, heads, j, K, E)
    dk = tl.zeros([KEYS, E], tl.float32)
    dv = tl.zeros([KEYS, E], tl.float32)
    begin, end = that_see_block(start, N, reach, shift, QUERIES, KEYS)
    for first in range(begin, end, QUERIES):
        row = tl.arange(0, QUERIES)
        i = first + row
        q = load_rows(query, lane_head, heads, i, N, E)
        do = load_rows(dout, lane_head, heads, i, N, E)
        divisor = tl.load(log_sum + lane_head * N + i, mask=i < N, other=0.0)
        along = tl.load(delta + lane_head * N + i, mask=i < N, other=0.0)
        places = places_of_key_0(offset, lane_head, heads, first, row[None, :], shift, SHARED)
        whole = is_whole(first, start, N, K, reach, shift, split, SPLITS, QUERIES, KEYS)
        tile = (whole, i[None, :], start, j[:, None], N, K, reach, shift, split, skip)
        added = load_offsets(places, *tile, SPLITS)
        scores = tl.dot(k, tl.trans(q)) * scale + added
        weights = tl.exp2(scores * LOG2_E - divisor[None, :])
        dweights = tl.dot(v, tl.trans(do))
        dropped = weights
        if DROPS:
            number = load_drawn(drawn, lane_head, i[None, :], N, DROPS)
            kept = kept_by_dropout(number, j[:, None], lowest)
            dropped = tl.where(kept, weights, 0.0)
            dweights = tl.where(kept, dweights * (1 / (1 - rate)), 0.0)
        dv = tl.dot(dropped.to(do.dtype), do, dv)
        dscores = weights * (dweights - along[None, :])
        dk = tl.dot(dscores.to(q.dtype), q, dk)
    store_rows(dkey, dk * scale, lane_head, heads, j, K, E)
    store_rows(dvalue, dv / (1 - rate), lane_head, heads, j, K, E)


# What launches them


def tiles(queries: int, keys: int) -> dict[str, int]:
    """How many queries and keys a program has at a time, and how it is compiled."""
    return {"QUERIES": queries, "KEYS": keys, "num_warps": 4, "num_stages": 2}


# By the width of a head; the fastest of those tried on an H200
FORWARD = {64: tiles(64, 64), 128: tiles(64, 64)}
BACKWARD_OF_QUERIES = {64: tiles(64, 64), 128: tiles(64, 32)}
BACKWARD_OF_KEYS = {64: tiles(64, 64), 128: tiles(32, 64)}
SMALL = tiles(32, 32)  # of any other width


def distance_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offset: Tensor,
    shift: int,
    scale: float,
    dropout: float = 0.0,
    split: int = 0,
    skip: int = 0,
) -> Tensor:
    """softmax(q.k_j scale + offset_c) v_j over the keys that a query sees, (B, H, N, E).

    query: (B, H, N, E)
    key, value: (B, H, K, E)
    offset: (H, C), or (B, H, N, C) if each query has its own
    shift: key j has the column c = j - i + shift
    split, skip: from key `split` on, c is larger by `skip`; every query sees all keys before it
    dropout: the rate at which weights are dropped
    """
    assert skip == 0 or query.shape[2] <= shift + 1, "a query does not see all of the first keys"
    drawn = drawn_for(query, dropout)
    out, _ = attend(query, key, value, offset, drawn, shift, scale, dropout, split, skip)
    return out


def drawn_for(query: Tensor, dropout: float) -> Tensor:
    """A random number for each query (B, H, N), from which the kernels' dropout draws."""
    shape = query.shape[:3] if dropout else (0,)
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device=query.device)


def lowest_kept(dropout: float) -> int:
    """The least of the numbers from -2^31 to 2^31 for which kept_by_dropout keeps a weight."""
    return round(dropout * 2**32) - 2**31


@torch.library.custom_op("palimpsest::distance_attention", mutates_args=())
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offset: Tensor,
    drawn: Tensor,
    shift: int,
    scale: float,
    dropout: float,
    split: int,
    skip: int,
) -> tuple[Tensor, Tensor]:
    """The output (B, H, N, E), and the base-2 log-sum-exp of each query's scores (BH, N)."""
    batch, heads, length, width = query.shape
    out = heads_last(query)
    log_sum = query.new_empty(batch * heads, length, dtype=torch.float32)
    given = addressed(query, key, value, by_query(offset, query), out)
    sizes = (heads, length, key.shape[2], offset.shape[-1] - skip, shift, split, skip)
    chosen = FORWARD.get(width, SMALL)
    grid = (triton.cdiv(length, chosen["QUERIES"]), batch * heads)
    rates = (scale, dropout, lowest_kept(dropout), dropout > 0, skip > 0, offset.dim() == 2)
    forward_kernel[grid](*given, drawn, log_sum, *sizes, *rates, width, **chosen)
    return out, log_sum


@torch.library.custom_op("palimpsest::distance_attention_backward", mutates_args=())
def attend_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offset: Tensor,
    drawn: Tensor,
    out: Tensor,
    dout: Tensor,
    log_sum: Tensor,
    shift: int,
    scale: float,
    dropout: float,
    split: int,
    skip: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key, value and offset."""
    batch, heads, length, width = query.shape
    keys = key.shape[2]
    dquery = torch.empty_like(query)
    dkey = torch.empty_like(key)
    dvalue = torch.empty_like(value)
    if offset.dim() == 2:
        doffset = query.new_empty(batch, heads, length, offset.shape[-1])
    else:
        doffset = torch.empty_like(offset)
    delta = torch.empty_like(log_sum)
    sizes = (heads, length, keys, offset.shape[-1] - skip, shift, split, skip)
    rates = (scale, dropout, lowest_kept(dropout), dropout > 0, skip > 0, offset.dim() == 2, width)
    inputs = (query, key, value, by_query(offset, query))

    chosen = BACKWARD_OF_QUERIES.get(width, SMALL)
    given = addressed(*inputs, out, dout, dquery, doffset)
    grid = (triton.cdiv(length, chosen["QUERIES"]), batch * heads)
    query_kernel[grid](*given, drawn, log_sum, delta, *sizes, *rates, **chosen)

    chosen = BACKWARD_OF_KEYS.get(width, SMALL)
    given = addressed(*inputs, dout, dkey, dvalue)
    grid = (triton.cdiv(keys, chosen["KEYS"]), batch * heads)
    key_kernel[grid](*given, drawn, log_sum, delta, *sizes, *rates, **chosen)
    if offset.dim() == 2:
        doffset = doffset.sum((0, 2), dtype=torch.float32).to(offset.dtype)
    return dquery, dkey, dvalue, doffset


def heads_last(query: Tensor) -> Tensor:
    """An empty (B, H, N, E), in memory (B, N, H, E): the output matrix reads it so."""
    batch, heads, length, width = query.shape
    return query.new_empty(batch, length, heads, width).transpose(1, 2)


def by_query(offset: Tensor, query: Tensor) -> Tensor:
    """The offset (B, H, N, C) of each query; all lanes and queries share one of (H, C)."""
    if offset.dim() == 4:
        return offset
    return offset[None, :, None].expand(len(query), -1, query.shape[2], -1)


def addressed(*tensors: Tensor) -> list[tuple]:
    """Each tensor with the strides of its lanes, heads and rows; its columns must be dense."""
    for tensor in tensors:
        assert tensor.stride(-1) == 1, "the last axis is not dense"
    return [(tensor, *tensor.stride()[:3]) for tensor in tensors]


@attend.register_fake
def _(query, key, value, offset, *_):
    return heads_last(query), query.new_empty(query.shape[:2].numel(), query.shape[2]).float()


@attend_backward.register_fake
def _(query, key, value, offset, *_):
    return tuple(torch.empty_like(each) for each in (query, key, value, offset))


def save(ctx, inputs, output) -> None:
    """Keep what the backward pass needs."""
    tensors = inputs[:5]  # up to drawn
    ctx.save_for_backward(*tensors, *output)
    ctx.numbers = inputs[5:]


def backward(ctx, dout: Tensor, _):
    query, key, value, offset, drawn, out, log_sum = ctx.saved_tensors
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()
    tensors = (query, key, value, offset, drawn, out, dout, log_sum)
    return *attend_backward(*tensors, *ctx.numbers), None, *[None for _ in ctx.numbers]


attend.register_autograd(backward, setup_context=save)


# Scores by distance beside each other


@torch.library.custom_op("palimpsest::products", mutates_args=())
def products(first: Tensor, of_first: Tensor, second: Tensor, of_second: Tensor) -> Tensor:
    """first @ of_first.mT and, right of it, second @ of_second.mT, (H, n, R + R').

    first, second: (H, n, E)
    of_first, of_second: (H, R, E) and (H, R', E)

    Each is written where it stays. torch.cat would copy both, and change their layout: then their
    gradients are copied, too.
    """
    split = of_first.shape[1]
    out = first.new_empty(*first.shape[:2], split + of_second.shape[1])
    torch.bmm(first, of_first.mT, out=out[..., :split])
    torch.bmm(second, of_second.mT, out=out[..., split:])
    return out


@products.register_fake
def _(first, of_first, second, of_second):
    return first.new_empty(*first.shape[:2], of_first.shape[1] + of_second.shape[1])


def save_given(ctx, inputs, output) -> None:
    """Keep what the backward pass of products needs."""
    ctx.save_for_backward(*inputs)


def products_backward(ctx, dout: Tensor):
    first, of_first, second, of_second = ctx.saved_tensors
    split = of_first.shape[1]
    left = dout[..., :split]
    right = dout[..., split:]
    return left @ of_first, left.mT @ first, right @ of_second, right.mT @ second


products.register_autograd(products_backward, setup_context=save_given)
