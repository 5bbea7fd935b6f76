"""Memformer in PyTorch, encoder-decoder and decoder-only: the fast version of reference/memformer.py.

Config, parameter names, shapes and initial values are the reference's. `advance` runs only encoder and writer, or all layers of
the decoder-only model. B lanes, N tokens, D width, H heads of width E, F feed-forward width, S slots, L layers, R distances.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from accelerated.attention.content import causal_mask, content_attention
from accelerated.attention.heads import (
    Declared,
    LayerNorm,
    at_least_float32,
    look_up,
    merge_heads,
    parameter,
    project,
)
from accelerated.attention.relative_shift import distance_sinusoids
from accelerated.attention.signed_distance import (
    far_to_near,
    simplified_attention,
    transformer_xl_attention,
)
from accelerated.attention.slots import Writer
from accelerated.protocol import (
    Layers,
    Model,
    Reading,
    Recomputable,
    check_lanes,
    initialise,
)
from reference.memformer import SPECIALS, Config, init_params


class State(NamedTuple):
    """What a segment passes to the next one; axis 0 of every field is the lane (a row of the batch)."""

    memory: Tensor  # (B, 1, S, D), decoder-only (B, L, S, D), in float32 or better
    previous: Tensor  # (B, N) token ids, decoder-only (B, 0)


class Distances(nn.Module):
    """Constants of all self-attentions of a stack: the causal mask, and for each distance its row of R, or its sinusoids."""

    def __init__(self, config: Config, causal: bool):
        super().__init__()
        length = config.segment + (
            1 if causal and config.encoder_layers else 0
        )  # 1: the decoder reads the task's token first
        self.length, (lowest, highest) = (
            length,
            (int(end) for end in config.distances(causal)[[0, -1]]),
        )
        mask = causal_mask(length, length) if causal else None
        simplified = config.positions == "simplified"
        if simplified:
            rows = far_to_near(lowest, highest, length)
        else:
            rows = distance_sinusoids(highest - lowest + 1, config.width, lowest)
        self.register_buffer(
            "mask", mask, persistent=False
        )  # (N, N), true if a query must not see a key
        self.register_buffer(
            "rows", rows, persistent=False
        )  # (2N - 1, R) of 0 and 1, or (R, D); from far to near


class Attention(Declared):
    """What self-attention and cross-attention share: parameters of the same names, by which they project rows to heads."""

    def declare_projections(self, config: Config, biases: bool) -> None:
        """Parameters of query, key and value; the output's are declared last."""
        inner = config.heads * config.head_width
        self.query = parameter(inner, config.width)  # (HE, D)
        self.query_bias = parameter(inner) if biases else None  # (HE,)
        self.key = parameter(inner, config.width)  # (HE, D)
        self.key_bias = (
            parameter(inner) if biases else None
        )  # (HE,), gets no gradient: softmax cancels it
        self.value = parameter(inner, config.width)  # (HE, D)
        self.value_bias = parameter(inner) if biases else None  # (HE,)

    def project(self, normal: Tensor, *names: str) -> tuple[Tensor, ...]:
        """Query, key or value, as `names` say, (B, H, n, E) each, of normalised rows (B, n, D), by one product."""
        key_bias = None if self.key_bias is None else self.key_bias.detach()
        biases = {"query": self.query_bias, "key": key_bias, "value": self.value_bias}
        return project(
            normal,
            self.heads,
            [getattr(self, name) for name in names],
            [biases[name] for name in names],
        )

    def output_rows(self, attended: Tensor) -> Tensor:
        """(B, n, D) of what the heads attended to (B, H, n, E)."""
        out = functional.linear(merge_heads(attended), self.output, self.output_bias)
        return functional.dropout(out, self.dropout_rate, self.training)


class SelfAttention(Attention):
    """Attention of tokens to each other and, in the decoder-only model, to their layer's memory.

    Positions are simplified (Eqs. 2-4) or Transformer-XL's (Eq. 1), which has no biases on query, key and value.
    """

    def __init__(self, config: Config, causal: bool):
        super().__init__()
        simplified, inner = config.positions == "simplified", config.heads * config.head_width
        self.heads, self.dropout_rate = config.heads, config.dropout
        self.norm = LayerNorm(config.width)
        self.memory_norm = None if config.encoder_layers else LayerNorm(config.width)
        self.declare_projections(config, biases=simplified)
        self.positions = (
            parameter(len(config.distances(causal)), config.head_width) if simplified else None
        )  # (R, E)
        self.distance_key = None if simplified else parameter(inner, config.width)  # (HE, D), W_r
        self.content_bias = (
            None if simplified else parameter(config.heads, config.head_width)
        )  # (H, E), u
        self.distance_bias = (
            None if simplified else parameter(config.heads, config.head_width)
        )  # (H, E), v
        self.output = parameter(config.width, inner)  # (D, HE)
        self.output_bias = parameter(config.width)  # (D,)

    def forward(
        self,
        x: Tensor,
        distances: Distances,
        memory: Tensor | None = None,
        readable: Tensor | None = None,
    ) -> Tensor:
        """(B, N, D) from x (B, N, D) and memory (B, S, D); readable (B, N) is false for padding of the encoder's x."""
        query, key, value = self.project(self.norm(x), "query", "key", "value")
        if memory is not None:
            slots = self.project(self.memory_norm(memory), "key", "value")
            key, value = (
                torch.cat(pair, 2) for pair in zip(slots, (key, value), strict=True)
            )  # (B, H, S + N, E)
        mask = distances.mask if readable is None else ~readable[:, None, None]
        return self.output_rows(
            self.attend(query, key, value, self.far_to_near(distances), distances.length, mask)
        )

    def far_to_near(self, distances: Distances) -> Tensor:
        """R of all distances, from far to near: simplified positions (2N - 1, E), or W_r R (H, R, E)."""
        if self.distance_key is None:
            return distances.rows @ self.positions
        return project(distances.rows[None], self.heads, [self.distance_key])[0][0]

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rows: Tensor,
        count: int,
        mask: Tensor | None,
    ) -> Tensor:
        """Attention (B, H, n, E), the last `count` keys with positions; query i and key j take row n - 1 - i + j of rows."""
        rate = self.dropout_rate if self.training else 0.0
        if self.distance_key is None:
            return simplified_attention(query, key, value, rows, mask, rate)
        biases = (self.content_bias, self.distance_bias)
        return transformer_xl_attention(query, key, value, rows, *biases, count, mask, rate)


class CrossAttention(Attention):
    """Attention of tokens to memory or to an encoded segment, without positions (Figure 2b)."""

    def __init__(self, config: Config, of_memory: bool):
        super().__init__()
        inner = config.heads * config.head_width
        self.heads, self.dropout_rate = config.heads, config.dropout
        self.norm = LayerNorm(config.width)
        self.memory_norm = (
            LayerNorm(config.width) if of_memory else None
        )  # the encoder's output is already normalised
        self.declare_projections(config, biases=True)
        self.output = parameter(config.width, inner)  # (D, HE)
        self.output_bias = parameter(config.width)  # (D,)

    def forward(self, x: Tensor, source: Tensor, readable: Tensor | None = None) -> Tensor:
        """(B, N, D) from x (B, N, D) and source (B, K, D); readable (B, K) is false for padding."""
        return self.attend(x, *self.source_key_value(source), readable)

    def source_key_value(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """Key and value (B, H, K, E) of source (B, K, D), which is the memory or already normalised."""
        return self.project(
            source if self.memory_norm is None else self.memory_norm(source), "key", "value"
        )

    def attend(
        self, x: Tensor, key: Tensor, value: Tensor, readable: Tensor | None = None
    ) -> Tensor:
        """The same as forward, from the source's key and value (B, H, K, E)."""
        mask = None if readable is None else ~readable[:, None, None]  # (B, 1, 1, K)
        [query], rate = (
            self.project(self.norm(x), "query"),
            self.dropout_rate if self.training else 0.0,
        )
        return self.output_rows(content_attention(query, key, value, mask, rate))


class FeedForward(Recomputable):
    """The last part of every layer. Layers inherit it, because its parameters have the layer's names, and declare it last."""

    def declare_feed_forward(self, config: Config) -> None:
        self.dropout_rate = config.dropout
        self.mlp_norm = LayerNorm(config.width)
        self.mlp_hidden = parameter(config.feed_forward, config.width)  # (F, D)
        self.mlp_hidden_bias = parameter(config.feed_forward)  # (F,)
        self.mlp_output = parameter(config.width, config.feed_forward)  # (D, F)
        self.mlp_output_bias = parameter(config.width)  # (D,)

    def feed_forward(self, x: Tensor) -> Tensor:
        """(B, N, D) from x (B, N, D)."""
        hidden = torch.relu(
            functional.linear(self.mlp_norm(x), self.mlp_hidden, self.mlp_hidden_bias)
        )  # (B, N, F)
        out = functional.linear(hidden, self.mlp_output, self.mlp_output_bias)
        return functional.dropout(out, self.dropout_rate, self.training)


class EncoderLayer(FeedForward):
    """Tokens attend to each other, then to the memory (Figure 2a)."""

    def __init__(self, config: Config):
        super().__init__()
        self.attention = SelfAttention(config, causal=False)
        self.read = CrossAttention(config, of_memory=True)
        self.declare_feed_forward(config)

    def forward(
        self, x: Tensor, memory: Tensor, readable: Tensor | None, distances: Distances
    ) -> Tensor:
        x = x + self.attention(x, distances, readable=readable)
        x = x + self.read(x, memory)
        return x + self.feed_forward(x)


class DecoderLayer(FeedForward):
    """Tokens attend to earlier tokens, then to the encoded previous segment."""

    def __init__(self, config: Config):
        super().__init__()
        self.attention = SelfAttention(config, causal=True)
        self.cross = CrossAttention(config, of_memory=False)
        self.declare_feed_forward(config)

    def forward(
        self, x: Tensor, encoded: Tensor, readable: Tensor | None, distances: Distances
    ) -> Tensor:
        x = x + self.attention(x, distances)
        x = x + self.cross(x, encoded, readable)
        return x + self.feed_forward(x)


class MemoryLayer(FeedForward):
    """Tokens attend to this layer's memory and to earlier tokens; the output is written to the memory (Figure 1b)."""

    def __init__(self, config: Config):
        super().__init__()
        self.attention = SelfAttention(config, causal=True)
        self.writer = Writer(config.width, config.heads, config.head_width)
        self.declare_feed_forward(config)

    def forward(self, x: Tensor, memory: Tensor, distances: Distances) -> tuple[Tensor, Tensor]:
        x = x + self.attention(x, distances, memory)
        x = x + self.feed_forward(x)
        return x, self.writer(memory, x)


class Stack(nn.Module):
    """The encoder, which encodes a segment together with the memory (Eq. 5), or the decoder, which predicts from it (Eq. 6)."""

    def __init__(self, config: Config, layer: type, count: int, causal: bool):
        super().__init__()
        self.distances = Distances(config, causal)
        self.layers = Layers(layer(config) for _ in range(count))
        self.norm = LayerNorm(config.width)

    def forward(self, x: Tensor, source: Tensor, readable: Tensor | None) -> Tensor:
        """The last hidden states, as many as embeddings x (B, n, D); source is the memory (B, S, D), or the encoded (B, N, D)."""
        for layer in self.layers:
            x = layer(x, source, readable, self.distances)
        return self.norm(x)


class MemoryDecoder(Stack):
    """The decoder-only model's layers (Figure 1b), each with its own memory."""

    def forward(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Final hidden states (B, N, D) and the next memory (B, L, S, D) from embeddings x (B, N, D) and memory."""
        memories = []
        for layer, slots in zip(self.layers, memory.unbind(1), strict=True):
            x, slots = layer(x, slots, self.distances)
            memories.append(slots)
        return self.norm(x), torch.stack(memories, 1)


class Memformer(Model):
    """The model. `config` is the reference's; the initial weights are those that the reference draws from `seed`."""

    Config = Config
    state_type = State
    config: Config

    def __init__(self, config: Config, seed: int = 0):
        super().__init__(config)
        specials = len(SPECIALS) if config.encoder_layers else 0
        self.embedding = parameter(
            config.vocabulary + specials, config.width
        )  # (V + 5, D), decoder-only (V, D)
        self.initial_memory = parameter(
            config.memories, config.slots, config.width
        )  # (1 or L, S, D)
        self.encoder = (
            Stack(config, EncoderLayer, config.encoder_layers, causal=False)
            if config.encoder_layers
            else None
        )
        self.writer = (
            Writer(config.width, config.heads, config.head_width) if config.encoder_layers else None
        )
        decoder, layer = (
            (Stack, DecoderLayer) if config.encoder_layers else (MemoryDecoder, MemoryLayer)
        )
        self.decoder = decoder(config, layer, config.decoder_layers, causal=True)
        initialise(self, init_params(config, np.random.default_rng(seed)))

    def describe(self) -> str:
        """One line on how far back the model looks: its temporal range is unlimited (section 2.5)."""
        c = self.config
        kind = "encoder-decoder" if c.encoder_layers else "decoder-only, in each of its layers"
        return f"{c.slots} memory slots ({kind}) carry what was read over any number of segments of {c.segment}"

    @property
    def attention_reach(self) -> int:
        """How many tokens back a prediction can look by attention only, without memory."""
        return self.config.segment * (2 if self.config.encoder_layers else 1)

    def state_shapes(self, batch: int) -> dict[str, tuple[int, ...]]:
        """The shape of each field of a State of `batch` lanes; raises ValueError if batch is below 1."""
        c = self.config
        memory = (check_lanes(batch), c.memories, c.slots, c.width)
        return {"memory": memory, "previous": (batch, c.segment if c.encoder_layers else 0)}

    def initial_state(self, batch: int) -> State:
        """The state at a document's start: learned slots and a segment of begin tokens; raises ValueError if batch is below 1."""
        shapes = self.state_shapes(batch)
        previous = torch.full(
            shapes["previous"], self.config.special("begin"), device=self.embedding.device
        )
        return State(at_least_float32(self.initial_memory.expand(shapes["memory"])), previous)

    def read(self, tokens: Tensor, state: State, task: tuple | None = None) -> Reading:
        """Read a segment of tokens (B, N). Reading.hidden (B, N, D) predicts the next tokens, or what a Task asks for.

        Raises ValueError if N is not config.segment, if the state does not fit this model and B lanes, or if the decoder-only
        model is given a task.
        """
        self._check(tokens, state, task)
        if self.encoder is None:
            hidden, memory = self.decoder(look_up(tokens, self.embedding), state.memory)
            return Reading(hidden * self.config.width**-0.5, State(memory, state.previous), {})
        encoded, memory, readable = self.encode(state, task)
        kind, prompt = (0, tokens) if task is None else (task.kind[:, None], task.prompt)
        first = (
            tokens.new_full((len(tokens), 1), self.config.special("continuation")) + kind
        )  # the task's token
        hidden = self.decoder(
            look_up(torch.cat([first, prompt], 1), self.embedding), encoded, readable
        )
        return Reading(
            self._predicting(hidden, kind) * self.config.width**-0.5, State(memory, tokens), {}
        )

    def output_matrix(self) -> Tensor:
        """(V, D), the vocabulary's rows of the embedding; special tokens are never predicted."""
        return self.embedding[: self.config.vocabulary]

    def advance(self, tokens: Tensor, state: State, task: tuple | None = None) -> State:
        """The state after tokens (B, N), without decoder and logits; raises ValueError as read does."""
        self._check(tokens, state, task)
        if self.encoder is None:
            return State(
                self.decoder(look_up(tokens, self.embedding), state.memory)[1], state.previous
            )
        return State(self.encode(state, task)[1], tokens)

    def _check(self, tokens, state, task):
        c = self.config
        if tokens.shape[1] != c.segment:
            raise ValueError(
                f"a segment of {tokens.shape[1]} tokens is not one of {c.segment}; pad it"
            )
        if task is not None and c.encoder_layers == 0:
            raise ValueError(
                "the decoder-only model (encoder_layers 0) has no tasks but continuation; leave task out"
            )
        self.check_state(state, len(tokens))

    def _predicting(self, hidden, kind):
        """The N of the decoder's N + 1 rows that predict: the last N in continuation, the first N in the other tasks."""
        if isinstance(kind, int):
            return hidden[:, 1:]
        return torch.where((kind == 0)[..., None], hidden[:, 1:], hidden[:, :-1])

    def encode(self, state, task):
        """Eq. 5: encoded (B, N, D), the next memory (B, 1, S, D), and readable (B, N), false for padding, or None."""
        reading, readable = (
            (state.previous, None) if task is None else (task.reading, task.readable)
        )
        memory, x = state.memory[:, 0], look_up(reading, self.embedding)
        encoded = self.encoder(x, memory, readable)
        return encoded, self.writer(memory, encoded, readable)[:, None], readable
