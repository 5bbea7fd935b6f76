"""Attention by content, without positions: the models read their states, slots or compressed memories with it."""

import math

import torch
from torch.nn import functional


def scaled_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """softmax((q.k) scale) v without a mask; query (B, H, ..., N, E), key and value (B, H, ..., K, E), scale (H, ...)."""
    scores = (query * scale[..., None, None]) @ key.transpose(-1, -2)  # (B, H, ..., N, K)
    return scores.softmax(-1) @ value


def content_attention_plain(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None, dropout: float = 0.0
) -> torch.Tensor:
    """softmax(q.k / sqrt(E)) v; mask, true if a query must not see a key, broadcasts to (B, H, N, K)."""
    scores = query * query.shape[-1] ** -0.5 @ key.transpose(-1, -2)
    if mask is not None:
        scores = scores.masked_fill(mask, -math.inf)
    return functional.dropout(scores.softmax(-1), dropout) @ value


def content_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None, dropout: float = 0.0
) -> torch.Tensor:
    """The same as content_attention_plain, by the fastest path.

    torch's SDPA draws other dropout masks than the reference, and leaves rounding errors in the gradient of a query that has only
    one key, which should be exactly zero; so these cases take the plain path.
    """
    if dropout or key.shape[2] == 1:
        return content_attention_plain(query, key, value, mask, dropout)
    return functional.scaled_dot_product_attention(query, key, value, None if mask is None else ~mask)
