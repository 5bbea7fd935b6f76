"""Gated DeltaNet in PyTorch: the fast version of reference/gated_deltanet.py.

Each head keeps a matrix that maps keys to values; every token updates it by the delta rule.
The reference does so token by token, this file by chunks of tokens.

Config, parameter names, shapes and initial values are the reference's. B lanes, N tokens in a
segment, D width, H heads with keys of width E and values of width P, C = H (2E + P) columns of the
convolution, F feed-forward width, L layers, n tokens in a chunk.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from accelerated.attention.heads import (
    NORM_EPSILON,
    Layers,
    at_least_float32,
    compilable,
    embed,
    merge_heads,
    parameter,
    split_heads,
)
from accelerated.protocol import CheckpointableLayer, Model, Reading, check_lanes, initialise
from reference.gated_deltanet import Config, init_params

CHUNK = 64  # tokens
TAPS = 4  # of a convolution


class State(NamedTuple):
    """What a segment passes to the next one; axis 0 is the lane. Both have float32 at least."""

    matrices: Tensor  # (B, L, H, E, P)
    inputs: Tensor  # (B, L, 3, C), the last ones of each layer's convolution


def gated_delta_rule(matrix: Tensor, *rows: Tensor) -> tuple[Tensor, Tensor]:
    """What the queries read, (B, H, N, P), and the matrix after the tokens (Equation 10).

    rows: query and key (B, H, N, E), value (B, H, N, P), strength and log_decay (B, H, N, 1)
    matrix: before the tokens, (B, H, E, P)

    All have float32 at least: a triangular system is not solved in less (decision 12: its type).
    """
    read = []
    for chunk in zip(*(x.split(CHUNK, 2) for x in rows), strict=True):
        out, matrix = read_chunk(matrix, *chunk)
        read.append(out)
    return torch.cat(read, 2), matrix


def read_chunk(
    matrix: Tensor, query: Tensor, key: Tensor, value: Tensor, strength: Tensor, log_decay: Tensor
) -> tuple[Tensor, Tensor]:
    """gated_delta_rule for one chunk of n tokens, without a loop over them.

    What each token writes depends linearly on what those before it wrote: a triangular system.
    """
    total = log_decay.cumsum(2)  # (B, H, n, 1), since the chunk's beginning
    between = total - total.mT  # (B, H, n, n)
    later = torch.ones_like(between, dtype=torch.bool).triu(1)
    between = between.masked_fill(later, -torch.inf).exp()  # masked before, so nothing overflows
    grown = total.exp()
    system = strength * (key @ key.mT) * between  # its diagonal is taken for 1
    sides = torch.cat([strength * value, strength * grown * key], -1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    own, asked = solved.split([value.shape[-1], key.shape[-1]], -1)

    written = own - (asked @ matrix)  # (B, H, n, P)
    scores = (query @ key.mT) * between
    read = (grown * query) @ matrix + (scores @ written)
    last = total[:, :, -1:]  # (B, H, 1, 1)
    left = (last - total).exp() * key  # (B, H, n, E)
    return read, last.exp() * matrix + (left.mT @ written)


def rms_norm(x: Tensor, scale: Tensor) -> Tensor:
    """x with a mean square of 1 over the last axis, times scale, in the type of scale."""
    return functional.rms_norm(x.to(scale.dtype), scale.shape, scale, NORM_EPSILON)


class Layer(CheckpointableLayer):
    """The matrices of all heads, then the feed-forward."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        width = config.width
        heads = config.heads
        inner = heads * config.value_width
        mixed = 2 * heads * config.head_width + inner
        self.norm = parameter(width)  # (D,)
        self.input = parameter(mixed + inner + 2 * heads, width)  # (C + HP + 2H, D)
        self.taps = parameter(mixed, TAPS)  # (C, 4)
        self.decay_bias = parameter(heads)  # (H,)
        self.decay_rate = parameter(heads)  # (H,)
        self.read_norm = parameter(config.value_width)  # (P,)
        self.output = parameter(width, inner)  # (D, HP)
        self.mlp_norm = parameter(width)  # (D,)
        self.mlp_hidden = parameter(2 * config.feed_forward, width)  # (2F, D)
        self.mlp_output = parameter(width, config.feed_forward)  # (D, F)

    @compilable
    def forward(self, x: Tensor, matrix: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Read x (B, N, D); return the output, and matrix and inputs after it.

        matrix (B, H, E, P) and inputs (B, 3, C) are those before the segment.
        """
        projected = functional.linear(rms_norm(x, self.norm), self.input)
        sizes = [len(self.taps), self.output.shape[1], 2 * self.config.heads]
        mixed, gate, gates = projected.split(sizes, -1)
        rows = torch.cat([inputs, at_least_float32(mixed)], 1)  # (B, 3 + N, C)
        read, matrix = gated_delta_rule(matrix, *self.heads_of(rows), *self.gates(gates))
        read = merge_heads(rms_norm(read, self.read_norm))  # (B, N, HP)
        gated = read * functional.silu(gate)
        x = x + self.dropout(functional.linear(gated, self.output))
        return self.mlp(x), matrix, rows[:, x.shape[1] :]

    def heads_of(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Scaled query, key and value (B, H, N, E or P) of the convolution's rows (B, 3 + N, C)."""
        c = self.config
        taps = at_least_float32(self.taps)[:, None]  # (C, 1, 4)
        filtered = functional.conv1d(rows.mT, taps, groups=len(taps)).mT
        inner = c.heads * c.head_width
        units, value = functional.silu(filtered).split([2 * inner, c.heads * c.value_width], -1)
        units = units.unflatten(-1, (-1, c.head_width))  # of unit length, but for the factor below
        units = functional.rms_norm(units, (c.head_width,), eps=NORM_EPSILON).flatten(2)
        query, key = split_heads(units * c.head_width**-0.5, c.heads, 2)
        [value] = split_heads(value, c.heads, 1)
        return query * c.head_width**-0.5, key, value

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Strength and the logarithm of the decay, (B, H, N, 1) each, of their columns of W x."""
        asked, step = split_heads(at_least_float32(x), self.config.heads, 2)
        step = functional.softplus(step + self.decay_bias[:, None, None])
        rate = at_least_float32(self.decay_rate).exp()[:, None, None]
        return torch.sigmoid(asked), -rate * step

    def mlp(self, x: Tensor) -> Tensor:
        """x (B, N, D) with the feed-forward's output added."""
        both = functional.linear(rms_norm(x, self.mlp_norm), self.mlp_hidden)  # (B, N, 2F)
        gate, hidden = both.chunk(2, -1)
        hidden = functional.silu(gate) * hidden
        return x + self.dropout(functional.linear(hidden, self.mlp_output))

    def dropout(self, x: Tensor) -> Tensor:
        """x with entries dropped in training (decision 11: after each sublayer)."""
        return functional.dropout(x, self.config.dropout, self.training)


class GatedDeltanet(Model):
    """The model; `config` is the reference's, which draws the initial weights from `seed`."""

    state_type = State
    config: Config

    def __init__(self, config: Config, seed: int = 0):
        super().__init__(config)
        self.embedding = parameter(config.vocabulary, config.width)  # (V, D), the output's too
        self.layers = Layers(Layer(config) for _ in range(config.layers))
        self.final_norm = parameter(config.width)  # (D,)
        initialise(self, init_params, seed)

    def state_shapes(self, batch: int) -> dict[str, tuple[int, ...]]:
        """The shape of each field of a State; raises ValueError if batch is below 1."""
        check_lanes(batch)
        c = self.config
        columns = c.heads * (2 * c.head_width + c.value_width)
        return {
            "matrices": (batch, c.layers, c.heads, c.head_width, c.value_width),
            "inputs": (batch, c.layers, TAPS - 1, columns),
        }

    def initial_state(self, batch: int) -> State:
        """The state at a document's start: zeros."""
        dtype = at_least_float32(self.embedding[:0]).dtype
        shapes = self.state_shapes(batch).values()
        return State(*(self.embedding.new_zeros(shape, dtype=dtype) for shape in shapes))

    def read(self, tokens: Tensor, state: State) -> Reading:
        """Read a segment of tokens (B, N). Reading.hidden (B, N, D) predicts the next tokens.

        Raises ValueError if N is not config.segment, or if the state does not fit this model and B
        lanes.
        """
        self.check_segment(tokens, state)
        x = embed(tokens, self.embedding)  # (B, N, D)
        matrices = []
        inputs = []
        for layer, *before in zip(
            self.layers, state.matrices.unbind(1), state.inputs.unbind(1), strict=True
        ):
            x, matrix, rows = layer(x, *before)
            matrices.append(matrix)
            inputs.append(rows)
        hidden = rms_norm(x, self.final_norm) * self.config.width**-0.5
        return Reading(hidden, State(torch.stack(matrices, 1), torch.stack(inputs, 1)), {})

    @property
    def attention_reach(self) -> int:
        """How many tokens back a prediction can look without the matrices: by convolutions."""
        return self.config.layers * (TAPS - 1)

    def describe(self) -> str:
        """One line on how far back the model can look."""
        c = self.config
        matrices = f"{c.layers} layers x {c.heads} matrices of {c.head_width} x {c.value_width}"
        return f"convolutions reach {self.attention_reach} tokens back; {matrices} hold the rest"
