"""The Compressive Transformer token by token: memories are projected once, at a segment's start."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from accelerated.attention.content import sdpa
from accelerated.compressive import Compressive, State
from accelerated.generation.token_by_token import TokenByToken


class Rows(NamedTuple):
    """What a segment's tokens read, and what they write for later tokens and the memories."""

    keys: list[Tensor]  # per layer (B, H, K, E), of compressed memory, memory and the segment
    values: list[Tensor]
    distance_keys: list[Tensor]  # (H, E, K), already scaled
    hidden: list[Tensor]  # (B, N, D), inputs of the layer


class Steps(TokenByToken):
    """A segment's keys are [compressed memory | memory | segment], as in the model."""

    model: Compressive

    @staticmethod
    def fits(model: Compressive) -> bool:
        """Whether a token's attention is SDPA's, which gives no weights: two variants need them."""
        c = model.config
        return c.positions == "transformer_xl" and c.compression != "most_used"

    def rows_at(self, state: State) -> Rows:
        """The rows at a segment's start."""
        c = self.model.config
        lanes = len(state.memory)
        zeros = state.memory.new_zeros
        empty = zeros(lanes, c.heads, c.segment, c.head_width)
        rows = Rows([], [], [], [])
        for index, layer in enumerate(self.model.layers):
            remembered = torch.cat([state.compressed[:, index], state.memory[:, index]], 1)
            key, value = layer.project_remembered(remembered)  # (B, H, C + M, E)
            rows.keys.append(torch.cat([key, empty], 2))
            rows.values.append(torch.cat([value, empty], 2))
            distance_key = layer.project_distances(self.model.sinusoids) * c.head_width**-0.5
            rows.distance_keys.append(distance_key.transpose(1, 2))
            rows.hidden.append(zeros(lanes, c.segment, c.width))
        return rows

    def hidden_after(self, token: Tensor, position: Tensor, rows: Rows) -> Tensor:
        """The hidden row (B, D) after token (B,) at position (1,) of its segment."""
        c = self.model.config
        h = self.model.look_up(token[:, None])  # (B, 1, D)
        place = position + c.compressed_memory + c.memory  # of its key
        number = torch.arange(rows.keys[0].shape[2], device=token.device)  # (K,)
        last = rows.distance_keys[0].shape[2] - 1  # the column of distance 0
        columns = (number - place + last).clamp(0, last)  # (K,), each key's of distance_keys
        for index, layer in enumerate(self.model.layers):
            rows.hidden[index].index_copy_(1, position, h)
            attended = self.attend(index, h, place, columns, number > place, rows)
            h = layer.mix(h, attended)
        return h[:, 0] * c.width**-0.5

    def attend(
        self, index: int, h: Tensor, place: Tensor, columns: Tensor, unread: Tensor, rows: Rows
    ) -> Tensor:
        """A layer's attention (B, H, 1, E) for a token h (B, 1, D) whose key's place is (1,).

        columns (K,) says which column of distance_keys a key takes, unread (K,) if it is later.
        """
        layer = self.model.layers[index]
        query, key, value = layer.project_own(h)  # (B, H, 1, E)
        keys = rows.keys[index].index_copy_(2, place, key)
        values = rows.values[index].index_copy_(2, place, value)

        content_query = query + layer.content_bias[:, None]
        distance_query = (query + layer.distance_bias[:, None])[:, :, 0]  # (B, H, E)
        distance_query = distance_query.transpose(0, 1)
        by_distance = torch.bmm(distance_query, rows.distance_keys[index]).transpose(0, 1)
        offset = by_distance.index_select(2, columns).masked_fill(unread, -math.inf)
        return sdpa(content_query, keys, values, offset[:, :, None])

    def close(self, state: State, tokens: Tensor, rows: Rows) -> State:
        """The State after a complete segment."""
        memories = []
        compresseds = []
        for index, layer in enumerate(self.model.layers):
            remembered = (state.memory[:, index], state.compressed[:, index])
            memory, compressed, _, _ = layer.remember(rows.hidden[index], *remembered, usage=None)
            memories.append(memory)
            compresseds.append(compressed)
        return State(torch.stack(memories, 1), torch.stack(compresseds, 1))
