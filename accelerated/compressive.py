"""Compressive Transformer in PyTorch: the fast version of reference/compressive.py.

Each layer attends to its segment's N rows, to M rows before them (memory), and to C rows of what is
older: what leaves memory is compressed, c rows to one. Transformer-XL has no compressed memory.

Official implementation: sonnet/python/modules/nets/transformer.py of Sonnet v1.

Config, parameter names, shapes and initial values are the reference's. B lanes, D width, H heads of
width E, F feed-forward width, L layers, K = C + M + N keys, V vocabulary, R distances.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from accelerated.adaptive import AdaptiveSoftmax, Tail
from accelerated.attention.content import content_attention
from accelerated.attention.heads import (
    NORM_EPSILON,
    LayerNorm,
    Layers,
    ParameterModule,
    at_least_float32,
    compilable,
    embed,
    merge_heads,
    parameter,
    project_heads,
)
from accelerated.attention.relative_shift import (
    AttentionInputs,
    distance_sinusoids,
    relative_attention,
)
from accelerated.protocol import CheckpointableLayer, Model, Reading, check_lanes, initialise
from reference.compressive import Config, init_params


class State(NamedTuple):
    """What a segment passes to the next one; axis 0 is the lane (a row of the batch).

    A document starts with zeros (Algorithm 1, lines 1-2).
    """

    memory: Tensor  # (B, L, M, D)
    compressed: Tensor  # (B, L, C, D)


# Compression functions f_c (section 3.2), and what a loss makes of an error


class Compression(ParameterModule):
    """A compression function f_c: rows evicted from memory (B, N, D) -> (B, N/c, D).

    `forward` takes these rows and usage (B, N), the mean attention to each, which only MostUsed
    reads; it may be None for the others. N/c is rounded down.
    """

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.rate = config.compression_rate
        self.declare_weights(config.width)
        if config.compression_loss.startswith("auto_encoding"):
            self.decoder = parameter(self.rate * config.width, config.width)  # g, (cD, D)

    def declare_weights(self, width: int) -> None:
        """Declare the parameters of f_c; pooling has none."""

    def grouped(self, evicted: Tensor) -> Tensor:
        """Every c rows of evicted (B, N, D) as a group, (B, N/c, c, D); the newest may be left."""
        count = evicted.shape[1] // self.rate
        return evicted[:, : count * self.rate].unflatten(1, (count, self.rate))

    def reconstructed(self, new: Tensor) -> Tensor:
        """The evicted rows (B, N, D) as the decoder makes them from the compressed (B, N/c, D).

        Rows that are in no group are zeros.
        """
        rows = functional.linear(new, self.decoder)  # (B, N/c, cD)
        rows = rows.view(new.shape[0], -1, self.config.width)
        return functional.pad(rows, (0, 0, 0, self.config.segment - rows.shape[1]))


class MaxPooling(Compression):
    """Element-wise maximum over every c rows."""

    def forward(self, evicted: Tensor, usage: Tensor | None) -> Tensor:
        return self.grouped(evicted).amax(2)


class MeanPooling(Compression):
    """The mean of c rows."""

    def forward(self, evicted: Tensor, usage: Tensor | None) -> Tensor:
        return self.grouped(evicted).mean(2)


class MostUsed(Compression):
    """The N/c rows with the largest usage, in order of time; of equally used rows the older."""

    def forward(self, evicted: Tensor, usage: Tensor) -> Tensor:
        _, length, width = evicted.shape
        by_usage = usage.argsort(dim=1, descending=True, stable=True)  # (B, N)
        kept = by_usage[:, : length // self.rate].sort(1).values  # (B, N/c)
        return evicted.gather(1, kept[:, :, None].expand(-1, -1, width))


class Conv(Compression):
    """A convolution with kernel and stride c: c rows are concatenated, then one matrix."""

    def declare_weights(self, width: int) -> None:
        self.weight = parameter(width, self.rate * width)  # (D, cD)

    def forward(self, evicted: Tensor, usage: Tensor | None) -> Tensor:
        return functional.linear(self.grouped(evicted).flatten(2), self.weight)


class DilatedConv(Conv):
    """A convolution with kernel 2 and a ReLU for each dilation, then a Conv."""

    def declare_weights(self, width: int) -> None:
        for dilation in self.config.dilations:
            self.register_parameter(f"dilated_{dilation}", parameter(width, 2 * width))  # (D, 2D)
        super().declare_weights(width)

    def forward(self, evicted: Tensor, usage: Tensor | None) -> Tensor:
        x = evicted
        for dilation in self.config.dilations:
            if self.config.authors_code:  # row i - dilation, for the rows that have one
                earlier = x[:, :-dilation]
                later = x[:, dilation:]
            else:  # zeros before the first row
                earlier = functional.pad(x, (0, 0, dilation, 0))[:, : x.shape[1]]
                later = x
            pairs = torch.cat([earlier, later], -1)  # (B, N, 2D)
            x = torch.relu(functional.linear(pairs, getattr(self, f"dilated_{dilation}")))
        return super().forward(x, usage)


COMPRESSIONS = {
    "max_pooling": MaxPooling,
    "mean_pooling": MeanPooling,
    "conv": Conv,
    "dilated_conv": DilatedConv,
    "most_used": MostUsed,
}


def error_of(config: Config, x: Tensor, y: Tensor) -> Tensor:
    """Reconstruction error of x and y (B, ...), in float32 or better.

    It is the mean of (x - y)^2, or over lanes of the norm of x - y, as Algorithm 2, line 8 has it.
    That one's gradient is 0 if x = y, where it has no derivative.
    """
    x = at_least_float32(x)
    y = at_least_float32(y)
    if config.compression_loss.endswith("_norm"):
        return torch.linalg.vector_norm((x - y).flatten(1), dim=1).mean()
    return functional.mse_loss(x, y)


# The model


class Layer(CheckpointableLayer):
    """A layer (Algorithm 1): attention, feed-forward, update of memories.

    Its keys are [compressed memory | memory | segment], K = C + M + N. `number` counts from 0.
    The authors' `TransformerTower` has the layers, `MultiheadAttention` the attention.
    """

    def __init__(self, config: Config, number: int):
        super().__init__()
        width = config.width
        heads = config.heads
        inner = heads * config.head_width
        self.config = config
        self.is_last = number == config.layers - 1
        self.memory_rows, self.compressed_rows = config.rows_of(number)  # M, C of this layer
        self.own_distances = config.authors_code and self.compressed_rows > 0  # decision 6
        self.simplified = config.positions == "simplified"
        self.query = parameter(inner, width)  # (HE, D)
        self.key = parameter(inner, width)  # (HE, D)
        self.value = parameter(inner, width)  # (HE, D)
        if self.simplified:
            self.query_bias = parameter(heads, config.head_width)  # (H, E)
            self.key_bias = parameter(heads, config.head_width)  # never read: softmax cancels it
            self.value_bias = parameter(heads, config.head_width)  # (H, E)
            self.positions = parameter(config.max_distance + 1, config.head_width)  # (R, E)
        else:
            self.distance_key = parameter(inner, width)  # (HE, D), W_R
            self.content_bias = parameter(heads, config.head_width)  # (H, E), u
            self.distance_bias = parameter(heads, config.head_width)  # (H, E), v
        if self.own_distances:
            self.compressed_distance_key = parameter(inner, width)  # (HE, D)
            self.compressed_distance_bias = parameter(heads, config.head_width)  # (H, E)
        self.output = parameter(width, inner)  # (D, HE)
        self.output_bias = parameter(width) if config.authors_code else None  # (D,)
        epsilon = 1e-5 if config.authors_code else NORM_EPSILON
        self.norm = LayerNorm(width, epsilon)
        self.mlp_hidden = parameter(config.feed_forward, width)  # (F, D)
        self.mlp_hidden_bias = parameter(config.feed_forward)  # (F,)
        self.mlp_output = parameter(width, config.feed_forward)  # (D, F)
        self.mlp_output_bias = parameter(width)  # (D,)
        self.mlp_norm = LayerNorm(width, epsilon)
        compression = COMPRESSIONS[config.compression]
        self.compression = compression(config) if self.compressed_rows else None

    @compilable
    def forward(
        self,
        h: Tensor,
        memory: Tensor,
        compressed: Tensor,
        sinusoids: tuple[Tensor, ...],
        memory_only: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Read h (B, N, D) with memory (B, M, D) and compressed (B, C, D).

        Returns the next layer's input, the next memory and compressed memory, and the compression's
        loss or None. With memory_only it is None, and the last layer returns h in place of its
        output.
        """
        no_output = memory_only and self.is_last
        measure = isinstance(self.compression, MostUsed)
        if no_output and not measure:
            memory, compressed, _, _ = self.remember(h, memory, compressed, None)
            return h, memory, compressed, None

        # Algorithm 1, lines 5 to 11
        query, key, value = self.project(h, torch.cat([compressed, memory], 1))
        distances = self.project_distances(sinusoids)
        attended, usage = self.attend(query, key, value, distances, measure)
        memory, compressed, evicted, new = self.remember(h, memory, compressed, usage)

        loss = None
        if new is not None and not memory_only:
            loss = self.compression_loss(query, key, value, evicted, new)
        if not no_output:
            h = self.mix(h, attended)  # lines 7 and 12
        return h, memory, compressed, loss

    def project(self, h: Tensor, remembered: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query (B, H, N, E) of h (B, N, D), key and value (B, H, K, E) of [remembered | h]."""
        query, own_key, own_value = self.project_own(h)
        key, value = self.project_remembered(remembered)
        return query, torch.cat([key, own_key], 2), torch.cat([value, own_value], 2)

    def project_own(self, h: Tensor) -> tuple[Tensor, ...]:
        """Query, key and value of a segment's own rows h (B, n, D), each (B, H, n, E)."""
        return project_heads(h, self.config.heads, [self.query, self.key, self.value])

    def project_remembered(self, remembered: Tensor) -> tuple[Tensor, ...]:
        """Key and value of remembered rows (B, C + M, D), each (B, H, C + M, E).

        Not in one product with the segment's own: these rows need no gradient.
        """
        return project_heads(remembered, self.config.heads, [self.key, self.value])

    def project_distances(self, sinusoids: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """(r,), the distance keys from far to near: W_R times sinusoids (K, D), (H, K, E).

        Simplified positions are (H, R, E), the same for all heads. If the compressed rows have
        distances of their own, the result is (r of M + N rows, their own r of C + N rows).
        """
        before = self.compressed_rows + self.memory_rows
        if self.simplified:
            # as many as there are, from far to near
            positions = self.positions[: before + self.config.segment].flip(0)
            return (positions.expand(self.config.heads, -1, -1),)
        if not self.own_distances:
            return (self.distance_keys(sinusoids[0], before, self.distance_key),)
        return (
            self.distance_keys(sinusoids[0], self.memory_rows, self.distance_key),
            self.distance_keys(sinusoids[1], self.compressed_rows, self.compressed_distance_key),
        )

    def distance_keys(self, sinusoids: Tensor, before: int, weight: Tensor) -> Tensor:
        """r (H, before + N, E) of the nearest distances."""
        rows = sinusoids[-before - self.config.segment :]
        [distance_key] = project_heads(rows[None], self.config.heads, [weight])
        return distance_key[0]

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        distances: tuple[Tensor, ...],
        measure: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Attended (B, H, N, E), and usage (B, K) or None if not measured (Algorithm 1, line 6)."""
        content_bias, distance_bias, *own_bias = self.distance_biases()
        if self.simplified:
            value = value + self.value_bias[:, None]
        dropout = self.config.dropout if self.training else 0.0
        own = (distances[1], own_bias[0]) if self.own_distances else None
        heads = AttentionInputs(query, key, value, distances[0], content_bias, distance_bias)
        return relative_attention(
            heads, dropout, measure, in_values=self.simplified, compressed=own
        )

    def distance_biases(self) -> tuple[Tensor, ...]:
        """u and v (H, E), and the compressed rows' own v if they have one.

        Simplified positions have one bias, of the query. The authors add them to scaled queries, so
        that they are not divided by sqrt(E).
        """
        if self.simplified:
            return (self.query_bias, self.query_bias)
        biases = [self.content_bias, self.distance_bias]
        if self.own_distances:
            biases.append(self.compressed_distance_bias)
        if self.config.authors_code:
            biases = [bias * self.config.head_width**0.5 for bias in biases]
        return tuple(biases)

    def mix(self, h: Tensor, attended: Tensor) -> Tensor:
        """The next layer's input from h (B, N, D) and attended (B, H, N, E)."""
        out = functional.linear(merge_heads(attended), self.output, self.output_bias)
        a = self.norm(self.dropout(out) + h)  # Algorithm 1, line 7
        hidden = functional.linear(a, self.mlp_hidden, self.mlp_hidden_bias)  # (B, N, F)
        hidden = torch.relu(hidden)
        if self.config.authors_code:
            hidden = self.dropout(hidden)
        out = functional.linear(hidden, self.mlp_output, self.mlp_output_bias)
        return self.mlp_norm(self.dropout(out) + a)  # line 12

    def dropout(self, x: Tensor) -> Tensor:
        """x with entries dropped in training (decision 13: where dropout is)."""
        return functional.dropout(x, self.config.dropout, self.training)

    def remember(
        self, h: Tensor, memory: Tensor, compressed: Tensor, usage: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Next memory, next compressed memory, evicted (B, N, D) and new (B, N/c, D).

        Without compressed memory new is None. usage (B, K) is each key's, or None.
        """
        length = h.shape[1]
        queue = torch.cat([memory, h], 1).detach()  # no gradient through memory
        evicted = queue[:, :length]  # Algorithm 1, line 8
        next_memory = queue[:, length:]  # line 10
        if self.compression is None:
            return next_memory, compressed.detach(), evicted, None

        if usage is not None:  # that of the evicted rows, which follow the compressed ones
            first = self.compressed_rows
            usage = usage[:, first : first + length]
        new = self.compression(evicted, usage)  # line 9
        next_compressed = torch.cat([compressed, new], 1)[:, new.shape[1] :]  # line 11
        if self.config.compression_loss != "bptt":
            next_compressed = next_compressed.detach()  # only its own loss trains the compression
        return next_memory, next_compressed, evicted, new

    def compression_loss(
        self, query: Tensor, key: Tensor, value: Tensor, evicted: Tensor, new: Tensor
    ) -> Tensor | None:
        """The auxiliary loss that trains the compression, or None if there is none."""
        kind = self.config.compression_loss.removesuffix("_norm")
        if kind == "attention_reconstruction":
            return self.attention_reconstruction(query, key, value, new)
        if kind == "auto_encoding" and self.compression is not None:
            found = self.compression.reconstructed(new)  # section 3.2
            return error_of(self.config, found, evicted)
        return None

    def attention_reconstruction(
        self, query: Tensor, key: Tensor, value: Tensor, new: Tensor
    ) -> Tensor:
        """Algorithm 2: the error between attention over new and attention over the evicted rows.

        Attention is by content only, without positions. In key and value (B, H, K, E) the evicted
        rows follow the compressed ones; new is (B, N/c, D). Only new gets a gradient: query, key,
        value and the attention's parameters are detached.
        """
        first = self.compressed_rows
        evicted = slice(first, first + self.config.segment)
        with torch.no_grad():
            target = content_attention(query, key[:, :, evicted], value[:, :, evicted])
        matrices = [self.key.detach(), self.value.detach()]
        new_key, new_value = project_heads(new, self.config.heads, matrices)
        out = content_attention(query.detach(), new_key, new_value)
        return error_of(self.config, out, target)


class Compressive(Model):
    """The model; `config` is the reference's, which draws the initial weights from `seed`."""

    state_type = State
    config: Config
    sinusoids: Tensor | None  # (K, D), for Transformer-XL's positions

    def __init__(self, config: Config, seed: int = 0):
        super().__init__(config)
        width = config.width
        (_, first), *bands = pairwise((0, *config.cutoffs, config.vocabulary))
        self.embedding = parameter(first, width)  # (V, D), or (first cutoff, D)
        tails = []
        for number, (start, stop) in enumerate(bands, start=1):
            tails.append(Tail(stop - start, width // config.div_value**number, width))
        self.tails = Layers(tails)
        if config.cutoffs:
            self.clusters = parameter(len(tails), width)  # (tails, D)
        self.layers = Layers(Layer(config, number) for number in range(config.layers))

        sinusoids = None
        if config.positions == "transformer_xl":
            keys = config.compressed_memory + config.memory + config.segment
            sinusoids = distance_sinusoids(keys, width)
        self.register_buffer("sinusoids", sinusoids, persistent=False)
        initialise(self, init_params, seed)

    def state_shapes(self, batch: int) -> dict[str, tuple[int, ...]]:
        """The shape of each field of a State; raises ValueError if batch is below 1."""
        check_lanes(batch)
        c = self.config
        memory = (batch, c.layers, c.memory, c.width)
        compressed = (batch, c.layers, c.compressed_memory, c.width)
        return {"memory": memory, "compressed": compressed}

    def read(self, tokens: Tensor, state: State, memory_only: bool = False) -> Reading:
        """Read a segment of tokens (B, N). Reading.hidden (B, N, D) predicts the next tokens.

        Reading.auxiliary has a compression loss per layer. With memory_only these, and the last
        layer's output, are not computed. Raises ValueError if N is not config.segment, or if the
        state does not fit this model and B lanes.
        """
        self.check_segment(tokens, state)
        h = self.embed(tokens)  # (B, N, D)
        sinusoids = self.dropped_sinusoids()
        memories = []
        compresseds = []
        auxiliary = {}
        for index, layer in enumerate(self.layers):
            memory, compressed = self.memories_of(state, index)
            h, memory, compressed, loss = layer(h, memory, compressed, sinusoids, memory_only)
            memories.append(memory)
            compresseds.append(compressed)
            if loss is not None:
                auxiliary[f"layers.{index}.compression"] = loss
        next_state = self.state_of(memories, compresseds)
        return Reading(h * self.config.width**-0.5, next_state, auxiliary)

    def dropped_sinusoids(self) -> tuple[Tensor, ...]:
        """A tuple with the sinusoids (K, D) of all distances; empty for simplified positions.

        With authors_code, dropout is applied, and sinusoids (C + N, D) for the compressed rows' own
        distances follow. All layers share both.
        """
        if self.sinusoids is None:
            return ()
        if not self.config.authors_code:
            return (self.sinusoids,)
        c = self.config
        rows = (self.sinusoids, self.sinusoids[-c.compressed_memory - c.segment :])
        return tuple(functional.dropout(part, c.dropout, self.training) for part in rows)

    def memories_of(self, state: State, number: int) -> tuple[Tensor, Tensor]:
        """A layer's memory (B, M, D) and compressed memory (B, C, D): the last rows of its own."""
        layer = self.layers[number]
        memory = state.memory[:, number, self.config.memory - layer.memory_rows :]
        first = self.config.compressed_memory - layer.compressed_rows
        return memory, state.compressed[:, number, first:]

    def state_of(self, memories: list[Tensor], compresseds: list[Tensor]) -> State:
        """The State of each layer's memories; zeros stand before a layer's fewer rows."""
        c = self.config
        memories = [rows_at_end(rows, c.memory) for rows in memories]
        compresseds = [rows_at_end(rows, c.compressed_memory) for rows in compresseds]
        return State(torch.stack(memories, 1), torch.stack(compresseds, 1))

    def advance(self, tokens: Tensor, state: State) -> State:
        """The state after tokens (B, N), without logits and compression losses."""
        return self.read(tokens, state, memory_only=True).state

    def embed(self, tokens: Tensor) -> Tensor:
        """The first layer's input (B, N, D)."""
        matrix = self.output_matrix()
        if isinstance(matrix, AdaptiveSoftmax):
            return matrix.embed(tokens)
        return embed(tokens, matrix)

    def output_matrix(self) -> Tensor | AdaptiveSoftmax:
        """(V, D), the embedding; with cutoffs the AdaptiveSoftmax."""
        if self.config.cutoffs:
            return AdaptiveSoftmax(self.embedding, self.clusters, tuple(self.tails))
        return self.embedding

    def auxiliary_parameters(self) -> list[nn.Parameter]:
        """The compression's parameters, if its own loss trains them and the task loss does not."""
        if self.config.compression_loss == "bptt":
            return []
        weights = []
        for layer in self.layers:
            if layer.compression is not None:
                weights.extend(layer.compression.parameters())
        return weights

    @property
    def attention_reach(self) -> int:
        """How many tokens back a prediction can look, through memory and compressed memory.

        That is the paper's temporal range, or more if the rate does not divide the segment.
        """
        c = self.config
        made = max(1, c.new_rows)  # of a segment
        rows = map(c.rows_of, range(c.layers))
        return sum(memory + compressed * c.segment // made for memory, compressed in rows)

    def describe(self) -> str:
        """One line on how far back the model looks, the paper's temporal range (section 3.3)."""
        c = self.config
        memories = f"{c.memory}"
        if c.compressed_memory:
            memories = f"{c.memory} + {c.compression_rate} x {c.compressed_memory}"
        most = "at most " if c.memories else ""
        temporal_range = f"{c.layers} layers x {most}({memories}) = {c.temporal_range:,} tokens"
        return f"temporal range {temporal_range}, and segments of {c.segment}"


def rows_at_end(rows: Tensor, count: int) -> Tensor:
    """rows (B, n, D) with zeros before them, (B, count, D)."""
    missing = count - rows.shape[1]
    return functional.pad(rows, (0, 0, missing, 0)) if missing else rows
