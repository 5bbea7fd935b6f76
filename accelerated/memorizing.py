"""Memorizing Transformer in PyTorch: the fast version of reference/memorizing.py.

Config, parameter names, shapes and initial values are the reference's. The search is exact; the memory has no gradient.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from accelerated.attention.heads import (
    LayerNorm,
    at_least_float32,
    look_up,
    merge_heads,
    parameter,
    project_heads,
)
from accelerated.attention.retrieval import Memory, retrieval_attention, searchable
from accelerated.attention.sliding_window import (
    offsets_by_pair,
    offsets_of,
    sliding_attention,
    tables_by_distance,
)
from accelerated.protocol import (
    Layers,
    Model,
    Reading,
    Recomputable,
    check_lanes,
    initialise,
)
from reference.memorizing import Config, init_params


class State(NamedTuple):
    """What a segment passes to the next one; axis 0 of every field is the lane (a row of the batch)."""

    keys: Tensor  # (B, L, H, N, E), of the previous segment, unit length
    values: Tensor  # (B, L, H, N, E)
    memory_keys: Tensor  # (B, H, M, E), the memory layer's, the newest last; they have no gradient
    memory_values: Tensor  # (B, H, M, E)


def remember(memory: Tensor, rows: Tensor) -> Tensor:
    """The last M of memory (B, H, M, E) and of the segment's rows (B, H, N, E), the newest last, without gradient."""
    new = max(0, rows.shape[2] - memory.shape[2])  # the first of the rows that is kept
    return torch.cat([memory[:, :, rows.shape[2] :], rows[:, :, new:]], 2).detach()


class Layer(Recomputable):
    """Layer `number` (from 1): local attention, mixed with what the memory layer finds, and feed-forward."""

    def __init__(self, config: Config, number: int):
        super().__init__()
        d, h, he, f = (
            config.width,
            config.heads,
            config.heads * config.head_width,
            config.feed_forward,
        )
        self.config = config
        self.norm = LayerNorm(d)
        self.key = parameter(he, d)  # (HE, D)
        self.value = parameter(he, d)  # (HE, D)
        self.query = parameter(he, d)  # (HE, D)
        self.scale = parameter(h)  # (H,)
        self.position_bias = parameter(h, config.buckets)  # (H, buckets)
        self.memory_gate = (
            parameter(h) if number == config.memory_layer and config.memory else None
        )  # (H,)
        self.output = parameter(d, he)  # (D, HE)
        self.mlp_norm = LayerNorm(d)
        self.mlp_hidden = parameter(f, d)  # (F, D)
        self.mlp_output = parameter(d, f)  # (D, F)

    def dropout(self, x: Tensor) -> Tensor:
        """x with entries dropped in training (decision 11: where dropout is)."""
        return functional.dropout(x, self.config.dropout, self.training)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Key and query of unit length, and value, each (B, H, N, E)."""
        matrices = torch.cat([self.key, self.query, self.value])
        return project_heads(self.dropout(self.norm(x)), matrices, self.config.heads, 3)

    def retrieve(self, query: Tensor, local: Tensor, memory: Memory) -> Tensor:
        """local (B, H, N, E) mixed with what each query (B, H, N, E) finds in memory."""
        retrieved = retrieval_attention(query, memory, self.scale, self.config.retrieved)
        g = torch.sigmoid(at_least_float32(self.memory_gate))[:, None, None].to(
            local.dtype
        )  # (H, 1, 1)
        return torch.lerp(local, retrieved, g)

    def mlp(self, x: Tensor) -> Tensor:
        """x (B, N, D) with the feed-forward's output added."""
        hidden = functional.linear(self.mlp_norm(x), self.mlp_hidden).relu_()  # (B, N, F)
        return x + self.dropout(functional.linear(hidden, self.mlp_output))

    def forward(
        self, x: Tensor, previous: tuple, memory: Memory, offset: Tensor, no_output: bool = False
    ) -> tuple[Tensor, tuple]:
        """Read x (B, N, D); return the output and the segment's (keys, values).

        previous: the previous segment's (keys, values), (B, H, N, E) each
        memory: read only in the memory layer
        offset: what is added to the scores of local attention, (H, N, 2N)
        no_output: its output is not needed; x is returned unchanged
        """
        dropout = self.config.dropout if self.training else 0.0
        key, query, value = self.project(x)
        if no_output:
            return x, (key, value)
        keys, values = (
            torch.cat([previous[0], key], 2),
            torch.cat([previous[1], value], 2),
        )  # (B, H, 2N, E)
        attended = sliding_attention(
            query * self.scale[:, None, None], keys, values, offset, dropout
        )
        if self.memory_gate is not None:
            attended = self.retrieve(query, attended, memory)
        return self.mlp(x + functional.linear(merge_heads(attended), self.output)), (key, value)


class Memorizing(Model):
    """The model. `config` is the reference's; the initial weights are those that the reference draws from `seed`."""

    Config = Config
    state_type = State
    config: Config
    in_bucket: Tensor  # (3N - 1, buckets)
    mask: Tensor  # (3N - 1,)

    def __init__(self, config: Config, seed: int = 0):
        super().__init__(config)
        self.embedding = parameter(config.vocabulary, config.width)  # (V, D), the output's too
        self.layers = Layers(Layer(config, number) for number in range(1, config.layers + 1))
        self.final_norm = LayerNorm(config.width)
        in_bucket, mask = tables_by_distance(
            config.segment, config.buckets, config.max_distance
        )  # (3N - 1, ...)
        self.register_buffer("in_bucket", in_bucket, persistent=False)
        self.register_buffer("mask", mask, persistent=False)
        initialise(self, init_params(config, np.random.default_rng(seed)))

    def describe(self) -> str:
        """One line on how far back the model can look."""
        c = self.config
        reach = f"attention reaches {c.layers} layers x {c.segment} = {c.layers * c.segment:,} tokens back"
        lookup = f"; layer {c.memory_layer} looks up {c.retrieved} of the last {c.memory:,} tokens"
        return reach + lookup if c.memory else reach

    @property
    def attention_reach(self) -> int:
        """How many tokens back a prediction can look by attention only, without memory."""
        return self.config.layers * self.config.segment

    def state_shapes(self, batch: int) -> dict[str, tuple[int, ...]]:
        """The shape of each field of a State of `batch` lanes; raises ValueError if batch is below 1."""
        c = self.config
        rows = (check_lanes(batch), c.layers, c.heads, c.segment, c.head_width)
        memory = (batch, c.heads, c.memory, c.head_width)
        return {"keys": rows, "values": rows, "memory_keys": memory, "memory_values": memory}

    def initial_state(self, batch: int) -> State:
        """The state at a document's start: zero keys and values."""
        shapes = self.state_shapes(batch)
        return State(*(self.embedding.new_zeros(shape) for shape in shapes.values()))

    def output_matrix(self) -> Tensor:
        """(V, D), the embedding."""
        return self.embedding

    def read(self, tokens: Tensor, state: State) -> Reading:
        """Read a segment: tokens (B, N). Reading.hidden (B, N, D) predicts the next tokens.

        Raises ValueError if there are not N tokens, or if the state does not fit this model and B lanes.
        """
        hidden, state = self._read(tokens, state)
        return Reading(self.output_rows(hidden), state, {})

    def advance(self, tokens: Tensor, state: State) -> State:
        """The state after tokens (B, N), without the logits and the last layer's own output."""
        return self._read(tokens, state, memory_only=True)[1]

    def output_rows(self, hidden):
        return self.final_norm(hidden) * self.config.width**-0.5

    def _read(self, tokens, state, memory_only=False):
        """The last layer's output (B, N, D) and the next state."""
        c = self.config
        if tokens.shape[1] != c.segment:
            raise ValueError(
                f"a segment of {tokens.shape[1]} tokens is not one of {c.segment}; pad it"
            )
        self.check_state(state, len(tokens))
        x, pairs = look_up(tokens, self.embedding), []  # (B, N, D)
        memory = searchable(state.memory_keys, state.memory_values)
        offsets = offsets_by_pair(
            offsets_of(self.layers, self.in_bucket, self.mask), c.segment, x.dtype
        )  # (L, H, N, 2N)
        for number, (layer, offset) in enumerate(
            zip(self.layers, offsets.unbind(0), strict=True), start=1
        ):
            previous = (state.keys[:, number - 1], state.values[:, number - 1])
            x, pair = layer(x, previous, memory, offset, memory_only and number == c.layers)
            pairs.append(pair)
        return x, self.next_state(state, pairs)

    def next_state(self, state, pairs):
        """The State after a segment with these (keys, values) of each layer, which the memory layer's own join."""
        key, value = pairs[self.config.memory_layer - 1]
        keys, values = (
            torch.stack(field, 1) for field in zip(*pairs, strict=True)
        )  # (B, L, H, N, E)
        return State(
            keys, values, remember(state.memory_keys, key), remember(state.memory_values, value)
        )
