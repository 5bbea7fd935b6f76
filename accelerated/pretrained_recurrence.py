"""GPT-2 with recurrence in PyTorch: reference/pretrained_recurrence.py made fast.

Same config, parameter names, shapes and initialisation. `vectors` 0 is plain GPT-2, whose windows know nothing of each other.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from accelerated.attention.content import content_attention
from accelerated.attention.heads import layer_norm, merge_heads, split_heads
from accelerated.attention.parameters import adopt_parameters
from accelerated.protocol import Output
from reference.pretrained_recurrence import NORM_EPSILON, Config, init_params, pooled_rows


class State(NamedTuple):
    """What a window hands to the next one; axis 0 of every field is the lane."""

    pooled: torch.Tensor  # (B, D), for plain GPT-2 (B, 0)
    present: torch.Tensor  # (B,) bool, false before a document's first window, for plain GPT-2 (B, 0)


class Stream(NamedTuple):
    """A window being read token by token: `step` alone takes it. n of its T tokens have been read."""

    tokens: torch.Tensor  # (B, n)
    keys: tuple  # per layer (B, H, S + n or n, E), those of the inserted vectors first
    values: tuple
    mixed: torch.Tensor  # (B, n, D), the layers' outputs in their shares
    present: torch.Tensor  # (B,) of the State that this window reads


def mean_over_positions(p, mixed):
    return mixed.mean(1)


def max_over_positions(p, mixed):
    return mixed.max(1).values


def attention_over_positions(p, mixed):
    """Positions weighted by how well they fit a learned fixed key; (B, n, D) -> (B, D)."""
    weights = (mixed @ p.fixed_key[:, None] * mixed.shape[-1] ** -0.5).softmax(1)  # (B, n, 1)
    return (weights.transpose(1, 2) @ mixed)[:, 0]


POOLINGS = {"mean": mean_over_positions, "max": max_over_positions, "attention": attention_over_positions}


def with_slots(causal, vectors, present):
    """What queries must not see, (B, 1, N, S + K): of S vectors those that are not present (B,), of K tokens the causal mask."""
    absent = ~present[:, None, None, None].expand(-1, 1, len(causal), vectors)
    return torch.cat([absent, causal.expand(len(present), 1, -1, -1)], -1)


class PretrainedRecurrence(nn.Module):
    """The model; `config` as in the reference, `seed` gives the weights that the reference draws from it."""

    Config = Config

    def __init__(self, config, seed=0):
        super().__init__()
        self.config = config
        adopt_parameters(self, init_params(config, np.random.default_rng(seed)))
        causal = torch.ones(config.segment, config.segment, dtype=torch.bool).triu(1)
        self.register_buffer("future_keys", causal, persistent=False)  # (T, T), true where a query must not look

    def describe(self):
        """One line about how far back the model can look."""
        c = self.config
        reach = f"windows of {c.segment} tokens, {c.overlap} of them shared with the one before"
        if not c.vectors:
            return f"{reach}; nothing else is known of what came earlier (plain GPT-2)"
        what = "one pooled vector is" if c.vectors == 1 else f"{c.vectors} vectors are"
        return f"{reach}; {what} carried from window to window, into layer {', '.join(map(str, c.insertion_layers))}"

    @property
    def attention_reach(self):
        """Tokens back that a prediction can depend on by attention alone, without what the memory carries farther."""
        return self.config.segment

    def auxiliary_parameters(self):
        """None: there is one objective."""
        return []

    def initial_state(self, batch):
        """What a document starts with: nothing to insert."""
        if self.config.vectors == 0:
            empty = self.embedding.new_zeros(batch, 0)
            return State(empty, empty.bool())
        pooled = self.embedding.new_zeros(batch, self.config.width)
        return State(pooled, torch.zeros(batch, dtype=torch.bool, device=pooled.device))

    def forward(self, tokens, state):
        """Read a window: tokens (B, N), 1 <= N <= T, of which the window before has read the first o. Output.logits (B, N, V).

        Raises ValueError for another N.
        """
        outputs, hidden = self._read(tokens, state)
        return Output(functional.linear(hidden, self.embedding), self._next_state(state, outputs, hidden), {})

    def advance(self, tokens, state):
        """The state after a window of tokens (B, N), without logits."""
        if not self.config.vectors:
            return state
        return self._next_state(state, *self._read(tokens, state))

    def step(self, token, state):
        """Read one token (B,) in evaluation mode; returns logits (B, V) and the Stream to pass on.

        state is the Stream of an earlier step, or a State, which begins a window. A full window is closed and the next one opened
        with its last o tokens, so that the next step's token is the first that it has not seen.
        """
        hidden, stream = self._extend(token[:, None], state if isinstance(state, Stream) else self.stream(state))
        if stream.tokens.shape[1] == self.config.segment:
            stream = self._next_window(stream)
        return functional.linear(hidden[:, -1], self.embedding), stream

    def stream(self, state):
        """Open a window for `step`: keys and values of what is inserted into it."""
        c, batch = self.config, len(state.present)
        tokens = torch.zeros(batch, 0, dtype=torch.long, device=state.pooled.device)
        empty = self.embedding.new_zeros(batch, c.heads, 0, c.width // c.heads)
        pairs, inserted = [(empty, empty)] * c.layers, self._inserted(state)
        for number in c.insertion_layers if inserted is not None else ():
            p = self.layers[number - 1]
            pairs[number - 1] = self._project(p, layer_norm(inserted, p.norm, NORM_EPSILON), ("key", "value"))
        mixed = self.embedding.new_zeros(batch, 0, c.width)
        return Stream(tokens, *zip(*pairs, strict=True), mixed, state.present)

    def _read(self, tokens, state):
        """All layers' outputs for tokens (B, N), and the last after the final norm."""
        c, length = self.config, tokens.shape[1]
        if not 1 <= length <= c.segment:
            raise ValueError(f"a window of {length} tokens; it must have 1 to {c.segment}, the segment")
        x, outputs, inserted = self._embed(tokens, 0), [], self._inserted(state)
        causal = self.future_keys[:length, :length]
        masks = (causal, None if inserted is None else with_slots(causal, c.vectors, state.present))
        for number, p in enumerate(self.layers, start=1):
            own = inserted if number in c.insertion_layers else None
            x = x + self._attention(p, x, own, masks[own is not None])
            x = x + self._mlp(p, x)
            outputs.append(x)
        return outputs, layer_norm(x, self.final_norm, NORM_EPSILON)

    def _embed(self, tokens, at):
        """Embeddings of tokens (B, N), the first of them at position `at` of its window."""
        x = functional.embedding(tokens, self.embedding) + self.positions[at : at + tokens.shape[1]]
        return self._dropout(x)

    def _inserted(self, state):
        """h_prev, (B, S, D); None in plain GPT-2."""
        c = self.config
        if not c.vectors:
            return None
        x = state.pooled
        for layer in range(1, c.module_layers + 1):
            x = functional.gelu(self._affine(x, self.module, f"hidden_{layer}"), approximate="tanh")
        return self._affine(x, self.module, "inserted").view(len(x), c.vectors, c.width)

    def _next_state(self, state, outputs, hidden):
        if not self.config.vectors:
            return state
        last = hidden if self.config.pool_final_norm else outputs[-1]
        return self._pool(self._mix([*outputs[:-1], last]))

    def _mix(self, outputs):
        """Eq. 1's share of every layer, before positions are pooled; (B, N, D)."""
        shares = self.module.layer_scores.softmax(-1)
        return sum(share * output for share, output in zip(shares, outputs, strict=True))

    def _pool(self, mixed):
        """Eq. 1: the State that a window of mixed outputs (B, N, D) leaves."""
        rows = pooled_rows(self.config, mixed.shape[1])
        pooled = POOLINGS[self.config.pooling](self.module, mixed[:, :rows])
        return State(pooled, torch.ones(len(mixed), dtype=torch.bool, device=mixed.device))

    def _affine(self, x, p, name):
        return functional.linear(x, getattr(p, name), getattr(p, f"{name}_bias"))

    def _dropout(self, x):
        return functional.dropout(x, self.config.dropout, self.training)

    def _project(self, p, x, names):
        """Some of query, key and value (B, H, N, E) of x (B, N, D), by one product. A key's bias has no gradient."""
        biases = [getattr(p, f"{name}_bias") for name in names]
        biases = [bias.detach() if name == "key" else bias for name, bias in zip(names, biases, strict=True)]
        weight = torch.cat([getattr(p, name) for name in names])
        return split_heads(functional.linear(x, weight, torch.cat(biases)), self.config.heads, len(names))

    def _attention(self, p, x, inserted, mask):
        """What tokens x (B, N, D) find in [inserted (B, S, D) | x] (Figure 2)."""
        query, key, value = self._project(p, layer_norm(x, p.norm, NORM_EPSILON), ("query", "key", "value"))
        if inserted is not None:
            slots = self._project(p, layer_norm(inserted, p.norm, NORM_EPSILON), ("key", "value"))
            key, value = (torch.cat(pair, 2) for pair in zip(slots, (key, value), strict=True))
        rate = self.config.dropout if self.training else 0.0
        out = content_attention(query, key, value, mask, rate)
        return self._dropout(self._affine(merge_heads(out), p, "output"))

    def _mlp(self, p, x):
        hidden = self._affine(layer_norm(x, p.mlp_norm, NORM_EPSILON), p, "mlp_hidden")
        return self._dropout(self._affine(functional.gelu(hidden, approximate="tanh"), p, "mlp_output"))

    def _extend(self, tokens, stream):
        """More tokens (B, m) of a window: final hidden states (B, m, D), and the stream with what they add."""
        c, count, at = self.config, tokens.shape[1], stream.tokens.shape[1]
        x, outputs, keys, values = self._embed(tokens, at), [], [], []
        causal = self.future_keys[at : at + count, : at + count]  # (m, n + m)
        for p, *seen in zip(self.layers, stream.keys, stream.values, strict=True):
            query, *new = self._project(p, layer_norm(x, p.norm, NORM_EPSILON), ("query", "key", "value"))
            key, value = (torch.cat(pair, 2) for pair in zip(seen, new, strict=True))
            slots = key.shape[2] - at - count
            out = content_attention(query, key, value, with_slots(causal, slots, stream.present) if slots else causal)
            x = x + self._affine(merge_heads(out), p, "output")
            x = x + self._mlp(p, x)
            outputs.append(x)
            keys.append(key)
            values.append(value)
        hidden = layer_norm(x, self.final_norm, NORM_EPSILON)
        mixed = stream.mixed
        if c.vectors:
            mixed = torch.cat([mixed, self._mix([*outputs[:-1], hidden if c.pool_final_norm else x])], 1)
        return hidden, Stream(torch.cat([stream.tokens, tokens], 1), tuple(keys), tuple(values), mixed, stream.present)

    def _next_window(self, stream):
        """The stream of the window after a full one, which reads the last o tokens again."""
        c = self.config
        opened = self.stream(self._pool(stream.mixed) if c.vectors else self.initial_state(len(stream.tokens)))
        return self._extend(stream.tokens[:, c.stride :], opened)[1] if c.overlap else opened
