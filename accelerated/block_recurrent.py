"""Block-Recurrent Transformer in PyTorch: the fast version of reference/block_recurrent.py.

Config, parameter names, shapes and initial values are the reference's. Only the states' projections and updates run block by
block (W tokens each). The tokens' projections, feed-forward, sliding attention and, after the states are known, cross-attention
run for the whole segment at once. Under feedback (section 3.7) all layers wait for the previous block's states.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from accelerated.attention.content import fold_tiles, sdpa, unfold_tiles
from accelerated.attention.heads import (
    Declared,
    LayerNorm,
    at_least_float32,
    look_up,
    merge_heads,
    parameter,
    project_heads,
    takes_sdpa,
)
from accelerated.attention.sliding_window import (
    offsets_by_pair,
    offsets_of,
    sliding_attention,
    tables_by_distance,
)
from accelerated.protocol import (
    Layers,
    Model,
    Reading,
    Recomputable,
    check_lanes,
    initialise,
)
from reference.block_recurrent import Config, init_params


class State(NamedTuple):
    """What a segment passes to the next one; axis 0 of every field is the lane (a row of the batch)."""

    states: Tensor  # (B, R, S, D), in float32 or better
    keys: Tensor  # (B, L, H, W, E), of the last block, unit length
    values: Tensor  # (B, L, H, W, E)


class FixedGate(Declared):
    """Mixes the carried states with a candidate, at a learned rate for each feature (section 3.4)."""

    def __init__(self, width: int, fan_in: int):
        super().__init__()
        self.weight_z = parameter(width, fan_in)  # (D, I), I the width of the gate's input
        self.bias_z = parameter(width)  # (D,)
        self.bias_g = parameter(width)  # (D,)

    def forward(self, carry: Tensor, hidden: Tensor) -> Tensor:
        candidate = at_least_float32(
            functional.linear(hidden, self.weight_z, self.bias_z)
        )  # Eq. 1, (B, S, D)
        g = torch.sigmoid(at_least_float32(self.bias_g))  # Eq. 2
        return candidate + g * (carry - candidate)  # Eq. 3


class LSTMGate(Declared):
    """Mixes the carried states with a candidate, by an input and a forget gate that depend on the input (section 3.4)."""

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
        z, i, f = at_least_float32(functional.linear(hidden, weight, bias)).chunk(
            3, dim=-1
        )  # (B, S, D) each
        return carry * torch.sigmoid(f) + torch.tanh(z) * torch.sigmoid(i)  # Eqs. 4-7


GATES = {"fixed": FixedGate, "lstm": LSTMGate}


class Recurrence(Declared):
    """A layer's recurrent cell: its states attend to themselves and to a block's tokens, and gates update them (section 3.2)."""

    def __init__(self, config: Config):
        super().__init__()
        d, h, he, f = (
            config.width,
            config.heads,
            config.heads * config.head_width,
            config.feed_forward,
        )
        gate, single, skip = (
            GATES[config.gate],
            config.configuration == "single",
            config.configuration == "skip",
        )
        self.config = config
        self.initial = parameter(config.states, d)  # (S, D), the states at a document's start
        self.ids = parameter(config.states, d)  # (S, D), learned IDs of the states
        self.norm = LayerNorm(d)
        self.key = parameter(he, d)  # (HE, D)
        self.value = parameter(he, d)  # (HE, D)
        self.query = parameter(he, d)  # (HE, D), state to state
        self.cross_query = parameter(he, d)  # (HE, D), state to token
        self.scale = parameter(h)  # (H,)
        self.cross_scale = parameter(h)  # (H,)
        self.attention_gate = None if single else gate(d, 2 * he)
        self.mlp_norm = LayerNorm(d) if config.configuration == "dual" else None
        self.mlp_hidden = (
            None if skip else parameter(f, 2 * he if single else d)
        )  # (F, D), single (F, 2HE)
        self.mlp_gate = None if skip else gate(d, f)

    def matrices(self) -> Tensor:
        """K_s, Q_s^h, Q_e^h, V_s as one matrix (4HE, D), concatenated once for all blocks."""
        return torch.cat([self.key, self.query, self.cross_query, self.value])

    def project(self, states: Tensor, matrices: Tensor) -> tuple[Tensor, ...]:
        """K_s, Q_s^h, Q_e^h, V_s of norm(states) + state IDs (section 3.3), each (B, H, S, E)."""
        return project_heads(self.norm(states) + self.ids, matrices, self.config.heads, 4)

    def keys_and_values(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """K_s and V_s, which tokens read: (B, H, S, E) each."""
        return project_heads(
            self.norm(states) + self.ids, torch.cat([self.key, self.value]), self.config.heads, 2
        )

    def update(self, states: Tensor, projected: tuple, keys: Tensor, values: Tensor) -> Tensor:
        """The states after a block, from its own and the previous block's keys and values (B, H, 2W, E)."""
        state_key, query, cross_query, state_value = projected
        among_states = scaled_attention(query, state_key, state_value, self.scale)
        cross = scaled_attention(cross_query, keys, values, self.cross_scale)
        return self.gated(
            states, torch.cat([merge_heads(among_states), merge_heads(cross)], dim=-1)
        )

    def gated(self, states: Tensor, attended: Tensor) -> Tensor:
        """The next states from states (B, S, D) and attended (B, S, 2HE), by gate configuration (section 3.6)."""
        if self.config.configuration == "single":
            return self.mlp_gate(states, torch.relu(functional.linear(attended, self.mlp_hidden)))
        middle = self.attention_gate(states, attended)
        if self.config.configuration == "skip":
            return middle
        return self.mlp_gate(
            middle, torch.relu(functional.linear(self.mlp_norm(middle), self.mlp_hidden))
        )

    def forward(
        self, keys: Tensor, values: Tensor, states: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Update the states block by block from keys and values (B, H, W + N, E), which begin with the previous block's.

        Returns what each block's tokens read, K_s and V_s (B, H, N/W, S, E), and the states after the last block.
        """
        state_keys, state_values, matrices = [], [], self.matrices()
        # split, not slices: a split's backward is one concatenation, a slice's fills a whole segment with zeros
        keys, values = keys.split(self.config.window, 2), values.split(self.config.window, 2)
        for block in range(len(keys) - 1):
            near = slice(block, block + 2)
            projected = self.project(states, matrices)
            state_keys.append(projected[0])
            state_values.append(projected[-1])
            states = self.update(
                states, projected, torch.cat(keys[near], 2), torch.cat(values[near], 2)
            )
        return torch.stack(state_keys, 2), torch.stack(state_values, 2), states


def scaled_attention_plain(query: Tensor, key: Tensor, value: Tensor, scale: Tensor) -> Tensor:
    """softmax((q.k) scale) v without a mask, as states read tokens, states and tokens states.

    query (B, H, ..., N, E), key and value (B, H, ..., K, E), scale (H, ...).
    """
    scores = (query * scale[..., None, None]) @ key.mT  # (B, H, ..., N, K)
    return scores.softmax(-1) @ value


def scaled_attention_sdpa(query: Tensor, key: Tensor, value: Tensor, scale: Tensor) -> Tensor:
    """The same as scaled_attention_plain by SDPA, with at most one axis of tiles."""
    query = query * scale[..., None, None]
    if query.dim() == 4:
        return sdpa(query, key, value, scale=1.0)
    tiles = [fold_tiles(x) for x in (query, key, value)]
    return unfold_tiles(sdpa(*tiles, scale=1.0), len(query))


def scaled_attention(query: Tensor, key: Tensor, value: Tensor, scale: Tensor) -> Tensor:
    """The same as scaled_attention_plain, by the fastest path."""
    attend = scaled_attention_sdpa if takes_sdpa(query, key) else scaled_attention_plain
    return attend(query, key, value, scale)


def cross_attend(query: Tensor, state_keys: Tensor, state_values: Tensor, scale: Tensor) -> Tensor:
    """Attention (B, H, N, E) of each block of query (B, H, N, E) to its own states (B, H, N/W, S, E)."""
    tiles = query.unflatten(2, (state_keys.shape[2], -1))  # (B, H, N/W, W, E)
    return scaled_attention(tiles, state_keys, state_values, scale[:, None]).flatten(2, 3)


class Layer(Recomputable):
    """Layer `number` (from 1): sliding attention, cross-attention if it reads states, feed-forward, the cell if recurrent."""

    def __init__(self, config: Config, number: int):
        super().__init__()
        d, h, he, f = (
            config.width,
            config.heads,
            config.heads * config.head_width,
            config.feed_forward,
        )
        recurrent = number in config.recurrent_layers
        reads = recurrent or config.feedback
        self.config = config
        self.norm = LayerNorm(d)
        self.key = parameter(he, d)  # (HE, D)
        self.value = parameter(he, d)  # (HE, D)
        self.query = parameter(he, d)  # (HE, D), token to token
        self.scale = parameter(h)  # (H,)
        self.position_bias = parameter(h, config.buckets)  # (H, buckets)
        self.cross_query = parameter(he, d) if reads else None  # (HE, D), token to state
        self.cross_scale = parameter(h) if reads else None  # (H,)
        self.output = parameter(
            d, 2 * he if reads else he
        )  # (D, HE), with cross-attention (D, 2HE)
        self.mlp_norm = LayerNorm(d)
        self.mlp_hidden = parameter(f, d)  # (F, D)
        self.mlp_output = parameter(d, f)  # (D, F)
        self.state = Recurrence(config) if recurrent else None

    def dropout(self, x: Tensor) -> Tensor:
        """x with entries dropped in training (decision 11: where dropout is)."""
        return functional.dropout(x, self.config.dropout, self.training)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """Key, query, cross query (None if the layer reads no states) of unit length, and value, each (B, H, N, E)."""
        x = self.dropout(self.norm(x))
        if self.cross_query is None:
            key, query, value = project_heads(
                x, torch.cat([self.key, self.query, self.value]), self.config.heads, 3
            )
            return key, query, None, value
        return project_heads(
            x, torch.cat([self.key, self.query, self.cross_query, self.value]), self.config.heads, 4
        )

    def mlp(self, x: Tensor) -> Tensor:
        """x (B, N, D) with the feed-forward's output added."""
        hidden = functional.linear(self.mlp_norm(x), self.mlp_hidden).relu_()  # (B, N, F)
        return x + self.dropout(functional.linear(hidden, self.mlp_output))

    def forward(
        self,
        x: Tensor,
        previous: tuple,
        states: Tensor | None,
        shared: tuple | None,
        offset: Tensor,
        no_output: bool = False,
    ) -> tuple[Tensor, tuple, Tensor | None]:
        """Read x (B, N, D); return the output, the last block's (keys, values) and the next states.

        previous: the previous block's (keys, values), (B, H, W, E) each
        states: the layer's own, (B, S, D), if it is recurrent
        shared: under feedback the K_s and V_s (B, H, 1, S, E) that all layers except the recurrent one read
        offset: what is added to the scores of a tile, (H, W, 2W)
        no_output: its output is not needed; x is returned unchanged
        """
        window, dropout = self.config.window, self.config.dropout if self.training else 0.0
        key, query, cross_query, value = self.project(x)
        keys, values = (
            torch.cat([previous[0], key], 2),
            torch.cat([previous[1], value], 2),
        )  # (B, H, W + N, E)
        last = (keys[:, :, -window:], values[:, :, -window:])
        if self.state is not None:
            *shared, states = self.state(keys, values, states)
        if no_output:
            return x, last, states
        attended = merge_heads(
            sliding_attention(query * self.scale[:, None, None], keys, values, offset, dropout)
        )
        if shared is not None:
            cross = cross_attend(cross_query, *shared, self.cross_scale)
            attended = torch.cat([attended, merge_heads(cross)], dim=-1)  # (B, N, 2HE)
        return self.mlp(x + functional.linear(attended, self.output)), last, states


class BlockRecurrent(Model):
    """The model. `config` is the reference's; the initial weights are those that the reference draws from `seed`."""

    Config = Config
    state_type = State
    config: Config
    in_bucket: Tensor  # (3W - 1, buckets)
    mask: Tensor  # (3W - 1,)

    def __init__(self, config: Config, seed: int = 0):
        super().__init__(config)
        self.embedding = parameter(config.vocabulary, config.width)  # (V, D), the output's too
        self.layers = Layers(Layer(config, number) for number in range(1, config.layers + 1))
        self.final_norm = LayerNorm(config.width)
        in_bucket, mask = tables_by_distance(
            config.window, config.buckets, config.max_distance
        )  # (3W - 1, ...)
        self.register_buffer("in_bucket", in_bucket, persistent=False)
        self.register_buffer("mask", mask, persistent=False)
        initialise(self, init_params(config, np.random.default_rng(seed)))

    def describe(self) -> str:
        """One line on how far back the model can look."""
        c = self.config
        reach = f"attention reaches {c.layers} layers x {c.window} = {c.layers * c.window:,} tokens back"
        if not c.recurrent_layers:
            return reach
        return f"{reach}; {c.states} recurrent states on layer {', '.join(map(str, c.recurrent_layers))} carry the rest"

    @property
    def attention_reach(self) -> int:
        """How many tokens back a prediction can look by attention only, without memory."""
        return self.config.layers * self.config.window

    def state_shapes(self, batch: int) -> dict[str, tuple[int, ...]]:
        """The shape of each field of a State of `batch` lanes; raises ValueError if batch is below 1."""
        c = self.config
        states = (check_lanes(batch), len(c.recurrent_layers), c.states, c.width)
        rows = (batch, c.layers, c.heads, c.window, c.head_width)
        return {"states": states, "keys": rows, "values": rows}

    @property
    def cells(self) -> list[Recurrence]:
        """The cells of the recurrent layers, in order."""
        return [layer.state for layer in self.layers if layer.state is not None]

    def initial_state(self, batch: int) -> State:
        """The state at a document's start: the learned states, and zero keys and values."""
        shapes = self.state_shapes(batch)
        zeros = self.embedding.new_zeros(shapes["keys"])
        learned = [cell.initial for cell in self.cells]
        states = (
            torch.stack(learned).expand(shapes["states"])
            if learned
            else self.embedding.new_zeros(shapes["states"])
        )
        return State(at_least_float32(states), zeros, zeros)

    def output_matrix(self) -> Tensor:
        """(V, D), the embedding."""
        return self.embedding

    def read(self, tokens: Tensor, state: State) -> Reading:
        """Read a segment: tokens (B, N), N a multiple of the window. Reading.hidden (B, N, D) predicts the next tokens.

        Raises ValueError if N is not a positive multiple of the window, or if the state does not fit this model and B lanes.
        """
        hidden, state = self._read(tokens, state)
        return Reading(self.output_rows(hidden), state, {})

    def advance(self, tokens: Tensor, state: State) -> State:
        """The state after tokens (B, N), without the logits and, except under feedback, the last layer's own output."""
        return self._read(tokens, state, memory_only=True)[1]

    def output_rows(self, hidden):
        return self.final_norm(hidden) * self.config.width**-0.5

    def _read(self, tokens, state, memory_only=False):
        """The last layer's output (B, N, D) and the next state."""
        c, length = self.config, tokens.shape[1]
        if length == 0 or length % c.window:
            raise ValueError(
                f"a segment of {length} tokens is not a positive multiple of window {c.window}; pad it"
            )
        self.check_state(state, len(tokens))
        x, offsets = (
            look_up(tokens, self.embedding),
            offsets_of(self.layers, self.in_bucket, self.mask),
        )  # x (B, N, D)
        offsets = offsets_by_pair(offsets, c.window, x.dtype)  # (L, H, W, 2W)
        if not c.feedback:
            return self._stack(x, state, offsets, memory_only)
        outs = []
        for block in x.split(c.window, dim=1):
            # not memory_only: dropout must draw the same numbers as in read
            out, state = self._stack(block, state, offsets, memory_only=False)
            outs.append(out)
        return torch.cat(outs, dim=1), state

    def _stack(self, x, state, offsets, memory_only):
        """Run all layers over x (B, N, D), which under feedback is one block."""
        c, states, keys, values, shared = self.config, [], [], [], None
        if c.feedback:
            owner = self.layers[c.recurrent_layers[0] - 1].state
            shared = tuple(
                field[:, :, None] for field in owner.keys_and_values(state.states[:, 0])
            )  # (B, H, 1, S, E)
        for number, (layer, offset) in enumerate(
            zip(self.layers, offsets.unbind(0), strict=True), start=1
        ):
            layer_states = (
                None if layer.state is None else state.states[:, c.recurrent_layers.index(number)]
            )  # (B, S, D)
            previous = (state.keys[:, number - 1], state.values[:, number - 1])
            no_output = memory_only and number == c.layers
            x, (key, value), layer_states = layer(
                x, previous, layer_states, shared, offset, no_output
            )
            keys.append(key)
            values.append(value)
            if layer_states is not None:
                states.append(layer_states)
        states = torch.stack(states, 1) if states else state.states
        return x, State(states, torch.stack(keys, 1), torch.stack(values, 1))
