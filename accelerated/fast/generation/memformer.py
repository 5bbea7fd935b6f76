"""Memformer token by token: what a segment's tokens attend to is projected once, at its start."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from accelerated.fast.generation.token_by_token import TokenByToken, columns_of_query
from accelerated.memformer import DecoderLayer, Memformer, MemoryLayer, State


class Rows(NamedTuple):
    """What a segment's tokens read, and what they write for later tokens and the memory."""

    by_distance: list[Tensor]  # per decoder layer, as SelfAttention.position_rows has it
    keys: list[Tensor]  # (B, H, K, E): of memory or of the task's token, then of the N tokens
    values: list[Tensor]
    cross: list[tuple[Tensor, ...]]  # keys and values (B, H, N, E) of the encoded segment
    hidden: list[Tensor]  # decoder-only (B, N, D): a layer's output, which its memory reads
    memory: list[Tensor]  # encoder-decoder, only one: the next State's


class Steps(TokenByToken):
    """The encoder-decoder and the decoder-only model."""

    model: Memformer

    def rows_at(self, state: State) -> Rows:
        """The rows at a segment's start."""
        c = self.model.config
        decoder = self.model.decoder
        shape = (len(state.memory), c.heads, decoder.distances.length, c.head_width)
        empty = self.model.embedding.new_zeros(shape)  # until tokens come
        nothing = empty[:, :, :0]
        rows = Rows([], [], [], [], [], [])
        slots = self.model.slots(state)  # (B, 1 or L, S, D)
        for index, layer in enumerate(decoder.layers):
            rows.by_distance.append(layer.attention.position_rows())
            key = nothing
            value = nothing
            if isinstance(layer, MemoryLayer):
                key, value = layer.attention.key_value_of_memory(slots[:, index])  # (B, H, S, E)
                rows.hidden.append(empty.new_zeros(len(slots), c.segment, c.width))
            rows.keys.append(torch.cat([key, empty], 2))
            rows.values.append(torch.cat([value, empty], 2))
        if not self.model.decoder_only:
            self.encode(state, rows)
        return rows

    def encode(self, state: State, rows: Rows) -> None:
        """Tokens read the encoded previous segment, and first of all the task's token."""
        encoded, memory = self.model.encode(state, None)
        rows.memory.append(memory)
        for layer in self.model.decoder.layers:
            if isinstance(layer, DecoderLayer):
                rows.cross.append(layer.cross.key_value(encoded))
        first = state.previous.new_full((len(memory),), self.model.continuation)
        self.decode(first, first.new_zeros(1), rows)

    def hidden_after(self, token: Tensor, position: Tensor, rows: Rows) -> Tensor:
        """The hidden row (B, D) after token (B,) at position (1,)."""
        if not self.model.decoder_only:
            position = position + 1  # the task's token is the first
        return self.model.scaled(self.decode(token, position, rows))

    def decode(self, token: Tensor, place: Tensor, rows: Rows) -> Tensor:
        """The decoder's output (B, D) for token (B,) at place (1,) of those that it reads."""
        decoder = self.model.decoder
        length = decoder.distances.length
        unread = torch.arange(length, device=place.device) > place  # (N,), true for later keys
        columns = columns_of_query(place, length, length)  # (N,), each key's row of by_distance
        x = functional.embedding(token[:, None], self.model.embedding)  # (B, 1, D)
        for index, layer in enumerate(decoder.layers):
            by_distance = rows.by_distance[index]
            nearest = columns.clamp(max=by_distance.shape[-2] - 1)  # later keys may have no row
            by_key = by_distance.index_select(-2, nearest)  # (..., N, E)
            attention = layer.attention
            query, key, value = attention.query_key_value(attention.norm(x))  # (B, H, 1, E)
            before = rows.keys[index].shape[2] - length  # slots, which have no positions
            keys = rows.keys[index].index_copy_(2, place + before, key)
            values = rows.values[index].index_copy_(2, place + before, value)
            attended = attention.attend(query, keys, values, by_key, unread)
            x = x + attention.project_back(attended)
            if isinstance(layer, DecoderLayer):
                x = x + layer.cross.attend(x, *rows.cross[index])
            x = x + layer.mlp(x)
            if isinstance(layer, MemoryLayer):
                rows.hidden[index].index_copy_(1, place, x)
        return decoder.norm(x)[:, 0]

    def close(self, state: State, tokens: Tensor, rows: Rows) -> State:
        """The State after a complete segment."""
        if not self.model.decoder_only:
            return State(rows.memory[0].clone(), tokens)  # a copy: a CUDA graph's is overwritten
        slots = self.model.slots(state)  # (B, L, S, D)
        memories = []
        for index, layer in enumerate(self.model.decoder.layers):
            if isinstance(layer, MemoryLayer):
                memories.append(layer.writer(slots[:, index], rows.hidden[index]))
        return State(torch.stack(memories, 1), state.previous)
