"""Memformer's decoders in one batch, on a GPU, since each needs only what its segment encoded.

    joined(segments)    fewer segments, each of which is several of a rollout

Its other functions stand in paths.py for those of replay.py, and read what was joined. Encoder and
writer still go from one to the next. A joined segment's rows are the lanes of its first part, then
those of the second. It has one seed, from which the encoders draw their dropout before the decoders
do: so the memory path alone draws the same.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from accelerated.data.lanes import Segment
from accelerated.protocol import Reading, State
from accelerated.replay import state_read

# Tokens that are decoded at once: products of width 512 then fill 98% of an H200's places
TOGETHER = 2**13
BATCHES = 4  # of a rollout at least: memory replay keeps the graph of one


def joined(segments: Sequence[Segment]) -> list[Segment]:
    """The segments, joined to equally many parts of at most TOGETHER tokens, BATCHES or more.

    All have a task, or none has.
    """
    count = len(segments)
    size = max(1, min(TOGETHER // segments[0].tokens.numel(), count // BATCHES))
    while count % size:
        size -= 1
    return [join(segments[first : first + size]) for first in range(0, count, size)]


def join(parts: Sequence[Segment]) -> Segment:
    """The parts below each other."""
    fields = tree_map(rows_below, *(part[:5] for part in parts))
    return Segment(*fields, host_starts=any(part.any_starts for part in parts))


def rows_below(*rows: Any) -> Any:
    """A field of all parts, or None if there is none, as of a task."""
    return None if all(part is None for part in rows) else torch.cat(rows)


def parts_of(segment: Segment, state: State) -> Iterator[Segment]:
    """The segments of as many lanes as the state has; most are one themselves."""
    lanes = len(state[0])
    if len(segment.tokens) == lanes:
        yield segment
        return
    for first in range(0, len(segment.tokens), lanes):
        part = segment.keep_lanes(slice(first, first + lanes))
        yield part._replace(host_starts=segment.any_starts)


def advance_segment(plain: Callable, model: Any, segment: Segment, state: State) -> State:
    """The state after all parts, one after another."""
    for part in parts_of(segment, state):
        state = plain(model, part, state)
    return state


def read_segment(plain: Callable, model: Any, segment: Segment, state: State) -> Reading:
    """What predicts (GB, N, D) of G parts of B lanes, and the state (B, ...) after the last."""
    if len(segment.tokens) == len(state[0]):
        return plain(model, segment, state)
    encoded = []
    for part in parts_of(segment, state):
        of_part, memory = model.encode(state_read(model, part, state), part.task)
        encoded.append(of_part)  # (B, N, D)
        state = state._make([memory, part.tokens])
    hidden = model.decode(segment.tokens, torch.cat(encoded), segment.task)
    return Reading(model.scaled(hidden), state, {})
