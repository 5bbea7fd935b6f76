"""Compressive Transformer in PyTorch: reference/compressive.py made fast. Without compressed memory it is Transformer-XL.

Same config, parameter names, shapes and initialisation. What is compressed has already been projected to keys and values by the
segment's own attention, so the attention-reconstruction loss projects the compressed rows alone.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from accelerated.attention.heads import layer_norm, merge_heads, split_heads
from accelerated.attention.parameters import adopt_parameters
from accelerated.attention.relative_shift import distance_sinusoids, relative_attention
from accelerated.protocol import Output
from reference.compressive import Config, init_params


class State(NamedTuple):
    """What a segment hands to the next one; axis 0 of every field is the lane."""

    memory: torch.Tensor  # (B, L, M, D)
    compressed: torch.Tensor  # (B, L, C, D)


class Stream(NamedTuple):
    """A segment being read token by token: `step` alone takes it. n of its N tokens have been read."""

    state: State  # at the segment's start
    hidden: torch.Tensor  # (B, L, n, D), inputs of the layers
    keys: tuple  # per layer (B, H, C + M + n, E)
    values: tuple
    distance_keys: tuple  # per layer (H, K, E)
    usage: torch.Tensor  # (B, L, K), attention that each key got so far, summed over tokens, mean over heads


def project_own(p, heads, h):
    """Query, key and value of a segment's own rows h (B, n, D), each (B, H, n, E)."""
    return split_heads(functional.linear(h, torch.cat([p.query, p.key, p.value])), heads, 3)


def project_remembered(p, heads, remembered):
    """Key and value of remembered rows (B, C + M, D), each (B, H, C + M, E).

    Apart from the segment's own: they need no gradient, which half the work of a joint product would be spent on.
    """
    return split_heads(functional.linear(remembered, torch.cat([p.key, p.value])), heads, 2)


def project(p, heads, h, remembered):
    """Query (B, H, N, E) of h (B, N, D), key and value (B, H, K, E) of [remembered | h]."""
    query, *own = project_own(p, heads, h)
    before = project_remembered(p, heads, remembered)
    return query, *(torch.cat(pair, 2) for pair in zip(before, own, strict=True))


def dilated_layer(x, weight, rate):
    """relu(W [x_{i-rate}; x_i]), zeros before the first row."""
    earlier = functional.pad(x, (0, 0, rate, 0))[:, : x.shape[1]]
    return torch.relu(functional.linear(torch.cat([earlier, x], -1), weight))


def most_used(evicted, usage, kept):
    """The `kept` rows of evicted (B, N, D) with the largest usage (B, N), in their order in time; of equals the older."""
    at = usage.argsort(dim=1, descending=True, stable=True)[:, :kept].sort(1).values
    return evicted.gather(1, at[:, :, None].expand(-1, -1, evicted.shape[2]))


def compress(p, config, evicted, usage):
    """f_c (section 3.2): evicted (B, N, D) to (B, N/c, D); usage (B, N) is the mean attention that each row got."""
    rate = config.compression_rate
    if config.compression == "most_used":
        return most_used(evicted, usage, evicted.shape[1] // rate)
    if config.compression == "max_pooling":
        return evicted.unflatten(1, (-1, rate)).amax(2)
    if config.compression == "mean_pooling":
        return evicted.unflatten(1, (-1, rate)).mean(2)
    if config.compression == "dilated_conv":
        for dilation in config.dilations:
            evicted = dilated_layer(evicted, getattr(p, f"dilated_{dilation}"), dilation)
    return functional.linear(evicted.unflatten(1, (-1, rate)).flatten(2), p.weight)


def content_attention(query, key, value):
    """softmax(q.k / sqrt(E)) v without mask or positions (Algorithm 2, line 6)."""
    return (query * query.shape[-1] ** -0.5 @ key.transpose(-1, -2)).softmax(-1) @ value


def attention_reconstruction(p, query, key, value, new):
    """Algorithm 2 of one layer, mean square: attention over the evicted rows' key and value against that over new (B, N/c, D).

    Gradient reaches new alone: query, key, value and the attention parameters are detached here.
    """
    with torch.no_grad():
        target = content_attention(query, key, value)
    projected = functional.linear(new, torch.cat([p.key, p.value]).detach())
    out = content_attention(query.detach(), *split_heads(projected, query.shape[1], 2))
    return functional.mse_loss(out, target)


def auto_encoding(p, evicted, new):
    """Mean square of evicted - g(new) (section 3.2)."""
    return functional.mse_loss(functional.linear(new, p.compression.decoder).view(evicted.shape), evicted)


class Compressive(nn.Module):
    """The model; `config` as in the reference, `seed` gives the weights that the reference draws from it."""

    Config = Config

    def __init__(self, config, seed=0):
        super().__init__()
        self.config = config
        adopt_parameters(self, init_params(config, np.random.default_rng(seed)))
        total = config.compressed_memory + config.memory + config.segment
        self.register_buffer("sinusoids", distance_sinusoids(total, config.width), persistent=False)

    def describe(self):
        """One line about how far back the model looks, the paper's temporal range (3.3)."""
        c = self.config
        memories = f"{c.memory} + {c.compression_rate} x {c.compressed_memory}" if c.compressed_memory else c.memory
        return f"temporal range {c.layers} layers x ({memories}) = {c.temporal_range:,} tokens, and segments of {c.segment}"

    @property
    def attention_reach(self):
        """Tokens back that a prediction can depend on by attention alone, without what the memory carries farther."""
        return self.config.temporal_range

    def auxiliary_parameters(self):
        """The compression's parameters, where an auxiliary loss trains them and the task loss does not."""
        if self.config.compression_loss == "bptt":
            return []
        return [parameter for name, parameter in self.named_parameters() if ".compression." in name]

    def initial_state(self, batch):
        """What a document starts with: zeros (Algorithm 1, lines 1-2)."""
        c = self.config
        return State(*(self.embedding.new_zeros(batch, c.layers, n, c.width) for n in (c.memory, c.compressed_memory)))

    def forward(self, tokens, state):
        """Read a segment of tokens (B, N). Output.logits (B, N, V) predict the next token; auxiliary has a loss per layer.

        Raises ValueError if N is not config.segment or state is of other memory sizes.
        """
        hidden, state, auxiliary, _ = self._read(tokens, state)
        return Output(self._logits(hidden), state, auxiliary)

    def advance(self, tokens, state):
        """The state after tokens (B, N), without logits, compression losses and what the last layer makes of its input."""
        return self._read(tokens, state, memory_only=True)[1]

    def usage(self, tokens, state):
        """The attention weight that each key got, mean over heads and queries, by layer: (B, L, K); and the next state."""
        _, state, _, usage = self._read(tokens, state, measure=True)
        return torch.stack(usage, 1), state

    def step(self, token, state):
        """Read one token (B,) in evaluation mode; returns logits (B, V) and the Stream to pass on.

        state is the Stream of an earlier step, or a State to begin a segment from.
        """
        stream = state if isinstance(state, Stream) else self.stream(state)
        h, hidden, keys, values, usages = self.embedding[token][:, None], [], [], [], []
        for p, *seen in zip(self.layers, stream.keys, stream.values, stream.distance_keys, strict=True):
            hidden.append(h)
            attended, key, value, usage = self._step_attention(p, h, *seen)
            keys.append(key)
            values.append(value)
            usages.append(usage)
            h = self._mix(p, h, attended)
        hidden = torch.cat([stream.hidden, torch.stack(hidden, 1)], 2)
        usage = stream.usage + torch.stack(usages, 1)
        stream = stream._replace(hidden=hidden, keys=tuple(keys), values=tuple(values), usage=usage)
        full = hidden.shape[2] == self.config.segment
        return self._logits(h)[:, 0], self.stream(self._close_segment(stream)) if full else stream

    def stream(self, state):
        """Open a state for `step`: project what every token of the coming segment reads."""
        self._check(state)
        batch, heads = len(state.memory), self.config.heads
        keys, values, distance_keys = [], [], []
        for layer, p in enumerate(self.layers):
            remembered = torch.cat([state.compressed[:, layer], state.memory[:, layer]], 1)
            key, value = project_remembered(p, heads, remembered)
            keys.append(key)
            values.append(value)
            distance_keys.append(self._distance_key(p))
        hidden = state.memory[:, :, :0]
        usage = hidden.new_zeros(batch, len(self.layers), len(self.sinusoids))
        return Stream(state, hidden, tuple(keys), tuple(values), tuple(distance_keys), usage)

    def _logits(self, hidden):
        return functional.linear(hidden * self.config.width**-0.5, self.embedding)

    def _dropout(self, x):
        return functional.dropout(x, self.config.dropout, self.training)

    def _distance_key(self, p):
        """W_R R (H, K, E)"""
        return split_heads(functional.linear(self.sinusoids, p.distance_key)[None], self.config.heads, 1)[0][0]

    def _check(self, state):
        for name, rows in (("memory", state.memory), ("compressed_memory", state.compressed)):
            if rows.shape[2] != getattr(self.config, name):
                raise ValueError(f"the state holds {rows.shape[2]} rows of {name}, the model {getattr(self.config, name)}")

    def _read(self, tokens, state, memory_only=False, measure=False):
        """The last layer's output, the next state, auxiliary losses and, to measure them, each layer's usage (B, K)."""
        c = self.config
        measure = measure or c.compression == "most_used"
        if tokens.shape[1] != c.segment:
            raise ValueError(f"a segment of {tokens.shape[1]} tokens is not one of {c.segment}; pad it")
        self._check(state)
        h, memories, compresseds, auxiliary, usages = functional.embedding(tokens, self.embedding), [], [], {}, []
        for layer, p in enumerate(self.layers):
            memory, compressed = state.memory[:, layer], state.compressed[:, layer]
            last = memory_only and layer + 1 == c.layers
            attended, usage, projected = None, None, None
            if measure or not last:
                projected = project(p, c.heads, h, torch.cat([compressed, memory], 1))
                attended, usage = self._attend(p, *projected, self._distance_key(p), measure)
            next_memory, next_compressed, evicted, new = self._remember(p, h, memory, compressed, usage)
            memories.append(next_memory)
            compresseds.append(next_compressed)
            usages.append(usage)
            if not memory_only:
                auxiliary |= self._compression_loss(layer, p, projected, evicted, new)
            if not last:
                h = self._mix(p, h, attended)
        return h, State(torch.stack(memories, 1), torch.stack(compresseds, 1)), auxiliary, usages

    def _attend(self, p, query, key, value, distance_key, measure):
        """attended (B, H, N, E) and usage (B, K), None unless measured"""
        dropout = self.config.dropout if self.training else 0.0
        return relative_attention(query, key, value, distance_key, p.content_bias, p.distance_bias, dropout, measure)

    def _mix(self, p, h, attended):
        """Algorithm 1, lines 7 and 12: the next layer's input from h (B, N, D) and attended (B, H, N, E)."""
        a = layer_norm(self._dropout(functional.linear(merge_heads(attended), p.output)) + h, p.norm)
        hidden = functional.linear(a, p.mlp_hidden, p.mlp_hidden_bias).relu_()
        return layer_norm(self._dropout(functional.linear(hidden, p.mlp_output, p.mlp_output_bias)) + a, p.mlp_norm)

    def _remember(self, p, h, memory, compressed, usage):
        """Algorithm 1, lines 8 to 11: next memory, next compressed memory, evicted, new; the last two None for C = 0."""
        c, n = self.config, h.shape[1]
        queue = torch.cat([memory, h], 1).detach()  # memory is data
        evicted, next_memory = queue[:, :n], queue[:, n:]
        if c.compressed_memory == 0:
            return next_memory, compressed.detach(), None, None
        own = usage[:, c.compressed_memory : c.compressed_memory + n] if c.compression == "most_used" else None
        new = compress(getattr(p, "compression", None), c, evicted, own)
        next_compressed = torch.cat([compressed, new], 1)[:, new.shape[1] :]
        if c.compression_loss != "bptt":
            next_compressed = next_compressed.detach()  # the compression has a loss of its own
        return next_memory, next_compressed, evicted, new

    def _compression_loss(self, layer, p, projected, evicted, new):
        """{name: loss} of one layer, empty where nothing is measured."""
        c = self.config
        if new is None or c.compression_loss in ("bptt", "none"):
            return {}
        if c.compression_loss == "auto_encoding":
            loss = auto_encoding(p, evicted, new)
        else:
            query, key, value = projected
            own = slice(c.compressed_memory, c.compressed_memory + c.segment)  # where evicted stands among the keys
            loss = attention_reconstruction(p, query, key[:, :, own], value[:, :, own], new)
        return {f"layers.{layer}.compression": loss}

    def _step_attention(self, p, h, keys, values, distance_key):
        """One token h (B, 1, D) of a layer: attended (B, H, 1, E), keys and values with its own, and usage (B, K)."""
        query, key, value = project_own(p, self.config.heads, h)
        keys, values = torch.cat([keys, key], 2), torch.cat([values, value], 2)
        read = keys.shape[2]
        attended, usage = self._attend(p, query, keys, values, distance_key[:, -read:], measure=True)
        return attended, keys, values, functional.pad(usage, (0, len(self.sinusoids) - read))

    def _close_segment(self, stream):
        """The state after a segment that has been read whole."""
        memories, compresseds = [], []
        for layer, p in enumerate(self.layers):
            usage = stream.usage[:, layer]  # a sum over queries, not a mean: only its order counts
            h, memory, compressed = (rows[:, layer] for rows in (stream.hidden, *stream.state))
            next_memory, next_compressed, _, _ = self._remember(p, h, memory, compressed, usage)
            memories.append(next_memory)
            compresseds.append(next_compressed)
        return State(torch.stack(memories, 1), torch.stack(compresseds, 1))
