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

    step(input, state) returns (loss, next state). A first pass without gradients keeps only the
    states. It calls advance(input, state) if given, which must return step's next state but may
    skip what only the loss needs. Then the steps run again from last to first, so that only one
    step's graph exists at a time. Both passes draw the same random numbers, so what `advance` skips
    must draw none before the next state is computed. No gradient flows into the given state; make a
    learned initial state inside the first step.
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
    """Advance through the inputs, then replay them from last to first; return the last state.

    This is the order of Algorithm 1. replay_one(input, state, dafter) computes an input again and
    returns (next state, gradient with respect to `state`). dafter is the gradient with respect to
    the next state, None for the last input.
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
    """Draw random numbers (dropout) from seed inside the block.

    On exit the generators of the CPU and of `device` are restored, those of other GPUs are not.
    """
    devices = [device] if device.type == "cuda" else []  # a CPU's is always restored
    with torch.random.fork_rng(devices):
        torch.default_generator.manual_seed(seed)  # 3 ms less than torch.manual_seed takes
        if devices:
            torch.cuda.manual_seed_all(seed)
        yield
