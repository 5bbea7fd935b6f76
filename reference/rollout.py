"""A rollout of any reference: consecutive segments, the objective that trains on them, all gradients. For gradients.py and tests.

The names are those of the conformance vectors (docs/porting.md): "0/logits" are the logits of the first segment, "grad/embedding"
is the gradient of the embedding, "grad_state/memory" that of a field of the first state.
"""

from types import ModuleType
from typing import NamedTuple

import numpy as np

SGD_RATE = 0.1
ADAMW = {
    "rate": 0.01,
    "beta1": 0.9,
    "beta2": 0.999,
    "epsilon": 1e-6,
    "decay": 0.1,
}  # epsilon: a rounded zero stays small


class Segment(NamedTuple):
    """What all lanes read in one step."""

    tokens: np.ndarray  # (B, N)
    targets: np.ndarray  # (B, N)
    scored: np.ndarray  # (B, N) bool, false on padding
    starts: np.ndarray  # (B,) bool, where a document begins
    task: tuple | None = None  # Memformer's


def choose_lanes(starts: np.ndarray, first: tuple, second: tuple) -> tuple:
    """A state that is `first` in the lanes where starts (B,) is true and `second` elsewhere."""
    return type(first)(
        *(
            np.where(starts.reshape(-1, *[1] * (a.ndim - 1)), a, b)
            for a, b in zip(first, second, strict=True)
        )
    )


def named(prefix: str, state: tuple) -> dict:
    """A state's fields as {prefix + name: array}."""
    return {prefix + name: field for name, field in state._asdict().items()}


def count_scored(segments: list) -> int:
    """Scored tokens of a rollout, at least 1."""
    return max(1, sum(int(segment.scored.sum()) for segment in segments))


def rollout_forward(
    reference: ModuleType, params: dict, config: object, segments: list, state: tuple
) -> tuple:
    """Read the segments: {name: array} of logits, losses, next states and of the objective; a cache for each; the last state.

    The objective is the summed cross-entropy in nats / scored tokens + the auxiliary losses, summed over layers, / segments.
    """
    rows, caches, nats, auxiliary = {}, [], 0.0, 0.0
    for k, segment in enumerate(segments):
        state = choose_lanes(
            segment.starts, reference.initial_state(params, config, len(segment.starts)), state
        )
        task = {} if segment.task is None else {"task": segment.task}
        logits, state, cache = reference.forward(params, config, segment.tokens, state, **task)
        loss, loss_cache = reference.cross_entropy_forward(logits, segment.targets, segment.scored)
        losses, auxiliary_cache = {}, []
        if hasattr(reference, "auxiliary_forward"):
            losses, auxiliary_cache = reference.auxiliary_forward(params, config, cache)
        rows |= {f"{k}/logits": logits} | {
            f"{k}/auxiliary.{name}": np.array(value) for name, value in losses.items()
        }
        rows |= {f"{k}/loss": np.array(loss)} | named(f"{k}/next.", state)
        nats, auxiliary = nats + loss, auxiliary + sum(losses.values())
        caches.append((segment, cache, loss_cache, auxiliary_cache))
    objective = nats / count_scored(segments) + auxiliary / len(segments)
    return rows | {"objective": np.array(objective)}, caches, state


def rollout_backward(
    reference: ModuleType, params: dict, config: object, caches: list
) -> tuple[dict, tuple]:
    """Gradients of the objective: {name: gradient} of the parameters, and that of the state before the first segment."""
    grads, dstate, count = {}, None, count_scored([segment for segment, *_ in caches])
    for segment, cache, loss_cache, auxiliary_cache in reversed(caches):
        dlogits = reference.cross_entropy_backward(1 / count, loss_cache)
        dparams, dstate = reference.backward(params, config, cache, dlogits, dstate)
        reference.add_into(grads, dparams)
        if auxiliary_cache:
            reference.add_into(
                grads, reference.auxiliary_backward(config, 1 / len(caches), auxiliary_cache)
            )
        zero = type(dstate)(*map(np.zeros_like, dstate))
        if hasattr(reference, "initial_state_backward"):
            reference.add_into(
                grads,
                reference.initial_state_backward(
                    config, choose_lanes(segment.starts, dstate, zero)
                ),
            )
        dstate = choose_lanes(
            segment.starts, zero, dstate
        )  # a lane that starts reads nothing of the state before
    return grads, dstate


def sgd(params: dict, grads: dict) -> dict:
    """The parameters after one step of plain gradient descent."""
    return {name: value - SGD_RATE * grads[name] for name, value in params.items()}


def adamw(
    params: dict, grads: dict, moments: dict, step: int, settings: dict = ADAMW
) -> tuple[dict, dict]:
    """Parameters and {name: (first, second moment)} after step `step`, from 1, of AdamW; all parameters decay."""
    rate, beta1, beta2, epsilon, decay = settings.values()
    after = {}
    for name, value in params.items():
        first, second = moments.get(name, (0.0, 0.0))
        first, second = (
            beta1 * first + (1 - beta1) * grads[name],
            beta2 * second + (1 - beta2) * grads[name] ** 2,
        )
        moved = (first / (1 - beta1**step)) / (np.sqrt(second / (1 - beta2**step)) + epsilon)
        after[name], moments = (
            value - rate * (moved + decay * value),
            moments | {name: (first, second)},
        )
    return after, moments
