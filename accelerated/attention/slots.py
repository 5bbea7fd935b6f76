"""Memformer's slot attention, which writes a segment into the memory (Figure 2c)."""

import math

import torch
from torch import Tensor

from accelerated.attention.heads import (
    Declared,
    LayerNorm,
    at_least_float32,
    merge_heads,
    parameter,
    project,
    split_heads,
)


class Writer(Declared):
    """Each slot attends to [itself | encoded], not to other slots; its value of itself is the slot."""

    def __init__(self, width: int, heads: int, head_width: int):
        super().__init__()
        inner, self.heads = heads * head_width, heads
        self.memory_norm = LayerNorm(width)
        self.norm = LayerNorm(width)
        self.query = parameter(inner, width)  # (HE, D)
        self.query_bias = parameter(inner)  # (HE,)
        self.key = parameter(inner, width)  # (HE, D)
        self.key_bias = parameter(inner)  # (HE,), gets no gradient: softmax cancels it
        self.value = parameter(width, width)  # (D, D)
        self.value_bias = parameter(width)  # (D,)
        self.retention = parameter(heads)  # (H,), bias on a slot's score for itself

    def forward(self, memory: Tensor, encoded: Tensor, readable: Tensor | None = None) -> Tensor:
        """The next memory (B, S, D) from memory (B, S, D) and encoded (B, N, D); readable (B, N) is false for padding."""
        source = self.norm(encoded)
        weights = self.weights(memory, source, readable)
        [value] = project(source, self.heads, [self.value], [self.value_bias])  # (B, H, N, D/H)
        [slots] = split_heads(memory, self.heads, 1)  # (B, H, S, D/H)
        return merge_heads(weights[..., :1] * slots + weights[..., 1:].to(value.dtype) @ value)

    def weights(self, memory: Tensor, source: Tensor, readable: Tensor | None = None) -> Tensor:
        """Each slot's attention to itself and to source (B, N, D), the normalised tokens: (B, H, S, 1 + N)."""
        normal, key_bias = self.memory_norm(memory), self.key_bias.detach()
        query, slot_key = project(
            normal, self.heads, [self.query, self.key], [self.query_bias, key_bias]
        )  # (B, H, S, E)
        [key] = project(source, self.heads, [self.key], [key_bias])  # (B, H, N, E)
        query = query * query.shape[-1] ** -0.5
        itself = (query * slot_key).sum(-1, keepdim=True) + self.retention[
            :, None, None
        ]  # (B, H, S, 1)
        others = query @ key.transpose(-1, -2)  # (B, H, S, N)
        if readable is not None:
            others = others.masked_fill(~readable[:, None, None], -math.inf)
        return at_least_float32(torch.cat([itself, others], -1)).softmax(-1)
