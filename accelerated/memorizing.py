"""Memorizing Transformer in PyTorch: the fast version of reference/memorizing.py.

Tokens attend to the N tokens before them. In one layer each query also attends to the most similar
of the last M keys: the search is exact, and the memory has no gradient.

Official implementation: transformer/ of google-research/meliad.

Config, parameter names, shapes and initial values are the reference's. B lanes, N tokens in a
segment, D width, H heads of width E, F feed-forward width, L layers, M memory length.
"""

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from accelerated.attention.heads import (
    LayerNorm,
    Layers,
    at_least_float32,
    compilable,
    embed,
    merge_heads,
    parameter,
    project_unit_heads,
)
from accelerated.attention.retrieval import Memory, retrieval_attention, searchable
from accelerated.attention.sliding_window import (
    offsets_by_distance,
    sliding_attention,
    tables_by_distance,
)
from accelerated.protocol import CheckpointableLayer, Model, Reading, check_lanes, initialise
from reference.memorizing import Config, init_params

KeyValue: TypeAlias = tuple[Tensor, Tensor]  # keys and values


class State(NamedTuple):
    """What a segment passes to the next one; axis 0 is the lane. A document starts with zeros."""

    keys: Tensor  # (B, L, H, N, E), of the previous segment, unit length
    values: Tensor  # (B, L, H, N, E)
    memory_keys: Tensor  # (B, H, M, E), the memory layer's, the newest last, without gradient
    memory_values: Tensor  # (B, H, M, E)


def remember(memory: Tensor, rows: Tensor) -> Tensor:
    """The next memory: the last M of memory (B, H, M, E) and of the segment's rows (B, H, N, E).

    The newest stand last. It has no gradient.
    """
    length = rows.shape[2]
    kept = memory[:, :, length:]
    first = max(0, length - memory.shape[2])  # more rows than the memory holds
    return torch.cat([kept, rows[:, :, first:]], 2).detach()


class Layer(CheckpointableLayer):
    """Layer `number` (from 1): local attention, in the memory layer the lookup, feed-forward."""

    def __init__(self, config: Config, number: int):
        super().__init__()
        width = config.width
        inner = config.heads * config.head_width
        self.config = config
        self.looks_up = number == config.memory_layer and config.memory > 0
        self.norm = LayerNorm(width)
        self.key = parameter(inner, width)  # (HE, D)
        self.value = parameter(inner, width)  # (HE, D)
        self.query = parameter(inner, width)  # (HE, D)
        self.scale = parameter(config.heads)  # (H,)
        self.position_bias = parameter(config.heads, config.buckets)  # (H, buckets)
        if self.looks_up:
            self.memory_gate = parameter(config.heads)  # (H,)
        self.output = parameter(width, inner)  # (D, HE)
        self.mlp_norm = LayerNorm(width)
        self.mlp_hidden = parameter(config.feed_forward, width)  # (F, D)
        self.mlp_output = parameter(width, config.feed_forward)  # (D, F)

    def forward(
        self,
        x: Tensor,
        previous: KeyValue,
        memory: Memory,
        by_distance: Tensor,
    ) -> tuple[Tensor, KeyValue]:
        """Read x (B, N, D); return the output and the segment's (keys, values).

        previous: the previous segment's (keys, values), (B, H, N, E) each
        memory: read only in the memory layer
        by_distance: what is added to scores, (H, 3N - 1)
        """
        query, scaled, own, keys, values = self.project_beside(x, *previous)
        dropout = self.config.dropout if self.training else 0.0
        attended = sliding_attention(scaled, keys, values, by_distance, dropout)
        if query is not None:
            attended = self.retrieve(query, attended, memory)
        return self.finish(x, attended), own

    @compilable
    def project_beside(
        self, x: Tensor, previous_keys: Tensor, previous_values: Tensor
    ) -> tuple[Tensor | None, Tensor, KeyValue, Tensor, Tensor]:
        """What attention takes: query, scaled query, own (key, value), and all keys and values.

        All keys and values are the previous segment's and x's, (B, H, 2N, E). The others are
        (B, H, N, E). The query itself is for the lookup; without one it is None.
        """
        key, query, value = self.project(x)
        keys = torch.cat([previous_keys, key], 2)
        values = torch.cat([previous_values, value], 2)
        scaled = query * self.scale[:, None, None]
        return query if self.looks_up else None, scaled, (key, value), keys, values

    @compilable
    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """The output (B, N, D) from x and what its heads attended to, (B, H, N, E)."""
        return self.mlp(x + functional.linear(merge_heads(attended), self.output))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Key and query of unit length, and value, each (B, H, N, E)."""
        x = self.dropout(self.norm(x))
        matrices = torch.cat([self.key, self.query, self.value])
        key, query, value = project_unit_heads(x, matrices, self.config.heads, 3)
        return key, query, value

    @compilable
    def retrieve(self, query: Tensor, local: Tensor, memory: Memory) -> Tensor:
        """local (B, H, N, E) mixed with what each query (B, H, N, E) finds in memory."""
        found = retrieval_attention(query, memory, self.scale, self.config.retrieved)
        g = torch.sigmoid(at_least_float32(self.memory_gate))
        g = g[:, None, None].to(local.dtype)  # (H, 1, 1)
        return torch.lerp(local, found, g)

    def mlp(self, x: Tensor) -> Tensor:
        """x (B, N, D) with the feed-forward's output added."""
        hidden = functional.linear(self.mlp_norm(x), self.mlp_hidden).relu_()  # (B, N, F)
        return x + self.dropout(functional.linear(hidden, self.mlp_output))

    def dropout(self, x: Tensor) -> Tensor:
        """x with entries dropped in training (decision 11: where dropout is)."""
        return functional.dropout(x, self.config.dropout, self.training)


class Memorizing(Model):
    """The model; `config` is the reference's, which draws the initial weights from `seed`."""

    state_type = State
    config: Config
    in_bucket: Tensor  # (3N - 1, buckets)
    seen: Tensor  # (3N - 1,)

    def __init__(self, config: Config, seed: int = 0):
        super().__init__(config)
        self.embedding = parameter(config.vocabulary, config.width)  # (V, D), the output's too
        self.layers = Layers(Layer(config, number) for number in range(1, config.layers + 1))
        self.final_norm = LayerNorm(config.width)
        in_bucket, seen = tables_by_distance(config.segment, config.buckets, config.max_distance)
        self.register_buffer("in_bucket", in_bucket, persistent=False)
        self.register_buffer("seen", seen, persistent=False)
        initialise(self, init_params, seed)

    def state_shapes(self, batch: int) -> dict[str, tuple[int, ...]]:
        """The shape of each field of a State; raises ValueError if batch is below 1."""
        check_lanes(batch)
        c = self.config
        rows = (batch, c.layers, c.heads, c.segment, c.head_width)
        memory = (batch, c.heads, c.memory, c.head_width)
        return {"keys": rows, "values": rows, "memory_keys": memory, "memory_values": memory}

    def read(self, tokens: Tensor, state: State) -> Reading:
        """Read a segment of tokens (B, N). Reading.hidden (B, N, D) predicts the next tokens.

        Raises ValueError if N is not config.segment, or if the state does not fit this model and B
        lanes.
        """
        self.check_segment(tokens, state)
        x = embed(tokens, self.embedding)  # (B, N, D)
        memory = self.memory_of(state)
        offsets = offsets_by_distance(self.layers, self.in_bucket, self.seen)  # (L, H, 3N - 1)
        pairs = []
        previous = zip(state.keys.unbind(1), state.values.unbind(1), strict=True)
        for layer, pair, offset in zip(self.layers, previous, offsets, strict=True):
            x, pair = layer(x, pair, memory, offset)  # keys and values (B, H, N, E)
            pairs.append(pair)
        return Reading(self.output_rows(x), self.next_state(state, pairs), {})

    @compilable
    def memory_of(self, state: State) -> Memory:
        """The Memory that the memory layer's queries search."""
        return searchable(state.memory_keys, state.memory_values)

    @compilable
    def next_state(self, state: State, pairs: list[KeyValue]) -> State:
        """The State after a segment with these (keys, values) of each layer, (B, H, N, E) each.

        The memory layer's own join the memory.
        """
        keys = torch.stack([key for key, _ in pairs], 1)  # (B, L, H, N, E)
        values = torch.stack([value for _, value in pairs], 1)
        new_keys, new_values = pairs[self.config.memory_layer - 1]
        memory_keys = remember(state.memory_keys, new_keys)
        memory_values = remember(state.memory_values, new_values)
        return State(keys, values, memory_keys, memory_values)

    def output_rows(self, hidden: Tensor) -> Tensor:
        """hidden (..., D), ready for the output matrix."""
        rows = self.final_norm(hidden)
        drops = self.training and self.config.output_dropout
        rows = functional.dropout(rows, self.config.dropout, drops)
        return rows * self.config.width**-0.5

    @property
    def attention_reach(self) -> int:
        """How many tokens back a prediction can look by attention only, without memory."""
        return self.config.layers * self.config.segment

    def describe(self) -> str:
        """One line on how far back the model can look."""
        c = self.config
        tokens = f"{c.layers} layers x {c.segment} = {self.attention_reach:,} tokens"
        reach = f"attention reaches {tokens} back"
        if c.memory == 0:
            return reach
        looked_up = f"{c.retrieved} of the last {c.memory:,} tokens"
        return f"{reach}; layer {c.memory_layer} looks up {looked_up}"
