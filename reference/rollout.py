"""A rollout of any reference: segments, the objective that trains on them, and all gradients.

gradients.py and the tests use it. A rollout is consecutive segments of the same lanes, in which
documents start where they like. Names are those of the conformance vectors (docs/porting.md):
"0/logits" are the logits of the first segment, "grad/embedding" is the gradient of the embedding,
"grad_state/memory" that of a field of the first state.
"""

from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np


class Segment(NamedTuple):
    """One step of a rollout."""

    tokens: np.ndarray  # (B, N)
    targets: np.ndarray  # (B, N)
    scored: np.ndarray  # (B, N) bool
    starts: np.ndarray  # (B,) bool, where a document begins
    task: tuple | None = None  # Memformer's; None is continuation


def count_scored(segments: list) -> int:
    """Scored tokens of a rollout, at least 1."""
    return max(1, sum(int(segment.scored.sum()) for segment in segments))


def choose_lanes(starts: np.ndarray, first: NamedTuple, second: NamedTuple) -> NamedTuple:
    """A state that is `first` in the lanes where starts (B,) is true and `second` elsewhere."""
    fields = []
    for a, b in zip(first, second, strict=True):
        chosen = starts.reshape(-1, *[1] * (a.ndim - 1))  # (B, 1, ...), as many axes as the field
        fields.append(np.where(chosen, a, b))
    return first._make(fields)


def named(prefix: str, state: NamedTuple) -> dict:
    """A state's fields as {prefix + name: array}."""
    return {prefix + name: field for name, field in state._asdict().items()}


def rollout_forward(
    reference: ModuleType, params: dict, config: object, segments: list, state: NamedTuple
) -> tuple[dict, list, NamedTuple]:
    """Read the segments: {name: array}, a cache for each segment, and the last state.

    The arrays are logits, losses, next states and the objective. The objective is the summed
    cross-entropy in nats / scored tokens + the auxiliary losses, summed over layers, / segments.
    """
    rows = {}
    caches = []
    nats = 0.0
    auxiliary = 0.0
    for k, segment in enumerate(segments):
        # A lane that starts reads the initial state, and nothing of the state before
        initial = reference.initial_state(params, config, len(segment.starts))
        state = choose_lanes(segment.starts, initial, state)
        task = {} if segment.task is None else {"task": segment.task}
        logits, state, cache = reference.forward(params, config, segment.tokens, state, **task)
        loss, loss_cache = reference.cross_entropy_forward(logits, segment.targets, segment.scored)
        losses = {}
        auxiliary_cache = []
        if hasattr(reference, "auxiliary_forward"):
            losses, auxiliary_cache = reference.auxiliary_forward(params, config, cache)

        rows[f"{k}/logits"] = logits
        rows |= {f"{k}/auxiliary.{name}": np.array(value) for name, value in losses.items()}
        rows[f"{k}/loss"] = np.array(loss)
        rows |= named(f"{k}/next.", state)
        nats = nats + loss
        auxiliary = auxiliary + sum(losses.values())
        caches.append((segment, cache, loss_cache, auxiliary_cache))

    objective = nats / count_scored(segments) + auxiliary / len(segments)
    rows["objective"] = np.array(objective)
    return rows, caches, state


def rollout_backward(
    reference: ModuleType, params: dict, config: object, caches: list
) -> tuple[dict, Any]:
    """Gradients of the objective: {name: gradient} of the parameters, and that of the first state.

    The first state is the one before the first segment.
    """
    grads = {}
    steps = [*segments_backward(reference, params, config, caches)]
    for own, _ in steps:
        reference.add_into(grads, own)
    return grads, steps[-1][1]


def segments_backward(
    reference: ModuleType, params: dict, config: object, caches: list
) -> Iterator[tuple[dict, NamedTuple]]:
    """For each segment, from the last to the first: its gradients and that of the state before it.

    The gradients are {name: gradient} of the parameters, to be summed over segments.
    """
    count = count_scored([segment for segment, *_ in caches])
    dstate = None
    for segment, cache, loss_cache, auxiliary_cache in reversed(caches):
        dlogits = reference.cross_entropy_backward(1 / count, loss_cache)
        grads, dstate = reference.backward(params, config, cache, dlogits, dstate)
        if auxiliary_cache:
            dauxiliary = reference.auxiliary_backward(config, 1 / len(caches), auxiliary_cache)
            reference.add_into(grads, dauxiliary)

        # A lane that starts has read the initial state
        zero = dstate._make(np.zeros_like(field) for field in dstate)
        if hasattr(reference, "initial_state_backward"):
            dinitial = choose_lanes(segment.starts, dstate, zero)
            reference.add_into(grads, reference.initial_state_backward(config, dinitial))
        dstate = choose_lanes(segment.starts, zero, dstate)
        yield grads, dstate
