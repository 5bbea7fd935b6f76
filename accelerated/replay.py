"""Back-propagation over a rollout (K consecutive segments): three methods with one result.

    (model, segments, state, divisor=None, share=1.0, rank=0)
        -> (loss, auxiliary losses, next state)

Each method adds gradients to .grad; they agree up to rounding, and differ in what they keep. The
objective is the rollout's summed cross-entropy divided by its number of scored tokens, which is
`loss`, in nats per token, plus the model's auxiliary losses {name: mean over segments}.

If these lanes (rows of the batch) are only a part of an update's, as with gradient accumulation,
`divisor` is the number of scored tokens in all of its lanes, and `share` is the weight of these
lanes' auxiliary losses, so that the parts' gradients add up to the whole update's. No gradient
flows into the incoming state. A document that starts inside the rollout takes the model's initial
state, which does get a gradient. If nothing is scored, the loss is 0. Each segment has its own seed
for dropout, so that all methods draw the same numbers; processes of different `rank` draw others.

Nothing here synchronizes with a GPU: `Segment.to` keeps the targets and the document starts on the
host. Logits are computed in chunks of rows (`cross_entropy_sum`, `logits_in_chunks`);
evaluation/score.py uses them too.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from accelerated.adaptive import AdaptiveSoftmax
from accelerated.attention.heads import (
    at_least_float32,
    logits_from,
    with_fast_path,
)
from accelerated.data.lanes import Segment
from accelerated.memory_replay import (
    Gradients,
    back_propagate,
    detach,
    last_to_first,
    seeded,
)
from accelerated.protocol import (
    Model,
    OutputMatrix,
    Reading,
    State,
    logits_by,
    replace_lanes,
)

# How many logits exist at once, 256 MB in float32. In smaller chunks, adding up the matrix's
# gradient costs more
CHUNK = 2**26
IGNORED = -100  # the target of a token that is not scored, as torch's losses have it
# Between the seeds of two processes. Their generators stay equal, so one saved state restores all
RANK_STEP = 0x9E3779B1

Losses: TypeAlias = dict[str, Tensor]  # {name of an auxiliary loss: scalar}
Result: TypeAlias = tuple[Tensor, Losses, State]  # the loss, auxiliary losses, the next state

# The three methods


def through_time(
    model: Model,
    segments: Sequence[Segment],
    state: State,
    divisor: float | None = None,
    share: float = 1.0,
    rank: int = 0,
) -> Result:
    """Full back-propagation through time: keeps the autograd graph of all K segments."""
    return forward_then_backward(run_segment, model, segments, state, divisor, share, rank)


def checkpointed(
    model: Model,
    segments: Sequence[Segment],
    state: State,
    divisor: float | None = None,
    share: float = 1.0,
    rank: int = 0,
) -> Result:
    """Gradient checkpointing: keeps each segment's incoming state, and computes the rest again."""
    run = functools.partial(checkpoint, run_segment, use_reentrant=False, preserve_rng_state=False)
    return forward_then_backward(run, model, segments, state, divisor, share, rank)


def forward_then_backward(
    run: Callable[..., Result],
    model: Model,
    segments: Sequence[Segment],
    state: State,
    divisor: float | None,
    share: float,
    rank: int,
) -> Result:
    """Run all segments forward with `run`, as run_segment does, then make one backward call."""
    seeds, divisor, weight = parts_of_the_objective(segments, divisor, share, rank)
    state = detach(state)
    parts = []
    auxiliary = []
    extra = 0.0
    for segment, seed in zip(segments, seeds, strict=True):
        part, losses, state = run(model, segment, state, seed, divisor)
        parts.append(part)
        auxiliary.append(detach(losses))
        extra = extra + sum(losses.values())

    loss = functools.reduce(torch.add, parts)
    objective = loss + extra * weight
    objective.backward()
    return loss.detach(), summed_losses(auxiliary, weight), detach(state)


def memory_replay(
    model: Model,
    segments: Sequence[Segment],
    state: State,
    divisor: float | None = None,
    share: float = 1.0,
    rank: int = 0,
) -> Result:
    """Memory Replay Back-Propagation (Memformer, Algorithm 1): keeps only each segment's state.

    A first pass computes the states without gradient. Then each segment is computed again from its
    state, from last to first, and its gradients are computed at once. So one segment's graph
    exists at a time.
    """
    seeds, divisor, weight = parts_of_the_objective(segments, divisor, share, rank)
    parts = []
    auxiliary = []

    def advance(pair: tuple[Segment, int], before: State) -> State:
        segment, seed = pair
        with torch.no_grad(), seeded(seed, segment.tokens.device):
            return advance_segment(model, segment, before)

    def replay_one(
        pair: tuple[Segment, int], before: State, dafter: Gradients | None
    ) -> tuple[State, Gradients]:
        segment, seed = pair

        def objective(before: State) -> tuple[Tensor, State]:
            part, losses, after = run_segment(model, segment, before, seed, divisor)
            parts.append(part.detach())
            auxiliary.append(detach(losses))
            return part + sum(losses.values()) * weight, after

        _, after, dbefore = back_propagate(objective, before, dafter)
        return after, dbefore

    pairs = list(zip(segments, seeds, strict=True))
    last = last_to_first(pairs, detach(state), advance, replay_one)
    return functools.reduce(torch.add, parts), summed_losses(auxiliary, weight), last


BACKPROP = {
    "through_time": through_time,
    "checkpointed": checkpointed,
    "memory_replay": memory_replay,
}


# One segment


def run_segment(model: Model, segment: Segment, state: State, seed: int, divisor: float) -> Result:
    """One segment's summed cross-entropy / divisor, its auxiliary losses, and the next state."""
    with seeded(seed, segment.tokens.device):
        reading = read_segment(model, segment, state)
    nats = segment_cross_entropy(reading.hidden, model.output_matrix(), segment)
    return nats / divisor, reading.auxiliary, reading.state


@with_fast_path
def read_segment(model: Model, segment: Segment, state: State) -> Reading:
    """The model's Reading of a segment; lanes where a document starts read the initial state."""
    before = state_read(model, segment, state)
    return model.read(segment.tokens, before, *task_of(segment))


@with_fast_path
def advance_segment(model: Model, segment: Segment, state: State) -> State:
    """The state after a segment, by `advance`, which may skip what only the logits need."""
    before = state_read(model, segment, state)
    return model.advance(segment.tokens, before, *task_of(segment))


def state_read(model: Model, segment: Segment, state: State) -> State:
    """The state that a segment reads: the initial one in lanes where a document starts."""
    if not segment.any_starts:
        return state
    return replace_lanes(segment.starts, model.initial_state(len(segment.starts)), state)


def task_of(segment: Segment) -> tuple:
    """What a model takes after tokens and state: the segment's task, if it has one."""
    return () if segment.task is None else (segment.task,)


def targets_of(segment: Segment) -> Tensor:
    """The targets (B, N) of a segment, IGNORED if they are not scored."""
    return segment.targets.masked_fill(~segment.scored, IGNORED)


def parts_of_the_objective(
    segments: Sequence[Segment], divisor: float | None, share: float, rank: int
) -> tuple[list[int], float, float]:
    """Each segment's seed, the divisor of losses, and a segment's weight of auxiliary losses."""
    seeds = segment_seeds(segments, rank)
    if divisor is None:
        divisor = count_scored(segments)
    return seeds, divisor or 1, share / len(segments)


def count_scored(segments: Sequence[Segment]) -> int:
    """The number of scored tokens in a rollout."""
    return sum(int(segment.scored.sum()) for segment in segments)


def segment_seeds(segments: Sequence, rank: int = 0) -> list[int]:
    """A seed for each segment, drawn from torch's global generator and different for each rank."""
    drawn = torch.randint(2**31, (len(segments),)).tolist()
    return [(seed + RANK_STEP * rank) % 2**31 for seed in drawn]


def summed_losses(parts: list[Losses], weight: float) -> Losses:
    """The weighted auxiliary losses of a rollout from those of each segment, in few operations."""
    names = list(parts[0])
    if not names:
        return {}
    by_segment = [torch.stack(list(losses.values())) for losses in parts]  # K of (names,)
    sums = torch.stack(by_segment).sum(0) * weight
    return dict(zip(names, sums.unbind(), strict=True))


# The loss


def segment_cross_entropy(hidden: Tensor, matrix: OutputMatrix, segment: Segment) -> Tensor:
    """Summed -log p of what is scored in a segment, from a Reading's hidden (B, N, D)."""
    on_host = segment.scored_targets if isinstance(matrix, AdaptiveSoftmax) else None
    return target_cross_entropy(hidden, matrix, targets_of(segment), on_host)


def target_cross_entropy(
    hidden: Tensor, matrix: OutputMatrix, targets: Tensor, host_targets: np.ndarray | None = None
) -> Tensor:
    """Summed -log p, in float32 or better, of targets (B, N) from a Reading's hidden (B, N, D).

    Targets that are IGNORED do not count. host_targets (B, N) are the same on the host, negative
    where they do not count; without them an adaptive softmax copies the targets from the device,
    which synchronizes.
    """
    hidden = hidden.flatten(0, 1)  # (R, D)
    targets = targets.flatten()  # (R,)
    if on_host(hidden):
        counted = (targets != IGNORED).nonzero()[:, 0]
        if len(counted) < len(hidden):
            hidden = hidden.index_select(0, counted)
            targets = targets[counted]
        host_targets = None  # they have other rows now
    if not isinstance(matrix, AdaptiveSoftmax):
        return cross_entropy_sum(hidden, matrix, targets)
    known = targets.cpu().numpy() if host_targets is None else host_targets.flatten()
    return matrix.cross_entropy_sum(hidden, targets, known, cross_entropy_sum)


def rows_of_chunk(words: int) -> int:
    """How many rows have at most CHUNK logits."""
    return max(1, CHUNK // words)


@with_fast_path
def cross_entropy_sum(hidden: Tensor, matrix: Tensor, targets: Tensor) -> Tensor:
    """Summed -log p of targets (R,), in float32 or better, from hidden (R, D) and matrix (V, D).

    Targets that are IGNORED do not count. If there are more than CHUNK logits, only a chunk exists
    at a time, and the backward pass makes it again.
    """
    rows = rows_of_chunk(len(matrix))
    if len(hidden) <= rows:
        return cross_entropy_of_rows(hidden, matrix, targets)
    matrix = at_least_float32(matrix)  # the type in which its gradients are summed
    sums = []
    for part, of_part in zip(hidden.split(rows), targets.split(rows), strict=True):
        chunk = (part, matrix, of_part)
        sums.append(checkpoint(cross_entropy_of_rows, *chunk, use_reentrant=False))
    return torch.stack(sums).sum()


def cross_entropy_of_rows(hidden: Tensor, matrix: Tensor, targets: Tensor) -> Tensor:
    """cross_entropy_sum without chunks: all logits (R, V) exist at once."""
    logits = at_least_float32(logits_from(hidden, matrix.to(hidden.dtype)))
    return functional.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORED)


def on_host(tensor: Tensor) -> bool:
    """Whether rows that are not scored can be left out without waiting for a GPU."""
    return tensor.device.type == "cpu"


def logits_in_chunks(
    hidden: Tensor, matrix: OutputMatrix, targets: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (logits (n, V) in float32 or better, targets (n,)) of hidden (R, D), in chunks."""
    words = matrix.vocabulary if isinstance(matrix, AdaptiveSoftmax) else len(matrix)
    rows = rows_of_chunk(words)
    for part, of_part in zip(hidden.split(rows), targets.split(rows), strict=True):
        yield at_least_float32(logits_by(part, matrix)), of_part
