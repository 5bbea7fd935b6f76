"""Attention by content, without positions, and torch's SDPA, the path of most attention on a GPU."""

import math

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

# SDPA's kernels that may run, the same in training, evaluation and `advance`. On a GPU attention with an offset or a mask takes
# the memory-efficient one, attention without takes flash; cuDNN's has open faults with masks.
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def takes_sdpa(query: Tensor, key: Tensor) -> bool:
    """Whether attention of any kind goes through SDPA: not on a CPU, where only content_attention gains, and decides for itself.

    A query that has only one key takes the plain path: its gradient is exactly zero, and SDPA would leave rounding errors.
    """
    return query.device.type != "cpu" and key.shape[-2] > 1


def causal_mask(n: int, k: int, device: torch.device | None = None) -> Tensor:
    """The mask (N, K), true if query i must not see key j: j > K - N + i."""
    return torch.ones(n, k, dtype=torch.bool, device=device).triu(k - n + 1)


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offset: Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """softmax(q.k scale + offset) v by the kernels of BACKENDS; scale is 1 / sqrt(E) if None.

    query (B, H, N, E), key and value (B, H, K, E). offset broadcasts to (B, H, N, K): numbers to add, -inf if a query must not
    see a key, or a mask, false if it must not. dropout is the rate at which weights are dropped.
    """
    if offset is not None and offset.dtype != torch.bool:
        offset = offset.to(query.dtype)
    attend = functional.scaled_dot_product_attention
    if query.device.type == "cpu":  # it has only flash and math, and choosing kernels takes time
        return attend(query, key, value, offset, dropout, causal, scale=scale)
    with sdpa_kernel(BACKENDS):
        return attend(query, key, value, offset, dropout, causal, scale=scale)


def fold_tiles(x: Tensor) -> Tensor:
    """Tiles (B, H, T, n, E) as a batch of B T for SDPA, which takes four axes: (BT, H, n, E)."""
    return x.transpose(1, 2).flatten(0, 1)


def unfold_tiles(x: Tensor, batch: int) -> Tensor:
    """The inverse of fold_tiles: (BT, H, n, E) -> (B, H, T, n, E)."""
    return x.unflatten(0, (batch, -1)).transpose(1, 2)


def scaled_attention_plain(query: Tensor, key: Tensor, value: Tensor, scale: Tensor) -> Tensor:
    """softmax((q.k) scale) v without a mask; query (B, H, ..., N, E), key and value (B, H, ..., K, E), scale (H, ...)."""
    scores = (query * scale[..., None, None]) @ key.transpose(-1, -2)  # (B, H, ..., N, K)
    return scores.softmax(-1) @ value


def scaled_attention_sdpa(query: Tensor, key: Tensor, value: Tensor, scale: Tensor) -> Tensor:
    """The same as scaled_attention_plain by SDPA, with at most one axis of tiles."""
    query = query * scale[..., None, None]
    if query.dim() == 4:
        return sdpa(query, key, value, scale=1.0)
    return unfold_tiles(sdpa(*map(fold_tiles, (query, key, value)), scale=1.0), len(query))


def scaled_attention(query: Tensor, key: Tensor, value: Tensor, scale: Tensor) -> Tensor:
    """The same as scaled_attention_plain, by the fastest path."""
    attend = scaled_attention_sdpa if takes_sdpa(query, key) else scaled_attention_plain
    return attend(query, key, value, scale)


def content_attention_plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = False,
) -> Tensor:
    """softmax(q.k / sqrt(E)) v; mask, true if a query must not see a key, broadcasts to (B, H, N, K).

    causal: instead of a mask, query i sees the keys 0..i; N = K.
    """
    scores = query * query.shape[-1] ** -0.5 @ key.transpose(-1, -2)
    if causal:
        mask = causal_mask(*scores.shape[-2:], scores.device)
    if mask is not None:
        scores = scores.masked_fill(mask, -math.inf)
    return functional.dropout(scores.softmax(-1), dropout) @ value


def content_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = False,
) -> Tensor:
    """The same as content_attention_plain, by the fastest path: SDPA on a GPU, one of the two on a CPU.

    On a CPU SDPA is slower in bfloat16, and if only keys need gradients: it computes the query's all the same.
    """
    only_keys = torch.is_grad_enabled() and key.requires_grad and not query.requires_grad
    faster_on_a_cpu = (
        key.shape[-2] > 1 and query.dtype != torch.bfloat16 and dropout == 0 and not only_keys
    )
    if takes_sdpa(query, key) or faster_on_a_cpu:
        return sdpa(query, key, value, None if mask is None else ~mask, dropout, causal)
    return content_attention_plain(query, key, value, mask, dropout, causal)
