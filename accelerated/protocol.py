"""The interface of every model: (tokens, state) -> (logits, next state).

A state is a NamedTuple of tensors; their axis 0 is the lane (a row of the batch). `Model` says what
every model has.

A model computes in the dtype of its parameters (`computing_in`): so do activations, keys, values
and rows of memory. Gates, losses, recurrent states and memory slots are at least float32: a segment
changes a state only a little, and bfloat16 would round the change away. LayerNorm casts back to the
parameters' dtype.

tokens (B, N) are the token ids of one segment in B lanes.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from accelerated.adaptive import AdaptiveSoftmax
from accelerated.attention.heads import ParameterModule, logits_from
from accelerated.data.lanes import Task
from accelerated.memory_replay import with_gradient
from accelerated.presets import ModelConfig


class State(Protocol):
    """What a segment passes to the next one: a NamedTuple of tensors, whose axis 0 is the lane.

    Each model has one of its own, called State too, with named fields.
    """

    @classmethod
    def _make(cls, fields: Iterable[Tensor], /) -> "State": ...

    def __iter__(self) -> Iterator[Tensor]: ...

    def __getitem__(self, number: int, /) -> Tensor: ...


OutputMatrix: TypeAlias = Tensor | AdaptiveSoftmax  # (V, D), or what stands in its place


class Reading(NamedTuple):
    """What a model's `read` returns for one segment.

    Losses are computed from it in chunks, because all logits (B, N, V) may not fit in memory.
    """

    hidden: Tensor  # (B, N, D), ready for the output matrix
    state: Any  # the next one, of the model's own State
    auxiliary: dict[str, Tensor]  # {name: scalar loss}, added to the task loss


class Output(NamedTuple):
    """What a model returns for one segment."""

    logits: Tensor  # (B, N, V)
    state: State  # the next one
    auxiliary: dict[str, Tensor]  # {name: scalar loss}, added to the task loss


class CheckpointableLayer(ParameterModule):
    """A layer that can be checkpointed: only its inputs are kept, and backward computes it again.

    If it `preserves_rng`, the random state is kept too, so that dropout draws the same again.
    """

    checkpointed = False
    preserves_rng = False

    def __call__(self, *given: Any) -> Any:
        """Call `forward`; by torch.utils.checkpoint if `checkpointed` and gradients are enabled."""
        if self.checkpointed and torch.is_grad_enabled():
            forward = super().__call__
            keep = self.preserves_rng
            return checkpoint(forward, *given, use_reentrant=False, preserve_rng_state=keep)
        return super().__call__(*given)


class Model(ParameterModule, ABC):
    """Base class of the models: subclasses implement the abstract methods and may override others.

    Its methods raise ValueError for the state of another model or of another number of lanes.
    """

    state_type: type[State]
    config: ModelConfig
    embedding: nn.Parameter  # (V, D)

    @abstractmethod
    def __init__(self, config: ModelConfig, seed: int = 0):
        """A model of these sizes, with the weights that its reference draws from `seed`."""
        super().__init__()
        self.config = config

    @abstractmethod
    def describe(self) -> str:
        """One line on how far back the model can look."""

    @property
    @abstractmethod
    def attention_reach(self) -> int:
        """How many tokens back a prediction can look by attention only, without memory."""

    @abstractmethod
    def state_shapes(self, batch: int) -> dict[str, tuple[int, ...]]:
        """The shape of each field of a State of `batch` lanes."""

    def initial_state(self, batch: int) -> State:
        """The State at a document's start: zeros, or in some models learned, with gradients.

        Raises ValueError if batch is below 1.
        """
        return self.state_type._make(
            map(self.embedding.new_zeros, self.state_shapes(batch).values())
        )

    @abstractmethod
    def read(self, tokens: Tensor, state: State, *task: Task) -> Reading:
        """Read a segment of tokens (B, N); `hidden` (B, N, D) predicts the next tokens.

        Only models that take tasks accept a Task. Raises ValueError for an N that the model cannot
        read: most need N = config.segment; block_recurrent reads any positive multiple of its
        window, pretrained_recurrence any N from 1 to config.segment.
        """

    def advance(self, tokens: Tensor, state: State, *task: Task) -> State:
        """Return the same next State as `read`; some models skip what only the logits need."""
        return self.read(tokens, state, *task).state

    def output_matrix(self) -> OutputMatrix:
        """(V, D), the embedding: logits are hidden rows times its transpose.

        Some models have an AdaptiveSoftmax instead.
        """
        return self.embedding

    def forward(self, tokens: Tensor, state: State, *task: Task) -> Output:
        """Read a segment of tokens (B, N); Output.logits (B, N, V) predict the next tokens.

        Raises ValueError as `read` does, and unless tokens are integers (B, N). Ids outside the
        vocabulary are rejected only on the CPU: checking them on a GPU would synchronize.
        """
        check_tokens(tokens, 2)
        traced = torch.compiler.is_compiling()  # torch.export too: a traced tensor has no numbers
        if tokens.device.type == "cpu" and not traced:
            check_vocabulary(tokens, self.config.vocabulary)
        hidden, state, auxiliary = self.read(tokens, state, *task)
        return Output(logits_of(self, hidden), state, auxiliary)

    def auxiliary_parameters(self) -> list[nn.Parameter]:
        """The parameters that only auxiliary losses train; their gradients are clipped separately.

        Most models have none.
        """
        return []

    def check_segment(self, tokens: Tensor, state: State) -> None:
        """Raise ValueError unless tokens (B, N) are a segment, and the state fits them."""
        length = tokens.shape[1]
        segment = self.config.segment
        if length != segment:
            raise ValueError(f"a segment of {length} tokens is not one of {segment}; pad it")
        self.check_state(state, tokens.shape[0])

    def check_state(self, state: State, lanes: int) -> None:
        """Raise ValueError unless the state is of this model and has so many lanes.

        Reads only types and shapes: it makes no tensor and waits for no device.
        """
        if type(state) is not self.state_type:
            raise ValueError(f"the state is {type(state)}, this model takes {self.state_type}")
        for name, expected in self.state_shapes(lanes).items():
            given = tuple(getattr(state, name).shape)
            if given[1:] != expected[1:]:
                raise ValueError(
                    f"the state's {name} has shape {given}, expected {expected}; "
                    "is it another model's?"
                )
            if given != expected:
                raise ValueError(
                    f"the state's {name} has {given[0]} lanes, expected {lanes}, "
                    "as many as the tokens have"
                )


def logits_of(model: Model, hidden: Tensor) -> Tensor:
    """The logits (..., V) of hidden rows (..., D) that are ready for the output matrix."""
    return logits_by(hidden, model.output_matrix()).to(hidden.dtype)


def logits_by(hidden: Tensor, matrix: OutputMatrix) -> Tensor:
    """The logits (..., V) of hidden rows (..., D); of an AdaptiveSoftmax the log-probabilities."""
    if isinstance(matrix, AdaptiveSoftmax):
        return matrix.log_probabilities(hidden)
    return logits_from(hidden, matrix)


def overlap_of(config: ModelConfig) -> int:
    """Tokens that a segment shares with the previous one; only GPT-2's windows overlap."""
    return getattr(config, "overlap", 0)


def initialise(module: Any, init_params: Callable, seed: int) -> None:
    """Load the weights that a reference's function draws from the module's config and the seed.

    Does nothing on the meta device, where tensors have no data. Raises RuntimeError unless names
    and shapes are the same.
    """
    if next(module.parameters()).is_meta:
        return
    params = init_params(module.config, np.random.default_rng(seed))
    module.load_state_dict({name: torch.tensor(value) for name, value in params.items()})


# The mode and the type that a model computes in


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
    """Context manager: inside, the model computes with copies of its parameters cast to dtype.

    Buffers are cast too, except those of transformers' modules. Gradients reach the original
    parameters, in their own dtype. The copies are made on entry: a parameter changed inside keeps
    its old copy, so update parameters and clear gradients outside. The copies' memory is reused,
    because CUDA graphs read fixed addresses.
    """
    changed = tensors_of_other_types(model, dtype)
    try:
        originals = [original for _, _, original in changed]
        if originals:
            copies = Copies.apply(memory_of_copies(model, dtype, originals), *originals)
            for (holder, name, _), copy in zip(changed, copies, strict=True):
                holder[name] = copy
        yield
    finally:
        for holder, name, original in changed:
            holder[name] = original


def tensors_of_other_types(model: nn.Module, dtype: torch.dtype) -> list[tuple[dict, str, Tensor]]:
    """(The dict that holds it, its name, itself) of each floating tensor of another type.

    Buffers of a package's modules stay as they are: a frequency of position 300 that is rounded to
    bfloat16 would be a radian off.
    """
    found = []
    for module in model.modules():
        holders: list[dict] = [module._parameters]
        if isinstance(module, ParameterModule):
            holders.append(module._buffers)
        for holder in holders:
            for name, tensor in holder.items():
                if tensor is None or tensor.dtype == dtype:
                    continue
                if tensor.is_floating_point():
                    found.append((holder, name, tensor))
    return found


def memory_of_copies(model: nn.Module, dtype: torch.dtype, originals: list[Tensor]) -> list[Tensor]:
    """Tensors in dtype with the originals' shapes, the same each time unless the model moved."""
    kept = model.__dict__.setdefault("memory_of_copies", {})
    devices = [original.device for original in originals]
    if dtype not in kept or [copy.device for copy in kept[dtype]] != devices:
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


# Checks


def check_lanes(batch: int) -> None:
    """Raise ValueError if the number of lanes is below 1."""
    if batch < 1:
        raise ValueError(f"a batch of {batch} lanes; it must have at least 1")


def check_tokens(tokens: Tensor, axes: int) -> None:
    """Raise ValueError unless tokens are a tensor of ids with so many axes."""
    if isinstance(tokens, Tensor) and tokens.dim() == axes and not tokens.is_floating_point():
        return
    kind = getattr(tokens, "dtype", type(tokens).__name__)
    shape = tuple(getattr(tokens, "shape", ()))
    form = "(lanes, tokens)" if axes == 2 else "(lanes,)"
    raise ValueError(
        f"tokens are {kind} of shape {shape}, expected a tensor of ids as int64 {form}"
    )


def check_vocabulary(tokens: Tensor, vocabulary: int) -> None:
    """Raise ValueError unless all tokens are ids 0 .. vocabulary - 1."""
    if tokens.numel() == 0:
        return
    lowest, highest = tokens.aminmax()
    if lowest < 0 or highest >= vocabulary:
        raise ValueError(
            f"tokens are {int(lowest)} to {int(highest)}, expected 0 to {vocabulary - 1}; "
            "was another tokenizer used?"
        )


# States


def require_gradient(state: State) -> State:
    """The same state as leaf tensors that require gradients, except fields of token ids."""
    return state._make(map(with_gradient, state))


def keep_lanes(state: State, rows: Tensor | list[int] | slice) -> State:
    """The state of only the lanes in rows."""
    return state._make(field[rows] for field in state)


def write_lanes(state: State, rows: slice, part: State) -> State:
    """The state with the lanes at `rows` replaced by those of `part`.

    It is changed in place, unless `part` has all lanes: there may be no room for a second long
    memory. So its fields must share no memory with each other or with parameters. An initial
    state's may; `repeat_lane` makes one whose fields do not.
    """
    if len(part[0]) == len(state[0]):
        return part
    for field, new in zip(state, part, strict=True):
        field[rows] = new
    return state


def repeat_lane(state: State, lanes: int) -> State:
    """Copies of the only lane of a state, detached, in memory of their own."""
    return state._make(torch.cat([field.detach()] * lanes) for field in state)


def replace_lanes(starts: Tensor, initial: State, state: State) -> State:
    """The initial state in lanes with starts (B,) true, and the carried one in the other lanes.

    In lanes that start, gradients go to the learned initial state and not to the carried one. It
    does not check whether any lane starts, which would synchronize with the GPU; a Segment knows
    (`any_starts`).
    """
    fields = []
    for new, old in zip(initial, state, strict=True):
        other_axes = [1] * (old.dim() - 1)
        fields.append(torch.where(starts.view(-1, *other_axes), new, old))
    return state._make(fields)


def state_from(state: State, fields: list[Tensor]) -> State:
    """Turn saved tensors into a State of the same types and on the same device as `state`."""
    return state._make(saved.to(field) for saved, field in zip(fields, state, strict=True))
