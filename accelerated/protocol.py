"""The interface of every model: (tokens, state) -> (logits, next state). Models, replay, training and evaluation use this file.

A state is a NamedTuple of tensors; their axis 0 is the lane (a row of the batch). A model is a torch.nn.Module with

    config                     a frozen Config, the reference's dataclass, which the class has as Config
    initial_state(batch)       the state at the start of a document; its learned part gets gradients
    read(tokens, state)        the Reading of one segment: hidden rows, next state, auxiliary losses
    output_matrix()            (V, D): logits are the product of hidden rows and its transpose
    model(tokens, state)       the Output of one segment: `read` with logits, for who needs all of them
    advance(tokens, state)     only the next state, which costs less
    step(token, state)         (logits, stream) after one token in each lane, for generation
    state_shapes(batch)        a State that holds the shape of each field, to check states against
    auxiliary_parameters()     the parameters that only auxiliary losses train; their gradients are clipped separately
    attention_reach            how many tokens back a prediction can look by attention only
    describe()                 one line on how far back the model can look

tokens (B, N) are the token ids of one segment in B lanes; token is (B,). A stream is a state in the middle of a segment: only
`step` returns and takes it. Models raise ValueError for a state of another model or of another number of lanes.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional


class Reading(NamedTuple):
    """What a model's `read` returns for one segment. A loss takes it: (B, N, V) logits may be too large to hold at once."""

    hidden: torch.Tensor  # (B, N, D), ready for the output matrix
    state: tuple  # the model's State
    auxiliary: dict  # {name: scalar loss}, added to the task loss


class Output(NamedTuple):
    """What a model returns for one segment."""

    logits: torch.Tensor  # (B, N, V)
    state: tuple  # the model's State
    auxiliary: dict  # {name: scalar loss}, added to the task loss


def logits_of(model: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """The logits (..., V) of hidden rows (..., D) that are ready for the output matrix."""
    return functional.linear(hidden, model.output_matrix())


def with_logits(model: nn.Module, reading: Reading) -> Output:
    """The Output of a Reading."""
    return Output(logits_of(model, reading.hidden), reading.state, reading.auxiliary)


def at_least_float32(x: torch.Tensor) -> torch.Tensor:
    """x in float32, or in its own type if more precise. Gates and losses need it: bfloat16 rounds a gate of 0.99909 to 1."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def initialise(module: nn.Module, params: dict[str, np.ndarray]) -> None:
    """Load params, from a reference's init_params, into module; raises RuntimeError unless the names are the same."""
    module.load_state_dict({name: torch.tensor(value) for name, value in params.items()})


def check_lanes(batch: int) -> int:
    """Return the number of lanes; raises ValueError if it is below 1."""
    if batch < 1:
        raise ValueError(f"a batch of {batch} lanes; it must have at least 1")
    return batch


def check_state(state: tuple, expected: tuple) -> None:
    """Raise ValueError unless state has the type of `expected`, a State of shapes, and each field has its shape.

    Reads only types and shapes: it makes no tensor and waits for no device.
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
    """The state's class with its module, because every model calls its class State."""
    return f"{type(state).__module__.rpartition('.')[2]}.{type(state).__qualname__}"


def detach(state: tuple) -> tuple:
    """The same state, detached from the autograd graph."""
    return type(state)(*(field.detach() for field in state))


def require_gradient(state: tuple) -> tuple:
    """The same state as leaf tensors that require gradients, except fields of token ids."""
    return type(state)(*(field.detach().requires_grad_(field.is_floating_point()) for field in state))


def keep_lanes(state: tuple, rows: torch.Tensor | list[int] | slice) -> tuple:
    """The state of only the lanes in rows."""
    return type(state)(*(field[rows] for field in state))


def join_lanes(states: list[tuple]) -> tuple:
    """Concatenate states along the lanes, in their order."""
    return type(states[0])(*map(torch.cat, zip(*states, strict=True)))


def replace_lanes(starts: torch.Tensor, initial: tuple, state: tuple) -> tuple:
    """Return the initial state in lanes with starts (B,) true, and the carried state in the other lanes.

    In lanes that start, gradients go to the learned initial state and not to the carried one. It never asks whether any lane
    starts: on a GPU the answer would wait for all work before it. A Segment knows (`any_starts`).
    """
    lanes = (starts.view(-1, *[1] * (field.dim() - 1)) for field in state)
    return type(state)(*(torch.where(lane, new, old) for lane, new, old in zip(lanes, initial, state, strict=True)))


def state_from(state: tuple, fields: list[torch.Tensor]) -> tuple:
    """Turn saved tensors into a State of the same type and on the same device as `state`."""
    return type(state)(*(saved.to(field.device) for saved, field in zip(fields, state, strict=True)))
