"""Attention with an offset by distance as one kernel on a GPU, in Triton.

It replaces SDPA with tiles (sliding_window.py) and SDPA with an offset that is shifted, masked and
copied (relative_shift.py). No key is copied, and scores that no query sees are not computed. The
gradient of the offset is written once for each query, where the distance is, and not added up.

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

from accelerated.attention.on_a_cpu import heads_last

LOG2_E = tl.constexpr(1 / math.log(2))
FAR_BELOW = tl.constexpr(-1e30)  # where a maximum begins: finite, so that no difference is NaN

# Kernels. A program has one lane and head, and a block of queries or of keys. A tensor with rows is
# given as its address and the strides of its lanes, heads and rows (addressed)


@triton.jit
def addresses(tensor, lane_head, heads, rows):
    """Where rows of one lane and head begin, in the shape of `rows`."""
    lane = (lane_head // heads).to(tl.int64)
    head = (lane_head % heads).to(tl.int64)
    first = tensor[0] + lane * tensor[1] + head * tensor[2]
    return first + rows.to(tl.int64) * tensor[3]


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
    offsets, i, first, N, shift, split, skip, SPLITS: tl.constexpr, KEYS: tl.constexpr
):
    """Write zeros to the columns of queries i (rows, 1), from `first` on, that no key has.

    They stand before key 0's and, if the first keys have columns of their own, before key split's.
    """
    before = shift - i
    store_zeros(offsets, before, shift - first, i < N, KEYS)
    if SPLITS:
        store_zeros(offsets + split + before, skip, skip, i < N, KEYS)


@triton.jit
def scores_of(
    first, second, offsets, i, j, N, K, C, shift, split, skip, scale, SPLITS: tl.constexpr
):
    """Scores in base 2 of the rows of queries and keys, their columns, and which are seen.

    The first rows are those of axis 0: queries, if i is (rows, 1) and j (1, rows), or keys.
    """
    column = j - i + shift
    if SPLITS:
        column += tl.where(j >= split, skip, 0)
    seen = (column >= 0) & (column < C) & (j < K) & (i < N)
    added = tl.load(offsets + column, mask=seen, other=-float("inf")).to(tl.float32)
    scores = (tl.dot(first, tl.trans(second)) * scale + added) * LOG2_E
    return scores, column, seen


@triton.jit
def keys_of_dropout(seed, lane_head, DROPS: tl.constexpr):
    """Two random numbers for one lane and head, from which kept_by_dropout draws."""
    first = 0
    second = 0
    if DROPS:
        drawn = tl.load(seed)
        first = tl.randint(drawn, 2 * lane_head)
        second = tl.randint(drawn, 2 * lane_head + 1)
    return first, second


@triton.jit
def kept_by_dropout(keys, i, column, C, rate):
    """What dropout multiplies the weight of query i in a column by: 0 or 1 / (1 - rate).

    A hash of query and column, so that both passes draw the same. torch's own generator, Philox,
    would take longer than the attention.
    """
    number = (i * C + column).to(tl.uint32) ^ keys[0]
    number = (number ^ (number >> 16)) * 0x7FEB352D + keys[1]
    number = (number ^ (number >> 15)) * 0x846CA68B
    number ^= number >> 16
    uniform = (number >> 8).to(tl.float32) * (1 / 2**24)
    return tl.where(uniform >= rate, 1 / (1 - rate), 0.0)


@triton.jit
def forward_kernel(
    query,  # (B, H, N, E)
    key,  # (B, H, K, E)
    value,  # (B, H, K, E)
    offset,  # (B, H, N, C)
    out,  # (B, H, N, E)
    seed,  # of dropout
    log_sum,  # (BH, N)
    heads, N, K, C, shift, split, skip, scale, rate,
    DROPS: tl.constexpr,
    SPLITS: tl.constexpr,
    E: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Fill out (B, H, N, E) and log_sum (BH, N), the base-2 logarithm of each softmax's divisor."""
    first = tl.program_id(0) * QUERIES
    lane_head = tl.program_id(1)
    i = first + tl.arange(0, QUERIES)
    q = load_rows(query, lane_head, heads, i, N, E)
    offsets = addresses(offset, lane_head, heads, i[:, None])
    drawn = keys_of_dropout(seed, lane_head, DROPS)

    highest = tl.full([QUERIES], FAR_BELOW, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    attended = tl.zeros([QUERIES, E], tl.float32)
    begin = tl.maximum(first - shift, 0) // KEYS * KEYS
    end = tl.minimum(first + QUERIES - 1 - shift + C - skip, K)
    for start in range(begin, end, KEYS):
        j = start + tl.arange(0, KEYS)
        k = load_rows(key, lane_head, heads, j, K, E)  # (KEYS, E)
        v = load_rows(value, lane_head, heads, j, K, E)
        scores, column, _ = scores_of(
            q, k, offsets, i[:, None], j[None, :], N, K, C, shift, split, skip, scale, SPLITS
        )
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        smaller = tl.exp2(highest - new_highest)
        weights = tl.exp2(scores - new_highest[:, None])
        total = total * smaller + tl.sum(weights, 1)
        highest = new_highest
        if DROPS:
            weights *= kept_by_dropout(drawn, i[:, None], column, C, rate)
        attended = tl.dot(weights.to(v.dtype), v, attended * smaller[:, None])

    total = tl.where(total == 0, 1.0, total)  # of rows after the last query
    store_rows(out, attended / total[:, None], lane_head, heads, i, N, E)
    tl.store(log_sum + lane_head * N + i, highest + tl.log2(total), mask=i < N)


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
    seed,  # of dropout
    log_sum,  # (BH, N)
    delta,  # (BH, N)
    heads, N, K, C, shift, split, skip, scale, rate,
    DROPS: tl.constexpr,
    SPLITS: tl.constexpr,
    E: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Fill dquery, doffset (B, H, N, C) and delta (BH, N), the sum of out dout."""
    first = tl.program_id(0) * QUERIES
    lane_head = tl.program_id(1)
    i = first + tl.arange(0, QUERIES)
    q = load_rows(query, lane_head, heads, i, N, E)
    do = load_rows(dout, lane_head, heads, i, N, E)
    o = load_rows(out, lane_head, heads, i, N, E)
    along = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(delta + lane_head * N + i, along, mask=i < N)
    divisor = tl.load(log_sum + lane_head * N + i, mask=i < N, other=0.0)
    offsets = addresses(offset, lane_head, heads, i[:, None])
    doffsets = addresses(doffset, lane_head, heads, i[:, None])
    drawn = keys_of_dropout(seed, lane_head, DROPS)

    store_unseen(doffsets, i[:, None], first, N, shift, split, skip, SPLITS, KEYS)
    dq = tl.zeros([QUERIES, E], tl.float32)
    begin = tl.maximum(first - shift, 0) // KEYS * KEYS
    end = tl.minimum(first + QUERIES - 1 - shift + C - skip, K)
    for start in range(begin, end, KEYS):
        j = start + tl.arange(0, KEYS)
        k = load_rows(key, lane_head, heads, j, K, E)  # (KEYS, E)
        v = load_rows(value, lane_head, heads, j, K, E)
        scores, column, seen = scores_of(
            q, k, offsets, i[:, None], j[None, :], N, K, C, shift, split, skip, scale, SPLITS
        )
        weights = tl.exp2(scores - divisor[:, None])
        dweights = tl.dot(do, tl.trans(v))
        if DROPS:
            dweights *= kept_by_dropout(drawn, i[:, None], column, C, rate)
        dscores = weights * (dweights - along[:, None])
        tl.store(doffsets + column, dscores.to(doffset[0].dtype.element_ty), mask=seen)
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
    seed,  # of dropout
    log_sum,  # (BH, N)
    delta,  # (BH, N)
    heads, N, K, C, shift, split, skip, scale, rate,
    DROPS: tl.constexpr,
    SPLITS: tl.constexpr,
    E: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Fill dkey and dvalue. Scores are made transposed, (KEYS, QUERIES)."""
    first = tl.program_id(0) * KEYS
    lane_head = tl.program_id(1)
    j = first + tl.arange(0, KEYS)
    k = load_rows(key, lane_head, heads, j, K, E)  # (KEYS, E)
    v = load_rows(value, lane_head, heads, j, K, E)
    drawn = keys_of_dropout(seed, lane_head, DROPS)

    dk = tl.zeros([KEYS, E], tl.float32)
    dv = tl.zeros([KEYS, E], tl.float32)
    begin = tl.maximum(first + shift - (C - skip) + 1, 0) // QUERIES * QUERIES
    end = tl.minimum(first + KEYS + shift, N)
    for start in range(begin, end, QUERIES):
        i = start + tl.arange(0, QUERIES)
        q = load_rows(query, lane_head, heads, i, N, E)
        do = load_rows(dout, lane_head, heads, i, N, E)
        divisor = tl.load(log_sum + lane_head * N + i, mask=i < N, other=0.0)
        along = tl.load(delta + lane_head * N + i, mask=i < N, other=0.0)

        offsets = addresses(offset, lane_head, heads, i[None, :])
        scores, column, _ = scores_of(
            k, q, offsets, i[None, :], j[:, None], N, K, C, shift, split, skip, scale, SPLITS
        )
        weights = tl.exp2(scores - divisor[None, :])
        dweights = tl.dot(v, tl.trans(do))
        dropped = weights
        if DROPS:
            kept = kept_by_dropout(drawn, i[None, :], column, C, rate)
            dropped = weights * kept
            dweights *= kept
        dv = tl.dot(dropped.to(do.dtype), do, dv)
        dscores = weights * (dweights - along[None, :])
        dk = tl.dot(dscores.to(q.dtype), q, dk)
    store_rows(dkey, dk * scale, lane_head, heads, j, K, E)
    store_rows(dvalue, dv, lane_head, heads, j, K, E)


# What launches them


def tiles(queries: int, keys: int, warps: int, stages: int) -> dict[str, int]:
    """How many queries and keys a program has at a time, and how it is compiled."""
    return {"QUERIES": queries, "KEYS": keys, "num_warps": warps, "num_stages": stages}


# By the width of a head; the fastest of those tried on an H100
FORWARD = {64: tiles(64, 64, 4, 3), 128: tiles(128, 64, 8, 3)}
BACKWARD_OF_QUERIES = {64: tiles(64, 64, 4, 3), 128: tiles(64, 32, 4, 3)}
BACKWARD_OF_KEYS = {64: tiles(64, 64, 4, 3), 128: tiles(32, 64, 4, 3)}
SMALL = tiles(32, 32, 4, 2)  # of any other width


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
    seed = torch.randint(2**31, (1,), device=query.device) if dropout else query.new_empty(0)
    out, _ = attend(query, key, value, offset, seed, shift, scale, dropout, split, skip)
    return out


@torch.library.custom_op("palimpsest::distance_attention", mutates_args=())
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offset: Tensor,
    seed: Tensor,
    shift: int,
    scale: float,
    dropout: float,
    split: int,
    skip: int,
) -> tuple[Tensor, Tensor]:
    """Attended (B, H, N, E), and the logarithm of each softmax's divisor (BH, N)."""
    batch, heads, length, width = query.shape
    out = heads_last(query)
    log_sum = query.new_empty(batch * heads, length, dtype=torch.float32)
    given = addressed(query, key, value, by_query(offset, query), out)
    sizes = (heads, length, key.shape[2], offset.shape[-1], shift, split, skip)
    chosen = FORWARD.get(width, SMALL)
    grid = (triton.cdiv(length, chosen["QUERIES"]), batch * heads)
    rates = (scale, dropout, dropout > 0, skip > 0)
    forward_kernel[grid](*given, seed, log_sum, *sizes, *rates, width, **chosen)
    return out, log_sum


@torch.library.custom_op("palimpsest::distance_attention_backward", mutates_args=())
def attend_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offset: Tensor,
    seed: Tensor,
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
    sizes = (heads, length, keys, offset.shape[-1], shift, split, skip)
    rates = (scale, dropout, dropout > 0, skip > 0, width)
    inputs = (query, key, value, by_query(offset, query))

    chosen = BACKWARD_OF_QUERIES.get(width, SMALL)
    given = addressed(*inputs, out, dout, dquery, doffset)
    grid = (triton.cdiv(length, chosen["QUERIES"]), batch * heads)
    query_kernel[grid](*given, seed, log_sum, delta, *sizes, *rates, **chosen)

    chosen = BACKWARD_OF_KEYS.get(width, SMALL)
    given = addressed(*inputs, dout, dkey, dvalue)
    grid = (triton.cdiv(keys, chosen["KEYS"]), batch * heads)
    key_kernel[grid](*given, seed, log_sum, delta, *sizes, *rates, **chosen)
    if offset.dim() == 2:
        doffset = doffset.sum((0, 2), dtype=torch.float32).to(offset.dtype)
    return dquery, dkey, dvalue, doffset


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
    tensors = inputs[:5]  # up to the seed
    ctx.save_for_backward(*tensors, *output)
    ctx.numbers = inputs[5:]


def backward(ctx, dout: Tensor, _):
    query, key, value, offset, seed, out, log_sum = ctx.saved_tensors
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()
    tensors = (query, key, value, offset, seed, out, dout, log_sum)
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
