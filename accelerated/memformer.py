"""Memformer in PyTorch, encoder-decoder and decoder-only: the fast version of reference/memformer.py.

Config, parameter names, shapes and initial values are the reference's. `advance` runs only encoder and writer, or all layers of
the decoder-only model. B lanes, N tokens, D width, H heads of width E, F feed-forward width, S slots, L layers, R distances.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from accelerated import protocol
from accelerated.attention.content import causal_mask, content_attention
from accelerated.attention.heads import LayerNorm, at_least_float32, look_up, merge_heads, parameter, split_heads
from accelerated.attention.signed_distance import distance_index, signed_sinusoids, simplified_attention, transformer_xl_attention
from accelerated.protocol import Output, Reading, Stream, check_lanes, check_state, initialise, logits_of, with_logits
from reference.memformer import SPECIALS, Config, init_params


class State(NamedTuple):
    """What a segment passes to the next one; axis 0 of every field is the lane (a row of the batch)."""

    memory: torch.Tensor  # (B, 1, S, D), decoder-only (B, L, S, D), in float32 or better
    previous: torch.Tensor  # (B, N) token ids, decoder-only (B, 0)


def project(x: torch.Tensor, heads: int, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x W^T + b, split into heads: (B, n, D) -> (B, H, n, E)."""
    return split_heads(functional.linear(x, weight, bias), heads, 1)[0]


class Distances(nn.Module):
    """Constants that all self-attentions of a stack share: rows of distances, the causal mask and sinusoids."""

    def __init__(self, config: Config, causal: bool):
        super().__init__()
        length = config.segment + (1 if causal and config.encoder_layers else 0)  # 1: the decoder reads the task's token first
        lowest, highest = (int(end) for end in config.distances(causal)[[0, -1]])
        mask = causal_mask(length, length) if causal else None
        sinusoids = signed_sinusoids(lowest, highest, config.width) if config.positions == "transformer_xl" else None
        self.register_buffer("index", distance_index(length, lowest, highest), persistent=False)  # (N, N) of 0 .. R - 1
        self.register_buffer("mask", mask, persistent=False)  # (N, N), true if a query must not see a key
        self.register_buffer("sinusoids", sinusoids, persistent=False)  # (R, D)


class SelfAttention(nn.Module):
    """Attention of tokens to each other and, in the decoder-only model, to their layer's memory.

    Positions are simplified (Eqs. 2-4) or Transformer-XL's (Eq. 1), which has no biases on query, key and value.
    """

    def __init__(self, config: Config, causal: bool):
        super().__init__()
        simplified, inner = config.positions == "simplified", config.heads * config.head_width
        self.heads, self.dropout = config.heads, config.dropout
        self.norm = LayerNorm(config.width)
        self.memory_norm = None if config.encoder_layers else LayerNorm(config.width)
        self.query = parameter(inner, config.width)  # (HE, D)
        self.query_bias = parameter(inner) if simplified else None  # (HE,)
        self.key = parameter(inner, config.width)  # (HE, D)
        self.key_bias = parameter(inner) if simplified else None  # (HE,)
        self.value = parameter(inner, config.width)  # (HE, D)
        self.value_bias = parameter(inner) if simplified else None  # (HE,)
        self.positions = parameter(len(config.distances(causal)), config.head_width) if simplified else None  # (R, E)
        self.distance_key = None if simplified else parameter(inner, config.width)  # (HE, D), W_r
        self.content_bias = None if simplified else parameter(config.heads, config.head_width)  # (H, E), u
        self.distance_bias = None if simplified else parameter(config.heads, config.head_width)  # (H, E), v
        self.output = parameter(config.width, inner)  # (D, HE)
        self.output_bias = parameter(config.width)  # (D,)

    def forward(
        self,
        x: torch.Tensor,
        distances: Distances,
        memory: torch.Tensor | None = None,
        readable: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """(B, N, D) from x (B, N, D) and memory (B, S, D); readable (B, N) is false for padding of the encoder's x."""
        normal = self.norm(x)
        query, (key, value) = self.project_query(normal), self.key_value(normal)
        if memory is not None:
            slots = self.key_value(self.memory_norm(memory))
            key, value = (torch.cat(pair, 2) for pair in zip(slots, (key, value), strict=True))  # (B, H, S + N, E)
        mask = distances.mask if readable is None else ~readable[:, None, None]
        return self.attend(query, key, value, distances.index, mask, distances.sinusoids)

    def project_query(self, normal: torch.Tensor) -> torch.Tensor:
        """Query (B, H, n, E) of normalised rows (B, n, D)."""
        return project(normal, self.heads, self.query, self.query_bias)

    def key_value(self, normal: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Key and value (B, H, n, E) of normalised rows (B, n, D). The key's bias gets no gradient: softmax cancels it."""
        key_bias = None if self.key_bias is None else self.key_bias.detach()
        return project(normal, self.heads, self.key, key_bias), project(normal, self.heads, self.value, self.value_bias)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        index: torch.Tensor,
        mask: torch.Tensor | None,
        sinusoids: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention with positions, then the output matrix; (B, n, D). index (n, K) is the row of distances of each pair."""
        rate = self.dropout if self.training else 0.0
        if sinusoids is None:
            out = simplified_attention(query, key, value, self.positions, index, mask, rate)
        else:
            [distance_key] = split_heads(functional.linear(sinusoids, self.distance_key)[None], self.heads, 1)  # (1, H, R, E)
            biases = (self.content_bias, self.distance_bias)
            out = transformer_xl_attention(query, key, value, distance_key[0], *biases, index, mask, rate)
        out = functional.linear(merge_heads(out), self.output, self.output_bias)
        return functional.dropout(out, self.dropout, self.training)


class CrossAttention(nn.Module):
    """Attention of tokens to memory or to an encoded segment, without positions (Figure 2b)."""

    def __init__(self, config: Config, of_memory: bool):
        super().__init__()
        inner = config.heads * config.head_width
        self.heads, self.dropout = config.heads, config.dropout
        self.norm = LayerNorm(config.width)
        self.memory_norm = LayerNorm(config.width) if of_memory else None  # the encoder's output is already normalised
        self.query = parameter(inner, config.width)  # (HE, D)
        self.query_bias = parameter(inner)  # (HE,)
        self.key = parameter(inner, config.width)  # (HE, D)
        self.key_bias = parameter(inner)  # (HE,)
        self.value = parameter(inner, config.width)  # (HE, D)
        self.value_bias = parameter(inner)  # (HE,)
        self.output = parameter(config.width, inner)  # (D, HE)
        self.output_bias = parameter(config.width)  # (D,)

    def forward(self, x: torch.Tensor, source: torch.Tensor, readable: torch.Tensor | None = None) -> torch.Tensor:
        """(B, N, D) from x (B, N, D) and source (B, K, D); readable (B, K) is false for padding."""
        return self.attend(x, *self.key_value(source), readable)

    def key_value(self, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Key and value (B, H, K, E) of source (B, K, D). The key's bias gets no gradient: softmax cancels it."""
        if self.memory_norm is not None:
            source = self.memory_norm(source)
        key = project(source, self.heads, self.key, self.key_bias.detach())
        return key, project(source, self.heads, self.value, self.value_bias)

    def attend(
        self, x: torch.Tensor, key: torch.Tensor, value: torch.Tensor, readable: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The same as forward, from the source's key and value (B, H, K, E)."""
        query = project(self.norm(x), self.heads, self.query, self.query_bias)
        mask = None if readable is None else ~readable[:, None, None]  # (B, 1, 1, K)
        out = content_attention(query, key, value, mask, self.dropout if self.training else 0.0)
        out = functional.linear(merge_heads(out), self.output, self.output_bias)
        return functional.dropout(out, self.dropout, self.training)


class Writer(nn.Module):
    """Slot attention (Figure 2c): each slot attends to [itself | encoded], not to other slots; its own value is the slot."""

    def __init__(self, config: Config):
        super().__init__()
        inner = config.heads * config.head_width
        self.heads = config.heads
        self.memory_norm = LayerNorm(config.width)
        self.norm = LayerNorm(config.width)
        self.query = parameter(inner, config.width)  # (HE, D)
        self.query_bias = parameter(inner)  # (HE,)
        self.key = parameter(inner, config.width)  # (HE, D)
        self.key_bias = parameter(inner)  # (HE,)
        self.value = parameter(config.width, config.width)  # (D, D)
        self.value_bias = parameter(config.width)  # (D,)
        self.retention = parameter(config.heads)  # (H,), bias on a slot's score for itself

    def forward(self, memory: torch.Tensor, encoded: torch.Tensor, readable: torch.Tensor | None = None) -> torch.Tensor:
        """The next memory (B, S, D) from memory (B, S, D) and encoded (B, N, D); readable (B, N) is false for padding."""
        normal, source, key_bias = self.memory_norm(memory), self.norm(encoded), self.key_bias.detach()
        query = project(normal, self.heads, self.query, self.query_bias)  # (B, H, S, E)
        own_key = project(normal, self.heads, self.key, key_bias)  # (B, H, S, E)
        key = project(source, self.heads, self.key, key_bias)  # (B, H, N, E)
        value = project(source, self.heads, self.value, self.value_bias)  # (B, H, N, D/H)
        query = query * query.shape[-1] ** -0.5
        own = (query * own_key).sum(-1, keepdim=True) + self.retention[:, None, None]  # (B, H, S, 1)
        others = query @ key.transpose(-1, -2)  # (B, H, S, N)
        if readable is not None:
            others = others.masked_fill(~readable[:, None, None], -math.inf)
        weights = at_least_float32(torch.cat([own, others], -1)).softmax(-1)
        [slots] = split_heads(memory, self.heads, 1)  # (B, H, S, D/H)
        return merge_heads(weights[..., :1] * slots + weights[..., 1:].to(value.dtype) @ value)


class FeedForward(nn.Module):
    """The last part of every layer. Layers inherit it, because its parameters have the layer's names, and declare it last."""

    def declare_feed_forward(self, config: Config) -> None:
        self.dropout = config.dropout
        self.mlp_norm = LayerNorm(config.width)
        self.mlp_hidden = parameter(config.feed_forward, config.width)  # (F, D)
        self.mlp_hidden_bias = parameter(config.feed_forward)  # (F,)
        self.mlp_output = parameter(config.width, config.feed_forward)  # (D, F)
        self.mlp_output_bias = parameter(config.width)  # (D,)

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, N, D) from x (B, N, D)."""
        hidden = torch.relu(functional.linear(self.mlp_norm(x), self.mlp_hidden, self.mlp_hidden_bias))  # (B, N, F)
        return functional.dropout(functional.linear(hidden, self.mlp_output, self.mlp_output_bias), self.dropout, self.training)


class EncoderLayer(FeedForward):
    """Tokens attend to each other, then to the memory (Figure 2a)."""

    def __init__(self, config: Config):
        super().__init__()
        self.attention = SelfAttention(config, causal=False)
        self.read = CrossAttention(config, of_memory=True)
        self.declare_feed_forward(config)

    def forward(self, x: torch.Tensor, memory: torch.Tensor, readable: torch.Tensor | None, distances: Distances) -> torch.Tensor:
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
        self, x: torch.Tensor, encoded: torch.Tensor, readable: torch.Tensor | None, distances: Distances
    ) -> torch.Tensor:
        x = x + self.attention(x, distances)
        x = x + self.cross(x, encoded, readable)
        return x + self.feed_forward(x)


class MemoryLayer(FeedForward):
    """Tokens attend to this layer's memory and to earlier tokens; the output is written to the memory (Figure 1b)."""

    def __init__(self, config: Config):
        super().__init__()
        self.attention = SelfAttention(config, causal=True)
        self.writer = Writer(config)
        self.declare_feed_forward(config)

    def forward(self, x: torch.Tensor, memory: torch.Tensor, distances: Distances) -> tuple[torch.Tensor, torch.Tensor]:
        x = x + self.attention(x, distances, memory)
        x = x + self.feed_forward(x)
        return x, self.writer(memory, x)


class Encoder(nn.Module):
    """Encodes a segment together with the memory (Eq. 5)."""

    def __init__(self, config: Config):
        super().__init__()
        self.distances = Distances(config, causal=False)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.encoder_layers))
        self.norm = LayerNorm(config.width)

    def forward(self, x: torch.Tensor, memory: torch.Tensor, readable: torch.Tensor | None) -> torch.Tensor:
        """Encoded (B, N, D) from embeddings x (B, N, D) and memory (B, S, D)."""
        for layer in self.layers:
            x = layer(x, memory, readable, self.distances)
        return self.norm(x)


class Decoder(nn.Module):
    """Predicts a segment from the encoded previous one (Eq. 6)."""

    def __init__(self, config: Config):
        super().__init__()
        self.distances = Distances(config, causal=True)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.decoder_layers))
        self.norm = LayerNorm(config.width)

    def forward(self, x: torch.Tensor, encoded: torch.Tensor, readable: torch.Tensor | None) -> torch.Tensor:
        """Final hidden states (B, N + 1, D) from embeddings x (B, N + 1, D) and encoded (B, N, D)."""
        for layer in self.layers:
            x = layer(x, encoded, readable, self.distances)
        return self.norm(x)


class MemoryDecoder(nn.Module):
    """The decoder-only model's layers (Figure 1b), each with its own memory."""

    def __init__(self, config: Config):
        super().__init__()
        self.distances = Distances(config, causal=True)
        self.layers = nn.ModuleList(MemoryLayer(config) for _ in range(config.decoder_layers))
        self.norm = LayerNorm(config.width)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Final hidden states (B, N, D) and the next memory (B, L, S, D) from embeddings x (B, N, D) and memory."""
        memories = []
        for layer, own in zip(self.layers, memory.unbind(1), strict=True):
            x, new = layer(x, own, self.distances)
            memories.append(new)
        return self.norm(x), torch.stack(memories, 1)


class Memformer(nn.Module):
    """The model. `config` is the reference's; the initial weights are those that the reference draws from `seed`."""

    Config = Config

    def __init__(self, config: Config, seed: int = 0):
        super().__init__()
        self.config = config
        specials = len(SPECIALS) if config.encoder_layers else 0
        self.embedding = parameter(config.vocabulary + specials, config.width)  # (V + 5, D), decoder-only (V, D)
        self.initial_memory = parameter(config.memories, config.slots, config.width)  # (1 or L, S, D)
        self.encoder = Encoder(config) if config.encoder_layers else None
        self.writer = Writer(config) if config.encoder_layers else None
        self.decoder = Decoder(config) if config.encoder_layers else MemoryDecoder(config)
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

    def auxiliary_parameters(self) -> list[nn.Parameter]:
        """An empty list: the model has no auxiliary loss."""
        return []

    def state_shapes(self, batch: int) -> State:
        """The shape of each field of a State of `batch` lanes; raises ValueError if batch is below 1."""
        c = self.config
        batch = check_lanes(batch)
        return State((batch, c.memories, c.slots, c.width), (batch, c.segment if c.encoder_layers else 0))

    def initial_state(self, batch: int) -> State:
        """The state at a document's start: learned slots and a segment of begin tokens; raises ValueError if batch is below 1."""
        shapes = self.state_shapes(batch)
        previous = torch.full(shapes.previous, self.config.special("begin"), device=self.embedding.device)
        return State(at_least_float32(self.initial_memory.expand(shapes.memory)), previous)

    def forward(self, tokens: torch.Tensor, state: State, task: tuple | None = None) -> Output:
        """Read a segment of tokens (B, N); Output.logits (B, N, V) predict the next token, or what a Task asks for.

        Raises ValueError if N is not config.segment, if the state does not fit this model and B lanes, or if the decoder-only
        model is given a task.
        """
        return with_logits(self, self.read(tokens, state, task))

    def read(self, tokens: torch.Tensor, state: State, task: tuple | None = None) -> Reading:
        """The same as forward, with the rows (B, N, D) that the output matrix takes instead of logits."""
        self._check(tokens, state, task)
        if self.encoder is None:
            hidden, memory = self.decoder(self._embed(tokens), state.memory)
            return Reading(self._output_rows(hidden), State(memory, state.previous), {})
        encoded, memory, readable = self._encode(state, task)
        kind, prompt = (0, tokens) if task is None else (task.kind[:, None], task.prompt)
        first = tokens.new_full((len(tokens), 1), self.config.special("continuation")) + kind  # the task's token
        hidden = self.decoder(self._embed(torch.cat([first, prompt], 1)), encoded, readable)
        return Reading(self._output_rows(self._predicting(hidden, kind)), State(memory, tokens), {})

    def output_matrix(self) -> torch.Tensor:
        """(V, D), the vocabulary's rows of the embedding; special tokens are never predicted."""
        return self.embedding[: self.config.vocabulary]

    def advance(self, tokens: torch.Tensor, state: State, task: tuple | None = None) -> State:
        """The state after tokens (B, N), without decoder and logits; raises ValueError as forward does."""
        self._check(tokens, state, task)
        if self.encoder is None:
            return State(self.decoder(self._embed(tokens), state.memory)[1], state.previous)
        return State(self._encode(state, task)[1], tokens)

    def _check(self, tokens, state, task):
        c = self.config
        if tokens.shape[1] != c.segment:
            raise ValueError(f"a segment of {tokens.shape[1]} tokens is not one of {c.segment}; pad it")
        if task is not None and c.encoder_layers == 0:
            raise ValueError("the decoder-only model (encoder_layers 0) has no tasks but continuation; leave task out")
        check_state(state, self.state_shapes(len(tokens)))

    def _embed(self, tokens):
        return look_up(tokens, self.embedding)

    def _output_rows(self, hidden):
        return hidden * self.config.width**-0.5

    def _predicting(self, hidden, kind):
        """The N of the decoder's N + 1 rows that predict: the last N in continuation, the first N in the other tasks."""
        if isinstance(kind, int):
            return hidden[:, 1:]
        return torch.where((kind == 0)[..., None], hidden[:, 1:], hidden[:, :-1])

    def _encode(self, state, task):
        """Eq. 5: encoded (B, N, D), the next memory (B, 1, S, D), and readable (B, N), false for padding, or None."""
        reading, readable = (state.previous, None) if task is None else (task.reading, task.readable)
        memory, x = state.memory[:, 0], self._embed(reading)
        encoded = self.encoder(x, memory, readable)
        return encoded, self.writer(memory, encoded, readable)[:, None], readable

    # The methods below are only for generation.

    step = protocol.step

    def stream(self, state: State) -> Stream:
        """The Stream at a segment's start, with what all tokens of the segment attend to."""
        c, layers, new = self.config, self.decoder.layers, self.embedding.new_zeros
        constants = self._constants([layer.attention for layer in layers])
        empty = new(len(state.memory), c.heads, len(self.decoder.distances.index), c.head_width)
        if self.encoder is None:
            pairs = zip([layer.attention for layer in layers], state.memory.unbind(1), strict=True)
            slots = [attention.key_value(attention.memory_norm(memory)) for attention, memory in pairs]
            keys, values = (tuple(torch.cat([pair[part], empty], 2) for pair in slots) for part in (0, 1))
            hidden = tuple(new(len(state.memory), c.segment, c.width) for _ in layers)
            return Stream(state, Rows(*constants, keys, values, (), (), hidden, (), ()), 0)
        encoded, memory, _ = self._encode(state, None)
        cross_keys, cross_values = zip(*(layer.cross.key_value(encoded) for layer in layers), strict=True)
        keys, values = (tuple(empty.clone() for _ in layers) for _ in range(2))
        rows = Rows(*constants, keys, values, cross_keys, cross_values, (), memory, torch.zeros_like(state.previous))
        first = state.previous.new_full((len(state.previous),), c.special("continuation"))
        self._decode(first, first.new_zeros(1), rows)
        return Stream(state, rows, 0)

    def _constants(self, attentions):
        """The first three fields of Rows: weights, biases and distance keys."""
        weights = tuple(torch.cat([each.query, each.key, each.value]) for each in attentions)
        sinusoids = self.decoder.distances.sinusoids
        if sinusoids is None:
            return weights, tuple(torch.cat([each.query_bias, each.key_bias, each.value_bias]) for each in attentions), ()
        return weights, (), tuple(project(sinusoids[None], self.config.heads, each.distance_key, None)[0] for each in attentions)

    def read_token(self, token: torch.Tensor, position: torch.Tensor, rows: "Rows") -> torch.Tensor:
        """Logits (B, V) after token (B,) at position (1,) of its segment; writes what later tokens read of it into rows."""
        if self.encoder is not None:
            rows.tokens.index_copy_(1, position, token[:, None])
            position = position + 1  # the task's token is the first
        return logits_of(self, self._output_rows(self._decode(token, position, rows)))[:, 0]

    def _decode(self, token, place, rows):
        """The final hidden state (B, 1, D) of a token (B,) with the number `place` (1,) among those that the decoder reads."""
        distances = self.decoder.distances
        index, unread = (table.index_select(0, place) for table in (distances.index, distances.mask))  # (1, N')
        x = functional.embedding(token[:, None], self.embedding)
        for number, layer in enumerate(self.decoder.layers):
            x = x + self._attend(number, x, place, index, unread, rows)
            if self.encoder is not None:
                x = x + layer.cross.attend(x, rows.cross_keys[number], rows.cross_values[number])
            x = x + layer.feed_forward(x)
            if self.encoder is None:
                rows.hidden[number].index_copy_(1, place, x)
        return self.decoder.norm(x)

    def _attend(self, number, x, place, index, unread, rows):
        """A layer's self-attention (B, 1, D) of a token x (B, 1, D); index and unread (1, N') are for all keys with positions."""
        attention = self.decoder.layers[number].attention
        projected = functional.linear(attention.norm(x), rows.weights[number], rows.biases[number] if rows.biases else None)
        query, *own = split_heads(projected, attention.heads, 3)  # (B, H, 1, E)
        slots = rows.keys[number].shape[2] - index.shape[1]
        pairs = zip((rows.keys[number], rows.values[number]), own, strict=True)
        keys, values = (seen.index_copy_(2, place + slots, row) for seen, row in pairs)
        if rows.distance_keys:
            biases = (attention.content_bias, attention.distance_bias)
            out = transformer_xl_attention(query, keys, values, rows.distance_keys[number], *biases, index, unread)
        else:
            out = simplified_attention(query, keys, values, attention.positions, index, unread)
        return functional.linear(merge_heads(out), attention.output, attention.output_bias)

    def next_stream(self, stream: Stream) -> Stream:
        """The Stream after one more token. After a segment's last token the next segment begins."""
        if stream.read + 1 < self.config.segment:
            return stream._replace(read=stream.read + 1)
        return self.stream(self._close_segment(stream))

    def _close_segment(self, stream):
        """The State after a complete segment."""
        rows = stream.rows
        if self.encoder is not None:
            return State(rows.memory.clone(), rows.tokens.clone())  # the rows are overwritten
        pairs = zip(self.decoder.layers, stream.state.memory.unbind(1), rows.hidden, strict=True)
        return State(torch.stack([layer.writer(memory, hidden) for layer, memory, hidden in pairs], 1), stream.state.previous)


class Rows(NamedTuple):
    """The rows of a Stream: what a segment's tokens read, and what they write for later tokens and the memory."""

    weights: tuple  # per decoder layer (3HE, D), of query, key and value
    biases: tuple  # per decoder layer (3HE,); empty with Transformer-XL's positions
    distance_keys: tuple  # per decoder layer (H, R, E), W_r R; empty with simplified positions
    keys: tuple  # per decoder layer (B, H, S + N, E) or (B, H, 1 + N, E): of memory or the task's token, and the tokens
    values: tuple
    cross_keys: tuple  # per decoder layer (B, H, N, E), of the encoded previous segment; decoder-only empty
    cross_values: tuple
    hidden: tuple  # decoder-only, per layer (B, N, D): its outputs, which are written to its memory
    memory: torch.Tensor | tuple  # (B, 1, S, D), the next State's; decoder-only empty
    tokens: torch.Tensor | tuple  # (B, N), the next State's; decoder-only empty
