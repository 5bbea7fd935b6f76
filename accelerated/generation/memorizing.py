"""The Memorizing Transformer token by token: keys and values follow the previous segment's."""

from typing import NamedTuple

from torch import Tensor
from torch.nn import functional

from accelerated.attention.content import sdpa
from accelerated.attention.heads import merge_heads
from accelerated.attention.retrieval import Memory, searchable
from accelerated.attention.sliding_window import of_query, offsets_of
from accelerated.generation.block_recurrent import with_room
from accelerated.generation.token_by_token import TokenByToken
from accelerated.memorizing import Memorizing, State


class Rows(NamedTuple):
    """What a segment's tokens read, and their keys and values after the previous segment's."""

    offsets: Tensor  # of scores, by distance, (L, H, 3N - 1)
    keys: tuple[Tensor, ...]  # per layer (B, H, 2N, E)
    values: tuple[Tensor, ...]
    memory: Memory


class Steps(TokenByToken):
    """All layers look back a segment's length; the memory layer looks up the memory too."""

    model: Memorizing

    def rows_at(self, state: State) -> Rows:
        """The rows at a segment's start."""
        model = self.model
        offsets = offsets_of(model.layers, model.in_bucket, model.mask).to(state.keys.dtype)
        # A copy: a CUDA graph's rows are overwritten
        memory = searchable(state.memory_keys.clone(), state.memory_values.clone())
        return Rows(offsets, with_room(state.keys), with_room(state.values), memory)

    def hidden_after(self, token: Tensor, position: Tensor, rows: Rows) -> Tensor:
        """The hidden row (B, D) after token (B,) at position (1,) of its segment."""
        place = position + self.length
        offsets = of_query(rows.offsets, position)[:, None]  # (L, 1, H, 1, 2N)
        x = functional.embedding(token[:, None], self.model.embedding)  # (B, 1, D)
        for index, layer in enumerate(self.model.layers):
            key, query, value = layer.project(x)  # (B, H, 1, E)
            keys = rows.keys[index].index_copy_(2, place, key)
            values = rows.values[index].index_copy_(2, place, value)
            scaled = query * layer.scale[:, None, None]
            attended = sdpa(scaled, keys, values, offsets[index], scale=1.0)
            if layer.looks_up:
                attended = layer.retrieve(query, attended, rows.memory)
            x = layer.mlp(x + functional.linear(merge_heads(attended), layer.output))
        return self.model.output_rows(x)[:, 0]

    def close(self, state: State, tokens: Tensor, rows: Rows) -> State:
        """The State after a complete segment: its keys and values become the previous segment's."""
        keys = [keys[:, :, self.length :] for keys in rows.keys]
        values = [values[:, :, self.length :] for values in rows.values]
        return self.model.next_state(state, list(zip(keys, values, strict=True)))
