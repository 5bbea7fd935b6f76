"""Parameters, norms and the splitting into heads, shared by all models and attentions."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from accelerated.attention.on_a_cpu import ProjectHeads

NORM_EPSILON = 1e-6  # added under the square roots


def at_least_float32(x: Tensor) -> Tensor:
    """x in float32, or in its own type if more precise. Gates and losses need it: bfloat16 rounds a gate of 0.99909 to 1."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def parameter(*shape: int) -> nn.Parameter:
    """An uninitialised parameter; its model later loads the reference's initial values."""
    return nn.Parameter(torch.empty(shape))


class Declared(nn.Module):
    """A module with parameters of its own, whose shapes it shows."""

    def extra_repr(self) -> str:
        return ", ".join(f"{name} {tuple(value.shape)}" for name, value in self._parameters.items())


class LayerNorm(Declared):
    """Layer norm over the last axis, in the type of its parameters; they have the references' names."""

    def __init__(self, width: int, epsilon: float = NORM_EPSILON):
        super().__init__()
        self.scale = parameter(width)  # (D,)
        self.bias = parameter(width)  # (D,)
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(
            x.to(self.scale.dtype), self.scale.shape, self.scale, self.bias, self.epsilon
        )


def look_up(tokens: Tensor, embedding: Tensor) -> Tensor:
    """Rows (..., D) of embedding (V, D), computed on a CPU in float32 or better.

    A CPU adds up a row's gradient in the embedding's type, where 4,000 ones in bfloat16 would stop at 256; a GPU in float32.
    """
    table = at_least_float32(embedding) if embedding.device.type == "cpu" else embedding
    return functional.embedding(tokens, table).to(embedding.dtype)


def unit_norm(x: Tensor) -> Tensor:
    """x with unit length over the last axis: query-key normalisation."""
    width = x.shape[
        -1
    ]  # x / sqrt(sum of squares + epsilon) = x / sqrt(mean of squares + epsilon / E) / sqrt(E)
    return functional.rms_norm(x, (width,), eps=NORM_EPSILON / width) * width**-0.5


def on_plain_cpu(x: Tensor) -> bool:
    """Whether x is on the CPU and nothing is being compiled, as the fast paths with a hand-written backward pass need."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def split_heads(x: Tensor, heads: int, parts: int) -> tuple[Tensor, ...]:
    """Split x (B, n, m HE) into m = parts tensors (B, H, n, E)."""
    width = x.shape[2] // (parts * heads)  # not -1: x may have no rows
    rows = x.view(*x.shape[:2], parts, heads, width).permute(2, 0, 3, 1, 4)
    return rows.unbind(0) if parts > 1 else (rows.squeeze(0),)  # the gradient of unbind is a copy


def merge_heads(x: Tensor) -> Tensor:
    """Concatenate the heads of x (B, H, N, E) into (B, N, HE)."""
    return x.transpose(1, 2).flatten(2)


def project(
    x: Tensor, heads: int, weights: list[Tensor], biases: Sequence[Tensor | None] = (None,)
) -> tuple[Tensor, ...]:
    """x W^T + b for each weight, by one product, split into heads: (B, n, D) -> (B, H, n, E) each."""
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    bias = biases[0] if len(weights) == 1 or biases[0] is None else torch.cat(biases)
    return split_heads(functional.linear(x, weight, bias), heads, len(weights))


def project_heads_plain(x: Tensor, weight: Tensor, heads: int, parts: int) -> tuple[Tensor, ...]:
    """Project x (B, N, D) by weight (m HE, D) to m = parts tensors (B, H, N, E), all except the last of unit length."""
    *vectors, value = split_heads(functional.linear(x, weight), heads, parts)
    return *(unit_norm(vector) for vector in vectors), value


def project_heads(x: Tensor, weight: Tensor, heads: int, parts: int) -> tuple[Tensor, ...]:
    """The same as project_heads_plain, by the fastest path for x."""
    if on_plain_cpu(x):
        return ProjectHeads.apply(x, weight, heads, parts, NORM_EPSILON)
    return project_heads_plain(x, weight, heads, parts)
