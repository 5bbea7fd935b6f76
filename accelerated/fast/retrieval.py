"""The search of the Memorizing Transformer's lookup on a GPU."""

import torch
from torch import Tensor

from accelerated.attention.retrieval import Memory, similarities


def nearest_keys_on_a_gpu(query: Tensor, memory: Memory, retrieved: int) -> Tensor:
    """The same as retrieval.nearest_keys; compiled it adds the offset on its way."""
    with torch.no_grad():
        if not torch.compiler.is_compiling():
            return largest_by_columns(similarities(query, memory), None, retrieved)
        queries = query.flatten(0, 1)  # (BH, N, E)
        keys = memory.keys.mT.flatten(0, 1)  # (BH, E, M)
        similarity = torch.bmm(queries, keys).unflatten(0, query.shape[:2])
        return largest_by_columns(similarity, memory.offset, retrieved)


def largest_by_columns(x: Tensor, offset: Tensor | None, count: int) -> Tensor:
    """Indices (..., N, count) of the `count` largest entries of each row of x + offset, unordered.

    x (..., N, M), offset (..., 1, M) or None for zero. On a GPU, torch.topk of a long row takes
    most of a lookup. So a row is viewed as a matrix, and only the `count` columns with the largest
    maxima are searched: no entry of another column exceeds any of these maxima. Under torch.compile
    the offset is added where x is read, and takes no memory. On a CPU this is slower.
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
