"""Attention with an offset by distance as one kernel on a GPU, in Triton.

    distance_attention   equals distance_attention_plain

It replaces SDPA with tiles (sliding_window.py) and SDPA with an offset that is shifted, masked and
copied (relative_shift.py). No key is copied, and scores that no query sees are not computed. The
gradient of the offset is written once for each query, where the distance is, and not added up.

A key that query i sees has a column c = j - i + shift, 0 <= c < C. Columns go from far to near, as
keys do. B lanes, H heads, N queries, K keys, E width of a head, C columns.

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


def distance_attention_plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offset: Tensor,
    shift: int,
    scale: float,
    kept: Tensor | None = None,
) -> Tensor:
    """softmax(q.k_j scale + offset_c) v_j over the keys that a query sees, (B, H, N, E).

    query: (B, H, N, E)
    key, value: (B, H, K, E)
    offset: (H, C), or (B, H, N, C) if each query has its own
    shift: key j has the column c = j - i + shift
    kept: what dropout multiplies the weights by, (B, H, N, K)
    """
    column = columns(query.shape[2], key.shape[2], shift, query.device)  # (N, K)
    last = offset.shape[-1] - 1
    seen = (column >= 0) & (column <= last)
    column = column.clamp(0, last)
    if offset.dim() == 2:
        by_key = offset[:, column]  # (H, N, K)
    else:
        by_key = offset.gather(-1, column.expand(*offset.shape[:2], -1, -1))
    scores = query @ key.mT * scale + by_key
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
    if kept is not None:
        weights = weights * kept
    return weights @ value


def columns(queries: int, keys: int, shift: int, device: torch.device) -> Tensor:
    """The column of each query and key, (N, K)."""
    query = torch.arange(queries, device=device)
    key = torch.arange(keys, device=device)
    return key - query[:, None] + shift


# Kernels. A program has one lane and head, and a block of queries or of keys


@triton.jit
def beginning(tensor, lane_head, heads, lane_stride, head_stride):
    """The address of the first row of one lane and head."""
    lane = (lane_head // heads).to(tl.int64)
    head = (lane_head % heads).to(tl.int64)
    return tensor + lane * lane_stride + head * head_stride


@triton.jit
def pointers(tensor, lane_head, heads, rows, lane_stride, head_stride, row_stride, E: tl.constexpr):
    """Addresses (rows, E) of rows of one lane and head."""
    first = beginning(tensor, lane_head, heads, lane_stride, head_stride)
    return first + rows[:, None].to(tl.int64) * row_stride + tl.arange(0, E)[None, :]


@triton.jit
def load_rows(tensor, lane_head, heads, rows, count, lane, head, row, E: tl.constexpr):
    """Rows (rows, E) of one lane and head, zeros beyond its `count` rows."""
    place = pointers(tensor, lane_head, heads, rows, lane, head, row, E)
    return tl.load(place, mask=(rows < count)[:, None], other=0.0)


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
    query, key, value, offset, seed, out, log_sum,
    query_lane, query_head, query_row,
    key_lane, key_head, key_row,
    value_lane, value_head, value_row,
    offset_lane, offset_head, offset_row,
    out_lane, out_head, out_row,
    heads, N, K, C, shift, scale, rate,
    E: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, DROPS: tl.constexpr,
):  # fmt: skip
    """Fill out (B, H, N, E) and log_sum (BH, N), the base-2 logarithm of each softmax's divisor."""
    first = tl.program_id(0) * QUERIES
    lane_head = tl.program_id(1)
    i = first + tl.arange(0, QUERIES)
    q = load_rows(query, lane_head, heads, i, N, query_lane, query_head, query_row, E)
    offsets = beginning(offset, lane_head, heads, offset_lane, offset_head)
    offsets += i[:, None].to(tl.int64) * offset_row
    drawn = keys_of_dropout(seed, lane_head, DROPS)

    highest = tl.full([QUERIES], FAR_BELOW, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    attended = tl.zeros([QUERIES, E], tl.float32)
    begin = tl.maximum(first - shift, 0) // KEYS * KEYS
    end = tl.minimum(first + QUERIES - 1 - shift + C, K)
    for start in range(begin, end, KEYS):
        j = start + tl.arange(0, KEYS)
        k = load_rows(key, lane_head, heads, j, K, key_lane, key_head, key_row, E)  # (KEYS, E)
        v = load_rows(value, lane_head, heads, j, K, value_lane, value_head, value_row, E)

        column = j[None, :] - i[:, None] + shift
        seen = (column >= 0) & (column < C) & (j < K)[None, :] & (i < N)[:, None]
        added = tl.load(offsets + column, mask=seen, other=-float("inf")).to(tl.float32)
        scores = (tl.dot(q, tl.trans(k)) * scale + added) * LOG2_E

        new_highest = tl.maximum(highest, tl.max(scores, 1))
        smaller = tl.exp2(highest - new_highest)
        weights = tl.exp2(scores - new_highest[:, None])
        total = total * smaller + tl.sum(weights, 1)
        highest = new_highest
        if DROPS:
            weights *= kept_by_dropout(drawn, i[:, None], column, C, rate)
        attended = tl.dot(weights.to(v.dtype), v, attended * smaller[:, None])

    total = tl.where(total == 0, 1.0, total)  # of rows after the last query
    o_row = pointers(out, lane_head, heads, i, out_lane, out_head, out_row, E)
    attended = attended / total[:, None]
    tl.store(o_row, attended.to(out.dtype.element_ty), mask=(i < N)[:, None])
    tl.store(log_sum + lane_head * N + i, highest + tl.log2(total), mask=i < N)


@triton.jit
def query_kernel(
    query, key, value, offset, seed, out, dout, log_sum, dquery, doffset, delta,
    query_lane, query_head, query_row,
    key_lane, key_head, key_row,
    value_lane, value_head, value_row,
    offset_lane, offset_head, offset_row,
    out_lane, out_head, out_row,
    dout_lane, dout_head, dout_row,
    dquery_lane, dquery_head, dquery_row,
    doffset_lane, doffset_head, doffset_row,
    heads, N, K, C, shift, scale, rate,
    E: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, DROPS: tl.constexpr,
):  # fmt: skip
    """Fill dquery, doffset (B, H, N, C) and delta (BH, N), the sum of out dout."""
    first = tl.program_id(0) * QUERIES
    lane_head = tl.program_id(1)
    i = first + tl.arange(0, QUERIES)
    q = load_rows(query, lane_head, heads, i, N, query_lane, query_head, query_row, E)
    do = load_rows(dout, lane_head, heads, i, N, dout_lane, dout_head, dout_row, E)
    o = load_rows(out, lane_head, heads, i, N, out_lane, out_head, out_row, E)
    along = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(delta + lane_head * N + i, along, mask=i < N)
    divisor = tl.load(log_sum + lane_head * N + i, mask=i < N, other=0.0)

    offsets = beginning(offset, lane_head, heads, offset_lane, offset_head)
    offsets += i[:, None].to(tl.int64) * offset_row
    doffsets = beginning(doffset, lane_head, heads, doffset_lane, doffset_head)
    doffsets += i[:, None].to(tl.int64) * doffset_row
    drawn = keys_of_dropout(seed, lane_head, DROPS)

    dq = tl.zeros([QUERIES, E], tl.float32)
    begin = tl.maximum(first - shift, 0) // KEYS * KEYS
    end = tl.minimum(first + QUERIES - 1 - shift + C, K)
    for start in range(begin, end, KEYS):
        j = start + tl.arange(0, KEYS)
        k = load_rows(key, lane_head, heads, j, K, key_lane, key_head, key_row, E)  # (KEYS, E)
        v = load_rows(value, lane_head, heads, j, K, value_lane, value_head, value_row, E)

        column = j[None, :] - i[:, None] + shift
        seen = (column >= 0) & (column < C) & (j < K)[None, :] & (i < N)[:, None]
        added = tl.load(offsets + column, mask=seen, other=-float("inf")).to(tl.float32)
        scores = (tl.dot(q, tl.trans(k)) * scale + added) * LOG2_E
        weights = tl.exp2(scores - divisor[:, None])
        dweights = tl.dot(do, tl.trans(v))
        if DROPS:
            dweights *= kept_by_dropout(drawn, i[:, None], column, C, rate)
        dscores = weights * (dweights - along[:, None])
        tl.store(doffsets + column, dscores.to(doffset.dtype.element_ty), mask=seen)
        dq = tl.dot(dscores.to(k.dtype), k, dq)

    dq_row = pointers(dquery, lane_head, heads, i, dquery_lane, dquery_head, dquery_row, E)
    tl.store(dq_row, (dq * scale).to(dquery.dtype.element_ty), mask=(i < N)[:, None])


@triton.jit
def key_kernel(
    query, key, value, offset, seed, dout, log_sum, delta, dkey, dvalue,
    query_lane, query_head, query_row,
    key_lane, key_head, key_row,
    value_lane, value_head, value_row,
    offset_lane, offset_head, offset_row,
    dout_lane, dout_head, dout_row,
    dkey_lane, dkey_head, dkey_row,
    dvalue_lane, dvalue_head, dvalue_row,
    heads, N, K, C, shift, scale, rate,
    E: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, DROPS: tl.constexpr,
):  # fmt: skip
    """Fill dkey and dvalue. Scores are made transposed, (KEYS, QUERIES)."""
    first = tl.program_id(0) * KEYS
    lane_head = tl.program_id(1)
    j = first + tl.arange(0, KEYS)
    inside = (j < K)[:, None]
    k = load_rows(key, lane_head, heads, j, K, key_lane, key_head, key_row, E)  # (KEYS, E)
    v = load_rows(value, lane_head, heads, j, K, value_lane, value_head, value_row, E)
    offsets = beginning(offset, lane_head, heads, offset_lane, offset_head)
    drawn = keys_of_dropout(seed, lane_head, DROPS)

    dk = tl.zeros([KEYS, E], tl.float32)
    dv = tl.zeros([KEYS, E], tl.float32)
    begin = tl.maximum(first + shift - C + 1, 0) // QUERIES * QUERIES
    end = tl.minimum(first + KEYS + shift, N)
    for start in range(begin, end, QUERIES):
        i = start + tl.arange(0, QUERIES)
        q = load_rows(query, lane_head, heads, i, N, query_lane, query_head, query_row, E)
        do = load_rows(dout, lane_head, heads, i, N, dout_lane, dout_head, dout_row, E)
        divisor = tl.load(log_sum + lane_head * N + i, mask=i < N, other=0.0)
        along = tl.load(delta + lane_head * N + i, mask=i < N, other=0.0)

        column = j[:, None] - i[None, :] + shift
        seen = (column >= 0) & (column < C) & inside & (i < N)[None, :]
        place = offsets + i[None, :].to(tl.int64) * offset_row
        added = tl.load(place + column, mask=seen, other=-float("inf")).to(tl.float32)
        scores = (tl.dot(k, tl.trans(q)) * scale + added) * LOG2_E
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

    dk_row = pointers(dkey, lane_head, heads, j, dkey_lane, dkey_head, dkey_row, E)
    tl.store(dk_row, (dk * scale).to(dkey.dtype.element_ty), mask=inside)
    dv_row = pointers(dvalue, lane_head, heads, j, dvalue_lane, dvalue_head, dvalue_row, E)
    tl.store(dv_row, dv.to(dvalue.dtype.element_ty), mask=inside)


# What launches them

# (queries, keys, warps, stages) of a program of each kernel, by the width of a head; the fastest of
# those tried on an H100
FORWARD = {64: (64, 64, 4, 3), 128: (128, 64, 8, 3)}
BACKWARD_OF_QUERIES = {64: (64, 64, 4, 3), 128: (64, 32, 4, 3)}
BACKWARD_OF_KEYS = {64: (64, 64, 4, 3), 128: (32, 64, 4, 3)}
SMALL = (32, 32, 4, 2)  # of any other width


def distance_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offset: Tensor,
    shift: int,
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """The same as distance_attention_plain; `dropout` is the rate at which weights are dropped."""
    seed = torch.randint(2**31, (1,), device=query.device) if dropout else query.new_empty(0)
    out, _ = attend(query, key, value, offset, seed, shift, scale, dropout)
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
) -> tuple[Tensor, Tensor]:
    """Attended (B, H, N, E), and the logarithm of each softmax's divisor (BH, N)."""
    batch, heads, length, width = query.shape
    out = heads_last(query)
    log_sum = query.new_empty(batch * heads, length, dtype=torch.float32)
    queries, keys, warps, stages = FORWARD.get(width, SMALL)
    forward_kernel[(triton.cdiv(length, queries), batch * heads)](
        *(query, key, value, offset, seed, out, log_sum),
        *strides(query, key, value, by_query(offset), out),
        *(heads, length, key.shape[2], offset.shape[-1], shift, scale, dropout),
        *(width, queries, keys, dropout > 0),
        num_warps=warps,
        num_stages=stages,
    )
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key, value and offset."""
    batch, heads, length, width = query.shape
    dquery = torch.empty_like(query)
    dkey = torch.empty_like(key)
    dvalue = torch.empty_like(value)
    if offset.dim() == 2:
        doffset = query.new_empty(batch, heads, length, offset.shape[-1])
    else:  # the first keys' distances do not occur for all queries
        doffset = torch.zeros_like(offset)
    delta = torch.empty_like(log_sum)
    sizes = (heads, length, key.shape[2], offset.shape[-1], shift, scale, dropout)

    queries, keys, warps, stages = BACKWARD_OF_QUERIES.get(width, SMALL)
    query_kernel[(triton.cdiv(length, queries), batch * heads)](
        *(query, key, value, offset, seed, out, dout, log_sum, dquery, doffset, delta),
        *strides(query, key, value, by_query(offset), out, dout, dquery, doffset),
        *sizes,
        *(width, queries, keys, dropout > 0),
        num_warps=warps,
        num_stages=stages,
    )
    queries, keys, warps, stages = BACKWARD_OF_KEYS.get(width, SMALL)
    key_kernel[(triton.cdiv(key.shape[2], keys), batch * heads)](
        *(query, key, value, offset, seed, dout, log_sum, delta, dkey, dvalue),
        *strides(query, key, value, by_query(offset), dout, dkey, dvalue),
        *sizes,
        *(width, queries, keys, dropout > 0),
        num_warps=warps,
        num_stages=stages,
    )
    if offset.dim() == 2:
        doffset = doffset.sum((0, 2), dtype=torch.float32).to(offset.dtype)
    return dquery, dkey, dvalue, doffset


def by_query(offset: Tensor) -> Tensor:
    """The offset (H, C) as (1, H, 1, C) that all lanes and queries share; or as it is."""
    if offset.dim() == 4:
        return offset
    return offset.as_strided((1, len(offset), 1, offset.shape[1]), (0, offset.stride(0), 0, 1))


def strides(*tensors: Tensor) -> list[int]:
    """The strides of each tensor's lanes, heads and rows. Columns must be next to each other."""
    found = []
    for tensor in tensors:
        assert tensor.stride(-1) == 1, "the last axis is not dense"
        found.extend(tensor.stride()[:3])
    return found


@attend.register_fake
def _(query, key, value, offset, seed, shift, scale, dropout):
    return heads_last(query), query.new_empty(query.shape[:2].numel(), query.shape[2]).float()


@attend_backward.register_fake
def _(query, key, value, offset, seed, out, dout, log_sum, shift, scale, dropout):
    return tuple(torch.empty_like(each) for each in (query, key, value, offset))


def save(ctx, inputs, output) -> None:
    """Keep what the backward pass needs."""
    *tensors, shift, scale, dropout = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.given = (shift, scale, dropout)


def backward(ctx, dout: Tensor, _):
    query, key, value, offset, seed, out, log_sum = ctx.saved_tensors
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()
    tensors = (query, key, value, offset, seed, out, dout, log_sum)
    return *attend_backward(*tensors, *ctx.given), None, None, None, None


attend.register_autograd(backward, setup_context=save)
