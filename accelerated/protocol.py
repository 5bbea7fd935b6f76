"""The interface of every model: (tokens, state) -> (logits, next state). Models, replay, training and evaluation use this file.

A state is a NamedTuple of tensors; their axis 0 is the lane (a row of the batch). A model is a Model with

    config                     a frozen Config, the reference's dataclass, which the class has as Config
    initial_state(batch)       the state at the start of a document; its learned part gets gradients
    read(tokens, state)        the Reading of one segment: hidden rows, next state, auxiliary losses
    advance(tokens, state)     only the next state, which costs less
    state_shapes(batch)        a State that holds the shape of each field, to check states against
    attention_reach            how many tokens back a prediction can look by attention only
    describe()                 one line on how far back the model can look

A model computes in the type of its parameters (`computing_in`): activations, keys, values and rows of memory have it. Gates,
losses, recurrent states and memory slots have float32 at least: a segment changes a state only a little, and bfloat16 would
round the change away. LayerNorm brings them back to the parameters' type.

tokens (B, N) are the token ids of one segment in B lanes; token is (B,). Models raise ValueError for a state of another model
or of another number of lanes.
"""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from accelerated.adaptive import AdaptiveSoftmax
from accelerated.attention.heads import Declared


class Reading(NamedTuple):
    """What a model's `read` returns for one segment. A loss takes it: (B, N, V) logits may be too large to hold at once."""

    hidden: Tensor  # (B, N, D), ready for the output matrix
    state: tuple  # the model's State
    auxiliary: dict  # {name: scalar loss}, added to the task loss


class Output(NamedTuple):
    """What a model returns for one segment."""

    logits: Tensor  # (B, N, V)
    state: tuple  # the model's State
    auxiliary: dict  # {name: scalar loss}, added to the task loss


def logits_of(model: nn.Module, hidden: Tensor) -> Tensor:
    """The logits (..., V) of hidden rows (..., D) that are ready for the output matrix."""
    return logits_by(hidden, model.output_matrix()).to(hidden.dtype)


def logits_by(hidden: Tensor, matrix: Tensor | AdaptiveSoftmax) -> Tensor:
    """The logits (..., V) of hidden rows (..., D) by an output matrix; of an AdaptiveSoftmax the log-probabilities."""
    return (
        matrix.log_probabilities(hidden)
        if isinstance(matrix, AdaptiveSoftmax)
        else functional.linear(hidden, matrix)
    )


class Recomputable(Declared):
    """A layer of a model. If it is `recomputed`, it keeps only its inputs, and the backward pass computes it again.

    If it `drops`, the random state is kept too, so that the same entries are dropped again. Reading a GPU's takes time.
    """

    recomputed, drops = False, False

    def __call__(self, *given: object) -> object:
        """What `forward` returns."""
        if self.recomputed and torch.is_grad_enabled():
            return checkpoint(
                super().__call__, *given, use_reentrant=False, preserve_rng_state=self.drops
            )
        return super().__call__(*given)


class Model(Declared):
    """What is the same in all models, or in most."""

    def forward(self, tokens: Tensor, state: tuple, *task: tuple) -> Output:
        """Read a segment; Output.logits (B, N, V) predict the next tokens.

        Raises ValueError as `read` does, and for tokens that are no token ids; a GPU is not asked whether they are too large.
        """
        check_tokens(tokens, 2)
        if (
            tokens.device.type == "cpu"
            and tokens.numel()
            and not 0 <= tokens.min() <= tokens.max() < self.config.vocabulary
        ):
            wrong = f"tokens are {int(tokens.min())} to {int(tokens.max())}"
            raise ValueError(
                f"{wrong}, expected 0 to {self.config.vocabulary - 1}; was another tokenizer used?"
            )
        hidden, state, auxiliary = self.read(tokens, state, *task)
        return Output(logits_of(self, hidden), state, auxiliary)

    def output_matrix(self) -> Tensor | AdaptiveSoftmax:
        """(V, D), the embedding: logits are the product of hidden rows and its transpose. Or else an AdaptiveSoftmax."""
        return self.embedding

    def auxiliary_parameters(self) -> list[nn.Parameter]:
        """The parameters that only auxiliary losses train; their gradients are clipped separately. Most models have none."""
        return []


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode inside; restore the previous mode on exit."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


@contextlib.contextmanager
def computing_in(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Inside, the model's parameters and buffers are copies in dtype, so that it computes in dtype.

    Gradients reach the parameters themselves, whose type stays as it is. The copies are made at the beginning: a parameter that
    is changed inside keeps its old copy. Update parameters and clear gradients outside. The copies keep their memory, because
    CUDA graphs read fixed addresses.
    """
    held = [
        tensors for module in model.modules() for tensors in (module._parameters, module._buffers)
    ]
    changed = [
        (tensors, name, x)
        for tensors in held
        for name, x in tensors.items()
        if x is not None and x.is_floating_point()
    ]
    changed = [(tensors, name, x) for tensors, name, x in changed if x.dtype != dtype]
    try:
        if changed:
            originals = [x for *_, x in changed]
            copies = Copies.apply(memory_of_copies(model, dtype, originals), *originals)
            for (tensors, name, _), copy in zip(changed, copies, strict=True):
                tensors[name] = copy
        yield
    finally:
        for tensors, name, x in changed:
            tensors[name] = x


def memory_of_copies(model: nn.Module, dtype: torch.dtype, originals: list[Tensor]) -> list[Tensor]:
    """Tensors in dtype with the originals' shapes, always the same ones unless the model has been moved."""
    kept = model.__dict__.setdefault("memory_of_copies", {})
    if dtype not in kept or [x.device for x in kept[dtype]] != [x.device for x in originals]:
        kept[dtype] = [torch.empty_like(x, dtype=dtype, requires_grad=False) for x in originals]
    return kept[dtype]


class Copies(torch.autograd.Function):
    """Copies all tensors into `copies`, of another type, in one operation.

    A gradient comes back in its tensor's own type.
    """

    @staticmethod
    def forward(ctx, copies: list[Tensor], *tensors: Tensor):
        ctx.dtypes = [tensor.dtype for tensor in tensors]
        ctx.set_materialize_grads(False)  # what got no gradient keeps none
        torch.ops.aten._foreach_copy_(copies, tensors)
        return tuple(copy.detach() for copy in copies)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: Tensor | None):
        converted = [
            None if gradient is None else torch.empty_like(gradient, dtype=dtype)
            for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
        ]
        arrived = [gradient for gradient in gradients if gradient is not None]
        if arrived:
            targets = [copy for copy in converted if copy is not None]
            torch.ops.aten._foreach_copy_(targets, arrived)
        return None, *converted


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
    for name, field, shape in zip(type(expected)._fields, state, expected, strict=True):
        given = tuple(field.shape)
        if given[1:] != shape[1:]:
            raise ValueError(
                f"the state's {name} has shape {given}, expected {shape}; is it another model's?"
            )
        if given != shape:
            raise ValueError(
                f"the state's {name} has {given[0]} lanes, expected {shape[0]}, as many as the tokens have"
            )


def check_tokens(tokens: Tensor, axes: int) -> None:
    """Raise ValueError unless tokens are a tensor of ids with so many axes."""
    if not isinstance(tokens, Tensor) or tokens.dim() != axes or tokens.is_floating_point():
        shape, form = (
            tuple(getattr(tokens, "shape", ())),
            "(lanes, tokens)" if axes == 2 else "(lanes,)",
        )
        kind = getattr(tokens, "dtype", type(tokens).__name__)
        raise ValueError(
            f"tokens are {kind} of shape {shape}, expected a tensor of ids as int64 {form}"
        )


def overlap_of(config: object) -> int:
    """Tokens that a model's segment shares with the previous one; only pretrained_recurrence's config has the field."""
    return getattr(config, "overlap", 0)


def kind_of(state: tuple) -> str:
    """The state's class with its module, because every model calls its class State."""
    return f"{type(state).__module__.rpartition('.')[2]}.{type(state).__qualname__}"


def detach(state: tuple) -> tuple:
    """The same state, detached from the autograd graph."""
    return type(state)(*(field.detach() for field in state))


def require_gradient(state: tuple) -> tuple:
    """The same state as leaf tensors that require gradients, except fields of token ids."""
    return type(state)(
        *(field.detach().requires_grad_(field.is_floating_point()) for field in state)
    )


def keep_lanes(state: tuple, rows: Tensor | list[int] | slice) -> tuple:
    """The state of only the lanes in rows."""
    return type(state)(*(field[rows] for field in state))


def put_lanes(state: tuple, rows: slice, part: tuple) -> tuple:
    """The state with the lanes at `rows` replaced by those of `part`.

    It is changed in place, unless `part` has all lanes: there may be no room for a second long memory. So its fields must share
    no memory with each other or with parameters. An initial state's may; `repeat_lane` makes one whose fields do not.
    """
    if len(part[0]) == len(state[0]):
        return part
    for field, new in zip(state, part, strict=True):
        field[rows] = new
    return state


def repeat_lane(state: tuple, lanes: int) -> tuple:
    """Copies of the only lane of a state, detached, in memory of their own."""
    return type(state)(*(field.detach().repeat(lanes, *[1] * (field.dim() - 1)) for field in state))


def replace_lanes(starts: Tensor, initial: tuple, state: tuple) -> tuple:
    """Return the initial state in lanes with starts (B,) true, and the carried state in the other lanes.

    In lanes that start, gradients go to the learned initial state and not to the carried one. It never asks whether any lane
    starts: on a GPU the answer would wait for all work before it. A Segment knows (`any_starts`).
    """
    lanes = (starts.view(-1, *[1] * (field.dim() - 1)) for field in state)
    return type(state)(
        *(torch.where(lane, new, old) for lane, new, old in zip(lanes, initial, state, strict=True))
    )


def state_from(state: tuple, fields: list[Tensor]) -> tuple:
    """Turn saved tensors into a State of the same types and on the same device as `state`."""
    return type(state)(*(saved.to(field) for saved, field in zip(fields, state, strict=True)))
