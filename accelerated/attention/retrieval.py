"""The Memorizing Transformer's lookup: attention of each query to its K nearest keys in a memory.

The search is exact, and takes most of the time. Attention to all of the memory under a mask is as
fast in a memory of a few hundred rows, and takes 1.8 to 2.8 times the time in 1,000 to 32,768.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class Memory(NamedTuple):
    """What queries are looked up in; it gets no gradient."""

    keys: Tensor  # (B, H, M, E)
    values: Tensor  # (B, H, M, E)
    offset: Tensor  # (B, H, 1, M), added in the search: -inf for empty rows, zero for all others


def searchable(keys: Tensor, values: Tensor) -> Memory:
    """The Memory of keys and values (B, H, M, E).

    Rows whose keys are zero are empty: they are found last.
    """
    keys = keys.detach()
    values = values.detach()
    empty = torch.linalg.vector_norm(keys, dim=-1) == 0  # (B, H, M)
    offset = torch.zeros_like(keys[..., 0])
    offset.masked_fill_(empty, -math.inf)
    return Memory(keys, values, offset[:, :, None])


def nearest_keys(query: Tensor, memory: Memory, retrieved: int) -> Tensor:
    """The K = retrieved keys of the memory that are most similar to each query, in any order.

    Returns indices (B, H, N, K) for query (B, H, N, E).
    """
    with torch.no_grad():
        queries = query.flatten(0, 1)  # (BH, N, E)
        keys = memory.keys.mT.flatten(0, 1)  # (BH, E, M)
        on_a_gpu = query.device.type == "cuda"
        if on_a_gpu and torch.compiler.is_compiling():
            similarity = torch.bmm(queries, keys).unflatten(0, query.shape[:2])
            return largest_by_columns(similarity, memory.offset, retrieved)
        offset = memory.offset.flatten(0, 1)  # (BH, 1, M)
        similarity = torch.baddbmm(offset, queries, keys)  # (BH, N, M), in one pass
        similarity = similarity.unflatten(0, query.shape[:2])
        if on_a_gpu:
            return largest_by_columns(similarity, None, retrieved)
        return similarity.topk(retrieved, dim=-1, sorted=False).indices


def largest_by_columns(x: Tensor, offset: Tensor | None, count: int) -> Tensor:
    """Where the `count` largest of x + offset stand in rows of M, in any order: (..., N, count).

    x (..., N, M), offset (..., 1, M) or None for zero. On a GPU torch's search in a long row takes
    most of a lookup. The row is laid out as a matrix, and only the `count` columns with the largest
    maxima are searched. Whatever stands in another column has these maxima above it. A compiled
    region adds the offset where it reads x, so x + offset takes no memory. On a CPU this is slower.
    """
    length = x.shape[-1]
    rows = 1
    while rows * rows * count < length and length % (2 * rows) == 0:
        rows *= 2
    if length // rows < count:
        total = x if offset is None else x + offset
        return total.topk(count, dim=-1, sorted=False).indices
    matrix = x.unflatten(-1, (rows, -1))  # (..., N, rows, M / rows)
    total = matrix
    if offset is not None:
        offset = offset.unflatten(-1, (rows, -1)).expand_as(matrix)
        total = matrix + offset
    column = total.amax(-2).topk(count, dim=-1, sorted=False).indices  # (..., N, count)
    every_row = column[..., None, :].expand(*matrix.shape[:-1], -1)
    candidates = matrix.gather(-1, every_row)
    if offset is not None:
        candidates = candidates + offset.gather(-1, every_row)
    place = candidates.flatten(-2).topk(count, dim=-1, sorted=False).indices
    row = place // count
    return row * matrix.shape[-1] + column.gather(-1, place % count)


def retrieval_attention(query: Tensor, memory: Memory, scale: Tensor, retrieved: int) -> Tensor:
    """softmax((q.k) scale) v, (B, H, N, E), over each query's K = retrieved nearest keys.

    query (B, H, N, E), scale (H,).
    """
    batch, heads, length, _ = memory.keys.shape
    head = torch.arange(batch * heads, device=query.device)
    first = head.view(batch, heads, 1, 1) * length  # each head's first of the BHM rows
    place = nearest_keys(query, memory, retrieved) + first  # (B, H, N, K)
    key = functional.embedding(place, memory.keys.flatten(0, 2))  # (B, H, N, K, E)
    value = functional.embedding(place, memory.values.flatten(0, 2))

    query = query * scale[:, None, None]
    scores = query[..., None, :] @ key.mT  # (B, H, N, 1, K)
    return (scores.softmax(-1) @ value).squeeze(-2)
