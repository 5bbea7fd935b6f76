"""Attention by content, without positions; torch's SDPA, the path of most attention on a GPU."""

import math

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from accelerated.attention.heads import takes_sdpa

# SDPA's kernels that may run, the same in training, evaluation and `advance`. On a GPU attention
# with an offset or a mask takes the memory-efficient one, attention without takes flash; cuDNN's
# has open faults with masks.
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def future_keys(n: int, k: int, device: torch.device | None = None) -> Tensor:
    """(N, K), true if query i must not see key j: j > K - N + i."""
    every = torch.ones(n, k, dtype=torch.bool, device=device)
    return every.triu(k - n + 1)


def content_attention_plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    masked_keys: Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = False,
) -> Tensor:
    """softmax(q.k / sqrt(E)) v, (B, H, N, E), of query (B, H, N, E), key and value (B, H, K, E).

    masked_keys: true if a query must not see a key; broadcasts to (B, H, N, K)
    causal: instead of masked_keys, query i sees the keys 0..i; N = K
    """
    scores = query * query.shape[-1] ** -0.5 @ key.mT  # (B, H, N, K)
    if causal:
        masked_keys = future_keys(query.shape[-2], key.shape[-2], query.device)
    if masked_keys is not None:
        scores = scores.masked_fill(masked_keys, -math.inf)
    weights = functional.dropout(scores.softmax(-1), dropout)
    return weights @ value


def content_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    masked_keys: Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = False,
) -> Tensor:
    """The same as content_attention_plain by SDPA, unless the plain path is faster."""
    if takes_sdpa(query, key) or sdpa_is_faster_on_a_cpu(query, key, dropout):
        seen = None if masked_keys is None else ~masked_keys
        return sdpa(query, key, value, seen, dropout, causal)
    return content_attention_plain(query, key, value, masked_keys, dropout, causal)


def sdpa_is_faster_on_a_cpu(query: Tensor, key: Tensor, dropout: float) -> bool:
    """Whether SDPA is faster on a CPU than the plain path.

    Not in bfloat16, with dropout, or if only the key needs a gradient: SDPA computes the query's
    too. A single key takes the plain path, for the reason that takes_sdpa gives.
    """
    if key.shape[-2] == 1 or query.dtype == torch.bfloat16 or dropout > 0:
        return False
    only_keys = torch.is_grad_enabled() and key.requires_grad and not query.requires_grad
    return not only_keys


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offset: Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """softmax(q.k scale + offset) v by the kernels of BACKENDS.

    query (B, H, N, E), key and value (B, H, K, E)
    offset: attn_mask of scaled_dot_product_attention, broadcasts to (B, H, N, K): added to the
        scores, -inf where a query must not see a key; or bool, false there
    dropout: dropout rate of the weights
    scale: 1 / sqrt(E) if None
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
