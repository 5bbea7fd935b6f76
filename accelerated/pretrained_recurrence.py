"""GPT-2 with recurrence in PyTorch: the fast version of reference/pretrained_recurrence.py.

A document is read in windows. What a window passes to the next one is a single vector:

    pool      the layers' outputs are mixed, and pooled over the window's positions (Eq. 1)
    insert    a small network maps the pooled vector to S vectors, which the next window's tokens
              attend to in some layers, beside earlier tokens (Figure 2)

`vectors` 0 is plain GPT-2, which carries nothing over. Config, parameter names, shapes and initial
values are the reference's.

B lanes, N of a window's T tokens, D width, H heads of width E, F feed-forward width, S inserted
vectors, L layers, K keys, V vocabulary, M the width of the network that makes the vectors.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from accelerated.attention.content import content_attention, future_keys
from accelerated.attention.heads import (
    LayerNorm,
    Layers,
    ParameterModule,
    compilable,
    embed,
    merge_heads,
    parameter,
    project_heads,
)
from accelerated.protocol import CheckpointableLayer, Model, Reading, check_lanes, initialise
from reference.pretrained_recurrence import NORM_EPSILON, Config, init_params
from reference.variants.pretrained_recurrence import pooled_rows


class State(NamedTuple):
    """What a window passes to the next one; axis 0 is the lane (a row of the batch)."""

    pooled: Tensor  # (B, D), for plain GPT-2 (B, 0)
    present: Tensor  # (B,) bool, false before a document's first window, for plain GPT-2 (B, 0)


class Layer(CheckpointableLayer):
    """A layer of GPT-2: attention to the window's tokens and to inserted vectors, then the MLP."""

    def __init__(self, config: Config):
        super().__init__()
        d = config.width
        f = config.feed_forward
        self.heads = config.heads
        self.dropout_rate = config.dropout
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

    @compilable
    def forward(self, x: Tensor, masked_keys: Tensor | None, inserted: Tensor | None) -> Tensor:
        """(B, N, D) from x (B, N, D) and inserted vectors (B, S, D), if any (Figure 2).

        masked_keys is true if a query must not see a key. Without it a token sees itself and
        earlier ones.
        """
        query, key, value = self.query_key_value(x)
        if inserted is not None:
            inserted_key, inserted_value = self.key_value(inserted)
            key = torch.cat([inserted_key, key], 2)  # (B, H, S + N, E)
            value = torch.cat([inserted_value, value], 2)
        x = x + self.attend(query, key, value, masked_keys)
        return x + self.mlp(x)

    def query_key_value(self, x: Tensor) -> tuple[Tensor, ...]:
        """Query, key and value (B, H, N, E) of x (B, N, D), by one product."""
        weights = [self.query, self.key, self.value]
        biases = [self.query_bias, self.key_bias.detach(), self.value_bias]
        return project_heads(self.norm(x), self.heads, weights, biases)

    def key_value(self, x: Tensor) -> tuple[Tensor, ...]:
        """Key and value (B, H, S, E) of inserted vectors x (B, S, D), which have no query."""
        biases = [self.key_bias.detach(), self.value_bias]
        return project_heads(self.norm(x), self.heads, [self.key, self.value], biases)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, masked_keys: Tensor | None
    ) -> Tensor:
        """Attention, causal without masked_keys, then the output matrix; (B, N, D)."""
        rate = self.dropout_rate if self.training else 0.0
        out = content_attention(query, key, value, masked_keys, rate, causal=masked_keys is None)
        out = functional.linear(merge_heads(out), self.output, self.output_bias)
        return functional.dropout(out, self.dropout_rate, self.training)

    def mlp(self, x: Tensor) -> Tensor:
        """(B, N, D) from x (B, N, D)."""
        hidden = functional.linear(self.mlp_norm(x), self.mlp_hidden, self.mlp_hidden_bias)
        hidden = functional.gelu(hidden, approximate="tanh")  # (B, N, F)
        out = functional.linear(hidden, self.mlp_output, self.mlp_output_bias)
        return functional.dropout(out, self.dropout_rate, self.training)


class Recurrence(ParameterModule):
    """What is added to GPT-2: windows are pooled, a small network makes the inserted vectors."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.layer_scores = parameter(config.layers)  # (L,)
        self.fixed_key = parameter(config.width) if config.pooling == "attention" else None  # (D,)
        fan_in = config.width
        for layer in range(1, config.module_layers + 1):
            weight = parameter(config.module_width, fan_in)
            bias = parameter(config.module_width)
            self.register_parameter(f"hidden_{layer}", weight)  # (M, D or M)
            self.register_parameter(f"hidden_{layer}_bias", bias)  # (M,)
            fan_in = config.module_width
        self.inserted = parameter(config.vectors * config.width, fan_in)  # (SD, M)
        self.inserted_bias = parameter(config.vectors * config.width)  # (SD,)

    def forward(self, pooled: Tensor) -> Tensor:
        """The vectors to insert, h_prev (B, S, D), from the pooled vector z (B, D)."""
        x = pooled
        for layer in range(1, self.config.module_layers + 1):
            weight = getattr(self, f"hidden_{layer}")
            bias = getattr(self, f"hidden_{layer}_bias")
            x = functional.gelu(functional.linear(x, weight, bias), approximate="tanh")
        vectors = functional.linear(x, self.inserted, self.inserted_bias)  # (B, SD)
        return vectors.view(x.shape[0], self.config.vectors, self.config.width)

    @compilable
    def mix_and_pool(self, outputs: Sequence[Tensor]) -> Tensor:
        """Eq. 1: z (B, D) of the layers' outputs (B, N, D)."""
        mixed = self.mix(outputs)
        return self.pool(mixed[:, : pooled_rows(self.config, mixed.shape[1])])

    def mix(self, outputs: Sequence[Tensor]) -> Tensor:
        """Eq. 1's weighted sum of the layers' outputs, before positions are pooled; (B, N, D)."""
        shares = self.layer_scores.softmax(-1)
        mixed = shares[0] * outputs[0]
        for share, output in zip(shares[1:], outputs[1:], strict=True):
            mixed = mixed + share * output
        return mixed

    def pool(self, mixed: Tensor) -> Tensor:
        """Eq. 1: z (B, D) of the mixed outputs (B, n, D) of a window's pooled positions."""
        if self.fixed_key is not None:
            similarity = mixed @ self.fixed_key[:, None] * mixed.shape[-1] ** -0.5
            weights = similarity.softmax(1)  # (B, n, 1)
            return (weights.transpose(1, 2) @ mixed)[:, 0]
        if self.config.pooling == "max":
            return mixed.max(1).values
        return mixed.mean(1)


class PretrainedRecurrence(Model):
    """The model; plain GPT-2 has no `module`."""

    state_type = State
    config: Config
    kind = "GPT-2"
    future_keys: Tensor  # (T, T), true if a query must not see a key

    def __init__(self, config: Config, seed: int = 0):
        super().__init__(config)
        self.embedding = parameter(config.vocabulary, config.width)  # (V, D)
        self.positions = parameter(config.max_positions, config.width)  # a row for each position
        self.layers = Layers(Layer(config) for _ in range(config.layers))
        self.final_norm = LayerNorm(config.width, NORM_EPSILON)
        self.module = Recurrence(config) if config.vectors else None
        future = future_keys(config.segment, config.segment)
        self.register_buffer("future_keys", future, persistent=False)
        initialise(self, init_params, seed)

    def describe(self) -> str:
        """One line on how far back the model can look."""
        c = self.config
        reach = f"windows of {c.segment} tokens, {c.overlap} of them shared with the previous one"
        if c.vectors == 0:
            return f"{reach}; nothing else is carried from earlier text (plain {self.kind})"
        what = "one pooled vector is" if c.vectors == 1 else f"{c.vectors} vectors are"
        layers = ", ".join(str(number) for number in c.insertion_layers)
        return f"{reach}; {what} carried from window to window, into layer {layers}"

    @property
    def attention_reach(self) -> int:
        """How many tokens back a prediction can look by attention only, without memory."""
        return self.config.segment

    def state_shapes(self, batch: int) -> dict[str, tuple[int, ...]]:
        """The shape of each field of a State; raises ValueError if batch is below 1."""
        check_lanes(batch)
        if self.config.vectors == 0:
            return {"pooled": (batch, 0), "present": (batch, 0)}
        return {"pooled": (batch, self.config.width), "present": (batch,)}

    def initial_state(self, batch: int) -> State:
        """The state at a document's start: nothing to insert."""
        shapes = self.state_shapes(batch)
        pooled = self.embedding.new_zeros(shapes["pooled"])
        present = torch.zeros(shapes["present"], dtype=torch.bool, device=pooled.device)
        return State(pooled, present)

    def read(self, tokens: Tensor, state: State) -> Reading:
        """Read a window of tokens (B, N); `hidden` (B, N, D) predicts the next tokens.

        1 <= N <= T, and the previous window has read the first o of them. Raises ValueError for
        another N, or if the state does not fit.
        """
        self.check_segment(tokens, state)
        outputs, hidden = self.run_layers(tokens, state)
        return Reading(hidden, self.next_state(state, outputs, hidden), {})

    def advance(self, tokens: Tensor, state: State) -> State:
        """The state after a window of tokens (B, N), without logits."""
        if self.module is not None:
            return self.read(tokens, state).state
        self.check_segment(tokens, state)
        return state

    def run_layers(self, tokens: Tensor, state: State) -> tuple[list[Tensor], Tensor]:
        """All layers' outputs for tokens (B, N), and the last one after the final norm."""
        c = self.config
        length = tokens.shape[1]
        x = embed(tokens, self.embedding) + self.positions[:length]  # (B, N, D)
        x = functional.dropout(x, c.dropout, self.training)
        inserted = self.vectors_to_insert(state)
        beside_inserted = None
        if inserted is not None:
            future = self.future_keys[:length, :length]
            beside_inserted = masked_with_inserted(future, c.vectors, state.present)
        outputs = []
        for number, layer in enumerate(self.layers, start=1):
            if inserted is not None and number in c.insertion_layers:
                x = layer(x, beside_inserted, inserted)
            else:
                x = layer(x, None, None)
            outputs.append(x)
        return outputs, self.final_norm(x)

    def vectors_to_insert(self, state: State) -> Tensor | None:
        """h_prev (B, S, D); None for plain GPT-2."""
        return None if self.module is None else self.module(state.pooled)

    def next_state(self, state: State, outputs: Sequence[Tensor], hidden: Tensor) -> State:
        """The State after a window, from all layers' outputs (B, N, D).

        hidden is the last one after the final norm.
        """
        if self.module is None:
            return state
        last = hidden if self.config.pool_final_norm else outputs[-1]
        pooled = self.module.mix_and_pool([*outputs[:-1], last])
        present = torch.ones(pooled.shape[0], dtype=torch.bool, device=pooled.device)
        return State(pooled, present)

    def check_segment(self, tokens: Tensor, state: State) -> None:
        """Raise ValueError unless 1 <= N <= config.segment, and the state fits tokens (B, N)."""
        length = tokens.shape[1]
        if not 1 <= length <= self.config.segment:
            most = self.config.segment
            raise ValueError(f"a window of {length} tokens; it must have 1 to {most}, the segment")
        self.check_state(state, tokens.shape[0])


def masked_with_inserted(future: Tensor, vectors: int, present: Tensor) -> Tensor:
    """Mask (B, 1, N, S + K), true at the keys that a query must not see.

    These are the S vectors in lanes where present (B,) is false, and tokens where future (N, K) is
    true.
    """
    lanes = present.shape[0]
    absent = ~present[:, None, None, None]
    absent = absent.expand(-1, 1, len(future), vectors)  # (B, 1, N, S)
    return torch.cat([absent, future.expand(lanes, 1, -1, -1)], -1)
