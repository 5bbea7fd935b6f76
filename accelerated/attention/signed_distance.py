"""Memformer's self-attention by signed distances: simplified positions (Eqs. 2-4) or Eq. 1's.

Eq. 1's are Transformer-XL's. Simplified positions take the plain path on a GPU too: SDPA does not
return the weights by which they are added to values.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

from accelerated.attention.content import future_keys
from accelerated.attention.heads import (
    ParameterModule,
    at_least_float32,
    by_query_and_key,
    takes_sdpa,
    with_fast_path,
)
from accelerated.attention.relative_shift import (
    AttentionInputs,
    distance_sinusoids,
    relative_attention_sdpa,
    relative_shift,
)
from reference.memformer import Config


def far_to_near(lowest: int, highest: int, length: int) -> Tensor:
    """One-hot matrix (2 length - 1, R) that looks distances up in a table of lowest .. highest.

    Row t stands for the distance length - 1 - t, clipped to lowest .. highest. The lookup is a
    product with the table (R, E), so that its gradient is a product too, not a sum by index.
    """
    distance = torch.arange(length - 1, -length, -1).clamp(lowest, highest)
    one_hot = functional.one_hot(distance - lowest, highest - lowest + 1)
    return one_hot.to(torch.get_default_dtype())


class Distances(ParameterModule):
    """Buffers of the distances i - j from query i to key j, shared by a stack's self-attentions."""

    masked_keys: Tensor | None  # (N, N), true if a query must not see a key; the encoder has none
    rows: Tensor  # from far to near: one-hot rows of a table, (2N - 1, R), or sinusoids (R, D)

    def __init__(self, config: Config, causal: bool):
        super().__init__()
        self.length = config.segment  # N
        if causal and config.encoder_layers:
            self.length += 1  # the decoder reads the task's token first
        distances = config.distances(causal)
        self.rows_count = len(distances)  # R
        lowest = int(distances[0])
        if config.positions == "simplified":
            rows = far_to_near(lowest, int(distances[-1]), self.length)
        else:
            rows = distance_sinusoids(self.rows_count, config.width, lowest)
        future = future_keys(self.length, self.length) if causal else None
        self.register_buffer("masked_keys", future, persistent=False)
        self.register_buffer("rows", rows, persistent=False)


def attention_weights(
    scores: Tensor, by_key: Tensor, masked_keys: Tensor | None, dropout: float
) -> Tensor:
    """softmax(scores + by_key) without hidden keys, then dropout. Changes scores in place.

    scores (B, H, N, K); by_key and masked_keys (B, H, N, N') are for the last N' of the K keys.
    """
    placed = scores[..., scores.shape[-1] - by_key.shape[-1] :]
    placed += by_key
    if masked_keys is not None:
        placed.masked_fill_(masked_keys, -math.inf)
    return functional.dropout(scores.softmax(-1), dropout)


@with_fast_path
def simplified_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Tensor,
    masked_keys: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """softmax(q.(k_j + R_{i-j}) / sqrt(E)) (v_j + R_{i-j}), (B, H, N, E): Eqs. 2 to 4.

    query: (B, H, N, E)
    key, value: (B, H, K, E), of which only the last N' have positions
    rows: R from far to near, (N + N' - 1, E); query i and key j take row N - 1 - i + j
    masked_keys: true if a query must not see one of those N' keys; broadcasts to (B, H, N, N')
    """
    pairs = by_query_and_key(at_least_float32(rows).T, query.shape[2])  # (E, N, N')
    positions = pairs.movedim(0, -1).to(query.dtype)  # (N, N', E)

    query = query * query.shape[-1] ** -0.5
    by_key = torch.einsum("bhne,nke->bhnk", query, positions)
    weights = attention_weights(query @ key.mT, by_key, masked_keys, dropout)

    placed = weights[..., weights.shape[-1] - positions.shape[1] :]  # (B, H, N, N')
    return weights @ value + torch.einsum("bhnk,nke->bhne", placed, positions)


def transformer_xl_attention_plain(
    heads: AttentionInputs, positioned: int, masked_keys: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    """softmax(((q + u).k_j + (q + v).r_{i-j}) / sqrt(E)) x_j, (B, H, N, E): Eq. 1.

    heads: query i and key j take row N - 1 - i + j of r, and a key that is hidden may have none
    positioned: how many keys have positions, the last ones
    masked_keys: true if a query must not see one of these keys; broadcasts to
        (B, H, N, positioned)
    """
    query, key, value, distance_key, content_bias, distance_bias = heads
    scale = query.shape[-1] ** -0.5
    content = (query + content_bias[:, None]) * scale @ key.mT  # (B, H, N, K)
    distance_query = (query + distance_bias[:, None]) * scale
    by_distance = distance_query @ distance_key.mT  # (B, H, N, R)
    by_key = relative_shift(by_distance)[..., :positioned]
    return attention_weights(content, by_key, masked_keys, dropout) @ value


def transformer_xl_attention(
    heads: AttentionInputs, positioned: int, masked_keys: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    """The same as transformer_xl_attention_plain, on a GPU by SDPA."""
    by_sdpa = takes_sdpa(heads.query, heads.key)
    attend = relative_attention_sdpa if by_sdpa else transformer_xl_attention_plain
    return attend(heads, positioned, masked_keys, dropout)
