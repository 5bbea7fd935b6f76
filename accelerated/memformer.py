"""Memformer in PyTorch: the fast version of reference/memformer.py.

Its memory is S slots, vectors that are passed from segment to segment. A segment takes three steps:

    encode    an encoder reads the previous segment's tokens, and the slots (Eq. 5)
    write     each slot attends to itself and to what was encoded: the next slots (Figure 2c)
    decode    a decoder predicts this segment's tokens, from earlier ones and from what was
              encoded (Eq. 6)

The decoder-only model (Figure 1b) has no encoder, and slots in each of its layers. A layer reads
its slots beside the tokens, and its output is written to them.

Config, parameter names, shapes and initial values are the reference's. B lanes, N tokens, D width,
H heads of width E, F feed-forward width, S slots, L layers, R distances, K keys, V vocabulary.
"""

from collections.abc import Callable
from typing import Generic, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from accelerated.attention.content import causal_mask, content_attention
from accelerated.attention.heads import (
    Declared,
    LayerClass,
    LayerNorm,
    Layers,
    at_least_float32,
    look_up,
    merge_heads,
    parameter,
    project,
    region,
)
from accelerated.attention.relative_shift import distance_sinusoids
from accelerated.attention.signed_distance import (
    far_to_near,
    simplified_attention,
    transformer_xl_attention,
)
from accelerated.attention.slots import Writer
from accelerated.data.tasks import Task
from accelerated.protocol import Model, Reading, Recomputable, check_lanes, initialise
from reference.memformer import SPECIALS, Config, init_params


class State(NamedTuple):
    """What a segment passes to the next one; axis 0 is the lane (a row of the batch)."""

    memory: Tensor  # (B, 1, S, D), decoder-only (B, L, S, D), in float32 or better
    previous: Tensor  # (B, N) token ids, decoder-only (B, 0)


class Attention(Declared):
    """What all attentions share: a norm, projections of rows to heads, and the projection back."""

    def __init__(self, config: Config):
        super().__init__()
        self.heads = config.heads
        self.dropout_rate = config.dropout
        self.norm = LayerNorm(config.width)

    def declare_projections(self, config: Config, biases: bool) -> None:
        """Parameters of query, key and value."""
        inner = config.heads * config.head_width
        self.query = parameter(inner, config.width)  # (HE, D)
        self.query_bias = parameter(inner) if biases else None  # (HE,)
        self.key = parameter(inner, config.width)  # (HE, D)
        self.key_bias = parameter(inner) if biases else None  # (HE,), without gradient: see project
        self.value = parameter(inner, config.width)  # (HE, D)
        self.value_bias = parameter(inner) if biases else None  # (HE,)

    def declare_output(self, config: Config) -> None:
        """Parameters of the projection back. They are declared last, as in the reference."""
        self.output = parameter(config.width, config.heads * config.head_width)  # (D, HE)
        self.output_bias = parameter(config.width)  # (D,)

    def project(self, normal: Tensor, *names: str) -> tuple[Tensor, ...]:
        """Query, key or value, as `names` say, by one product: (B, n, D) to (B, H, n, E) each."""
        # A key's bias adds the same to all scores of a query, and softmax cancels it
        key_bias = None if self.key_bias is None else self.key_bias.detach()
        weights = {"query": self.query, "key": self.key, "value": self.value}
        biases = {"query": self.query_bias, "key": key_bias, "value": self.value_bias}
        own_weights = [weights[name] for name in names]
        own_biases = [biases[name] for name in names]
        return project(normal, self.heads, own_weights, own_biases)

    def project_back(self, attended: Tensor) -> Tensor:
        """(B, n, D) of what the heads attended to (B, H, n, E)."""
        out = functional.linear(merge_heads(attended), self.output, self.output_bias)
        return functional.dropout(out, self.dropout_rate, self.training)

    @property
    def attention_dropout(self) -> float:
        """The rate at which weights of attention are dropped."""
        return self.dropout_rate if self.training else 0.0


class Distances(nn.Module):
    """What all self-attentions of a stack know of the distances i - j from query i to key j."""

    mask: Tensor | None  # (N, N), true if a query must not see a key; the encoder has none
    rows: Tensor  # from far to near: one-hot rows of a table, (2N - 1, R), or sinusoids (R, D)

    def __init__(self, config: Config, causal: bool):
        super().__init__()
        self.length = config.segment
        if causal and config.encoder_layers:
            self.length += 1  # the decoder reads the task's token first
        distances = config.distances(causal)
        lowest = int(distances[0])
        highest = int(distances[-1])
        if config.positions == "simplified":
            rows = far_to_near(lowest, highest, self.length)
        else:
            rows = distance_sinusoids(highest - lowest + 1, config.width, lowest)
        mask = causal_mask(self.length, self.length) if causal else None
        self.register_buffer("mask", mask, persistent=False)
        self.register_buffer("rows", rows, persistent=False)


class SelfAttention(Attention):
    """Attention of tokens to each other and, in the decoder-only model, to their layer's memory.

    A key knows how far it is from a query. Simplified positions (Eqs. 2-4) add a row for each
    distance to keys and values. Transformer-XL's (Eq. 1) are sinusoids; query, key and value then
    have no biases. Slots have no positions.
    """

    memory_norm: LayerNorm  # of the decoder-only model

    def __init__(self, config: Config, causal: bool):
        super().__init__(config)
        self.simplified = config.positions == "simplified"
        if config.encoder_layers == 0:
            self.memory_norm = LayerNorm(config.width)
        self.declare_projections(config, biases=self.simplified)
        if self.simplified:
            self.positions = parameter(len(config.distances(causal)), config.head_width)  # (R, E)
        else:
            inner = config.heads * config.head_width
            self.distance_key = parameter(inner, config.width)  # (HE, D), W_r
            self.content_bias = parameter(config.heads, config.head_width)  # (H, E), u
            self.distance_bias = parameter(config.heads, config.head_width)  # (H, E), v
        self.declare_output(config)

    def forward(
        self,
        x: Tensor,
        distances: Distances,
        memory: Tensor | None = None,
        readable: Tensor | None = None,
    ) -> Tensor:
        """(B, N, D) from x (B, N, D), memory (B, S, D); readable (B, N) is false for padding."""
        query, key, value = self.project(self.norm(x), "query", "key", "value")
        if memory is not None:
            slot_key, slot_value = self.project(self.memory_norm(memory), "key", "value")
            key = torch.cat([slot_key, key], 2)  # (B, H, S + N, E)
            value = torch.cat([slot_value, value], 2)
        mask = distances.mask if readable is None else ~readable[:, None, None]  # (B, 1, 1, N)
        rows = self.position_rows(distances)
        return self.project_back(self.attend(query, key, value, rows, distances.length, mask))

    def position_rows(self, distances: Distances) -> Tensor:
        """What each distance adds, from far to near: rows of R, (2N - 1, E), or W_r R."""
        if self.simplified:
            return distances.rows @ self.positions
        [by_distance] = project(distances.rows[None], self.heads, [self.distance_key])
        return by_distance[0]  # (H, R, E)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rows: Tensor,
        count: int,
        mask: Tensor | None,
    ) -> Tensor:
        """What the heads attend to, (B, H, n, E).

        The last `count` keys have positions: query i and key j take row n - 1 - i + j of `rows`,
        which are those of position_rows.
        """
        dropout = self.attention_dropout
        if self.simplified:
            return simplified_attention(query, key, value, rows, mask, dropout)
        biases = (self.content_bias, self.distance_bias)
        return transformer_xl_attention(query, key, value, rows, *biases, count, mask, dropout)


class CrossAttention(Attention):
    """Attention of tokens to memory or to an encoded segment, without positions (Figure 2b)."""

    def __init__(self, config: Config, of_memory: bool):
        super().__init__(config)
        # What was encoded is already normalised
        self.memory_norm = LayerNorm(config.width) if of_memory else None
        self.declare_projections(config, biases=True)
        self.declare_output(config)

    def forward(self, x: Tensor, source: Tensor, readable: Tensor | None = None) -> Tensor:
        """(B, N, D) from x (B, N, D) and source (B, K, D); readable (B, K) is false for padding."""
        key, value = self.source_key_value(source)
        return self.attend(x, key, value, readable)

    def source_key_value(self, source: Tensor) -> tuple[Tensor, ...]:
        """Key and value (B, H, K, E) of source (B, K, D)."""
        if self.memory_norm is not None:
            source = self.memory_norm(source)
        return self.project(source, "key", "value")

    def attend(
        self, x: Tensor, key: Tensor, value: Tensor, readable: Tensor | None = None
    ) -> Tensor:
        """The same as forward, from the source's key and value (B, H, K, E)."""
        mask = None if readable is None else ~readable[:, None, None]  # (B, 1, 1, K)
        [query] = self.project(self.norm(x), "query")
        return self.project_back(content_attention(query, key, value, mask, self.attention_dropout))


class FeedForward(Recomputable):
    """The last part of every layer. Layers inherit it: its parameters are the layer's own."""

    def declare_feed_forward(self, config: Config) -> None:
        """Parameters of the feed-forward. They are declared last, as in the reference."""
        self.dropout_rate = config.dropout
        self.mlp_norm = LayerNorm(config.width)
        self.mlp_hidden = parameter(config.feed_forward, config.width)  # (F, D)
        self.mlp_hidden_bias = parameter(config.feed_forward)  # (F,)
        self.mlp_output = parameter(config.width, config.feed_forward)  # (D, F)
        self.mlp_output_bias = parameter(config.width)  # (D,)

    def feed_forward(self, x: Tensor) -> Tensor:
        """(B, N, D) from x (B, N, D)."""
        hidden = functional.linear(self.mlp_norm(x), self.mlp_hidden, self.mlp_hidden_bias)
        hidden = torch.relu(hidden)  # (B, N, F)
        out = functional.linear(hidden, self.mlp_output, self.mlp_output_bias)
        return functional.dropout(out, self.dropout_rate, self.training)


class EncoderLayer(FeedForward):
    """Tokens attend to each other, then to the memory (Figure 2a)."""

    def __init__(self, config: Config):
        super().__init__()
        self.attention = SelfAttention(config, causal=False)
        self.read = CrossAttention(config, of_memory=True)
        self.declare_feed_forward(config)

    @region
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

    @region
    def forward(
        self, x: Tensor, encoded: Tensor, readable: Tensor | None, distances: Distances
    ) -> Tensor:
        x = x + self.attention(x, distances)
        x = x + self.cross(x, encoded, readable)
        return x + self.feed_forward(x)


class MemoryLayer(FeedForward):
    """Tokens attend to memory and to earlier tokens; the output is written to it (Figure 1b)."""

    def __init__(self, config: Config):
        super().__init__()
        self.attention = SelfAttention(config, causal=True)
        self.writer = Writer(config.width, config.heads, config.head_width, config.slot_value)
        self.declare_feed_forward(config)

    @region
    def forward(self, x: Tensor, memory: Tensor, distances: Distances) -> tuple[Tensor, Tensor]:
        x = x + self.attention(x, distances, memory)
        x = x + self.feed_forward(x)
        return x, self.writer(memory, x)


class Stack(nn.Module, Generic[LayerClass]):
    """The layers of the encoder (Eq. 5) or of a decoder (Eq. 6), and a norm after the last one."""

    def __init__(
        self, config: Config, layer: Callable[[Config], LayerClass], count: int, causal: bool
    ):
        super().__init__()
        self.distances = Distances(config, causal)
        self.layers = Layers(layer(config) for _ in range(count))
        self.norm = LayerNorm(config.width)

    def forward(self, x: Tensor, source: Tensor, readable: Tensor | None) -> Tensor:
        """(B, N, D) of x (B, N, D); source is memory (B, S, D) or what was encoded (B, N, D)."""
        for layer in self.layers:
            x = layer(x, source, readable, self.distances)
        return self.norm(x)


class MemoryStack(Stack[MemoryLayer]):
    """The layers of the decoder-only model (Figure 1b), each with its own memory."""

    def forward(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states (B, N, D) and the next memory (B, L, S, D), from x (B, N, D) and memory."""
        memories = []
        for layer, slots in zip(self.layers, memory.unbind(1), strict=True):
            x, slots = layer(x, slots, self.distances)
            memories.append(slots)
        return self.norm(x), torch.stack(memories, 1)


class Memformer(Model):
    """The model: an encoder-decoder, or decoder-only if the config has no encoder layers."""

    Config = Config
    state_type = State
    config: Config
    encoder: Stack[EncoderLayer]  # of the encoder-decoder model alone, as the writer
    writer: Writer
    decoder: Stack[DecoderLayer] | MemoryStack

    def __init__(self, config: Config, seed: int = 0):
        super().__init__(config)
        specials = 0 if self.decoder_only else len(SPECIALS)
        self.embedding = parameter(config.vocabulary + specials, config.width)  # (V or V + 5, D)
        memory = (config.memories, config.slots, config.width)
        biased = config.slot_normalization == "biased"
        self.slot_bias = parameter(*memory) if biased else None  # (1 or L, S, D), v_bias
        self.initial_memory = None if biased else parameter(*memory)  # (1 or L, S, D)
        if self.decoder_only:
            self.decoder = MemoryStack(config, MemoryLayer, config.decoder_layers, causal=True)
        else:
            self.encoder = Stack(config, EncoderLayer, config.encoder_layers, causal=False)
            self.writer = Writer(config.width, config.heads, config.head_width, config.slot_value)
            self.decoder = Stack(config, DecoderLayer, config.decoder_layers, causal=True)
        initialise(self, init_params, seed)

    @property
    def decoder_only(self) -> bool:
        """Whether the model has no encoder."""
        return self.config.encoder_layers == 0

    def describe(self) -> str:
        """One line on how far back the model can look; it has no limit (section 2.5)."""
        slots = f"{self.config.slots} memory slots"
        kind = "decoder-only, in each of its layers" if self.decoder_only else "encoder-decoder"
        what = f"carry what was read over any number of segments of {self.config.segment}"
        return f"{slots} ({kind}) {what}"

    @property
    def attention_reach(self) -> int:
        """How many tokens back a prediction can look by attention only, without memory."""
        return self.config.segment if self.decoder_only else 2 * self.config.segment

    def state_shapes(self, batch: int) -> dict[str, tuple[int, ...]]:
        """The shape of each field of a State; raises ValueError if batch is below 1."""
        c = self.config
        memory = (check_lanes(batch), c.memories, c.slots, c.width)
        previous = (batch, 0 if self.decoder_only else c.segment)
        return {"memory": memory, "previous": previous}

    def initial_state(self, batch: int) -> State:
        """The state at a document's start: learned slots and a segment of begin tokens."""
        shapes = self.state_shapes(batch)
        begin = self.config.special("begin")
        memory = self.embedding.new_zeros(shapes["memory"])  # read as v_bias / ||v_bias||
        if self.initial_memory is not None:
            memory = self.initial_memory.expand(shapes["memory"])
        previous = torch.full(shapes["previous"], begin, device=memory.device)
        return State(at_least_float32(memory), previous)

    def slots(self, state: State) -> Tensor:
        """The slots that a segment reads (B, 1 or L, S, D): what was written, or normalised."""
        if self.slot_bias is None:
            return state.memory
        return functional.normalize(state.memory + self.slot_bias, dim=-1)

    def read(self, tokens: Tensor, state: State, task: Task | None = None) -> Reading:
        """Read a segment of tokens (B, N); `hidden` (B, N, D) predicts the next tokens.

        With a Task it predicts what the Task asks for. Raises ValueError if N is not
        config.segment, if the state does not fit, or if the decoder-only model is given a task.
        """
        self.check(tokens, state, task)
        if self.decoder_only:
            x = look_up(tokens, self.embedding)  # (B, N, D)
            hidden, memory = self.decoder(x, self.slots(state))
            return Reading(self.scaled(hidden), State(memory, state.previous), {})

        encoded, memory = self.encode(state, task)
        hidden = self.decode(tokens, encoded, task)
        return Reading(self.scaled(hidden), State(memory, tokens), {})

    def advance(self, tokens: Tensor, state: State, task: Task | None = None) -> NamedTuple:
        """The state after tokens (B, N), by encoder and writer or the decoder-only layers."""
        if self.decoder_only:
            return self.read(tokens, state, task).state
        self.check(tokens, state, task)
        _, memory = self.encode(state, task)
        return State(memory, tokens)

    def encode(self, state: State, task: Task | None) -> tuple[Tensor, Tensor]:
        """Eq. 5: encoded (B, N, D) and the next memory (B, 1, S, D)."""
        reading = state.previous if task is None else task.reading
        readable = None if task is None else task.readable  # (B, N), false for padding
        x = look_up(reading, self.embedding)  # (B, N, D)
        memory = self.slots(state)[:, 0]  # (B, S, D)
        encoded = self.encoder(x, memory, readable)
        next_memory = self.writer(memory, encoded, readable)
        return encoded, next_memory[:, None]

    def decode(self, tokens: Tensor, encoded: Tensor, task: Task | None) -> Tensor:
        """Eq. 6: hidden states (B, N, D) that predict. The decoder reads the task's token first.

        In continuation row i predicts token i + 1, so the last N rows count. In the other tasks
        it predicts token i of the prompt, which is read next, so the first N do.
        """
        first = tokens.new_full((len(tokens), 1), self.config.special("continuation"))
        if task is None:
            x = look_up(torch.cat([first, tokens], 1), self.embedding)  # (B, N + 1, D)
            return self.decoder(x, encoded, None)[:, 1:]

        kind = task.kind[:, None]  # (B, 1)
        x = look_up(torch.cat([first + kind, task.prompt], 1), self.embedding)
        hidden = self.decoder(x, encoded, task.readable)  # (B, N + 1, D)
        return torch.where((kind == 0)[..., None], hidden[:, 1:], hidden[:, :-1])

    def scaled(self, hidden: Tensor) -> Tensor:
        """Hidden states that are ready for the output matrix, which is the embedding."""
        return hidden * self.config.width**-0.5

    def output_matrix(self) -> Tensor:
        """(V, D), the vocabulary's rows of the embedding; special tokens are never predicted."""
        return self.embedding[: self.config.vocabulary]

    def check(self, tokens: Tensor, state: State, task: Task | None) -> None:
        """Raise ValueError if the model cannot read this."""
        super().check(tokens, state)
        if task is not None and self.decoder_only:
            what = "the decoder-only model (encoder_layers 0) has no tasks but continuation"
            raise ValueError(f"{what}; leave task out")
