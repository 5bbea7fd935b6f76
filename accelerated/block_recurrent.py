"""Block-Recurrent Transformer in PyTorch: reference/block_recurrent.py made fast.

Same config, parameter names, shapes and initialisation. Only the states' projections and update run block after block; the
tokens' projections, feed-forward, sliding attention and, once each block's incoming state is known, cross-attention run for the
whole segment at once. The exception is feedback (section 3.7), where the whole stack must wait for the state of the block before.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from accelerated.attention.content import attention
from accelerated.attention.heads import layer_norm, merge_heads, project_heads
from accelerated.attention.parameters import adopt_parameters
from accelerated.attention.sliding_window import position_bucket, score_offset, sliding_attention, tile_distance, window_mask
from accelerated.protocol import Output
from reference.block_recurrent import Config, init_params


class State(NamedTuple):
    """What a segment hands to the next one; axis 0 of every field is the lane.

    While `step` reads a block, keys and values grow from W to 2W - 1 rows; they are back at W when the block is full.
    """

    states: torch.Tensor  # (B, R, S, D)
    keys: torch.Tensor  # (B, L, H, W, E), the last block's, unit length
    values: torch.Tensor  # (B, L, H, W, E)


class Stream(NamedTuple):
    """A State within a block, with what its tokens read of the recurrent states: K_s and V_s, fixed until the block ends.

    `step` alone takes it; `state` is a State for `forward` only where a block has just ended.
    """

    state: State
    shared: tuple  # per layer (K_s, V_s), each (B, H, S, E), or None


def gate(p, kind, carry, hidden):
    """Next state from the carried one and the gate's input (section 3.4)."""
    if kind == "fixed":
        candidate = functional.linear(hidden, p.weight_z, p.bias_z)  # Eq. 1
        g = torch.sigmoid(p.bias_g)  # Eq. 2
        return candidate + g * (carry - candidate)  # Eq. 3
    weight = torch.cat([p.weight_z, p.weight_i, p.weight_f])
    z, i, f = functional.linear(hidden, weight, torch.cat([p.bias_z, p.bias_i - 1, p.bias_f + 1])).chunk(3, dim=-1)
    return carry * torch.sigmoid(f) + torch.tanh(z) * torch.sigmoid(i)  # Eqs. 4-7


def gating(p, config, states, attended):
    """From states (B, S, D) and attended (B, S, 2HE) to the next states, by gate configuration (section 3.6)."""
    if config.configuration == "single":
        return gate(p.mlp_gate, config.gate, states, torch.relu(functional.linear(attended, p.mlp_hidden)))
    middle = gate(p.attention_gate, config.gate, states, attended)
    if config.configuration == "skip":
        return middle
    hidden = torch.relu(functional.linear(layer_norm(middle, p.mlp_norm), p.mlp_hidden))
    return gate(p.mlp_gate, config.gate, middle, hidden)


def state_matrices(p):
    """K_s, Q_s^h, Q_e^h, V_s as one matrix (4HE, D), put together once for all blocks."""
    return torch.cat([p.key, p.query, p.cross_query, p.value])


def project_states(p, config, states, matrices):
    """K_s, Q_s^h, Q_e^h, V_s of norm(states) + state IDs (section 3.3), each (B, H, S, E)."""
    return project_heads(layer_norm(states, p.norm) + p.ids, matrices, config.heads, 4)


def state_keys_and_values(p, config, states):
    """K_s and V_s alone, for tokens that read a state: (B, H, S, E) each."""
    return project_heads(layer_norm(states, p.norm) + p.ids, torch.cat([p.key, p.value]), config.heads, 2)


def update_states(p, config, states, projected, keys, values):
    """The horizontal direction on one block (section 3.2), keys and values (B, H, 2W, E)."""
    state_key, query, cross_query, state_value = projected
    own = attention(query, state_key, state_value, p.scale)
    cross = attention(cross_query, keys, values, p.cross_scale)
    return gating(p, config, states, torch.cat([merge_heads(own), merge_heads(cross)], dim=-1))


def recur(p, config, keys, values, states):
    """Run the cell over the blocks of keys and values (B, H, W + N, E).

    Returns what each block's tokens read, K_s and V_s (B, H, N/W, S, E), and the states after the last block.
    """
    state_keys, state_values, matrices = [], [], state_matrices(p)
    # split, not slices: the gradient of a split is one concatenation, that of each slice a whole segment of zeros
    keys, values = keys.split(config.window, 2), values.split(config.window, 2)
    for block in range(len(keys) - 1):
        near = slice(block, block + 2)
        projected = project_states(p, config, states, matrices)
        state_keys.append(projected[0])
        state_values.append(projected[-1])
        states = update_states(p, config, states, projected, torch.cat(keys[near], 2), torch.cat(values[near], 2))
    return torch.stack(state_keys, 2), torch.stack(state_values, 2), states


def cross_attend(query, state_keys, state_values, scale):
    """Every block of query (B, H, N, E) to its own states (B, H, N/W, S, E); (B, H, N, E)."""
    tiles = query.unflatten(2, (state_keys.shape[2], -1))  # (B, H, N/W, W, E)
    return attention(tiles, state_keys, state_values, scale[:, None]).flatten(2, 3)


class BlockRecurrent(nn.Module):
    """The model; `config` as in the reference, `seed` gives the weights that the reference draws from it."""

    Config = Config

    def __init__(self, config, seed=0):
        super().__init__()
        self.config = config
        adopt_parameters(self, init_params(config, np.random.default_rng(seed)))
        distance = tile_distance(config.window)
        self.register_buffer("mask", window_mask(distance, config.window), persistent=False)
        bucket = position_bucket(distance, config.buckets, config.max_distance)
        self.register_buffer("bucket", bucket, persistent=False)

    def describe(self):
        """One line about how far back the model can look."""
        c = self.config
        reach = f"attention reaches {c.layers} layers x {c.window} = {c.layers * c.window:,} tokens back"
        if not c.recurrent_layers:
            return reach
        return f"{reach}; {c.states} recurrent states on layer {', '.join(map(str, c.recurrent_layers))} carry the rest"

    @property
    def attention_reach(self):
        """Tokens back that a prediction can depend on by attention alone, without what the memory carries farther."""
        return self.config.layers * self.config.window

    def auxiliary_parameters(self):
        """None: the task loss trains them all."""
        return []

    def initial_state(self, batch):
        """What a document starts with: the learned states, and zero keys and values."""
        c = self.config
        zeros = self.embedding.new_zeros(batch, c.layers, c.heads, c.window, c.head_width)
        if not c.recurrent_layers:
            return State(self.embedding.new_zeros(batch, 0, c.states, c.width), zeros, zeros)
        learned = torch.stack([self.layers[layer - 1].state.initial for layer in c.recurrent_layers])
        return State(learned.expand(batch, -1, -1, -1), zeros, zeros)

    def forward(self, tokens, state):
        """Read a segment: tokens (B, N), N a multiple of the window. Output.logits (B, N, V) predict the next token.

        Raises ValueError if N is not a positive multiple of the window.
        """
        hidden, state = self._read(tokens, state)
        return Output(self._logits(hidden), state, {})

    def advance(self, tokens, state):
        """The state after tokens (B, N), without the logits and, but under feedback, the last layer's own output."""
        return self._read(tokens, state, memory_only=True)[1]

    def step(self, token, state):
        """Read one token (B,) in evaluation mode; returns logits (B, V) and the Stream to pass on.

        state is the Stream of an earlier step, or a State to begin from.
        """
        stream = state if isinstance(state, Stream) else self.stream(state)
        x, keys, values = self.embedding[token][:, None], [], []
        for index, layer in enumerate(self.layers):
            previous = (stream.state.keys[:, index], stream.state.values[:, index])
            x, grown = self._step_layer(layer, x, previous, stream.shared[index])
            keys.append(grown[0])
            values.append(grown[1])
        grown = State(stream.state.states, torch.stack(keys, 1), torch.stack(values, 1))
        full = grown.keys.shape[3] == 2 * self.config.window
        return self._logits(x)[:, 0], self.stream(self._close_block(grown)) if full else Stream(grown, stream.shared)

    def stream(self, state):
        """Open a state for `step`: project what every token of the coming block reads."""
        c, shared = self.config, [None] * self.config.layers
        for r, number in enumerate(c.recurrent_layers):
            shared[number - 1] = state_keys_and_values(self.layers[number - 1].state, c, state.states[:, r])
        if c.feedback:
            shared = [shared[c.recurrent_layers[0] - 1]] * c.layers
        return Stream(state, tuple(shared))

    def _logits(self, hidden):
        return functional.linear(layer_norm(hidden, self.final_norm) * self.config.width**-0.5, self.embedding)

    def _dropout(self, x):
        return functional.dropout(x, self.config.dropout, self.training)

    def _read(self, tokens, state, memory_only=False):
        c, length = self.config, tokens.shape[1]
        if length == 0 or length % c.window:
            raise ValueError(f"a segment of {length} tokens is not a positive multiple of window {c.window}; pad it")
        if state.keys.shape[3] != c.window:
            raise ValueError(f"the state holds {state.keys.shape[3]} rows of keys, not {c.window}: finish its block with step")
        x = functional.embedding(tokens, self.embedding)  # (B, N, D)
        if not c.feedback:
            return self._stack(x, state, memory_only)
        outs = []
        for block in x.split(c.window, dim=1):
            # never memory_only: a block's dropout must follow the same draws as in forward
            out, state = self._stack(block, state, memory_only=False)
            outs.append(out)
        return torch.cat(outs, dim=1), state

    def _stack(self, x, state, memory_only):
        """All layers over x (B, N, D), one block at a time under feedback."""
        c, states, keys, values, shared = self.config, [], [], [], None
        if c.feedback:
            owner = self.layers[c.recurrent_layers[0] - 1].state
            shared = tuple(field[:, :, None] for field in state_keys_and_values(owner, c, state.states[:, 0]))  # (B, H, 1, S, E)
        for index, layer in enumerate(self.layers):
            recurrent = index + 1 in c.recurrent_layers
            own = state.states[:, c.recurrent_layers.index(index + 1)] if recurrent else None
            previous = (state.keys[:, index], state.values[:, index])
            last = memory_only and index + 1 == c.layers
            x, (key, value), own = self._layer(layer, x, previous, own, shared, last)
            keys.append(key)
            values.append(value)
            if recurrent:
                states.append(own)
        states = torch.stack(states, 1) if states else state.states
        return x, State(states, torch.stack(keys, 1), torch.stack(values, 1))

    def _project(self, p, x):
        """Unit key and queries, and value: (key, query, cross query or nothing, value), each (B, H, N, E)."""
        normed = self._dropout(layer_norm(x, p.norm))
        crossing = (p.cross_query,) if hasattr(p, "cross_query") else ()
        matrices = (p.key, p.query, *crossing, p.value)
        return project_heads(normed, torch.cat(matrices), self.config.heads, len(matrices))

    def _layer(self, p, x, previous, states, shared, memory_only):
        """One layer over x (B, N, D): output, last block's (keys, values), next states. memory_only leaves x as it is."""
        c = self.config
        key, query, *crossing, value = self._project(p, x)
        keys, values = torch.cat([previous[0], key], 2), torch.cat([previous[1], value], 2)  # (B, H, W + N, E)
        last = (keys[:, :, -c.window :], values[:, :, -c.window :])
        if states is not None:
            *shared, states = recur(p.state, c, keys, values, states)
        if memory_only:
            return x, last, states
        dropout = c.dropout if self.training else 0.0
        offset = score_offset(p.position_bias, p.scale, self.bucket, self.mask)
        attended = merge_heads(sliding_attention(query * p.scale[:, None, None], keys, values, offset, dropout))
        if shared is not None:
            cross = cross_attend(crossing[0], *shared, p.cross_scale)
            attended = torch.cat([attended, merge_heads(cross)], dim=-1)  # (B, N, 2HE)
        return self._mlp(p, x + functional.linear(attended, p.output)), last, states

    def _mlp(self, p, x):
        hidden = torch.relu(functional.linear(layer_norm(x, p.mlp_norm), p.mlp_hidden))
        return x + self._dropout(functional.linear(hidden, p.mlp_output))

    def _step_layer(self, p, x, previous, shared):
        """One token x (B, 1, D) through a layer; returns the output and the keys and values with this token's added."""
        key, query, *crossing, value = self._project(p, x)
        window = self.config.window
        seen_keys, seen_values = previous[0][:, :, -window:], previous[1][:, :, -window:]  # the W tokens before this one
        scores = (query * p.scale[:, None, None]) @ seen_keys.transpose(-1, -2)
        scores = scores + (p.position_bias * p.scale[:, None])[:, None, self.bucket[0, :window]]  # distances W .. 1
        attended = merge_heads(scores.softmax(-1) @ seen_values)
        if shared is not None:
            cross = attention(crossing[0], *shared, p.cross_scale)
            attended = torch.cat([attended, merge_heads(cross)], dim=-1)
        grown = (torch.cat([previous[0], key], 2), torch.cat([previous[1], value], 2))
        return self._mlp(p, x + functional.linear(attended, p.output)), grown

    def _close_block(self, grown):
        """A full block: the states read it, and its keys and values become the previous block's."""
        c, states = self.config, []
        for r, number in enumerate(c.recurrent_layers):
            p, old = self.layers[number - 1].state, grown.states[:, r]
            keys, values = grown.keys[:, number - 1], grown.values[:, number - 1]
            states.append(update_states(p, c, old, project_states(p, c, old, state_matrices(p)), keys, values))
        states = torch.stack(states, 1) if states else grown.states
        return State(states, grown.keys[:, :, :, c.window :], grown.values[:, :, :, c.window :])
