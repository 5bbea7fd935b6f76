"""Memformer token by token: what a segment's tokens attend to is projected once, at its start."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from accelerated.attention.sliding_window import columns_of_query
from accelerated.generation.token_by_token import TokenByToken
from accelerated.memformer import Memformer, State


class Rows(NamedTuple):
    """What a segment's tokens read, and what they write for later tokens and the memory."""

    distance_rows: (
        tuple  # per decoder layer (2N - 1, E) or (H, R, E), see SelfAttention.far_to_near
    )
    keys: (
        tuple  # per layer (B, H, S + N, E) or (B, H, 1 + N, E): memory's or the task token's first
    )
    values: list
    cross: (
        tuple  # per layer keys and values (B, H, N, E) of the encoded segment; decoder-only empty
    )
    hidden: list  # decoder-only, per layer (B, N, D): its outputs, which its memory reads
    memory: list  # [(B, 1, S, D)], the next State's; decoder-only empty


class Steps(TokenByToken):
    """The encoder-decoder and the decoder-only model."""

    model: Memformer

    def rows_at(self, state: State) -> Rows:
        """The rows at a segment's start."""
        c = self.model.config
        decoder = self.model.decoder
        shape = (len(state.memory), c.heads, decoder.distances.length, c.head_width)
        empty = self.model.embedding.new_zeros(shape)  # (B, H, N or 1 + N, E), until tokens come
        rows = Rows([], [], [], [], [], [])
        for index, layer in enumerate(decoder.layers):
            rows.distance_rows.append(layer.attention.far_to_near(decoder.distances))
            key = value = empty[:, :, :0]
            if self.model.encoder is None:
                memory = layer.attention.memory_norm(state.memory[:, index])
                key, value = layer.attention.project(memory, "key", "value")  # (B, H, S, E)
                rows.hidden.append(memory.new_zeros(len(memory), c.segment, c.width))
            rows.keys.append(torch.cat([key, empty], 2))
            rows.values.append(torch.cat([value, empty], 2))
        if self.model.encoder is not None:
            self.encode(state, rows)
        return rows

    def encode(self, state: State, rows: Rows) -> None:
        """Tokens read the encoded previous segment, and first of all the task's token."""
        encoded, memory, _ = self.model.encode(state, None)
        rows.memory.append(memory)
        for layer in self.model.decoder.layers:
            rows.cross.append(layer.cross.source_key_value(encoded))
        task = self.model.config.special("continuation")
        first = state.previous.new_full((len(memory),), task)
        self.decode(first, first.new_zeros(1), rows)

    def hidden_after(self, token: Tensor, position: Tensor, rows: Rows) -> Tensor:
        """The hidden row (B, D) after token (B,) at position (1,)."""
        if self.model.encoder is not None:
            position = position + 1  # the task's token is the first
        return self.decode(token, position, rows) * self.model.config.width**-0.5

    def decode(self, token: Tensor, place: Tensor, rows: Rows) -> Tensor:
        """The decoder's output (B, D) for token (B,) at place (1,) of those that it reads."""
        decoder = self.model.decoder
        count = decoder.distances.length
        unread = decoder.distances.mask.index_select(0, place)  # (1, N), true for later keys
        columns = columns_of_query(place, count, count)  # (N,), each key's row of distance_rows
        x = functional.embedding(token[:, None], self.model.embedding)  # (B, 1, D)
        for index, layer in enumerate(decoder.layers):
            by_distance = rows.distance_rows[index]
            nearest = columns.clamp(max=by_distance.shape[-2] - 1)  # later keys may have no row
            by_key = by_distance.index_select(-2, nearest)  # (..., N, E)
            kept = (rows.keys[index], rows.values[index])
            x = x + attend(layer.attention, x, *kept, place, by_key, unread)
            if rows.cross:
                x = x + layer.cross.attend(x, *rows.cross[index])
            x = x + layer.feed_forward(x)
            if rows.hidden:
                rows.hidden[index].index_copy_(1, place, x)
        return decoder.norm(x)[:, 0]

    def close(self, state: State, tokens: Tensor, rows: Rows) -> State:
        """The State after a complete segment."""
        if self.model.encoder is not None:
            return State(rows.memory[0].clone(), tokens)  # a CUDA graph's rows are overwritten
        memories = []
        for index, layer in enumerate(self.model.decoder.layers):
            memories.append(layer.writer(state.memory[:, index], rows.hidden[index]))
        return State(torch.stack(memories, 1), state.previous)


def attend(
    attention: nn.Module,
    x: Tensor,
    keys: Tensor,
    values: Tensor,
    place: Tensor,
    by_key: Tensor,
    unread: Tensor,
) -> Tensor:
    """A self-attention's output (B, 1, D) for a token x (B, 1, D), whose key and value it writes.

    The last N keys (B, H, K, E) have positions: of those by_key (..., N, E) are the rows by distance, and unread (1, N) is true
    for later ones. The token's place (1,) is among them.
    """
    count = unread.shape[1]
    place = place + keys.shape[2] - count
    query, key, value = attention.project(attention.norm(x), "query", "key", "value")
    keys.index_copy_(2, place, key)
    values.index_copy_(2, place, value)
    attended = attention.attend(query, keys, values, by_key, count, unread)
    return attention.output_rows(attended)
