"""Compressive Transformer in PyTorch: the fast version of reference/compressive.py.

Without compressed memory it is Transformer-XL. Config, parameter names, shapes and initial values are the reference's. The
segment's attention has already projected the rows to be compressed to keys and values, so the attention-reconstruction loss
projects only the compressed rows.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from accelerated.adaptive import AdaptiveSoftmax, Tail
from accelerated.attention.content import content_attention
from accelerated.attention.heads import (
    Declared,
    LayerNorm,
    at_least_float32,
    look_up,
    merge_heads,
    parameter,
    split_heads,
)
from accelerated.attention.relative_shift import distance_sinusoids, relative_attention
from accelerated.protocol import (
    Layers,
    Model,
    Reading,
    Recomputable,
    check_lanes,
    initialise,
)
from reference.compressive import Config, init_params


class State(NamedTuple):
    """What a segment passes to the next one; axis 0 of every field is the lane (a row of the batch)."""

    memory: Tensor  # (B, L, M, D)
    compressed: Tensor  # (B, L, C, D)


# Compression functions f_c (section 3.2): rows evicted from memory (B, N, D) -> (B, N/c, D); usage (B, N): their mean attention.


def decoder(config: Config) -> nn.Parameter | None:
    """g (cD, D), which reconstructs the evicted rows for the auto-encoding loss; None for other losses."""
    auto_encoding = config.compression_loss == "auto_encoding"
    return (
        parameter(config.compression_rate * config.width, config.width) if auto_encoding else None
    )


class Pooling(nn.Module):
    """The mean of c rows, or feature by feature the largest."""

    def __init__(self, config: Config):
        super().__init__()
        self.rate, self.compression = config.compression_rate, config.compression
        self.decoder = decoder(config)  # (cD, D)

    def forward(self, evicted: Tensor, usage: Tensor | None) -> Tensor:
        groups = evicted.unflatten(1, (-1, self.rate))  # (B, N/c, c, D)
        return groups.amax(2) if self.compression == "max_pooling" else groups.mean(2)


class MostUsed(Pooling):
    """The N/c rows with the largest usage, in order of time; of equally used rows the older."""

    def forward(self, evicted: Tensor, usage: Tensor | None) -> Tensor:
        kept = evicted.shape[1] // self.rate
        at = usage.argsort(dim=1, descending=True, stable=True)[:, :kept].sort(1).values  # (B, N/c)
        return evicted.gather(1, at[:, :, None].expand(-1, -1, evicted.shape[2]))


class Conv(Declared):
    """A convolution with kernel and stride c: every c rows are concatenated and multiplied by one matrix."""

    def __init__(self, config: Config):
        super().__init__()
        self.rate = config.compression_rate
        self.weight = parameter(config.width, self.rate * config.width)  # (D, cD)
        self.decoder = decoder(config)  # (cD, D)

    def forward(self, evicted: Tensor, usage: Tensor | None) -> Tensor:
        return functional.linear(evicted.unflatten(1, (-1, self.rate)).flatten(2), self.weight)


class DilatedConv(Declared):
    """A convolution with kernel 2 and a ReLU for each dilation, then a convolution with kernel and stride c."""

    def __init__(self, config: Config):
        super().__init__()
        self.rate, self.dilations = config.compression_rate, config.dilations
        for dilation in self.dilations:
            self.register_parameter(
                f"dilated_{dilation}", parameter(config.width, 2 * config.width)
            )  # (D, 2D)
        self.weight = parameter(config.width, self.rate * config.width)  # (D, cD)
        self.decoder = decoder(config)  # (cD, D)

    def forward(self, evicted: Tensor, usage: Tensor | None) -> Tensor:
        x = evicted
        for dilation in self.dilations:
            earlier = functional.pad(x, (0, 0, dilation, 0))[
                :, : x.shape[1]
            ]  # x_{i - dilation}, zeros before the first row
            weight = getattr(self, f"dilated_{dilation}")
            x = torch.relu(functional.linear(torch.cat([earlier, x], -1), weight))
        return functional.linear(x.unflatten(1, (-1, self.rate)).flatten(2), self.weight)


COMPRESSIONS = {
    "max_pooling": Pooling,
    "mean_pooling": Pooling,
    "conv": Conv,
    "dilated_conv": DilatedConv,
    "most_used": MostUsed,
}


def mean_square(x: Tensor, y: Tensor) -> Tensor:
    """The mean of (x - y)^2, in float32 or better."""
    return functional.mse_loss(at_least_float32(x), at_least_float32(y))


class Layer(Recomputable):
    """A layer (Algorithm 1): attention over [compressed memory | memory | segment], feed-forward, update of memories."""

    def __init__(self, config: Config):
        super().__init__()
        d, h, e, f = config.width, config.heads, config.head_width, config.feed_forward
        self.config = config
        self.query = parameter(h * e, d)  # (HE, D)
        self.key = parameter(h * e, d)  # (HE, D)
        self.value = parameter(h * e, d)  # (HE, D)
        simplified = config.positions == "simplified"
        self.query_bias = parameter(h, e) if simplified else None  # (H, E)
        self.key_bias = (
            parameter(h, e) if simplified else None
        )  # (H, E), never read: softmax cancels it
        self.value_bias = parameter(h, e) if simplified else None  # (H, E)
        self.positions = parameter(config.max_distance + 1, e) if simplified else None  # (R, E)
        self.distance_key = None if simplified else parameter(h * e, d)  # (HE, D), W_R
        self.content_bias = None if simplified else parameter(h, e)  # (H, E), u
        self.distance_bias = None if simplified else parameter(h, e)  # (H, E), v
        self.output = parameter(d, h * e)  # (D, HE)
        self.norm = LayerNorm(d)
        self.mlp_hidden = parameter(f, d)  # (F, D)
        self.mlp_hidden_bias = parameter(f)  # (F,)
        self.mlp_output = parameter(d, f)  # (D, F)
        self.mlp_output_bias = parameter(d)  # (D,)
        self.mlp_norm = LayerNorm(d)
        self.compression = (
            COMPRESSIONS[config.compression](config) if config.compressed_memory else None
        )

    def forward(
        self,
        h: Tensor,
        memory: Tensor,
        compressed: Tensor,
        sinusoids: Tensor | None,
        memory_only: bool = False,
        measure: bool = False,
        no_output: bool = False,
    ) -> tuple:
        """Read h (B, N, D) with memory (B, M, D) and compressed (B, C, D).

        Returns the next layer's input, the next memory and compressed memory, the compression's loss or None, and the usage
        (B, K) or None. memory_only: no loss; no_output: the layer's output is not needed, h is returned unchanged.
        """
        measure = measure or isinstance(self.compression, MostUsed)
        projected, attended, usage = None, None, None
        if measure or not no_output:
            projected = self.project(h, torch.cat([compressed, memory], 1))
            attended, usage = self.attend(*projected, self.project_distances(sinusoids), measure)
        memory, compressed, evicted, new = self.remember(h, memory, compressed, usage)
        loss = (
            None if memory_only or new is None else self.compression_loss(projected, evicted, new)
        )
        return h if no_output else self.mix(h, attended), memory, compressed, loss, usage

    def project(self, h: Tensor, remembered: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query (B, H, N, E) of h (B, N, D), key and value (B, H, K, E) of [remembered | h]."""
        query, *segment_rows = self.project_own(h)
        before = self.project_remembered(remembered)
        return query, *(torch.cat(pair, 2) for pair in zip(before, segment_rows, strict=True))

    def project_own(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of a segment's own rows h (B, n, D), each (B, H, n, E)."""
        return split_heads(
            functional.linear(h, torch.cat([self.query, self.key, self.value])),
            self.config.heads,
            3,
        )

    def project_remembered(self, remembered: Tensor) -> tuple[Tensor, Tensor]:
        """Key and value of remembered rows (B, C + M, D), each (B, H, C + M, E).

        Separate from project_own: these rows need no gradient, so a joint product would waste work in backward.
        """
        return split_heads(
            functional.linear(remembered, torch.cat([self.key, self.value])), self.config.heads, 2
        )

    def project_distances(self, sinusoids: Tensor | None) -> Tensor:
        """r from far to near, (H, K, E): W_R times sinusoids (K, D). Simplified positions are (H, R, E), all heads the same."""
        if sinusoids is None:
            keys = self.config.compressed_memory + self.config.memory + self.config.segment
            return self.positions[:keys].flip(0).expand(self.config.heads, -1, -1)
        return split_heads(
            functional.linear(sinusoids, self.distance_key)[None], self.config.heads, 1
        )[0][0]

    def biases(self) -> tuple[Tensor, Tensor]:
        """u and v (H, E); with simplified positions both are the query's bias."""
        return (
            (self.content_bias, self.distance_bias)
            if self.positions is None
            else (self.query_bias, self.query_bias)
        )

    def biased_value(self, value: Tensor) -> Tensor:
        """value (B, H, n, E) with its bias, which only simplified positions have."""
        return value if self.positions is None else value + self.value_bias[:, None]

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, distance_key: Tensor, measure: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Attended (B, H, N, E), and usage (B, K) or None if not measured (Algorithm 1, line 6)."""
        given = (query, key, self.biased_value(value), distance_key, *self.biases())
        dropout = self.config.dropout if self.training else 0.0
        return relative_attention(*given, dropout, measure, in_values=self.positions is not None)

    def mix(self, h: Tensor, attended: Tensor) -> Tensor:
        """The next layer's input from h (B, N, D) and attended (B, H, N, E) (Algorithm 1, lines 7 and 12)."""
        a = self.norm(self.dropout(functional.linear(merge_heads(attended), self.output)) + h)
        hidden = torch.relu(
            functional.linear(a, self.mlp_hidden, self.mlp_hidden_bias)
        )  # (B, N, F)
        return self.mlp_norm(
            self.dropout(functional.linear(hidden, self.mlp_output, self.mlp_output_bias)) + a
        )

    def dropout(self, x: Tensor) -> Tensor:
        """x with entries dropped in training (decision 13: where dropout is)."""
        return functional.dropout(x, self.config.dropout, self.training)

    def remember(
        self, h: Tensor, memory: Tensor, compressed: Tensor, usage: Tensor | None
    ) -> tuple:
        """Next memory, next compressed memory, evicted, new (Algorithm 1, lines 8 to 11); the last two are None if C = 0."""
        c, n = self.config, h.shape[1]
        queue = torch.cat([memory, h], 1).detach()  # no gradient through memory
        evicted, next_memory = queue[:, :n], queue[:, n:]
        if self.compression is None:
            return next_memory, compressed.detach(), None, None
        evicted_usage = (
            None if usage is None else usage[:, c.compressed_memory : c.compressed_memory + n]
        )  # of the evicted rows
        new = self.compression(evicted, evicted_usage)  # (B, N/c, D)
        next_compressed = torch.cat([compressed, new], 1)[:, new.shape[1] :]
        if c.compression_loss != "bptt":
            next_compressed = next_compressed.detach()  # only its own loss trains the compression
        return next_memory, next_compressed, evicted, new

    def compression_loss(self, projected: tuple, evicted: Tensor, new: Tensor) -> Tensor | None:
        """The auxiliary loss that trains the compression, or None if there is none."""
        if self.config.compression_loss == "attention_reconstruction":
            return self.attention_reconstruction(*projected, new)
        if (
            self.config.compression_loss == "auto_encoding"
        ):  # the mean square of evicted - g(new) (section 3.2)
            return mean_square(
                functional.linear(new, self.compression.decoder).view(evicted.shape), evicted
            )
        return None

    def attention_reconstruction(
        self, query: Tensor, key: Tensor, value: Tensor, new: Tensor
    ) -> Tensor:
        """Algorithm 2: mean squared difference of attention over the evicted rows and over new (B, N/c, D), by content alone.

        In key and value (B, H, K, E) the evicted rows follow the compressed ones. Only new gets gradient: query, key, value and
        the attention's parameters are detached.
        """
        evicted_rows = slice(
            self.config.compressed_memory, self.config.compressed_memory + self.config.segment
        )
        with torch.no_grad():
            target = content_attention(query, key[:, :, evicted_rows], value[:, :, evicted_rows])
        projected = functional.linear(new, torch.cat([self.key, self.value]).detach())
        out = content_attention(query.detach(), *split_heads(projected, self.config.heads, 2))
        return mean_square(out, target)


class Compressive(Model):
    """The model. `config` is the reference's; the initial weights are those that the reference draws from `seed`."""

    Config = Config
    state_type = State
    config: Config
    sinusoids: Tensor | None  # (K, D), for Transformer-XL's positions

    def __init__(self, config: Config, seed: int = 0):
        super().__init__(config)
        self.embedding = parameter(config.bands[0][1], config.width)  # (V, D), the output's too
        widths = (config.width // config.div_value ** (i + 1) for i in range(len(config.cutoffs)))
        self.tails = Layers(
            Tail(stop - start, narrow, config.width)
            for narrow, (start, stop) in zip(widths, config.bands[1:], strict=True)
        )
        self.clusters = (
            parameter(len(config.cutoffs), config.width) if config.cutoffs else None
        )  # (tails, D)
        self.layers = Layers(Layer(config) for _ in range(config.layers))
        total = config.compressed_memory + config.memory + config.segment
        sinusoids = (
            distance_sinusoids(total, config.width)
            if config.positions == "transformer_xl"
            else None
        )
        self.register_buffer("sinusoids", sinusoids, persistent=False)  # (K, D)
        initialise(self, init_params(config, np.random.default_rng(seed)))

    def describe(self) -> str:
        """One line on how far back the model looks, the paper's temporal range (section 3.3)."""
        c = self.config
        memories = (
            f"{c.memory} + {c.compression_rate} x {c.compressed_memory}"
            if c.compressed_memory
            else c.memory
        )
        return f"temporal range {c.layers} layers x ({memories}) = {c.temporal_range:,} tokens, and segments of {c.segment}"

    @property
    def attention_reach(self) -> int:
        """How many tokens back a prediction can look by attention only, without memory."""
        return self.config.temporal_range

    def auxiliary_parameters(self) -> list[nn.Parameter]:
        """The compression's parameters, if an auxiliary loss trains them and the task loss does not."""
        if self.config.compression_loss == "bptt":
            return []
        compressions = (layer.compression for layer in self.layers if layer.compression is not None)
        return [weight for compression in compressions for weight in compression.parameters()]

    def state_shapes(self, batch: int) -> dict[str, tuple[int, ...]]:
        """The shape of each field of a State of `batch` lanes; raises ValueError if batch is below 1."""
        c = self.config
        memory = (check_lanes(batch), c.layers, c.memory, c.width)
        compressed = (batch, c.layers, c.compressed_memory, c.width)
        return {"memory": memory, "compressed": compressed}

    def initial_state(self, batch: int) -> State:
        """The state at a document's start: zeros (Algorithm 1, lines 1-2)."""
        shapes = self.state_shapes(batch)
        return State(*(self.embedding.new_zeros(shape) for shape in shapes.values()))

    def read(self, tokens: Tensor, state: State) -> Reading:
        """Read a segment of tokens (B, N). Reading.hidden (B, N, D) predicts the next tokens; auxiliary has a loss per layer.

        Raises ValueError if N is not config.segment, or if the state does not fit this model and B lanes.
        """
        hidden, state, auxiliary, _ = self._read(tokens, state)
        return Reading(hidden * self.config.width**-0.5, state, auxiliary)

    def output_matrix(self) -> Tensor | AdaptiveSoftmax:
        """(V, D), the embedding; with cutoffs the AdaptiveSoftmax."""
        return (
            AdaptiveSoftmax(self.embedding, self.clusters, tuple(self.tails))
            if self.config.cutoffs
            else self.embedding
        )

    def advance(self, tokens: Tensor, state: State) -> State:
        """The state after tokens (B, N), without logits, compression losses and the last layer's output."""
        return self._read(tokens, state, memory_only=True)[1]

    def usage(self, tokens: Tensor, state: State) -> Tensor:
        """Each key's attention weight, averaged over heads and queries, by layer (B, L, K)."""
        return torch.stack(self._read(tokens, state, measure=True)[-1], 1)

    def _read(self, tokens, state, memory_only=False, measure=False):
        """The last layer's output, the next state, auxiliary losses and each layer's usage (B, K) or None."""
        c = self.config
        if tokens.shape[1] != c.segment:
            raise ValueError(
                f"a segment of {tokens.shape[1]} tokens is not one of {c.segment}; pad it"
            )
        self.check_state(state, len(tokens))
        h = self.output_matrix().look_up(tokens) if c.cutoffs else look_up(tokens, self.embedding)
        memories, compresseds, auxiliary, usages = [], [], {}, []
        for index, layer in enumerate(self.layers):
            no_output = memory_only and index + 1 == c.layers
            remembered = (state.memory[:, index], state.compressed[:, index])
            h, memory, compressed, loss, usage = layer(
                h, *remembered, self.sinusoids, memory_only, measure, no_output
            )
            memories.append(memory)
            compresseds.append(compressed)
            usages.append(usage)
            if loss is not None:
                auxiliary[f"layers.{index}.compression"] = loss
        return h, State(torch.stack(memories, 1), torch.stack(compresseds, 1)), auxiliary, usages
