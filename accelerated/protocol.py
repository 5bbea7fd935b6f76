"""What every model of this project is: (tokens, state) -> (logits, next state), with a state whose fields have lanes first.

A model is a torch.nn.Module with
    config                          its reference's frozen Config
    initial_state(batch) -> state   what a document starts with; carries gradient into learned initial states
    model(tokens, state) -> Output  one segment of N tokens
    advance(tokens, state) -> state the memory path alone
    step(token, state) -> (logits, stream)  one token of generation
    auxiliary_parameters()          those that only auxiliary losses train, clipped apart from the rest
    attention_reach                 tokens back that attention alone can look
    describe()                      one line on how far back it can look
where a state is a NamedTuple of tensors whose axis 0 is the lane, and a stream is what step passes on to the next step: a state
within a block or segment, which step alone takes.
"""

from typing import NamedTuple

import torch


class Output(NamedTuple):
    """What a model returns for a segment."""

    logits: torch.Tensor  # (B, N, V)
    state: tuple  # the model's State
    auxiliary: dict  # {name: scalar loss}, differentiated beside the task loss


def initialise(module, params):
    """Give module the values of params, a reference's init_params; raises RuntimeError unless their names are the same."""
    module.load_state_dict({name: torch.tensor(value) for name, value in params.items()})


def check_state(state, expected):
    """Raise ValueError unless state is of the type of `expected`, a State of shapes, and each of its fields has its shape."""
    if type(state) is not type(expected):
        raise ValueError(f"the state is a {type(state).__qualname__}; this model takes its own {type(expected).__qualname__}")
    for name, field, shape in zip(expected._fields, state, expected, strict=True):
        if tuple(field.shape) != tuple(shape):
            raise ValueError(f"the state's {name} has shape {tuple(field.shape)}, expected {tuple(shape)}")


def detach(state):
    """The same state, cut from the graph that made it."""
    return type(state)(*(field.detach() for field in state))


def require_gradient(state):
    """The same state as leaves that collect gradients, where a field can have one (token ids cannot)."""
    return type(state)(*(field.detach().requires_grad_(field.is_floating_point()) for field in state))


def keep_lanes(state, rows):
    """The state of the lanes in rows."""
    return type(state)(*(field[rows] for field in state))


def replace_lanes(starts, initial, state):
    """The initial state in lanes where starts (B,) is true, the carried state elsewhere.

    Selection, not zeroing: gradients go to the learned initial state in the lanes that start, and nowhere else.
    """
    if not bool(starts.any()):
        return state
    lanes = (starts.view(-1, *[1] * (field.dim() - 1)) for field in state)
    return type(state)(*(torch.where(lane, new, old) for lane, new, old in zip(lanes, initial, state, strict=True)))


def state_from(state, fields):
    """A saved state's tensors as the model's State, on the device of `state`, one of the same model."""
    return type(state)(*(saved.to(field.device) for saved, field in zip(fields, state, strict=True)))
