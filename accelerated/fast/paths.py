"""Chooses a faster path by the arguments; `heads.with_fast_path` calls these functions.

Each function computes the same as the decorated one of its name, which it is given as `plain` and
calls if nothing is faster for the arguments.
"""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from accelerated.attention.relative_shift import (
    AttentionInputs,
    distance_query_of,
    scores_by_distance,
)
from accelerated.attention.retrieval import Memory
from accelerated.attention.sliding_window import window_of
from accelerated.fast import decoders
from accelerated.fast.devices import (
    aligned,
    padding_rows,
    takes_distance_attention,
    takes_kernels,
)
from accelerated.fast.graphs import CapturedBackprop, takes_graphs
from accelerated.fast.loss import CHUNK_OF_KERNEL, ChunkedCrossEntropy
from accelerated.fast.retrieval import nearest_keys_on_a_gpu
from accelerated.protocol import Model
from accelerated.replay import rows_of_chunk

LEAST_ALIGNMENT = 8  # of a small product's columns, on a GPU

# Products


def logits_from(plain: Callable, hidden: Tensor, matrix: Tensor) -> Tensor:
    """On a GPU, pad the vocabulary to an aligned size."""
    return plain(hidden, aligned(matrix))[..., : len(matrix)]


# Attention


def sliding_attention(
    plain: Callable,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    by_distance: Tensor,
    dropout: float = 0.0,
) -> Tensor:
    """On a GPU, one kernel, with offsets (H, W) for only the distances that a query sees."""
    if takes_distance_attention(query):
        from accelerated.fast.attention_gpu import distance_attention  # Triton: on a GPU alone

        window = window_of(by_distance)
        offset = by_distance[..., window - 1 : 2 * window - 1]  # W .. 1
        return distance_attention(query, keys, values, offset, 0, 1.0, dropout)
    return plain(query, keys, values, by_distance, dropout)


def relative_attention(
    plain: Callable,
    heads: AttentionInputs,
    dropout: float = 0.0,
    measure: bool = False,
    in_values: bool = False,
    compressed: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """On a GPU, one kernel, which returns no weights and does the relative shift itself."""
    if measure or in_values or not takes_distance_attention(heads.query):
        return plain(heads, dropout, measure, in_values, compressed)
    from accelerated.fast.attention_gpu import distance_attention  # Triton: on a GPU alone

    query = heads.query
    of_distances = (heads.distance_key, heads.distance_bias)
    split = 0
    skip = 0
    if compressed is None:
        by_distance = scores_by_distance(query, *of_distances)
    else:
        by_distance = scores_beside_own(query, compressed, of_distances)
        skip = query.shape[2]
        split = compressed[0].shape[1] - skip  # C
    shift = query.shape[2] - 1  # the last query sees key 0 at column N - 1 - (N - 1) = 0
    content = (query + heads.content_bias[:, None], heads.key, heads.value)
    scale = query.shape[-1] ** -0.5
    out = distance_attention(*content, by_distance, shift, scale, dropout, split, skip)
    return out, None


def scores_beside_own(query: Tensor, *keys_and_biases: tuple[Tensor, Tensor]) -> Tensor:
    """scores_by_distance of both, (B, H, N, R' + R), written beside each other without a copy."""
    from accelerated.fast.attention_gpu import products  # Triton: on a GPU alone

    given = []
    for key, bias in keys_and_biases:
        by_head = distance_query_of(query, bias).transpose(0, 1).flatten(1, 2)  # (H, BN, E)
        given += [by_head, key]
    joined = products(*given)  # (H, BN, R' + R)
    return joined.unflatten(1, (len(query), -1)).transpose(0, 1)


def simplified_attention(
    plain: Callable,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Tensor,
    masked_keys: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """On a GPU, pad the keys with hidden ones, so that the 16-bit products are aligned."""
    missing = padding_rows(key, LEAST_ALIGNMENT)
    if missing:  # a decoder reads its task's token, too; or slots stand before the tokens
        if masked_keys is None:  # all N' are seen
            positioned = rows.shape[0] - query.shape[2] + 1  # N'
            masked_keys = key.new_zeros(1, positioned, dtype=torch.bool)
        masked_keys = functional.pad(masked_keys, (0, missing), value=True)
        more_rows = (0, 0, 0, missing)
        key = functional.pad(key, more_rows)
        value = functional.pad(value, more_rows)
        rows = functional.pad(rows, more_rows)
    return plain(query, key, value, rows, masked_keys, dropout)


def nearest_keys(plain: Callable, query: Tensor, memory: Memory, retrieved: int) -> Tensor:
    """A GPU searches by columns."""
    if query.device.type == "cuda":
        return nearest_keys_on_a_gpu(query, memory, retrieved)
    return plain(query, memory, retrieved)


# The loss, back-propagation and generation


def cross_entropy_sum(plain: Callable, hidden: Tensor, matrix: Tensor, targets: Tensor) -> Tensor:
    """The loss and its gradient without a second set of logits; on a GPU by a Triton kernel.

    A matrix that is not aligned takes the same path, which does not keep the aligned one.
    """
    words = len(matrix)
    rows = rows_of_chunk(words)
    trains = torch.is_grad_enabled()
    if trains and takes_kernels(hidden):
        return ChunkedCrossEntropy.apply(hidden, matrix, targets, max(1, CHUNK_OF_KERNEL // words))
    unaligned = trains and padding_rows(matrix) > 0
    if unaligned or len(hidden) > rows:
        return ChunkedCrossEntropy.apply(hidden, matrix, targets, rows)
    return plain(hidden, matrix, targets)


def backprop_of(plain: Callable, model: Model, training: Any) -> Callable:
    """On a GPU, replay captured CUDA graphs, and decode Memformer's segments in one batch."""
    method = plain(model, training)
    device = model.embedding.device
    asks_the_host = hasattr(model.config, "base")  # some decoders of the package do
    if takes_graphs(training, device) and not asks_the_host:
        method = CapturedBackprop(model, training.backprop)
    if device.type == "cpu" or not getattr(model.config, "encoder_layers", 0):
        return method
    join = decoders.joined
    return lambda model, segments, *given, **named: method(model, join(segments), *given, **named)


read_segment = decoders.read_segment
advance_segment = decoders.advance_segment


def stepper_of(plain: Callable, model: Model, capture: bool = True) -> Any:
    """The model's Steps in generation/, which cache keys and values; on a GPU by a CUDA graph."""
    name = type(model).__module__.rpartition(".")[2]
    file = f"accelerated.fast.generation.{name}"
    if importlib.util.find_spec(file) is None:
        return plain(model, capture)
    steps = importlib.import_module(file).Steps
    if not steps.fits(model):
        return plain(model, capture)
    on_a_gpu = next(model.parameters()).is_cuda
    return steps(model, capture and on_a_gpu)
