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
In the encoder-decoder's decoder N counts the task's token too: one more than a segment has.
"""

import math
from typing import Generic, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from accelerated.attention.content import content_attention
from accelerated.attention.heads import (
    LayerClass,
    LayerNorm,
    Layers,
    ParameterModule,
    at_least_float32,
    compilable,
    embed,
    merge_heads,
    parameter,
    project_heads,
    split_heads,
)
from accelerated.attention.relative_shift import AttentionInputs
from accelerated.attention.signed_distance import (
    Distances,
    simplified_attention,
    transformer_xl_attention,
)
from accelerated.data.config import CONTINUATION
from accelerated.data.lanes import Task
from accelerated.protocol import CheckpointableLayer, Model, Reading, check_lanes, initialise
from reference.memformer import SPECIALS, Config, init_params


class State(NamedTuple):
    """What a segment passes to the next one; axis 0 is the lane (a row of the batch)."""

    memory: Tensor  # (B, 1, S, D), decoder-only (B, L, S, D), in float32 or better
    previous: Tensor  # (B, N) token ids, decoder-only (B, 0)


class Attention(ParameterModule):
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
        self.key_bias = parameter(inner) if biases else None  # (HE,), see fixed_key_bias
        self.value = parameter(inner, config.width)  # (HE, D)
        self.value_bias = parameter(inner) if biases else None  # (HE,)

    def declare_output(self, config: Config) -> None:
        """Parameters of the projection back. They are declared last, as in the reference."""
        self.output = parameter(config.width, config.heads * config.head_width)  # (D, HE)
        self.output_bias = parameter(config.width)  # (D,)

    @property
    def fixed_key_bias(self) -> Tensor | None:
        """The key's bias without gradient: softmax cancels what is the same for all keys."""
        return None if self.key_bias is None else self.key_bias.detach()

    def query_key_value(self, normed: Tensor) -> tuple[Tensor, ...]:
        """Query, key and value (B, H, n, E) of normalised rows (B, n, D), by one product."""
        weights = [self.query, self.key, self.value]
        biases = [self.query_bias, self.fixed_key_bias, self.value_bias]
        return project_heads(normed, self.heads, weights, biases)

    def key_value(self, normed: Tensor) -> tuple[Tensor, ...]:
        """Key and value (B, H, n, E) of normalised rows (B, n, D), by one product."""
        biases = [self.fixed_key_bias, self.value_bias]
        return project_heads(normed, self.heads, [self.key, self.value], biases)

    def project_back(self, attended: Tensor) -> Tensor:
        """(B, n, D) of what the heads attended to (B, H, n, E)."""
        out = functional.linear(merge_heads(attended), self.output, self.output_bias)
        return functional.dropout(out, self.dropout_rate, self.training)


class SelfAttention(Attention):
    """Attention of tokens to each other and, in the decoder-only model, to their layer's memory.

    Positions are relative. Simplified ones (Eqs. 2-4) add a learned row for each distance to keys
    and values. Transformer-XL's (Eq. 1) are sinusoids; query, key and value then have no biases.
    Slots have no positions.
    """

    def __init__(self, config: Config, distances: Distances):
        super().__init__(config)
        self.distances = distances  # the same for all layers of a stack
        self.simplified = config.positions == "simplified"
        reads_memory = config.encoder_layers == 0
        self.memory_norm = LayerNorm(config.width) if reads_memory else None
        self.declare_projections(config, biases=self.simplified)
        if self.simplified:
            self.positions = parameter(distances.rows_count, config.head_width)  # (R, E)
        else:
            inner = config.heads * config.head_width
            self.distance_key = parameter(inner, config.width)  # (HE, D), W_r
            self.content_bias = parameter(config.heads, config.head_width)  # (H, E), u
            self.distance_bias = parameter(config.heads, config.head_width)  # (H, E), v
        self.declare_output(config)

    def forward(
        self, x: Tensor, memory: Tensor | None = None, padding: Tensor | None = None
    ) -> Tensor:
        """Attend from x (B, N, D) to x and, if given, memory (B, S, D); returns (B, N, D).

        padding (B, 1, 1, N) is true at tokens that must not be attended to.
        """
        query, key, value = self.query_key_value(self.norm(x))
        if memory is not None:
            slot_key, slot_value = self.key_value_of_memory(memory)
            key = torch.cat([slot_key, key], 2)  # (B, H, S + N, E)
            value = torch.cat([slot_value, value], 2)
        # Only the encoder's tokens may be padding, and only a decoder has later ones to hide
        masked_keys = self.distances.masked_keys if padding is None else padding
        return self.project_back(self.attend(query, key, value, self.position_rows(), masked_keys))

    def key_value_of_memory(self, memory: Tensor) -> tuple[Tensor, ...]:
        """Key and value (B, H, S, E) of the decoder-only model's memory (B, S, D)."""
        assert self.memory_norm is not None
        return self.key_value(self.memory_norm(memory))

    def position_rows(self) -> Tensor:
        """What each distance adds, from far to near: (2N - 1, E), or in Eq. 1 (H, R, E)."""
        rows = self.distances.rows
        if self.simplified:
            return rows @ self.positions  # rows are one-hot: they name those of the table
        [by_distance] = project_heads(rows[None], self.heads, [self.distance_key])  # (1, H, R, E)
        return by_distance.squeeze(0)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, rows: Tensor, masked_keys: Tensor | None
    ) -> Tensor:
        """What the heads attend to, (B, H, n, E), from query (B, H, n, E) and keys (B, H, K, E).

        n is N, or 1 if a token is generated. The last N keys have positions: query i and key j of
        these take row n - 1 - i + j of `rows`, which are those of position_rows.
        """
        dropout = self.dropout_rate if self.training else 0.0
        if self.simplified:
            return simplified_attention(query, key, value, rows, masked_keys, dropout)
        heads = AttentionInputs(query, key, value, rows, self.content_bias, self.distance_bias)
        return transformer_xl_attention(heads, self.distances.length, masked_keys, dropout)


class CrossAttention(Attention):
    """Attention of tokens to memory or to an encoded segment, without positions (Figure 2b)."""

    def __init__(self, config: Config, reads_memory: bool):
        super().__init__(config)
        # What was encoded is already normalised
        self.memory_norm = LayerNorm(config.width) if reads_memory else None
        self.declare_projections(config, biases=True)
        self.declare_output(config)

    def forward(self, x: Tensor, source: Tensor, masked_keys: Tensor | None = None) -> Tensor:
        """(B, N, D) from x (B, N, D) and source (B, K, D); masked_keys is content_attention's."""
        if self.memory_norm is not None:
            source = self.memory_norm(source)
        key, value = self.key_value(source)
        return self.attend(x, key, value, masked_keys)

    def attend(
        self, x: Tensor, key: Tensor, value: Tensor, masked_keys: Tensor | None = None
    ) -> Tensor:
        """The same from the source's key and value (B, H, K, E)."""
        dropout = self.dropout_rate if self.training else 0.0
        [query] = project_heads(self.norm(x), self.heads, [self.query], [self.query_bias])
        return self.project_back(content_attention(query, key, value, masked_keys, dropout))


class Writer(ParameterModule):
    """Slot attention (Figure 2c): each slot attends to [itself | encoded], not to other slots.

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


class WithMlp(CheckpointableLayer):
    """The last part of every layer. Layers inherit it: its parameters are the layer's own."""

    def declare_mlp(self, config: Config) -> None:
        """Parameters of the MLP. They are declared last, as in the reference."""
        self.dropout_rate = config.dropout
        self.mlp_norm = LayerNorm(config.width)
        self.mlp_hidden = parameter(config.feed_forward, config.width)  # (F, D)
        self.mlp_hidden_bias = parameter(config.feed_forward)  # (F,)
        self.mlp_output = parameter(config.width, config.feed_forward)  # (D, F)
        self.mlp_output_bias = parameter(config.width)  # (D,)

    def mlp(self, x: Tensor) -> Tensor:
        """(B, N, D) from x (B, N, D)."""
        hidden = functional.linear(self.mlp_norm(x), self.mlp_hidden, self.mlp_hidden_bias)
        hidden = torch.relu(hidden)  # (B, N, F)
        out = functional.linear(hidden, self.mlp_output, self.mlp_output_bias)
        return functional.dropout(out, self.dropout_rate, self.training)


class EncoderLayer(WithMlp):
    """Tokens attend to each other, then to the memory (Figure 2a)."""

    def __init__(self, config: Config, distances: Distances):
        super().__init__()
        self.attention = SelfAttention(config, distances)
        self.read = CrossAttention(config, reads_memory=True)
        self.declare_mlp(config)

    @compilable
    def forward(self, x: Tensor, memory: Tensor, padding: Tensor | None) -> Tensor:
        x = x + self.attention(x, padding=padding)
        x = x + self.read(x, memory)
        return x + self.mlp(x)


class DecoderLayer(WithMlp):
    """Tokens attend to earlier tokens, then to the encoded previous segment."""

    def __init__(self, config: Config, distances: Distances):
        super().__init__()
        self.attention = SelfAttention(config, distances)
        self.cross = CrossAttention(config, reads_memory=False)
        self.declare_mlp(config)

    @compilable
    def forward(self, x: Tensor, encoded: Tensor, padding: Tensor | None) -> Tensor:
        x = x + self.attention(x)
        x = x + self.cross(x, encoded, padding)
        return x + self.mlp(x)


class MemoryLayer(WithMlp):
    """Tokens attend to memory and to earlier tokens; the output is written to it (Figure 1b)."""

    def __init__(self, config: Config, distances: Distances):
        super().__init__()
        self.attention = SelfAttention(config, distances)
        self.writer = Writer(config)
        self.declare_mlp(config)

    @compilable
    def forward(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attention(x, memory)
        x = x + self.mlp(x)
        return x, self.writer(memory, x)


class Stack(nn.Module, Generic[LayerClass]):
    """The layers of the encoder (Eq. 5) or of a decoder (Eq. 6), and a norm after the last one."""

    def __init__(self, config: Config, layer_class: type[LayerClass], count: int, causal: bool):
        super().__init__()
        self.distances = Distances(config, causal)
        self.layers = Layers(layer_class(config, self.distances) for _ in range(count))
        self.norm = LayerNorm(config.width)

    def forward(self, x: Tensor, source: Tensor, readable: Tensor | None) -> Tensor:
        """(B, N, D) of x (B, N, D); source is memory (B, S, D) or what was encoded (B, N, D).

        readable (B, N) is false for the encoder's padding. The decoder-only model runs its layers
        itself: each has a memory of its own.
        """
        padding = None if readable is None else ~readable[:, None, None]  # (B, 1, 1, N)
        for layer in self.layers:
            x = layer(x, source, padding)
        return self.norm(x)


class Memformer(Model):
    """The model: an encoder-decoder, or decoder-only if the config has no encoder layers."""

    state_type = State
    config: Config
    encoder: Stack[EncoderLayer]  # of the encoder-decoder model alone, as the writer
    writer: Writer
    decoder: Stack[DecoderLayer] | Stack[MemoryLayer]  # MemoryLayers are run by `read`

    def __init__(self, config: Config, seed: int = 0):
        super().__init__(config)
        specials = 0 if self.decoder_only else len(SPECIALS)
        self.begin = config.special("begin")  # a token's id
        self.continuation = config.special("continuation")
        self.slot_sets = config.slot_sets  # 1 or L
        self.embedding = parameter(config.vocabulary + specials, config.width)  # (V or V + 5, D)
        shape = (self.slot_sets, config.slots, config.width)  # (1 or L, S, D)
        if config.slot_normalization == "biased":
            self.slot_bias = parameter(*shape)  # v_bias
            self.initial_memory = None
        else:
            self.slot_bias = None
            self.initial_memory = parameter(*shape)
        if self.decoder_only:
            self.decoder = Stack(config, MemoryLayer, config.decoder_layers, causal=True)
        else:
            self.encoder = Stack(config, EncoderLayer, config.encoder_layers, causal=False)
            self.writer = Writer(config)
            self.decoder = Stack(config, DecoderLayer, config.decoder_layers, causal=True)
        initialise(self, init_params, seed)

    @property
    def decoder_only(self) -> bool:
        """Whether the model has no encoder."""
        return self.config.encoder_layers == 0

    def describe(self) -> str:
        """One line on how far back the model can look; it has no limit (section 2.5)."""
        c = self.config
        kind = "decoder-only, in each of its layers" if self.decoder_only else "encoder-decoder"
        how_far = f"carry what was read over any number of segments of {c.segment}"
        return f"{c.slots} memory slots ({kind}) {how_far}"

    @property
    def attention_reach(self) -> int:
        """How many tokens back a prediction can look by attention only, without memory."""
        return self.config.segment if self.decoder_only else 2 * self.config.segment

    def state_shapes(self, batch: int) -> dict[str, tuple[int, ...]]:
        """The shape of each field of a State; raises ValueError if batch is below 1."""
        check_lanes(batch)
        c = self.config
        memory = (batch, self.slot_sets, c.slots, c.width)
        previous = (batch, 0 if self.decoder_only else c.segment)
        return {"memory": memory, "previous": previous}

    def initial_state(self, batch: int) -> State:
        """The state at a document's start: learned slots and a segment of begin tokens."""
        shapes = self.state_shapes(batch)
        if self.initial_memory is None:
            memory = self.embedding.new_zeros(shapes["memory"])  # read as v_bias / ||v_bias||
        else:
            memory = self.initial_memory.expand(shapes["memory"])
        previous = torch.full(shapes["previous"], self.begin, device=memory.device)
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
        self.check_segment(tokens, state)
        if not self.decoder_only:
            encoded, memory = self.encode(state, task)
            hidden = self.decode(tokens, encoded, task)
            return Reading(self.scaled(hidden), State(memory, tokens), {})

        if task is not None:
            raise ValueError(
                "the decoder-only model (encoder_layers 0) has no tasks but continuation; "
                "leave task out"
            )
        x = embed(tokens, self.embedding)  # (B, N, D)
        memories = []
        for layer, slots in zip(self.decoder.layers, self.slots(state).unbind(1), strict=True):
            x, next_slots = layer(x, slots)  # (B, N, D), (B, S, D)
            memories.append(next_slots)
        hidden = self.decoder.norm(x)
        return Reading(self.scaled(hidden), State(torch.stack(memories, 1), state.previous), {})

    def advance(self, tokens: Tensor, state: State, task: Task | None = None) -> State:
        """The state after tokens (B, N), by encoder and writer or the decoder-only layers."""
        if self.decoder_only:
            return self.read(tokens, state, task).state
        self.check_segment(tokens, state)
        _, memory = self.encode(state, task)
        return State(memory, tokens)

    def encode(self, state: State, task: Task | None) -> tuple[Tensor, Tensor]:
        """Eq. 5: encoded (B, N, D) and the next memory (B, 1, S, D)."""
        reading = state.previous if task is None else task.reading
        readable = None if task is None else task.readable  # (B, N), false for padding
        x = embed(reading, self.embedding)  # (B, N, D)
        memory = self.slots(state)[:, 0]  # (B, S, D)
        encoded = self.encoder(x, memory, readable)
        next_memory = self.writer(memory, encoded, readable)
        return encoded, next_memory[:, None]

    def decode(self, tokens: Tensor, encoded: Tensor, task: Task | None) -> Tensor:
        """Eq. 6: hidden states (B, N, D) that predict. The decoder reads the task's token first."""
        if task is None:
            first = tokens.new_full((tokens.shape[0], 1), self.continuation)
            x = embed(torch.cat([first, tokens], 1), self.embedding)  # (B, N + 1, D)
            return self.decoder(x, encoded, None)[:, 1:]

        # The kinds of tasks stand in the order of SPECIALS
        first = self.continuation + task.kind[:, None]  # (B, 1)
        x = embed(torch.cat([first, task.prompt], 1), self.embedding)  # (B, N + 1, D)
        hidden = self.decoder(x, encoded, task.readable)
        after_token = hidden[:, 1:]  # row i has read the prompt's token i, and predicts the next
        before_token = hidden[:, :-1]  # row i has not, and predicts it
        continues = task.kind[:, None, None] == CONTINUATION
        return torch.where(continues, after_token, before_token)

    def scaled(self, hidden: Tensor) -> Tensor:
        """Hidden states that are ready for the output matrix, which is the embedding."""
        return hidden * self.config.width**-0.5

    def output_matrix(self) -> Tensor:
        """(V, D), the vocabulary's rows of the embedding; special tokens are never predicted."""
        return self.embedding[: self.config.vocabulary]
