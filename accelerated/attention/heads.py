"""What all models share: parameters, norms, heads, and which path an attention takes."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, wraps
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

NORM_EPSILON = 1e-6  # added under the square roots
# Whether accelerated/fast is there; everything works without it, only slower
HAS_FAST_PATHS = Path(__file__).parents[1].joinpath("fast", "paths.py").exists()
# Triton comes with torch's builds for CUDA, but not all; before torch 2.7 kernels took no tuples
HAS_TRITON = find_spec("triton") is not None and torch.__version__ >= "2.7"  # as versions

Function = TypeVar("Function", bound=Callable)


# Faster paths


def with_fast_path(plain: Function) -> Function:
    """Decorate a function: calls go to the faster one of its name in accelerated/fast/paths.py.

    That one gets `plain` as its first argument, to fall back on. Without the folder
    accelerated/fast, `plain` is returned unchanged.
    """
    if not HAS_FAST_PATHS:
        return plain
    name = plain.__name__

    @wraps(plain)
    def call(*given: Any, **named: Any) -> Any:
        from accelerated.fast import paths  # not before: its files import those of this room

        return getattr(paths, name)(plain, *given, **named)

    return cast(Function, call)


def takes_sdpa(query: Tensor, key: Tensor) -> bool:
    """Whether attention goes through torch's SDPA, as on a GPU.

    A query that has only one key takes the plain path: its gradient is exactly zero, and SDPA would
    leave rounding errors.
    """
    return query.device.type != "cpu" and key.shape[-2] > 1


# Parameters and norms


def at_least_float32(x: Tensor) -> Tensor:
    """x in float32, or in its own type if more precise.

    Gates and losses need it: bfloat16 rounds a gate of 0.99909 to 1.
    """
    return x.to(torch.promote_types(x.dtype, torch.float32))


def parameter(*shape: int) -> nn.Parameter:
    """An uninitialised parameter; its model later loads the reference's initial values."""
    return nn.Parameter(torch.empty(shape))


class ParameterModule(nn.Module):
    """An nn.Module that holds its weights as parameters of its own, and prints their shapes."""

    compiled = False  # whether its compilable methods are compiled

    def extra_repr(self) -> str:
        own = self.named_parameters(recurse=False)
        return ", ".join(f"{name} {tuple(value.shape)}" for name, value in own)


def compilable(method: Callable) -> Callable:
    """Decorate a method: torch.compile it if its module is `compiled` and in training mode.

    All layers of a class share one compiled method.
    """

    @wraps(method)
    def call(module: Any, *given: Any) -> Any:
        is_inside_another = torch.compiler.is_compiling()
        if is_inside_another or not (module.compiled and module.training):
            return method(module, *given)
        return compiled_once(method)(module, *given)

    return call


@cache
def compiled_once(method: Callable) -> Callable:
    """The method, which is compiled when it is called, for any number of layers."""
    return torch.compile(method, fullgraph=True, dynamic=False)


LayerClass = TypeVar("LayerClass", bound=nn.Module)


class Layers(nn.ModuleList, Generic[LayerClass]):
    """A ModuleList whose modules are all of one class: `layers: Layers[Layer]` says of which."""

    if TYPE_CHECKING:  # at run time it is a ModuleList

        def __init__(self, layers: Iterable[LayerClass]): ...
        def __iter__(self) -> Iterator[LayerClass]: ...
        def __getitem__(self, index: int) -> LayerClass: ...


class LayerNorm(ParameterModule):
    """Layer normalization over the last axis, in the dtype of its parameters.

    The parameters are named `scale` and `bias`, as in the references.
    """

    def __init__(self, width: int, epsilon: float = NORM_EPSILON):
        super().__init__()
        self.scale = parameter(width)  # (D,)
        self.bias = parameter(width)  # (D,)
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.scale.dtype)
        return functional.layer_norm(x, self.scale.shape, self.scale, self.bias, self.epsilon)


def unit_norm(x: Tensor) -> Tensor:
    """x with unit length over the last axis: query-key normalisation."""
    # x / sqrt(sum of squares + epsilon) = x / sqrt(mean of squares + epsilon / E) / sqrt(E)
    width = x.shape[-1]
    normed = functional.rms_norm(x, (width,), eps=NORM_EPSILON / width)
    return normed * width**-0.5


def embed(tokens: Tensor, embedding: Tensor) -> Tensor:
    """Rows (..., D) of embedding (V, D), looked up in float32 or better on a CPU.

    A CPU adds up a row's gradient in the embedding's type: in bfloat16 4,000 ones would stop at
    256. A GPU adds it up in float32.
    """
    on_a_cpu = embedding.device.type == "cpu"
    table = at_least_float32(embedding) if on_a_cpu else embedding
    return functional.embedding(tokens, table).to(embedding.dtype)


@with_fast_path
def logits_from(hidden: Tensor, matrix: Tensor) -> Tensor:
    """Rows (..., D) times a vocabulary's matrix (V, D): (..., V)."""
    return functional.linear(hidden, matrix)


# Heads


def split_heads(x: Tensor, heads: int, parts: int) -> tuple[Tensor, ...]:
    """Split x (B, n, m HE) into m = parts tensors (B, H, n, E)."""
    batch, length, columns = x.shape
    width = columns // (parts * heads)  # not -1: x may have no rows
    rows = x.view(batch, length, parts, heads, width)
    rows = rows.permute(2, 0, 3, 1, 4)  # (m, B, H, n, E)
    if parts == 1:
        return (rows.squeeze(0),)  # not unbind, whose gradient is a copy
    return rows.unbind(0)


def merge_heads(x: Tensor) -> Tensor:
    """Concatenate the heads of x (B, H, N, E) into (B, N, HE)."""
    return x.transpose(1, 2).flatten(2)


def project_heads(
    x: Tensor,  # (B, n, D)
    heads: int,
    weights: Sequence[Tensor],  # (HE, D) each
    biases: Sequence[Tensor | None] = (),  # (HE,) each, or none
) -> tuple[Tensor, ...]:
    """x W^T + b for each weight, by one product, split into heads: (B, H, n, E) each."""
    given = [bias for bias in biases if bias is not None]
    bias = concatenated(given) if given else None
    rows = functional.linear(x, concatenated(weights), bias)  # (B, n, m HE)
    return split_heads(rows, heads, len(weights))


def concatenated(tensors: Sequence[Tensor]) -> Tensor:
    """All rows of the tensors; one tensor alone is not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def project_unit_heads(
    x: Tensor,  # (B, N, D)
    weight: Tensor,  # (m HE, D)
    heads: int,
    parts: int,
) -> tuple[Tensor, ...]:
    """Project x by weight to m = parts tensors (B, H, N, E), all except the last of unit length."""
    *vectors, value = split_heads(functional.linear(x, weight), heads, parts)
    units = [unit_norm(vector) for vector in vectors]
    return (*units, value)


def by_query_and_key(by_distance: Tensor, queries: int) -> Tensor:
    """Spread what depends on the distance alone over n queries and K keys.

    (..., n + K - 1) -> (..., n, K): out[i, j] = by_distance[n - 1 - i + j]. The gradient adds up
    diagonals; that of an index matrix is slow on a GPU.
    """
    keys = by_distance.shape[-1] + 1 - queries
    return by_distance.unfold(-1, keys, 1).flip(-2)
