"""Memformer in PyTorch: reference/memformer.py made fast, encoder-decoder and decoder-only.

Same config, parameter names, shapes and initialisation. `advance` is the memory path alone: encoder and writer, or all layers of
the decoder-only model.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from accelerated.attention.content import content_attention
from accelerated.attention.heads import layer_norm, merge_heads, split_heads
from accelerated.attention.parameters import adopt_parameters
from accelerated.attention.signed_distance import distance_index, signed_sinusoids, simplified_attention, transformer_xl_attention
from accelerated.protocol import Output
from reference.memformer import Config, init_params


class State(NamedTuple):
    """What a segment hands to the next one; axis 0 of every field is the lane."""

    memory: torch.Tensor  # (B, 1, S, D), decoder-only (B, L, S, D)
    previous: torch.Tensor  # (B, N) token ids, decoder-only (B, 0)


class Stream(NamedTuple):
    """A segment being read token by token: `step` alone takes it. n of its N tokens have been read."""

    memory: torch.Tensor  # of the next State; in the decoder-only model still what this segment reads
    tokens: torch.Tensor  # (B, n)
    hidden: torch.Tensor  # (B, L, n, D), outputs of the decoder-only model's layers, which will write its memory
    keys: tuple  # per decoder layer (B, H, S + n or 1 + n, E): of memory or the task's token, and the tokens
    values: tuple
    encoded: tuple  # per decoder layer the key and the value (B, H, N, E) of what the encoder made of the segment before


def affine(x, p, name):
    """x by the matrix of that name, and its bias where it has one. A key's bias has no gradient: softmax does not notice it."""
    bias = getattr(p, f"{name}_bias", None)
    return functional.linear(x, getattr(p, name), bias.detach() if name == "key" and bias is not None else bias)


def project(x, p, name, heads):
    """affine, a head at a time: (B, n, D) -> (B, H, n, E)"""
    return split_heads(affine(x, p, name), heads, 1)[0]


def slot_attention(p, heads, memory, encoded, readable):
    """Figure 2c: each slot of memory (B, S, D) attends to [itself | encoded (B, N, D)]; its own value is the slot itself."""
    normal, source = layer_norm(memory, p.memory_norm), layer_norm(encoded, p.norm)
    query, own_key = (project(normal, p, name, heads) for name in ("query", "key"))
    key, value = (project(source, p, name, heads) for name in ("key", "value"))
    query = query * query.shape[-1] ** -0.5
    own = (query * own_key).sum(-1, keepdim=True) + p.retention[:, None, None]  # (B, H, S, 1)
    others = query @ key.transpose(-1, -2)  # (B, H, S, N)
    if readable is not None:
        others = others.masked_fill(~readable[:, None, None], -math.inf)
    weights = torch.cat([own, others], -1).softmax(-1)
    [slots] = split_heads(memory, heads, 1)  # (B, H, S, D/H)
    return merge_heads(weights[..., :1] * slots + weights[..., 1:] @ value)


class Memformer(nn.Module):
    """The model; `config` as in the reference, `seed` gives the weights that the reference draws from it."""

    Config = Config

    def __init__(self, config, seed=0):
        super().__init__()
        self.config = config
        adopt_parameters(self, init_params(config, np.random.default_rng(seed)))
        stacks = {"encoder": (False, config.segment)} if config.encoder_layers else {}
        stacks["decoder"] = (True, config.segment + (1 if config.encoder_layers else 0))
        for name, (causal, length) in stacks.items():
            lowest, highest = (int(end) for end in config.distances(causal)[[0, -1]])
            stack = getattr(self, name)
            stack.register_buffer("index", distance_index(length, lowest, highest), persistent=False)
            mask = torch.ones(length, length, dtype=torch.bool).triu(1) if causal else None
            stack.register_buffer("mask", mask, persistent=False)
            rows = signed_sinusoids(lowest, highest, config.width) if config.positions == "transformer_xl" else None
            stack.register_buffer("sinusoids", rows, persistent=False)

    def describe(self):
        """One line about how far back the model looks: its temporal range has no end (2.5)."""
        c = self.config
        kind = "encoder-decoder" if c.encoder_layers else "decoder-only, in each of its layers"
        return f"{c.slots} memory slots ({kind}) carry what was read over any number of segments of {c.segment}"

    @property
    def attention_reach(self):
        """Tokens back that a prediction can depend on by attention alone, without what the memory carries farther."""
        return self.config.segment * (2 if self.config.encoder_layers else 1)

    def auxiliary_parameters(self):
        """None: there is one objective."""
        return []

    def initial_state(self, batch):
        """What a document starts with: the learned slots, and a segment of begin tokens."""
        c = self.config
        width = c.segment if c.encoder_layers else 0
        previous = torch.full((batch, width), c.special("begin"), device=self.embedding.device)
        return State(self.initial_memory.expand(batch, -1, -1, -1), previous)

    def forward(self, tokens, state, task=None):
        """Read a segment of tokens (B, N); Output.logits (B, N, V) predict the next token, or what a Task asks for.

        Raises ValueError if N is not config.segment, or if the decoder-only model is given a task.
        """
        self._check(tokens, task)
        if self.config.encoder_layers == 0:
            x, memory = self._decode_only(tokens, state.memory)
            return Output(self._logits(layer_norm(x, self.decoder.norm)), State(memory, state.previous), {})
        encoded, memory, readable = self._encode(state, task)
        kind, prompt = (0, tokens) if task is None else (task.kind[:, None], task.prompt)
        first = tokens.new_full((len(tokens), 1), self.config.special("continuation")) + kind  # the task's token
        hidden = self._decode(torch.cat([first, prompt], 1), encoded, readable)
        return Output(self._logits(self._predicting(hidden, kind)), State(memory, tokens), {})

    def advance(self, tokens, state, task=None):
        """The state after tokens (B, N), without decoder and logits."""
        self._check(tokens, task)
        if self.config.encoder_layers == 0:
            return State(self._decode_only(tokens, state.memory)[1], state.previous)
        return State(self._encode(state, task)[1], tokens)

    def step(self, token, state):
        """Read one token (B,) in evaluation mode; returns logits (B, V) and the Stream to pass on.

        state is the Stream of an earlier step, or a State to begin a segment from.
        """
        stream = state if isinstance(state, Stream) else self.stream(state)
        hidden, stream = self._step(token, stream)
        stream = stream._replace(tokens=torch.cat([stream.tokens, token[:, None]], 1))
        full = stream.tokens.shape[1] == self.config.segment
        return self._logits(hidden)[:, 0], self.stream(self._close_segment(stream)) if full else stream

    def stream(self, state):
        """Open a state for `step`: read what every token of the coming segment looks at."""
        c, layers = self.config, self.decoder.layers
        tokens = state.previous.new_zeros(len(state.memory), 0)
        hidden = state.memory.new_zeros(len(state.memory), len(layers), 0, c.width)
        if c.encoder_layers == 0:
            remembered = (layer_norm(state.memory[:, i], p.attention.memory_norm) for i, p in enumerate(layers))
            pairs = [self._key_value(p.attention, m) for m, p in zip(remembered, layers, strict=True)]
            return Stream(state.memory, tokens, hidden, *zip(*pairs, strict=True), ())
        encoded, memory, _ = self._encode(state, None)
        seen = tuple(self._key_value(p.cross, encoded) for p in layers)
        empty = tuple(key[:, :, :0] for key, _ in seen)
        stream = Stream(memory, tokens, hidden, empty, empty, seen)
        first = state.previous.new_full((len(tokens),), c.special("continuation"))
        return self._step(first, stream)[1]

    def _check(self, tokens, task):
        c = self.config
        if tokens.shape[1] != c.segment:
            raise ValueError(f"a segment of {tokens.shape[1]} tokens is not one of {c.segment}; pad it")
        if task is not None and c.encoder_layers == 0:
            raise ValueError("the decoder-only model (encoder_layers 0) has no tasks but continuation; leave task out")

    def _logits(self, hidden):
        """Special tokens are never predicted."""
        return functional.linear(hidden * self.config.width**-0.5, self.embedding[: self.config.vocabulary])

    def _rate(self):
        return self.config.dropout if self.training else 0.0

    def _dropout(self, x):
        return functional.dropout(x, self.config.dropout, self.training)

    def _predicting(self, hidden, kind):
        """The N of the decoder's N + 1 rows that predict: the last in continuation, the first in the other tasks."""
        if isinstance(kind, int):
            return hidden[:, 1:]
        return torch.where((kind == 0)[..., None], hidden[:, 1:], hidden[:, :-1])

    def _encode(self, state, task):
        """Eq. 5: encoded (B, N, D), the next memory (B, 1, S, D), and where the encoder's input is no padding."""
        reading, readable = (state.previous, None) if task is None else (task.reading, task.readable)
        memory, x = state.memory[:, 0], functional.embedding(reading, self.embedding)
        for p in self.encoder.layers:
            x = x + self.self_attention(p.attention, self.encoder, x, readable=readable)
            x = x + self._cross_attention(p.read, x, layer_norm(memory, p.read.memory_norm))
            x = x + self._feed_forward(p, x)
        encoded = layer_norm(x, self.encoder.norm)
        return encoded, slot_attention(self.writer, self.config.heads, memory, encoded, readable)[:, None], readable

    def _decode(self, prompt, encoded, readable):
        """Eq. 6: final hidden states (B, N + 1, D) of prompt (B, N + 1)."""
        x = functional.embedding(prompt, self.embedding)
        for p in self.decoder.layers:
            x = x + self.self_attention(p.attention, self.decoder, x)
            x = x + self._cross_attention(p.cross, x, encoded, readable)
            x = x + self._feed_forward(p, x)
        return layer_norm(x, self.decoder.norm)

    def _decode_only(self, tokens, memory):
        """Figure 1b: the last layer's output (B, N, D) for tokens (B, N), and the next memory (B, L, S, D)."""
        x, memories = functional.embedding(tokens, self.embedding), []
        for layer, p in enumerate(self.decoder.layers):
            x = x + self.self_attention(p.attention, self.decoder, x, memory[:, layer])
            x = x + self._feed_forward(p, x)
            memories.append(slot_attention(p.writer, self.config.heads, memory[:, layer], x, None))
        return x, torch.stack(memories, 1)

    def _key_value(self, p, x):
        """Key and value (B, H, n, E) of x (B, n, D)."""
        return tuple(project(x, p, name, self.config.heads) for name in ("key", "value"))

    def self_attention(self, p, stack, x, memory=None, readable=None):
        """What tokens x (B, N, D) find in each other and, in the decoder-only model, in memory (B, S, D)."""
        normal = layer_norm(x, p.norm)
        query, (key, value) = project(normal, p, "query", self.config.heads), self._key_value(p, normal)
        if memory is not None:
            remembered = self._key_value(p, layer_norm(memory, p.memory_norm))
            key, value = (torch.cat(pair, 2) for pair in zip(remembered, (key, value), strict=True))
        mask = stack.mask if readable is None else ~readable[:, None, None]
        out = self._attend(p, stack, query, key, value, stack.index, mask)
        return self._dropout(affine(merge_heads(out), p, "output"))

    def _attend(self, p, stack, query, key, value, index, mask):
        """By the positions that the config names; (B, H, N, E)."""
        if self.config.positions == "simplified":
            return simplified_attention(query, key, value, p.positions, index, mask, self._rate())
        [distance_key] = split_heads(functional.linear(stack.sinusoids, p.distance_key)[None], self.config.heads, 1)
        biases = (p.content_bias, p.distance_bias)
        return transformer_xl_attention(query, key, value, distance_key[0], *biases, index, mask, self._rate())

    def _cross_attention(self, p, x, source, readable=None):
        """What x (B, N, D) finds in source (B, K, D), by content alone (Figure 2b)."""
        return self._cross(p, x, *self._key_value(p, source), readable)

    def _cross(self, p, x, key, value, readable=None):
        query = project(layer_norm(x, p.norm), p, "query", self.config.heads)
        mask = None if readable is None else ~readable[:, None, None]
        out = content_attention(query, key, value, mask, self._rate())
        return self._dropout(affine(merge_heads(out), p, "output"))

    def _feed_forward(self, p, x):
        return self._dropout(affine(affine(layer_norm(x, p.mlp_norm), p, "mlp_hidden").relu_(), p, "mlp_output"))

    def _step(self, token, stream):
        """One token (B,) through the decoder: final hidden state (B, 1, D) and the stream with its keys and values."""
        x, hidden, keys, values = functional.embedding(token[:, None], self.embedding), [], [], []
        for layer, p in enumerate(self.decoder.layers):
            out, key, value = self._step_attention(p.attention, x, stream.keys[layer], stream.values[layer])
            x = x + out
            if self.config.encoder_layers:
                x = x + self._cross(p.cross, x, *stream.encoded[layer])
            x = x + self._feed_forward(p, x)
            hidden.append(x)
            keys.append(key)
            values.append(value)
        stream = stream._replace(keys=tuple(keys), values=tuple(values))
        if self.config.encoder_layers == 0:
            stream = stream._replace(hidden=torch.cat([stream.hidden, torch.stack(hidden, 1)], 2))
        return layer_norm(x, self.decoder.norm), stream

    def _step_attention(self, p, x, keys, values):
        """One token x (B, 1, D): what it finds, and keys and values with its own."""
        c = self.config
        normal = layer_norm(x, p.norm)
        query = project(normal, p, "query", c.heads)
        keys, values = (torch.cat(pair, 2) for pair in zip((keys, values), self._key_value(p, normal), strict=True))
        read = keys.shape[2] - (0 if c.encoder_layers else c.slots)  # memory has no positions
        index = self.decoder.index[read - 1 : read, :read]
        out = self._attend(p, self.decoder, query, keys, values, index, None)
        return affine(merge_heads(out), p, "output"), keys, values

    def _close_segment(self, stream):
        """The state after a segment that has been read whole."""
        if self.config.encoder_layers:
            return State(stream.memory, stream.tokens)
        memories = [
            slot_attention(p.writer, self.config.heads, stream.memory[:, layer], stream.hidden[:, layer], None)
            for layer, p in enumerate(self.decoder.layers)
        ]
        return State(torch.stack(memories, 1), stream.tokens[:, :0])
