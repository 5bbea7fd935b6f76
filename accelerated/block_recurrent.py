"""Block-Recurrent Transformer in PyTorch: the fast version of reference/block_recurrent.py.

A segment of N tokens is cut into blocks of W. Tokens attend to the W tokens before them. Recurrent
layers, usually one, also have S states, which their tokens read and every block updates. Only the
states' projections and updates run block by block: the tokens' projections, feed-forward, sliding
attention and, once the states are known, cross-attention run for the whole segment at once. With
feedback, all layers run block by block.

Official implementation: transformer/ of google-research/meliad.

Config, parameter names, shapes and initial values are the reference's. B lanes, D width, H heads of
width E, F feed-forward width, L layers, of which R are recurrent. Section numbers are the paper's.
"""

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from accelerated.attention.heads import (
    LayerNorm,
    Layers,
    ParameterModule,
    at_least_float32,
    compilable,
    embed,
    merge_heads,
    parameter,
    project_unit_heads,
)
from accelerated.attention.sliding_window import (
    offsets_by_distance,
    scaled_attention,
    sliding_attention,
    tables_by_distance,
)
from accelerated.protocol import CheckpointableLayer, Model, Reading, check_lanes, initialise
from reference.block_recurrent import Config, init_params

KeyValue: TypeAlias = tuple[Tensor, Tensor]  # keys and values


class State(NamedTuple):
    """What a segment passes to the next one; axis 0 is the lane (a row of the batch)."""

    states: Tensor  # (B, R, S, D), in float32 or better
    keys: Tensor  # (B, L, H, W, E), of the last block, unit length
    values: Tensor  # (B, L, H, W, E)


class FixedGate(ParameterModule):
    """Mixes the carried states with a candidate, at a learned rate for each feature (3.4)."""

    def __init__(self, width: int, fan_in: int):
        super().__init__()
        self.weight_z = parameter(width, fan_in)  # (D, I), I the width of the gate's input
        self.bias_z = parameter(width)  # (D,)
        self.bias_g = parameter(width)  # (D,)

    def forward(self, carry: Tensor, hidden: Tensor) -> Tensor:
        z = functional.linear(hidden, self.weight_z, self.bias_z)  # Eq. 1, (B, S, D)
        z = at_least_float32(z)
        g = torch.sigmoid(at_least_float32(self.bias_g))  # Eq. 2
        return z + g * (carry - z)  # Eq. 3: c g + z (1 - g)


class LSTMGate(ParameterModule):
    """Mixes the carried states with a candidate, at rates that depend on the input (3.4)."""

    def __init__(self, width: int, fan_in: int):
        super().__init__()
        self.weight_z = parameter(width, fan_in)  # (D, I), I the width of the gate's input
        self.weight_i = parameter(width, fan_in)  # (D, I)
        self.weight_f = parameter(width, fan_in)  # (D, I)
        self.bias_z = parameter(width)  # (D,)
        self.bias_i = parameter(width)  # (D,)
        self.bias_f = parameter(width)  # (D,)

    def forward(self, carry: Tensor, hidden: Tensor) -> Tensor:
        weight = torch.cat([self.weight_z, self.weight_i, self.weight_f])  # (3D, I)
        bias = torch.cat([self.bias_z, self.bias_i - 1, self.bias_f + 1])
        rows = at_least_float32(functional.linear(hidden, weight, bias))
        z, i, f = rows.chunk(3, dim=-1)  # Eqs. 4-6 before their tanh or sigmoid, (B, S, D) each
        return carry * torch.sigmoid(f) + torch.tanh(z) * torch.sigmoid(i)  # Eq. 7


GATES = {"fixed": FixedGate, "lstm": LSTMGate}


class Projected(NamedTuple):
    """What a cell projects its states to, (B, H, S, E) each; keys and queries have unit length."""

    key: Tensor  # K_s
    query: Tensor  # Q_s^h, state to state
    cross_query: Tensor  # Q_e^h, state to token
    value: Tensor  # V_s


class Recurrence(ParameterModule):
    """A layer's recurrent cell, the horizontal direction (3.2).

    After each block its states attend to themselves and to its tokens, and gates update them.
    The authors' `recurrent_tbase` of a `TransformerLayer`.
    """

    def __init__(self, config: Config):
        super().__init__()
        width = config.width
        inner = config.heads * config.head_width
        gate = GATES[config.gate]
        self.config = config
        self.initial = parameter(config.states, width)  # (S, D), the states at a document's start
        self.ids = parameter(config.states, width)  # (S, D), learned IDs of the states
        self.norm = LayerNorm(width)
        self.key = parameter(inner, width)  # (HE, D)
        self.value = parameter(inner, width)  # (HE, D)
        self.query = parameter(inner, width)  # (HE, D), state to state
        self.cross_query = parameter(inner, width)  # (HE, D), state to token
        self.scale = parameter(config.heads)  # (H,)
        self.cross_scale = parameter(config.heads)  # (H,)

        # Gate configurations (3.6): single has one gate after an MLP, skip one without, dual both
        mlp_input = 2 * inner if config.configuration == "single" else width
        if config.configuration != "single":
            self.attention_gate = gate(width, 2 * inner)
        if config.configuration == "dual":
            self.mlp_norm = LayerNorm(width)
        if config.configuration != "skip":
            self.mlp_hidden = parameter(config.feed_forward, mlp_input)  # (F, D), single (F, 2HE)
            self.mlp_gate = gate(width, config.feed_forward)

    def forward(
        self, keys: Tensor, values: Tensor, states: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Update the states block by block.

        keys, values: (B, H, W + N, E), which begin with the previous segment's last block
        states: (B, S, D)

        Returns what each block's tokens read, K_s and V_s (B, H, N/W, S, E), and the states after
        the last block.
        """
        key_blocks = keys.split(self.config.window, 2)  # (B, H, W, E) each
        value_blocks = values.split(self.config.window, 2)
        matrices = self.matrices()
        state_keys = []
        state_values = []
        for block in range(len(key_blocks) - 1):
            near = slice(block, block + 2)  # the previous block and this one
            key, value, states = self.step(states, matrices, key_blocks[near], value_blocks[near])
            state_keys.append(key)
            state_values.append(value)
        return torch.stack(state_keys, 2), torch.stack(state_values, 2), states

    @compilable
    def step(
        self,
        states: Tensor,
        matrices: Tensor,
        keys: tuple[Tensor, ...],
        values: tuple[Tensor, ...],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """K_s and V_s of states (B, S, D), and the states after a block.

        keys, values: the previous block's and its own, (B, H, W, E) each
        """
        projected = self.project(states, matrices)
        near_keys = torch.cat(keys, 2)  # (B, H, 2W, E)
        near_values = torch.cat(values, 2)
        after = self.update(states, projected, near_keys, near_values)
        return projected.key, projected.value, after  # of before the update (decision 9)

    def matrices(self) -> Tensor:
        """The matrices of Projected as one (4HE, D), concatenated once for all blocks."""
        return torch.cat([self.key, self.query, self.cross_query, self.value])

    def project(self, states: Tensor, matrices: Tensor) -> Projected:
        """Projections of norm(states) + state IDs (3.3)."""
        rows = self.norm(states) + self.ids
        return Projected(*project_unit_heads(rows, matrices, self.config.heads, 4))

    def update(self, states: Tensor, projected: Projected, keys: Tensor, values: Tensor) -> Tensor:
        """The states (B, S, D) after a block; keys and values (B, H, 2W, E) end with its own."""
        state_key, query, cross_query, state_value = projected
        among_states = scaled_attention(query, state_key, state_value, self.scale)
        of_tokens = scaled_attention(cross_query, keys, values, self.cross_scale)
        attended = torch.cat([merge_heads(among_states), merge_heads(of_tokens)], dim=-1)
        return self.gated(states, attended)  # decision 10: the raw states are carried

    def gated(self, states: Tensor, attended: Tensor) -> Tensor:
        """The next states from states (B, S, D) and attended (B, S, 2HE) (3.6)."""
        configuration = self.config.configuration
        if configuration == "single":
            hidden = torch.relu(functional.linear(attended, self.mlp_hidden))  # (B, S, F)
            return self.mlp_gate(states, hidden)
        states = self.attention_gate(states, attended)
        if configuration == "skip":
            return states
        hidden = torch.relu(functional.linear(self.mlp_norm(states), self.mlp_hidden))
        return self.mlp_gate(states, hidden)


class Layer(CheckpointableLayer):
    """Layer `number` (from 1): attention, feed-forward, and the recurrent cell if it has one.

    Tokens attend to the previous W tokens and, if the layer reads states, in parallel to states.
    The authors' `TransformerLayer`, in transformer/transformer_layer.py.
    """

    def __init__(self, config: Config, number: int):
        super().__init__()
        width = config.width
        inner = config.heads * config.head_width
        recurrent = number in config.recurrent_layers
        self.config = config
        self.reads_states = recurrent or config.feedback
        self.norm = LayerNorm(width)
        self.key = parameter(inner, width)  # (HE, D)
        self.value = parameter(inner, width)  # (HE, D)
        self.query = parameter(inner, width)  # (HE, D), token to token
        self.scale = parameter(config.heads)  # (H,)
        self.position_bias = parameter(config.heads, config.buckets)  # (H, buckets)
        if self.reads_states:
            self.cross_query = parameter(inner, width)  # (HE, D), token to state
            self.cross_scale = parameter(config.heads)  # (H,)
        attended = 2 * inner if self.reads_states else inner
        self.output = parameter(width, attended)  # (D, HE), with cross-attention (D, 2HE)
        self.mlp_norm = LayerNorm(width)
        self.mlp_hidden = parameter(config.feed_forward, width)  # (F, D)
        self.mlp_output = parameter(width, config.feed_forward)  # (D, F)
        # The cell, as the reference names it
        self.state = Recurrence(config) if recurrent else None

    def forward(
        self,
        x: Tensor,
        previous: KeyValue,
        states: Tensor | None,
        shared: KeyValue | None,
        by_distance: Tensor,
        no_output: bool = False,
    ) -> tuple[Tensor, KeyValue, Tensor | None]:
        """Read x (B, N, D); return the output, the last block's (keys, values), the next states.

        previous: the previous block's (keys, values), (B, H, W, E) each
        states: the layer's own, (B, S, D), if it is recurrent
        shared: under feedback the K_s and V_s (B, H, 1, S, E) that the other layers read
        by_distance: what is added to scores, (H, 3W - 1)
        no_output: its output is not needed; x is returned unchanged
        """
        query, cross_query, keys, values = self.project_beside(x, *previous)
        window = self.config.window
        last = (keys[:, :, -window:], values[:, :, -window:])
        if self.state is not None:
            state_keys, state_values, states = self.state(keys, values, states)
            shared = (state_keys, state_values)
        if no_output:
            return x, last, states

        dropout = self.config.dropout if self.training else 0.0
        attended = sliding_attention(query, keys, values, by_distance, dropout)
        cross = None
        if cross_query is not None and shared is not None:
            state_keys, state_values = shared
            tiles = cross_query.unflatten(2, (state_keys.shape[2], -1))  # (B, H, N/W, W, E)
            cross = scaled_attention(tiles, state_keys, state_values, self.cross_scale[:, None])
            cross = cross.flatten(2, 3)
        return self.finish(x, attended, cross), last, states

    @compilable
    def project_beside(
        self, x: Tensor, previous_keys: Tensor, previous_values: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """Scaled query and cross query (B, H, N, E) of x, keys and values (B, H, W + N, E)."""
        key, query, cross_query, value = self.project(x)
        keys = torch.cat([previous_keys, key], 2)
        values = torch.cat([previous_values, value], 2)
        return query * self.scale[:, None, None], cross_query, keys, values

    @compilable
    def finish(self, x: Tensor, attended: Tensor, cross: Tensor | None) -> Tensor:
        """The output (B, N, D) from x and what its heads attended to, (B, H, N, E) each."""
        merged = merge_heads(attended)
        if cross is not None:
            merged = torch.cat([merged, merge_heads(cross)], dim=-1)  # (B, N, 2HE)
        return self.mlp(x + functional.linear(merged, self.output))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """Key, query, cross query and value of x (B, N, D), each (B, H, N, E).

        All except the value have unit length. The cross query is None if the layer reads no states.
        """
        x = self.dropout(self.norm(x))
        if not self.reads_states:
            matrices = torch.cat([self.key, self.query, self.value])
            key, query, value = project_unit_heads(x, matrices, self.config.heads, 3)
            return key, query, None, value
        matrices = torch.cat([self.key, self.query, self.cross_query, self.value])
        key, query, cross_query, value = project_unit_heads(x, matrices, self.config.heads, 4)
        return key, query, cross_query, value

    def mlp(self, x: Tensor) -> Tensor:
        """x (B, N, D) with the feed-forward's output added."""
        hidden = functional.linear(self.mlp_norm(x), self.mlp_hidden).relu_()  # (B, N, F)
        return x + self.dropout(functional.linear(hidden, self.mlp_output))

    def dropout(self, x: Tensor) -> Tensor:
        """x with entries dropped in training (decision 11: where dropout is)."""
        return functional.dropout(x, self.config.dropout, self.training)


class BlockRecurrent(Model):
    """The model; `config` is the reference's, which draws the initial weights from `seed`."""

    state_type = State
    config: Config
    in_bucket: Tensor  # (3W - 1, buckets)
    seen: Tensor  # (3W - 1,)

    def __init__(self, config: Config, seed: int = 0):
        super().__init__(config)
        self.embedding = parameter(config.vocabulary, config.width)  # (V, D), the output's too
        self.layers = Layers(Layer(config, number) for number in range(1, config.layers + 1))
        self.final_norm = LayerNorm(config.width)
        in_bucket, seen = tables_by_distance(config.window, config.buckets, config.max_distance)
        self.register_buffer("in_bucket", in_bucket, persistent=False)
        self.register_buffer("seen", seen, persistent=False)
        initialise(self, init_params, seed)

    @property
    def cells(self) -> list[Recurrence]:
        """The cells of the recurrent layers, in order."""
        return [layer.state for layer in self.layers if layer.state is not None]

    def state_shapes(self, batch: int) -> dict[str, tuple[int, ...]]:
        """The shape of each field of a State; raises ValueError if batch is below 1."""
        check_lanes(batch)
        c = self.config
        states = (batch, len(c.recurrent_layers), c.states, c.width)
        rows = (batch, c.layers, c.heads, c.window, c.head_width)
        return {"states": states, "keys": rows, "values": rows}

    def initial_state(self, batch: int) -> State:
        """The state at a document's start: the learned states, and zero keys and values."""
        shapes = self.state_shapes(batch)
        states = self.embedding.new_zeros(shapes["states"])
        if self.cells:
            learned = torch.stack([cell.initial for cell in self.cells])  # (R, S, D)
            states = learned.expand(shapes["states"])
        zeros = self.embedding.new_zeros(shapes["keys"])
        return State(at_least_float32(states), zeros, zeros)

    def read(self, tokens: Tensor, state: State, memory_only: bool = False) -> Reading:
        """Read a segment of tokens (B, N). Reading.hidden (B, N, D) predicts the next tokens.

        With memory_only the last layer's output is not computed, except under feedback. Raises
        ValueError if N is not a positive multiple of the window, or if the state does not fit.
        """
        self.check_segment(tokens, state)
        window = self.config.window
        x = embed(tokens, self.embedding)  # (B, N, D)
        offsets = offsets_by_distance(self.layers, self.in_bucket, self.seen)  # (L, H, 3W - 1)
        if not self.config.feedback:
            x, state = self.run_layers(x, state, None, offsets, memory_only)
            return Reading(self.output_rows(x), state, {})

        # Feedback (3.7): all layers read the states that the previous block has left in the last
        # recurrent one (decision 12)
        matrices = self.cells[-1].matrices()
        outs = []
        for block in x.split(window, dim=1):
            projected = self.cells[-1].project(state.states[:, -1], matrices)
            shared = (projected.key[:, :, None], projected.value[:, :, None])
            # not memory_only: dropout must draw the same numbers as in read
            out, state = self.run_layers(block, state, shared, offsets, memory_only=False)
            outs.append(out)
        return Reading(self.output_rows(torch.cat(outs, dim=1)), state, {})

    def advance(self, tokens: Tensor, state: State) -> State:
        """The state after tokens (B, N), without logits."""
        return self.read(tokens, state, memory_only=True).state

    def run_layers(
        self, x: Tensor, state: State, shared: KeyValue | None, offsets: Tensor, memory_only: bool
    ) -> tuple[Tensor, State]:
        """Run all layers over x (B, N, D), which under feedback is one block."""
        all_states = []
        all_keys = []
        all_values = []
        previous_keys = state.keys.unbind(1)  # (B, H, W, E) each
        previous_values = state.values.unbind(1)
        for index, (layer, offset) in enumerate(zip(self.layers, offsets, strict=True)):
            previous = (previous_keys[index], previous_values[index])
            states = None
            if layer.state is not None:
                states = state.states[:, len(all_states)]  # (B, S, D)
            no_output = memory_only and index == len(self.layers) - 1
            x, last, states = layer(x, previous, states, shared, offset, no_output)
            all_keys.append(last[0])
            all_values.append(last[1])
            if states is not None:
                all_states.append(states)

        next_states = torch.stack(all_states, 1) if all_states else state.states
        return x, State(next_states, torch.stack(all_keys, 1), torch.stack(all_values, 1))

    def check_segment(self, tokens: Tensor, state: State) -> None:
        """Raise ValueError unless the tokens are whole blocks, and the state fits."""
        window = self.config.window
        length = tokens.shape[1]
        if length == 0 or length % window:
            raise ValueError(
                f"a segment of {length} tokens is not a positive multiple of window {window}; "
                "pad it"
            )
        self.check_state(state, tokens.shape[0])

    def output_rows(self, hidden: Tensor) -> Tensor:
        """hidden (..., D), ready for the output matrix (decision 13: logits / sqrt(D))."""
        rows = self.final_norm(hidden)
        drops = self.training and self.config.output_dropout
        rows = functional.dropout(rows, self.config.dropout, drops)
        return rows * self.config.width**-0.5

    @property
    def attention_reach(self) -> int:
        """How many tokens back a prediction can look by attention only, without memory."""
        return self.config.layers * self.config.window

    def describe(self) -> str:
        """One line on how far back the model can look."""
        c = self.config
        tokens = f"{c.layers} layers x {c.window} = {self.attention_reach:,} tokens"
        reach = f"attention reaches {tokens} back"
        if not c.recurrent_layers:
            return reach
        numbers = ", ".join(map(str, c.recurrent_layers))
        return f"{reach}; {c.states} recurrent states on layer {numbers} carry the rest"
