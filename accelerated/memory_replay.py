"""Memory Replay Back-Propagation (Memformer, Algorithm 1) for any step that carries a state.

    loss, state = replay(step, inputs, state)

This file needs only torch. replay.py uses it for this project's models; docs/library.md shows it on
others.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

# A tensor, or tensors in any nest of tuples, lists and dicts
State = TypeVar("State")
Gradients = list[Tensor | None]  # of each leaf of a state


def replay(
    step: Callable[[Any, State], tuple[Tensor, State]],
    inputs: Sequence[Any],
    state: State,
    advance: Callable[[Any, State], State] | None = None,
) -> tuple[Tensor, State]:
    """Add the gradients of the steps' summed losses to .grad; return the sum and the last state.

    step(input, state) returns (loss, next state). A first pass keeps the states alone, made by
    advance(input, state), which may leave out what they do not depend on. Then each step is
    computed again from its state, the last one first, so that one step's graph exists at a time.
    Both draw the same random numbers: what `advance` leaves out must draw none before the state is
    known. No gradient flows into the given state; a learned one is best made by the first step.
    """
    seeds = drawn_seeds(len(inputs))
    device = device_of((inputs, state))
    losses = []

    def advance_one(number: int, before: State) -> State:
        with torch.no_grad(), seeded(seeds[number], device):
            if advance is not None:
                return advance(inputs[number], before)
            return step(inputs[number], before)[1]

    def replay_one(number: int, before: State, dafter: Gradients | None) -> tuple[State, Gradients]:
        with seeded(seeds[number], device):
            loss, after, dbefore = back_propagate(
                lambda state: step(inputs[number], state), before, dafter
            )
        losses.append(loss)
        return after, dbefore

    last = last_to_first(range(len(inputs)), detach(state), advance_one, replay_one)
    return torch.stack(losses).sum(), last


def last_to_first(
    inputs: Sequence[Any],
    state: State,
    advance: Callable[[Any, State], State],
    replay_one: Callable[[Any, State, Any], tuple[State, Any]],
) -> State:
    """The order of Algorithm 1; returns the state after the last input.

    replay_one(input, state, dafter) computes an input again, and returns the next state and the
    gradient of its own. dafter is the gradient of the next state, None after the last input.
    """
    states = [state]
    for given in inputs[:-1]:
        states.append(advance(given, states[-1]))
    last, dafter = replay_one(inputs[-1], states.pop(), None)
    for given in reversed(inputs[:-1]):
        _, dafter = replay_one(given, states.pop(), dafter)
    return last


def back_propagate(
    step: Callable[[State], tuple[Tensor, State]], before: State, dafter: Gradients | None
) -> tuple[Tensor, State, Gradients]:
    """The loss and the next state, without graph, and the gradient of each leaf of `before`."""
    before = tree_map_only(Tensor, with_gradient, before)
    loss, after = step(before)
    outputs = [loss]
    gradients: Gradients = [None]  # the loss's own, which is 1
    if dafter is not None:
        for leaf, gradient in zip(tree_leaves(after), dafter, strict=True):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                outputs.append(leaf)
                gradients.append(gradient)
    torch.autograd.backward(outputs, gradients)
    leaves = tree_leaves(before)
    dbefore = [
        zeros_if_none(leaf.grad, leaf) if isinstance(leaf, Tensor) else None for leaf in leaves
    ]
    return loss.detach(), detach(after), dbefore


def detach(state: State) -> State:
    """The state without graph."""
    return tree_map_only(Tensor, Tensor.detach, state)


def with_gradient(leaf: Tensor) -> Tensor:
    """A detached leaf, which requires gradients if it is floating point."""
    return leaf.detach().requires_grad_(leaf.is_floating_point())


def zeros_if_none(gradient: Tensor | None, leaf: Tensor) -> Tensor:
    """The gradient, or zeros shaped like `leaf` if it is None."""
    return torch.zeros_like(leaf) if gradient is None else gradient


# Random numbers


def drawn_seeds(count: int) -> list[int]:
    """A seed for each step, drawn from torch's generator."""
    return torch.randint(2**62, (count,)).tolist()


def device_of(nest: Any) -> torch.device:
    """Where the first tensor of a nest is; without one, the CPU."""
    devices = [leaf.device for leaf in tree_leaves(nest) if isinstance(leaf, Tensor)]
    return devices[0] if devices else torch.device("cpu")


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Draw random numbers (dropout) from seed inside; restore torch's generators on exit."""
    devices = [device] if device.type == "cuda" else []  # a CPU's is always restored
    with torch.random.fork_rng(devices):
        torch.default_generator.manual_seed(seed)  # 3 ms less than torch.manual_seed takes
        if devices:
            torch.cuda.manual_seed_all(seed)
        yield
