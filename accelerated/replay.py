"""Back-propagation over a rollout of K segments, for train.py: three methods of one signature, which agree to rounding.

    (model, segments, state, scored=None, share=1.0, rank=0) -> (loss, next state)

Each leaves gradients in .grad. The objective is the cross-entropy summed over the rollout divided by its number of scored
tokens, counted once, plus the mean over segments of the model's auxiliary losses; `loss` is the first part, in nats per token.
If these lanes are only some of those that an update sees, `scored` is what to divide by instead, and `share` their part of the
mean over lanes that the auxiliary losses are: objectives then sum to that of all lanes. The incoming state is data: no gradient
leaves the rollout. A document that starts inside it takes the model's initial state, which does get gradient. Every segment draws
its random numbers (dropout) from a seed of its own, so that computing it a second time repeats them, and all three methods see
the same. `rank` is the number of this process among those that train together: each draws other numbers.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from accelerated.protocol import detach, replace_lanes, require_gradient

RANK_STEP = 0x9E3779B1  # between the seeds of two processes, which draw the same numbers so that one state tells where all are


def segment_seeds(segments: list, rank: int = 0) -> list[int]:
    """A seed for each segment, drawn from torch's global generator; other ones for each rank."""
    return [(seed + RANK_STEP * rank) % 2**31 for seed in torch.randint(2**31, (len(segments),)).tolist()]


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Draw random numbers from seed inside; afterwards the generators are as they were."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def begin(model: torch.nn.Module, segment: tuple, state: tuple) -> tuple:
    """The state that a segment reads: carried, or the initial one in lanes where a document starts."""
    return replace_lanes(segment.starts, model.initial_state(len(segment.starts)), state)


def count_scored(segments: list) -> int:
    """The scored tokens of a rollout."""
    return sum(int(segment.scored.sum()) for segment in segments)


def divisor(segments: list, scored: float | None = None) -> float:
    """What the summed cross-entropy is divided by, 1 if nothing is scored so that the loss is 0 rather than NaN."""
    return (count_scored(segments) if scored is None else scored) or 1


def inputs_of(segment: tuple, state: tuple) -> tuple:
    """The arguments that a model reads a segment with: a task only if the segment has one."""
    return (segment.tokens, state) if segment.task is None else (segment.tokens, state, segment.task)


def run_segment(model: torch.nn.Module, segment: tuple, state: tuple, seed: int, scored: float) -> tuple:
    """(summed loss / scored tokens of the rollout, summed auxiliary losses, next state) of one segment."""
    with seeded(seed, segment.tokens.device):
        output = model(*inputs_of(segment, begin(model, segment, state)))
    logits = output.logits[segment.scored]  # (scored, V)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    nats = functional.cross_entropy(logits, segment.targets[segment.scored], reduction="sum")
    return nats / scored, sum(output.auxiliary.values()), output.state


def run_backward(tensors: list, gradients: list | None = None) -> None:
    """Make one backward call, outside of any autocast that the forward ran in."""
    device = tensors[0].device.type
    with torch.autocast(device, enabled=False):
        torch.autograd.backward(tensors, gradients)


def forward_then_backward(
    run: Callable, model: torch.nn.Module, segments: list, state: tuple, scored: float | None, share: float, rank: int
) -> tuple[torch.Tensor, tuple]:
    """Run all segments forward by run, a run_segment, then one backward call through all of them."""
    seeds, scored, state = segment_seeds(segments, rank), divisor(segments, scored), detach(state)
    loss, auxiliary = 0.0, 0.0
    for segment, seed in zip(segments, seeds, strict=True):
        part, extra, state = run(model, segment, state, seed, scored)
        loss, auxiliary = loss + part, auxiliary + extra
    run_backward([loss + auxiliary * (share / len(segments))])
    return loss.detach(), detach(state)


def through_time(
    model: torch.nn.Module, segments: list, state: tuple, scored: float | None = None, share: float = 1.0, rank: int = 0
) -> tuple[torch.Tensor, tuple]:
    """Full back-propagation through time: the graph of all K segments at once."""
    return forward_then_backward(run_segment, model, segments, state, scored, share, rank)


def checkpointed(
    model: torch.nn.Module, segments: list, state: tuple, scored: float | None = None, share: float = 1.0, rank: int = 0
) -> tuple[torch.Tensor, tuple]:
    """Gradient checkpointing: the graph keeps each segment's incoming state and computes the rest again going back."""
    run = functools.partial(checkpoint, run_segment, use_reentrant=False, preserve_rng_state=False)
    return forward_then_backward(run, model, segments, state, scored, share, rank)


def memory_replay(
    model: torch.nn.Module, segments: list, state: tuple, scored: float | None = None, share: float = 1.0, rank: int = 0
) -> tuple[torch.Tensor, tuple]:
    """Memory Replay Back-Propagation (Memformer, Algorithm 1): store states alone, then replay segments from the last.

    The first pass is the memory path without gradient. Going back, each segment is computed again from its stored state and
    one backward call takes its own loss and the gradient that arrived for its next state.
    """
    seeds, scored, states = segment_seeds(segments, rank), divisor(segments, scored), [detach(state)]
    with torch.no_grad():
        for segment, seed in zip(segments[:-1], seeds[:-1], strict=True):
            with seeded(seed, segment.tokens.device):
                states.append(model.advance(*inputs_of(segment, begin(model, segment, states[-1]))))
    torch.clear_autocast_cache()  # older torch would use weights that it cast without gradient again
    loss, last, dnext = 0.0, None, ()
    for segment, seed in zip(reversed(segments), reversed(seeds), strict=True):
        leaf = require_gradient(states.pop())
        part, extra, after = run_segment(model, segment, leaf, seed, scored)
        last = detach(after) if last is None else last
        arriving = [(field, grad) for field, grad in zip(after, dnext, strict=False) if field.requires_grad]
        objective = part + extra * (share / len(segments))
        run_backward([objective, *(f for f, _ in arriving)], [None, *(g for _, g in arriving)])
        dnext = [torch.zeros_like(field) if field.grad is None else field.grad for field in leaf]
        loss = loss + part.detach()
        del part, extra, after, objective, arriving  # this segment's graph goes before the next is built
    return loss, last


BACKPROP = {"through_time": through_time, "checkpointed": checkpointed, "memory_replay": memory_replay}
