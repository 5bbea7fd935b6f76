"""The Compressive Transformer token by token: memories are projected once, at a segment's start."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from accelerated.attention.content import sdpa
from accelerated.compressive import Compressive, State
from accelerated.fast.generation.token_by_token import TokenByToken


class Rows(NamedTuple):
    """What a segment's tokens read, and what they write for later tokens and the memories."""

    keys: list[Tensor]  # per layer (B, H, K, E), of compressed memory, memory and the segment
    values: list[Tensor]
    distance_keys: list[list[Tensor]]  # (H, E, K), already scaled; and compressed rows' own
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
            memory, compressed = self.model.memories_of(state, index)
            remembered = torch.cat([compressed, memory], 1)
            key, value = layer.project_remembered(remembered)  # (B, H, C + M, E)
            rows.keys.append(torch.cat([key, empty], 2))
            rows.values.append(torch.cat([value, empty], 2))
            distances = layer.project_distances(self.model.dropped_sinusoids())
            scaled = [part.transpose(1, 2) * c.head_width**-0.5 for part in distances]
            rows.distance_keys.append(scaled)
            rows.hidden.append(zeros(lanes, c.segment, c.width))
        return rows

    def hidden_after(self, token: Tensor, position: Tensor, rows: Rows) -> Tensor:
        """The hidden row (B, D) after token (B,) at position (1,) of its segment."""
        c = self.model.config
        h = self.model.embed(token[:, None])  # (B, 1, D)
        for index, layer in enumerate(self.model.layers):
            rows.hidden[index].index_copy_(1, position, h)
            h = layer.mix(h, self.attend(index, h, position, rows))
        return h[:, 0] * c.width**-0.5

    def attend(self, index: int, h: Tensor, position: Tensor, rows: Rows) -> Tensor:
        """A layer's attention (B, H, 1, E) for a token h (B, 1, D) at position (1,)."""
        layer = self.model.layers[index]
        place = position + layer.compressed_rows + layer.memory_rows  # of its key
        query, key, value = layer.project_own(h)  # (B, H, 1, E)
        keys = rows.keys[index].index_copy_(2, place, key)
        values = rows.values[index].index_copy_(2, place, value)

        content_bias, *distance_biases = layer.distance_biases()
        number = torch.arange(keys.shape[2], device=h.device)  # (K,)
        column = number - position + self.model.config.segment - 1  # of a key's distance
        offsets = []
        for distance_key, bias in zip(rows.distance_keys[index], distance_biases, strict=True):
            distance_query = (query + bias[:, None])[:, :, 0]  # (B, H, E)
            by_distance = torch.bmm(distance_query.transpose(0, 1), distance_key)
            columns = column.clamp(max=distance_key.shape[2] - 1)
            offsets.append(by_distance.transpose(0, 1).index_select(2, columns))  # (B, H, K)
        offset = offsets[0]
        if layer.own_distances:
            first = layer.compressed_rows
            offset = torch.cat([offsets[1][..., :first], offset[..., :-first]], 2)
        offset = offset.masked_fill(number > place, -math.inf)
        return sdpa(query + content_bias[:, None], keys, values, offset[:, :, None])

    def close(self, state: State, tokens: Tensor, rows: Rows) -> State:
        """The State after a complete segment."""
        memories = []
        compresseds = []
        for index, layer in enumerate(self.model.layers):
            remembered = self.model.memories_of(state, index)
            memory, compressed, _, _ = layer.remember(rows.hidden[index], *remembered, usage=None)
            memories.append(memory)
            compresseds.append(compressed)
        return self.model.state_of(memories, compresseds)
