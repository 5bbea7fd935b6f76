"""Compressive Transformer in PyTorch: the fast version of reference/compressive.py.

Each layer attends to its segment's N rows, to the M rows before them (memory), and to C compressed
rows of what is older. What leaves memory is compressed, c rows to one. Without compressed memory it
is Transformer-XL.

Config, parameter names, shapes and initial values are the reference's. B lanes, D width, H heads of
width E, F feed-forward width, L layers, K = C + M + N keys, V vocabulary, R distances.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from accelerated.adaptive import AdaptiveSoftmax, Tail
from accelerated.attention.content import content_attention
from accelerated.attention.heads import (
    Declared,
    LayerNorm,
    Layers,
    at_least_float32,
    look_up,
    merge_heads,
    parameter,
    project,
)
from accelerated.attention.relative_shift import distance_sinusoids, relative_attention
from accelerated.protocol import Model, Reading, Recomputable, check_lanes, initialise
from reference.compressive import Config, init_params


class State(NamedTuple):
    """What a segment passes to the next one; axis 0 is the lane (a row of the batch)."""

    memory: Tensor  # (B, L, M, D)
    compressed: Tensor  # (B, L, C, D)


class Compression(Declared):
    """A compression function f_c (section 3.2): rows evicted from memory (B, N, D) -> (B, N/c, D).

    `forward` takes them, and of each its mean attention, usage (B, N).
    """

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.rate = config.compression_rate
        self.declare_weights(config.width)
        if config.compression_loss == "auto_encoding":
            self.decoder = parameter(self.rate * config.width, config.width)  # g, (cD, D)

    def declare_weights(self, width: int) -> None:
        """Declare the parameters of f_c; pooling has none."""

    def grouped(self, evicted: Tensor) -> Tensor:
        """Every c rows of evicted (B, N, D) as a group, (B, N/c, c, D)."""
        return evicted.unflatten(1, (-1, self.rate))

    def reconstructed(self, new: Tensor) -> Tensor:
        """The evicted rows (B, N, D) as the decoder makes them from the compressed (B, N/c, D)."""
        rows = functional.linear(new, self.decoder)  # (B, N/c, cD)
        return rows.view(len(new), -1, self.config.width)


class MaxPooling(Compression):
    """Feature by feature the largest of c rows."""

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


class DilatedConv(Compression):
    """A convolution with kernel 2 and a ReLU for each dilation, then a Conv."""

    def declare_weights(self, width: int) -> None:
        for dilation in self.config.dilations:
            self.register_parameter(f"dilated_{dilation}", parameter(width, 2 * width))  # (D, 2D)
        self.weight = parameter(width, self.rate * width)  # (D, cD)

    def forward(self, evicted: Tensor, usage: Tensor | None) -> Tensor:
        x = evicted
        for dilation in self.config.dilations:
            # x_{i - dilation}, zeros before the first row
            earlier = functional.pad(x, (0, 0, dilation, 0))[:, : x.shape[1]]
            pairs = torch.cat([earlier, x], -1)  # (B, N, 2D)
            x = torch.relu(functional.linear(pairs, getattr(self, f"dilated_{dilation}")))
        return functional.linear(self.grouped(x).flatten(2), self.weight)


COMPRESSIONS = {
    "max_pooling": MaxPooling,
    "mean_pooling": MeanPooling,
    "conv": Conv,
    "dilated_conv": DilatedConv,
    "most_used": MostUsed,
}


def mean_square(x: Tensor, y: Tensor) -> Tensor:
    """The mean of (x - y)^2, in float32 or better."""
    return functional.mse_loss(at_least_float32(x), at_least_float32(y))


class Layer(Recomputable):
    """A layer (Algorithm 1): attention, feed-forward, update of memories.

    Its keys are [compressed memory | memory | segment], K = C + M + N.
    """

    def __init__(self, config: Config):
        super().__init__()
        width = config.width
        heads = config.heads
        inner = heads * config.head_width
        self.config = config
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
        self.output = parameter(width, inner)  # (D, HE)
        self.norm = LayerNorm(width)
        self.mlp_hidden = parameter(config.feed_forward, width)  # (F, D)
        self.mlp_hidden_bias = parameter(config.feed_forward)  # (F,)
        self.mlp_output = parameter(width, config.feed_forward)  # (D, F)
        self.mlp_output_bias = parameter(width)  # (D,)
        self.mlp_norm = LayerNorm(width)
        compression = COMPRESSIONS[config.compression]
        self.compression = compression(config) if config.compressed_memory else None

    def forward(
        self,
        h: Tensor,
        memory: Tensor,
        compressed: Tensor,
        sinusoids: Tensor | None,
        memory_only: bool = False,
        no_output: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Read h (B, N, D) with memory (B, M, D) and compressed (B, C, D).

        memory_only: the compression's loss is not needed
        no_output: neither the loss nor the output is needed, and h is returned unchanged

        Returns the next layer's input, the next memory and compressed memory, and the compression's
        loss or None.
        """
        measure = isinstance(self.compression, MostUsed)
        if no_output and not measure:
            memory, compressed, _, _ = self.remember(h, memory, compressed, None)
            return h, memory, compressed, None

        # Algorithm 1, lines 5 to 11
        query, key, value = self.project(h, torch.cat([compressed, memory], 1))
        distance_key = self.project_distances(sinusoids)
        attended, usage = self.attend(query, key, value, distance_key, measure)
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
        key = torch.cat([key, own_key], 2)
        value = torch.cat([value, own_value], 2)
        return query, key, value

    def project_own(self, h: Tensor) -> tuple[Tensor, ...]:
        """Query, key and value of a segment's own rows h (B, n, D), each (B, H, n, E)."""
        return project(h, self.config.heads, [self.query, self.key, self.value])

    def project_remembered(self, remembered: Tensor) -> tuple[Tensor, ...]:
        """Key and value of remembered rows (B, C + M, D), each (B, H, C + M, E).

        Separate from project_own: these rows need no gradient, so a joint product would waste work
        in backward.
        """
        return project(remembered, self.config.heads, [self.key, self.value])

    def project_distances(self, sinusoids: Tensor | None) -> Tensor:
        """r from far to near: W_R times sinusoids (K, D), (H, K, E).

        Simplified positions are (H, R, E), the same for all heads.
        """
        if sinusoids is None:
            keys = self.config.compressed_memory + self.config.memory + self.config.segment
            positions = self.positions[:keys].flip(0)  # as many as there are, from far to near
            return positions.expand(self.config.heads, -1, -1)
        [distance_key] = project(sinusoids[None], self.config.heads, [self.distance_key])
        return distance_key[0]

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, distance_key: Tensor, measure: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Attended (B, H, N, E), and usage (B, K) or None if not measured (Algorithm 1, line 6)."""
        if self.simplified:
            value = value + self.value_bias[:, None]
            biases = (self.query_bias, self.query_bias)
        else:
            biases = (self.content_bias, self.distance_bias)
        dropout = self.config.dropout if self.training else 0.0
        given = (query, key, value, distance_key, *biases)
        return relative_attention(*given, dropout, measure, in_values=self.simplified)

    def mix(self, h: Tensor, attended: Tensor) -> Tensor:
        """The next layer's input from h (B, N, D) and attended (B, H, N, E)."""
        out = functional.linear(merge_heads(attended), self.output)
        a = self.norm(self.dropout(out) + h)  # Algorithm 1, line 7
        hidden = functional.linear(a, self.mlp_hidden, self.mlp_hidden_bias)  # (B, N, F)
        hidden = torch.relu(hidden)
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
            first = self.config.compressed_memory
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
        if self.config.compression_loss == "attention_reconstruction":
            return self.attention_reconstruction(query, key, value, new)
        if self.config.compression_loss == "auto_encoding" and self.compression is not None:
            return mean_square(self.compression.reconstructed(new), evicted)  # section 3.2
        return None

    def attention_reconstruction(
        self, query: Tensor, key: Tensor, value: Tensor, new: Tensor
    ) -> Tensor:
        """Algorithm 2: the mean squared difference of attention over the evicted rows and over new.

        It is attention by content alone. In key and value (B, H, K, E) the evicted rows follow the
        compressed ones; new is (B, N/c, D). Only new gets gradient: query, key, value and the
        attention's parameters are detached.
        """
        first = self.config.compressed_memory
        evicted = slice(first, first + self.config.segment)
        with torch.no_grad():
            target = content_attention(query, key[:, :, evicted], value[:, :, evicted])
        matrices = [self.key.detach(), self.value.detach()]
        new_key, new_value = project(new, self.config.heads, matrices)
        out = content_attention(query.detach(), new_key, new_value)
        return mean_square(out, target)


class Compressive(Model):
    """The model; `config` is the reference's, which draws the initial weights from `seed`."""

    state_type = State
    config: Config
    sinusoids: Tensor | None  # (K, D), for Transformer-XL's positions

    def __init__(self, config: Config, seed: int = 0):
        super().__init__(config)
        width = config.width
        self.embedding = parameter(config.bands[0][1], width)  # (V, D), the output's too
        tails = []
        for number, (start, stop) in enumerate(config.bands[1:], start=1):
            tails.append(Tail(stop - start, width // config.div_value**number, width))
        self.tails = Layers(tails)
        if config.cutoffs:
            self.clusters = parameter(len(tails), width)  # (tails, D)
        self.layers = Layers(Layer(config) for _ in range(config.layers))

        sinusoids = None
        if config.positions == "transformer_xl":
            keys = config.compressed_memory + config.memory + config.segment
            sinusoids = distance_sinusoids(keys, width)
        self.register_buffer("sinusoids", sinusoids, persistent=False)
        initialise(self, init_params, seed)

    def state_shapes(self, batch: int) -> dict[str, tuple[int, ...]]:
        """The shape of each field of a State of `batch` lanes.

        Raises ValueError if batch is below 1.
        """
        c = self.config
        memory = (check_lanes(batch), c.layers, c.memory, c.width)
        compressed = (batch, c.layers, c.compressed_memory, c.width)
        return {"memory": memory, "compressed": compressed}

    def initial_state(self, batch: int) -> State:
        """The state at a document's start: zeros (Algorithm 1, lines 1-2)."""
        shapes = self.state_shapes(batch)
        return State(*(self.embedding.new_zeros(shape) for shape in shapes.values()))

    def read(self, tokens: Tensor, state: State, memory_only: bool = False) -> Reading:
        """Read a segment of tokens (B, N). Reading.hidden (B, N, D) predicts the next tokens.

        Reading.auxiliary has a compression loss per layer. With memory_only these, and the last
        layer's output, are not computed. Raises ValueError if N is not config.segment, or if the
        state does not fit this model and B lanes.
        """
        self.check(tokens, state)
        h = self.look_up(tokens)  # (B, N, D)
        memories = []
        compresseds = []
        auxiliary = {}
        for index, layer in enumerate(self.layers):
            remembered = (state.memory[:, index], state.compressed[:, index])
            no_output = memory_only and index == len(self.layers) - 1
            h, memory, compressed, loss = layer(
                h, *remembered, self.sinusoids, memory_only, no_output
            )
            memories.append(memory)
            compresseds.append(compressed)
            if loss is not None:
                auxiliary[f"layers.{index}.compression"] = loss
        next_state = State(torch.stack(memories, 1), torch.stack(compresseds, 1))
        return Reading(h * self.config.width**-0.5, next_state, auxiliary)

    def advance(self, tokens: Tensor, state: State) -> NamedTuple:
        """The state after tokens (B, N), without logits and compression losses."""
        return self.read(tokens, state, memory_only=True).state

    def usage(self, tokens: Tensor, state: State) -> Tensor:
        """Each key's attention weight, averaged over heads and queries, by layer (B, L, K)."""
        h = self.look_up(tokens)
        usages = []
        for index, layer in enumerate(self.layers):
            remembered = torch.cat([state.compressed[:, index], state.memory[:, index]], 1)
            projected = layer.project(h, remembered)
            distance_key = layer.project_distances(self.sinusoids)
            attended, usage = layer.attend(*projected, distance_key, measure=True)
            usages.append(usage)
            h = layer.mix(h, attended)
        return torch.stack(usages, 1)

    def look_up(self, tokens: Tensor) -> Tensor:
        """The first layer's input (B, N, D)."""
        matrix = self.output_matrix()
        if isinstance(matrix, AdaptiveSoftmax):
            return matrix.look_up(tokens)
        return look_up(tokens, matrix)

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
        """How many tokens back a prediction can look by attention only, without memory."""
        return self.config.temporal_range

    def describe(self) -> str:
        """One line on how far back the model looks, the paper's temporal range (section 3.3)."""
        c = self.config
        memories = f"{c.memory}"
        if c.compressed_memory:
            memories = f"{c.memory} + {c.compression_rate} x {c.compressed_memory}"
        temporal_range = f"{c.layers} layers x ({memories}) = {c.temporal_range:,} tokens"
        return f"temporal range {temporal_range}, and segments of {c.segment}"
