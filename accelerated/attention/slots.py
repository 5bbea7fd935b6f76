"""Memformer's slot attention, which writes a segment into the memory (Figure 2c)."""

import math

import torch
from torch import Tensor

from accelerated.attention.heads import (
    LayerNorm,
    ParameterModule,
    at_least_float32,
    compilable,
    merge_heads,
    parameter,
    project_heads,
    split_heads,
)
from reference.memformer import Config


class Writer(ParameterModule):
    """Each slot attends to [itself | encoded], not to other slots.

    Its own value is the slot, or is projected from it as a token's.
    """

    def __init__(self, config: Config):
        super().__init__()
        width = config.width
        inner = config.heads * config.head_width
        self.projects_slots = config.slot_value == "projected"
        self.heads = config.heads
        self.memory_norm = LayerNorm(width)
        self.norm = LayerNorm(width)
        self.query = parameter(inner, width)  # (HE, D)
        self.query_bias = parameter(inner)  # (HE,)
        self.key = parameter(inner, width)  # (HE, D)
        self.key_bias = parameter(inner)  # (HE,), gets no gradient: softmax cancels it
        self.value = parameter(width, width)  # (D, D)
        self.value_bias = parameter(width)  # (D,)

    @compilable
    def forward(self, memory: Tensor, encoded: Tensor, readable: Tensor | None = None) -> Tensor:
        """The next memory (B, S, D) from memory (B, S, D) and encoded (B, N, D).

        readable (B, N) is false for padding.
        """
        source = self.norm(encoded)
        weights = self.weights(memory, source, readable)  # (B, H, S, 1 + N)
        itself = weights[..., :1]
        others = weights[..., 1:]
        value = self.project_value(source)  # (B, H, N, D/H)
        if self.projects_slots:
            slots = self.project_value(self.memory_norm(memory))  # (B, H, S, D/H)
        else:
            [slots] = split_heads(memory, self.heads, 1)
        return merge_heads(itself * slots + others.to(value.dtype) @ value)

    def project_value(self, normed: Tensor) -> Tensor:
        """Values by head, (B, H, n, D/H), of normalised rows (B, n, D)."""
        [value] = project_heads(normed, self.heads, [self.value], [self.value_bias])
        return value

    def weights(self, memory: Tensor, source: Tensor, readable: Tensor | None = None) -> Tensor:
        """Each slot's attention to itself and to source, (B, H, S, 1 + N).

        memory (B, S, D); source (B, N, D) are the normalised tokens.
        """
        key_bias = self.key_bias.detach()
        normed = self.memory_norm(memory)
        matrices = [self.query, self.key]
        query, slot_key = project_heads(normed, self.heads, matrices, [self.query_bias, key_bias])
        [key] = project_heads(source, self.heads, [self.key], [key_bias])  # (B, H, N, E)
        query = query * query.shape[-1] ** -0.5  # (B, H, S, E)

        itself = (query * slot_key).sum(-1, keepdim=True)  # (B, H, S, 1)
        others = query @ key.mT  # (B, H, S, N)
        if readable is not None:
            others = others.masked_fill(~readable[:, None, None], -math.inf)
        return at_least_float32(torch.cat([itself, others], -1)).softmax(-1)
