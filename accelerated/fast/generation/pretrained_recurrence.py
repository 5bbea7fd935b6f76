"""GPT-2 with recurrence token by token: keys and values of a window's tokens are kept."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from accelerated.fast.generation.token_by_token import TokenByToken
from accelerated.pretrained_recurrence import PretrainedRecurrence, State, masked_with_inserted


class Rows(NamedTuple):
    """What a window's tokens read, and what they write for later tokens and the pooled vector."""

    keys: list[Tensor]  # per layer (B, H, S + T or T, E), those of the inserted vectors first
    values: list[Tensor]
    present: Tensor  # the State's
    outputs: list[Tensor]  # per layer (B, T, D); empty for plain GPT-2


class Steps(TokenByToken):
    """A segment is a window."""

    model: PretrainedRecurrence

    def rows_at(self, state: State) -> Rows:
        """The rows at a window's start, with keys and values of the inserted vectors."""
        c = self.model.config
        zeros = self.model.embedding.new_zeros
        lanes = len(state.pooled)
        empty = zeros(lanes, c.heads, c.segment, c.width // c.heads)
        nothing = empty[:, :, :0]
        inserted = self.model.vectors_to_insert(state)
        rows = Rows([], [], state.present.clone(), [])
        for number, layer in enumerate(self.model.layers, start=1):
            key = nothing
            value = nothing
            if inserted is not None and number in c.insertion_layers:
                key, value = layer.key_value(inserted)  # (B, H, S, E)
            rows.keys.append(torch.cat([key, empty], 2))
            rows.values.append(torch.cat([value, empty], 2))
            if inserted is not None:
                rows.outputs.append(zeros(lanes, c.segment, c.width))
        return rows

    def hidden_after(self, token: Tensor, position: Tensor, rows: Rows) -> Tensor:
        """The hidden row (B, D) after token (B,) at position (1,) of its window."""
        model = self.model
        x = functional.embedding(token[:, None], model.embedding)  # (B, 1, D)
        x = x + model.positions.index_select(0, position)
        unread = model.future_keys.index_select(0, position)  # (1, T)
        beside_inserted = unread
        if model.module is not None:
            vectors = model.config.vectors
            beside_inserted = masked_with_inserted(unread, vectors, rows.present)

        for index, layer in enumerate(model.layers):
            query, key, value = layer.query_key_value(x)  # (B, H, 1, E)
            before = rows.keys[index].shape[2] - self.length  # inserted vectors, S or none
            keys = rows.keys[index].index_copy_(2, position + before, key)
            values = rows.values[index].index_copy_(2, position + before, value)
            x = x + layer.attend(query, keys, values, beside_inserted if before else unread)
            x = x + layer.mlp(x)
            if rows.outputs:
                rows.outputs[index].index_copy_(1, position, x)
        return model.final_norm(x)[:, 0]

    def close(self, state: State, tokens: Tensor, rows: Rows) -> State:
        """The State after a full window."""
        if not rows.outputs:
            return state
        hidden = self.model.final_norm(rows.outputs[-1])
        return self.model.next_state(state, rows.outputs, hidden)
