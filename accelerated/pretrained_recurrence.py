"""GPT-2 with recurrence in PyTorch: the fast version of reference/pretrained_recurrence.py.

Config, parameter names, shapes and initial values are the reference's. `vectors` 0 is plain GPT-2, which carries nothing over.
B lanes, N of a window's T tokens, D width, H heads of width E, F feed-forward width, S inserted vectors, L layers, V vocabulary.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from accelerated.attention.content import causal_mask, content_attention
from accelerated.attention.heads import (
    Declared,
    LayerNorm,
    look_up,
    merge_heads,
    parameter,
    project,
)
from accelerated.protocol import (
    Layers,
    Model,
    Reading,
    Recomputable,
    check_lanes,
    initialise,
)
from reference.pretrained_recurrence import NORM_EPSILON, Config, init_params, pooled_rows


class State(NamedTuple):
    """What a window passes to the next one; axis 0 of every field is the lane (a row of the batch)."""

    pooled: Tensor  # (B, D), for plain GPT-2 (B, 0)
    present: Tensor  # (B,) bool, false before a document's first window, for plain GPT-2 (B, 0)


def with_slots(causal: Tensor, vectors: int, present: Tensor) -> Tensor:
    """The mask (B, 1, N, S + K), true for what queries must not see: S vectors if not present (B,), K tokens by `causal`."""
    absent = ~present[:, None, None, None].expand(-1, 1, len(causal), vectors)
    return torch.cat([absent, causal.expand(len(present), 1, -1, -1)], -1)


class Layer(Recomputable):
    """A layer of GPT-2: attention to the window's tokens and to inserted vectors, if any; then the MLP."""

    def __init__(self, config: Config):
        super().__init__()
        d, f = config.width, config.feed_forward
        self.heads, self.dropout_rate = config.heads, config.dropout
        self.norm = LayerNorm(d, NORM_EPSILON)
        self.query = parameter(d, d)  # (D, D)
        self.query_bias = parameter(d)  # (D,)
        self.key = parameter(d, d)  # (D, D)
        self.key_bias = parameter(d)  # (D,), without gradient: softmax cancels it
        self.value = parameter(d, d)  # (D, D)
        self.value_bias = parameter(d)  # (D,)
        self.output = parameter(d, d)  # (D, D)
        self.output_bias = parameter(d)  # (D,)
        self.mlp_norm = LayerNorm(d, NORM_EPSILON)
        self.mlp_hidden = parameter(f, d)  # (F, D)
        self.mlp_hidden_bias = parameter(f)  # (F,)
        self.mlp_output = parameter(d, f)  # (D, F)
        self.mlp_output_bias = parameter(d)  # (D,)

    def forward(self, x: Tensor, mask: Tensor | None, inserted: Tensor | None) -> Tensor:
        """(B, N, D) from x (B, N, D), inserted (B, S, D) and mask, true if a query must not see a key (Figure 2).

        Without a mask a token sees itself and earlier ones.
        """
        query, key, value = self.query_key_value(x)
        if inserted is not None:
            slots = self.key_value(inserted)
            key, value = (
                torch.cat(pair, 2) for pair in zip(slots, (key, value), strict=True)
            )  # (B, H, S + N, E)
        x = x + self.attend(query, key, value, mask)
        return x + self.mlp(x)

    def query_key_value(self, x: Tensor) -> tuple[Tensor, ...]:
        """Query, key and value (B, H, N, E) of x (B, N, D), by one product."""
        biases = [self.query_bias, self.key_bias.detach(), self.value_bias]
        return project(self.norm(x), self.heads, [self.query, self.key, self.value], biases)

    def key_value(self, x: Tensor) -> tuple[Tensor, ...]:
        """Key and value (B, H, S, E) of inserted vectors x (B, S, D), which have no query."""
        return project(
            self.norm(x),
            self.heads,
            [self.key, self.value],
            [self.key_bias.detach(), self.value_bias],
        )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Attention, causal if there is no mask, then the output matrix; (B, N, D)."""
        out = content_attention(
            query,
            key,
            value,
            mask,
            self.dropout_rate if self.training else 0.0,
            causal=mask is None,
        )
        out = functional.linear(merge_heads(out), self.output, self.output_bias)
        return functional.dropout(out, self.dropout_rate, self.training)

    def mlp(self, x: Tensor) -> Tensor:
        """(B, N, D) from x (B, N, D)."""
        hidden = functional.linear(
            self.mlp_norm(x), self.mlp_hidden, self.mlp_hidden_bias
        )  # (B, N, F)
        out = functional.linear(
            functional.gelu(hidden, approximate="tanh"), self.mlp_output, self.mlp_output_bias
        )
        return functional.dropout(out, self.dropout_rate, self.training)


class Recurrence(Declared):
    """What is added to GPT-2: Eq. 1 pools a window into one vector; a small network maps it to the inserted vectors."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.layer_scores = parameter(config.layers)  # (L,)
        self.fixed_key = parameter(config.width) if config.pooling == "attention" else None  # (D,)
        fan_in = config.width
        for layer in range(1, config.module_layers + 1):
            self.register_parameter(
                f"hidden_{layer}", parameter(config.module_width, fan_in)
            )  # (200, D or 200)
            self.register_parameter(
                f"hidden_{layer}_bias", parameter(config.module_width)
            )  # (200,)
            fan_in = config.module_width
        self.inserted = parameter(config.vectors * config.width, fan_in)  # (SD, 200)
        self.inserted_bias = parameter(config.vectors * config.width)  # (SD,)

    def forward(self, pooled: Tensor) -> Tensor:
        """h_prev (B, S, D) from z (B, D)."""
        x = pooled
        for layer in range(1, self.config.module_layers + 1):
            weight, bias = getattr(self, f"hidden_{layer}"), getattr(self, f"hidden_{layer}_bias")
            x = functional.gelu(functional.linear(x, weight, bias), approximate="tanh")
        return functional.linear(x, self.inserted, self.inserted_bias).view(
            len(x), self.config.vectors, self.config.width
        )

    def mix(self, outputs: list[Tensor]) -> Tensor:
        """Eq. 1's weighted sum of the layers' outputs, before positions are pooled; (B, N, D)."""
        shares = self.layer_scores.softmax(-1)
        return sum(share * output for share, output in zip(shares, outputs, strict=True))

    def pool(self, mixed: Tensor) -> Tensor:
        """Eq. 1: z (B, D) of the mixed outputs (B, n, D) of a window's pooled positions."""
        if self.config.pooling == "mean":
            return mixed.mean(1)
        if self.config.pooling == "max":
            return mixed.max(1).values
        weights = (mixed @ self.fixed_key[:, None] * mixed.shape[-1] ** -0.5).softmax(
            1
        )  # (B, n, 1), similarity to a learned key
        return (weights.transpose(1, 2) @ mixed)[:, 0]


class PretrainedRecurrence(Model):
    """The model. `config` is the reference's; the initial weights are those that the reference draws from `seed`."""

    Config = Config
    state_type = State
    config: Config

    def __init__(self, config: Config, seed: int = 0):
        super().__init__(config)
        self.embedding = parameter(config.vocabulary, config.width)  # (V, D)
        self.positions = parameter(
            config.max_positions, config.width
        )  # one row for each position in a window
        self.layers = Layers(Layer(config) for _ in range(config.layers))
        self.final_norm = LayerNorm(config.width, NORM_EPSILON)
        self.module = Recurrence(config) if config.vectors else None
        future = causal_mask(config.segment, config.segment)
        self.register_buffer(
            "future_keys", future, persistent=False
        )  # (T, T), true if a query must not see a key
        initialise(self, init_params(config, np.random.default_rng(seed)))

    def describe(self) -> str:
        """One line on how far back the model can look."""
        c = self.config
        reach = f"windows of {c.segment} tokens, {c.overlap} of them shared with the previous one"
        if not c.vectors:
            return f"{reach}; nothing else is carried from earlier text (plain GPT-2)"
        what = "one pooled vector is" if c.vectors == 1 else f"{c.vectors} vectors are"
        return f"{reach}; {what} carried from window to window, into layer {', '.join(map(str, c.insertion_layers))}"

    @property
    def attention_reach(self) -> int:
        """How many tokens back a prediction can look by attention only, without memory."""
        return self.config.segment

    def state_shapes(self, batch: int) -> dict[str, tuple[int, ...]]:
        """The shape of each field of a State of `batch` lanes; raises ValueError if batch is below 1."""
        batch = check_lanes(batch)
        if self.config.vectors == 0:
            return {"pooled": (batch, 0), "present": (batch, 0)}
        return {"pooled": (batch, self.config.width), "present": (batch,)}

    def initial_state(self, batch: int) -> State:
        """The state at a document's start: nothing to insert; raises ValueError if batch is below 1."""
        shapes = self.state_shapes(batch)
        pooled = self.embedding.new_zeros(shapes["pooled"])
        return State(pooled, torch.zeros(shapes["present"], dtype=torch.bool, device=pooled.device))

    def output_matrix(self) -> Tensor:
        """(V, D), the embedding."""
        return self.embedding

    def read(self, tokens: Tensor, state: State) -> Reading:
        """Read a window: tokens (B, N), 1 <= N <= T; the previous window has read the first o of them. hidden is (B, N, D).

        Raises ValueError for another N, or if the state does not fit this model and B lanes.
        """
        self._check(tokens, state)
        outputs, hidden = self._read(tokens, state)
        return Reading(hidden, self.next_state(state, outputs, hidden), {})

    def advance(self, tokens: Tensor, state: State) -> State:
        """The state after a window of tokens (B, N), without logits; raises ValueError as read does."""
        self._check(tokens, state)
        if self.module is None:
            return state
        return self.next_state(state, *self._read(tokens, state))

    def _check(self, tokens, state):
        if not 1 <= tokens.shape[1] <= self.config.segment:
            raise ValueError(
                f"a window of {tokens.shape[1]} tokens; it must have 1 to {self.config.segment}, the segment"
            )
        self.check_state(state, len(tokens))

    def _read(self, tokens, state):
        """The outputs of all layers for tokens (B, N), and the last output after the final norm."""
        c, length = self.config, tokens.shape[1]
        x = look_up(tokens, self.embedding) + self.positions[:length]
        x, outputs, inserted = (
            functional.dropout(x, c.dropout, self.training),
            [],
            self.vectors_to_insert(state),
        )
        future = self.future_keys[:length, :length]
        beside_slots = None if inserted is None else with_slots(future, c.vectors, state.present)
        for number, layer in enumerate(self.layers, start=1):
            inserts = inserted is not None and number in c.insertion_layers
            x = layer(x, beside_slots, inserted) if inserts else layer(x, None, None)
            outputs.append(x)
        return outputs, self.final_norm(x)

    def vectors_to_insert(self, state):
        """The vectors to insert, h_prev (B, S, D); None for plain GPT-2."""
        return None if self.module is None else self.module(state.pooled)

    def next_state(self, state, outputs, hidden):
        """The State after a window: its pooled layers' outputs (B, N, D); `hidden` is the last one after the final norm."""
        if self.module is None:
            return state
        mixed = self.module.mix(
            [*outputs[:-1], hidden if self.config.pool_final_norm else outputs[-1]]
        )
        rows = mixed[:, : pooled_rows(self.config, mixed.shape[1])]
        return State(
            self.module.pool(rows), torch.ones(len(rows), dtype=torch.bool, device=rows.device)
        )
