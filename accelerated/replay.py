"""Back-propagation over a rollout (K consecutive segments): three methods with one signature and, up to rounding, one result.

    (model, segments, state, scored=None, share=1.0, rank=0) -> (loss, auxiliary losses, next state)

Each method adds gradients to .grad. The objective is the rollout's summed cross-entropy divided by its number of scored tokens,
which is `loss`, in nats per token, plus the model's auxiliary losses {name: mean over segments}. If an update has more lanes
(rows of the batch) than these, `scored` replaces the divisor and `share` is the weight of these lanes' auxiliary losses: the
objectives then sum to the objective of all lanes. No gradient flows into the incoming state. A document that starts inside
the rollout takes the model's initial state, which does get gradient. If nothing is scored, the loss is 0. A segment has a seed of
its own for random numbers (dropout), so that all three methods draw the same; each process, whose number is `rank`, draws others.

Nothing here asks a GPU for a number, which would wait for all work before it (an adaptive softmax does): segments know what is
scored and where documents start. Logits are made in chunks of rows (`summed_nats`); evaluation/score.py uses them too.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from accelerated.adaptive import AdaptiveSoftmax
from accelerated.attention.heads import at_least_float32
from accelerated.protocol import detach, logits_by, replace_lanes, require_gradient

IGNORED = -100  # the target of a token that is not scored, as torch's losses have it
CHUNK = (
    2**26
)  # how many logits exist at once, 256 MB in float32; in smaller chunks, adding up the matrix's gradient costs more
RANK_STEP = 0x9E3779B1  # between the seeds of two processes; their generators stay equal, so one saved state restores all


def segment_seeds(segments: list, rank: int = 0) -> list[int]:
    """A seed for each segment, drawn from torch's global generator and different for each rank."""
    return [
        (seed + RANK_STEP * rank) % 2**31
        for seed in torch.randint(2**31, (len(segments),)).tolist()
    ]


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the random generators inside; their states are restored on exit."""
    with torch.random.fork_rng(
        [device] if device.type == "cuda" else []
    ):  # a CPU's is always restored
        torch.manual_seed(seed)
        yield


def begin(model: torch.nn.Module, segment: tuple, state: tuple) -> tuple:
    """The state that a segment reads: the initial state in lanes with a new document, the carried one elsewhere."""
    if not segment.any_starts:
        return state
    return replace_lanes(segment.starts, model.initial_state(len(segment.starts)), state)


def count_scored(segments: list) -> int:
    """The number of scored tokens in a rollout."""
    return sum(segment.count_scored for segment in segments)


def inputs_of(segment: tuple, state: tuple) -> tuple:
    """The arguments to call a model with; they include a task only if the segment has one."""
    return (
        (segment.tokens, state) if segment.task is None else (segment.tokens, state, segment.task)
    )


def targets_of(segment: tuple) -> torch.Tensor:
    """The targets (B, N) of a segment, IGNORED if they are not scored."""
    return segment.targets.masked_fill(~segment.scored, IGNORED)


def chunk_rows(matrix: torch.Tensor | AdaptiveSoftmax) -> int:
    """How many rows have at most CHUNK logits, by the output matrix (V, D)."""
    return max(
        1, CHUNK // (matrix.vocabulary if isinstance(matrix, AdaptiveSoftmax) else len(matrix))
    )


def logits_in_chunks(
    hidden: torch.Tensor, matrix: torch.Tensor | AdaptiveSoftmax, targets: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield (rows of hidden (n, D), their logits (n, V) in float32 or better, their targets (n,)), CHUNK logits at a time."""
    rows = chunk_rows(matrix)
    for part, aims in zip(hidden.split(rows), targets.split(rows), strict=True):
        yield part, at_least_float32(logits_by(part, matrix)), aims


def summed_nats(
    hidden: torch.Tensor, matrix: torch.Tensor | AdaptiveSoftmax, targets: torch.Tensor
) -> torch.Tensor:
    """Summed -log p, in float32 or better, of targets (B, N) from a Reading's hidden (B, N, D) and the output matrix (V, D).

    Targets that are IGNORED do not count. Of more than CHUNK logits by a matrix only a chunk exists at a time; an AdaptiveSoftmax
    makes all of its head's.
    """
    hidden, targets = hidden.flatten(0, 1), targets.flatten()
    if on_host(hidden):
        scored = (targets != IGNORED).nonzero()[:, 0]
        if len(scored) < len(hidden):
            hidden, targets = hidden.index_select(0, scored), targets[scored]
    if isinstance(matrix, AdaptiveSoftmax):
        return matrix.summed_nats(hidden, targets, IGNORED)
    if len(hidden) > chunk_rows(matrix):
        return ChunkedNats.apply(hidden, matrix, targets, chunk_rows(matrix), IGNORED)
    [(_, logits, aims)] = logits_in_chunks(hidden, matrix, targets)
    return functional.cross_entropy(logits, aims, reduction="sum", ignore_index=IGNORED)


class ChunkedNats(torch.autograd.Function):
    """Summed -log p of targets (R,) from hidden (R, D) and the output matrix (V, D), in chunks.

    It keeps no logits (R, V). Each chunk's logits give its gradients at once, so that they need not
    be made again; backward only scales the gradients.
    """

    @staticmethod
    def forward(ctx, hidden, matrix, targets, rows, ignored):
        exact = torch.promote_types(matrix.dtype, torch.float32)  # of sums over chunks
        total = 0.0
        dhidden = torch.empty_like(hidden)
        dmatrix = torch.zeros_like(matrix, dtype=exact)
        parts = [each.split(rows) for each in (hidden, targets, dhidden)]
        for chunk, aims, dchunk in zip(*parts, strict=True):
            logs = functional.linear(chunk, matrix).to(exact).log_softmax(-1)  # (n, V)
            total = total + functional.nll_loss(logs, aims, reduction="sum", ignore_index=ignored)

            # the gradient of the logits: p, less 1 at the target; nothing for what is ignored
            p = logs.exp_()
            aim = aims.clamp(min=0)[:, None]
            dlogits = p.scatter_add_(1, aim, p.new_full((len(p), 1), -1.0))
            counts = (aims != ignored)[:, None]
            dlogits = dlogits.mul_(counts).to(hidden.dtype)
            torch.mm(dlogits, matrix, out=dchunk)
            dmatrix += dlogits.T @ chunk
        ctx.save_for_backward(dhidden, dmatrix.to(matrix.dtype))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, dnats):
        dhidden, dmatrix = ctx.saved_tensors
        return dhidden * dnats, dmatrix * dnats, None, None, None


def on_host(tensor: torch.Tensor) -> bool:
    """Whether it costs nothing to ask which rows are scored; the others' logits are then not made."""
    return tensor.device.type == "cpu"


def run_segment(
    model: torch.nn.Module, segment: tuple, state: tuple, seed: int, scored: float
) -> tuple:
    """Return one segment's (summed cross-entropy / scored, auxiliary losses {name: loss}, next state)."""
    with seeded(seed, segment.tokens.device):
        reading = model.read(*inputs_of(segment, begin(model, segment, state)))
    nats = summed_nats(reading.hidden, model.output_matrix(), targets_of(segment))
    return nats / scored, reading.auxiliary, reading.state


def mean_losses(names: list[str], losses: list[torch.Tensor], weight: float) -> dict:
    """The auxiliary losses of a rollout by name, from those of each segment (names,); few operations, however many there are."""
    return (
        dict(zip(names, (torch.stack(losses).sum(0) * weight).unbind(), strict=True))
        if names
        else {}
    )


def stacked(losses: dict) -> torch.Tensor | None:
    """A segment's auxiliary losses (names,), without graph; None if there are none."""
    return torch.stack([*losses.values()]).detach() if losses else None


def forward_then_backward(
    run: Callable,
    model: torch.nn.Module,
    segments: list,
    state: tuple,
    scored: float | None,
    share: float,
    rank: int,
) -> tuple[torch.Tensor, dict, tuple]:
    """Run all segments forward with `run` (run_segment or a wrapper of it), then make one backward call."""
    seeds, scored, state = (
        segment_seeds(segments, rank),
        scored or count_scored(segments) or 1,
        detach(state),
    )
    loss, extra, auxiliary, weight = 0.0, 0.0, [], share / len(segments)
    for segment, seed in zip(segments, seeds, strict=True):
        part, losses, state = run(model, segment, state, seed, scored)
        loss, extra = loss + part, extra + sum(losses.values())
        auxiliary.append(stacked(losses))
    torch.autograd.backward([loss + extra * weight])
    return loss.detach(), mean_losses([*losses], auxiliary, weight), detach(state)


def through_time(
    model: torch.nn.Module,
    segments: list,
    state: tuple,
    scored: float | None = None,
    share: float = 1.0,
    rank: int = 0,
) -> tuple[torch.Tensor, dict, tuple]:
    """Full back-propagation through time: keeps the autograd graph of all K segments."""
    return forward_then_backward(run_segment, model, segments, state, scored, share, rank)


def checkpointed(
    model: torch.nn.Module,
    segments: list,
    state: tuple,
    scored: float | None = None,
    share: float = 1.0,
    rank: int = 0,
) -> tuple[torch.Tensor, dict, tuple]:
    """Gradient checkpointing: keeps each segment's incoming state and recomputes the rest during backward."""
    run = functools.partial(checkpoint, run_segment, use_reentrant=False, preserve_rng_state=False)
    return forward_then_backward(run, model, segments, state, scored, share, rank)


def memory_replay(
    model: torch.nn.Module,
    segments: list,
    state: tuple,
    scored: float | None = None,
    share: float = 1.0,
    rank: int = 0,
) -> tuple[torch.Tensor, dict, tuple]:
    """Memory Replay Back-Propagation (Memformer, Algorithm 1): stores only states, then replays segments from last to first.

    The first pass computes the states without gradient. Then each segment is computed again from its stored state, and one
    backward call takes its loss together with the gradient of its next state.
    """
    seeds, scored, states = (
        segment_seeds(segments, rank),
        scored or count_scored(segments) or 1,
        [detach(state)],
    )
    with torch.no_grad():
        for segment, seed in zip(segments[:-1], seeds[:-1], strict=True):
            with seeded(seed, segment.tokens.device):
                states.append(model.advance(*inputs_of(segment, begin(model, segment, states[-1]))))
    loss, auxiliary, weight, last, dnext = 0.0, [], share / len(segments), None, ()
    for segment, seed in zip(reversed(segments), reversed(seeds), strict=True):
        leaf = require_gradient(states.pop())
        part, losses, after = run_segment(model, segment, leaf, seed, scored)
        last = detach(after) if last is None else last
        arriving = [
            (field, grad) for field, grad in zip(after, dnext, strict=False) if field.requires_grad
        ]
        objective = part + sum(losses.values()) * weight
        torch.autograd.backward(
            [objective, *(f for f, _ in arriving)], [None, *(g for _, g in arriving)]
        )
        # Cloned: a CUDA graph writes the next segment's gradients where it wrote these
        dnext = [
            torch.zeros_like(field) if field.grad is None else field.grad.clone() for field in leaf
        ]
        loss, names = loss + part.detach(), [*losses]
        auxiliary.append(stacked(losses))
        del (
            part,
            losses,
            after,
            objective,
            arriving,
        )  # free this segment's graph before the next is built
    return loss, mean_losses(names, auxiliary, weight), last


BACKPROP = {
    "through_time": through_time,
    "checkpointed": checkpointed,
    "memory_replay": memory_replay,
}
