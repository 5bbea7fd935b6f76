"""The Block-Recurrent Transformer token by token: states are read and updated once a block."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from accelerated.attention.content import sdpa
from accelerated.attention.heads import merge_heads
from accelerated.attention.sliding_window import offsets_by_distance, scaled_attention
from accelerated.block_recurrent import BlockRecurrent, State
from accelerated.fast.generation.token_by_token import TokenByToken, columns_of_query


class Rows(NamedTuple):
    """What a block's tokens read, and their keys and values, which follow the previous block's."""

    offsets: Tensor  # of scores, by distance, (L, H, 3W - 1)
    keys: tuple[Tensor, ...]  # per layer (B, H, 2W, E)
    values: tuple[Tensor, ...]
    state_keys: list[Tensor]  # per recurrent layer K_s (B, H, S, E)
    state_values: list[Tensor]  # per recurrent layer V_s


class Steps(TokenByToken):
    """A segment is a block here."""

    model: BlockRecurrent

    @property
    def length(self) -> int:
        """The tokens of a block."""
        return self.model.config.window

    def rows_at(self, state: State) -> Rows:
        """The rows at a block's start."""
        model = self.model
        offsets = offsets_by_distance(model.layers, model.in_bucket, model.seen)
        offsets = offsets.to(state.keys.dtype)
        rows = Rows(offsets, with_room(state.keys), with_room(state.values), [], [])
        for states, cell in zip(state.states.unbind(1), model.cells, strict=True):
            projected = cell.project(states, cell.matrices())
            rows.state_keys.append(projected.key)
            rows.state_values.append(projected.value)
        return rows

    def hidden_after(self, token: Tensor, position: Tensor, rows: Rows) -> Tensor:
        """The hidden row (B, D) after token (B,) at position (1,) of its block."""
        c = self.model.config
        place = position + c.window
        columns = columns_of_query(position, c.window, 2 * c.window)
        of_query = rows.offsets.index_select(-1, columns)  # (L, H, 2W), of (L, H, 3W - 1)
        offsets = of_query[:, None, :, None]  # (L, 1, H, 1, 2W)
        x = functional.embedding(token[:, None], self.model.embedding)  # (B, 1, D)
        for index, layer in enumerate(self.model.layers):
            key, query, cross_query, value = layer.project(x)  # (B, H, 1, E)
            keys = rows.keys[index].index_copy_(2, place, key)
            values = rows.values[index].index_copy_(2, place, value)
            query = query * layer.scale[:, None, None]
            attended = sdpa(query, keys, values, offsets[index], scale=1.0)
            if cross_query is not None and layer.cross_scale is not None:
                number = index + 1
                cell = -1  # with feedback, other layers read the last cell's states
                if number in c.recurrent_layers:
                    cell = c.recurrent_layers.index(number)
                state_key = rows.state_keys[cell]
                state_value = rows.state_values[cell]
                cross = scaled_attention(cross_query, state_key, state_value, layer.cross_scale)
                attended = torch.cat([attended, cross], 1)  # (B, 2H, 1, E)
            x = layer.mlp(x + functional.linear(merge_heads(attended), layer.output))
        return self.model.output_rows(x)[:, 0]

    def close(self, state: State, tokens: Tensor, rows: Rows) -> State:
        """The State after a full block: the recurrent states have read it."""
        numbers = self.model.config.recurrent_layers
        states = []
        for before, number, cell in zip(
            state.states.unbind(1), numbers, self.model.cells, strict=True
        ):
            projected = cell.project(before, cell.matrices())
            keys = rows.keys[number - 1]
            values = rows.values[number - 1]
            states.append(cell.update(before, projected, keys, values))
        return State(
            torch.stack(states, 1) if states else state.states,
            torch.stack(rows.keys, 1)[:, :, :, self.length :],
            torch.stack(rows.values, 1)[:, :, :, self.length :],
        )


def with_room(previous: Tensor) -> tuple[Tensor, ...]:
    """Per layer (B, H, 2W, E): a block's keys or values (B, L, H, W, E), room for the next's."""
    return torch.cat([previous, torch.zeros_like(previous)], 3).unbind(1)
