"""What every model is: (tokens, state) -> (logits, next state). The models, replay, training and evaluation use this file.

A state is a NamedTuple of tensors whose axis 0 is the lane. A model is a torch.nn.Module that has

    config                     its reference's frozen Config; the class has it as Config
    initial_state(batch)       the state that a document starts with; gradients reach the learned part of it
    model(tokens, state)       an Output for one segment: logits, next state, auxiliary losses
    advance(tokens, state)     the next state alone, which costs less
    step(token, state)         (logits, stream) for one token of each lane, to generate with
    state_shapes(batch)        a state with the shape of each field in its place, to check states with
    auxiliary_parameters()     the parameters that only auxiliary losses train; their gradients are limited apart
    attention_reach            how many tokens back a prediction can look by attention alone
    describe()                 one line on how far back the model can look

tokens are (B, N) token ids, B lanes of one segment, and token is (B,). A stream is a state in the middle of a block or segment:
`step` returns it and takes it back, and nothing else takes it. A state of another model, or of another number of lanes than the
tokens, is refused with a ValueError.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import nn


class Output(NamedTuple):
    """What a model returns for a segment."""

    logits: torch.Tensor  # (B, N, V)
    state: tuple  # the model's State
    auxiliary: dict  # {name: scalar loss}, differentiated beside the task loss


def initialise(module: nn.Module, params: dict[str, np.ndarray]) -> None:
    """Give module the values of params, a reference's init_params; raises RuntimeError unless their names are the same."""
    module.load_state_dict({name: torch.tensor(value) for name, value in params.items()})


def check_lanes(batch: int) -> int:
    """The number of lanes, as it is; raises ValueError if there are none."""
    if batch < 1:
        raise ValueError(f"a batch of {batch} lanes; it must have at least 1")
    return batch


def check_state(state: tuple, expected: tuple) -> None:
    """Raise ValueError unless state is of the type of `expected`, a State of shapes, and each of its fields has its shape.

    Looks at types and shapes alone: no tensor is made, no device waited for.
    """
    if type(state) is not type(expected):
        raise ValueError(f"the state is a {kind_of(state)}, this model takes a {kind_of(expected)}")
    for name, field, shape in zip(expected._fields, state, expected, strict=True):
        found = tuple(field.shape)
        if found[1:] != shape[1:]:
            raise ValueError(f"the state's {name} has shape {found}, expected {shape}; is it another model's?")
        if found != shape:
            raise ValueError(f"the state's {name} has {found[0]} lanes, expected {shape[0]}, as many as the tokens have")


def kind_of(state: tuple) -> str:
    """The state's type and the file that it stands in: every model has a State."""
    return f"{type(state).__module__.rpartition('.')[2]}.{type(state).__qualname__}"


def detach(state: tuple) -> tuple:
    """The same state, cut from the graph that made it."""
    return type(state)(*(field.detach() for field in state))


def require_gradient(state: tuple) -> tuple:
    """The same state as leaves that collect gradients, if a field can have one (token ids cannot)."""
    return type(state)(*(field.detach().requires_grad_(field.is_floating_point()) for field in state))


def keep_lanes(state: tuple, rows: torch.Tensor | list[int] | slice) -> tuple:
    """The state of the lanes in rows."""
    return type(state)(*(field[rows] for field in state))


def join_lanes(states: list[tuple]) -> tuple:
    """One state of the lanes of several, in their order."""
    return type(states[0])(*map(torch.cat, zip(*states, strict=True)))


def replace_lanes(starts: torch.Tensor, initial: tuple, state: tuple) -> tuple:
    """The initial state in lanes where starts (B,) is true, the carried state elsewhere.

    Selection, not zeroing: gradients go to the learned initial state in the lanes that start, and nowhere else.
    """
    if not bool(starts.any()):
        return state
    lanes = (starts.view(-1, *[1] * (field.dim() - 1)) for field in state)
    return type(state)(*(torch.where(lane, new, old) for lane, new, old in zip(lanes, initial, state, strict=True)))


def state_from(state: tuple, fields: list[torch.Tensor]) -> tuple:
    """A saved state's tensors as the model's State, on the device of `state`, one of the same model."""
    return type(state)(*(saved.to(field.device) for saved, field in zip(fields, state, strict=True)))
