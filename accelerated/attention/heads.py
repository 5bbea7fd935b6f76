"""Parameters, norms and the splitting into heads, shared by all models and attentions."""

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

NORM_EPSILON = 1e-6  # added under the square roots


def at_least_float32(x: torch.Tensor) -> torch.Tensor:
    """x in float32, or in its own type if more precise. Gates and losses need it: bfloat16 rounds a gate of 0.99909 to 1."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def parameter(*shape: int) -> nn.Parameter:
    """An uninitialised parameter; its model later loads the reference's initial values."""
    return nn.Parameter(torch.empty(shape))


class LayerNorm(nn.Module):
    """Layer norm over the last axis, in the type of its parameters; they have the references' names."""

    def __init__(self, width: int, epsilon: float = NORM_EPSILON):
        super().__init__()
        self.scale = parameter(width)  # (D,)
        self.bias = parameter(width)  # (D,)
        self.epsilon = epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x.to(self.scale.dtype), self.scale.shape, self.scale, self.bias, self.epsilon)


def to_be_indexed(x: torch.Tensor) -> torch.Tensor:
    """x, but on a CPU in float32 or better: an entry's gradient is the sum over all places that read it.

    A CPU adds it up in x's type, where 4,000 ones in bfloat16 would stop at 256. A GPU's kernels use float32 themselves.
    """
    return at_least_float32(x) if x.device.type == "cpu" else x


def look_up(tokens: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
    """Rows (..., D) of embedding (V, D)."""
    return functional.embedding(tokens, to_be_indexed(embedding)).to(embedding.dtype)


def unit_norm(x: torch.Tensor) -> torch.Tensor:
    """x with unit length over the last axis: query-key normalisation."""
    width = x.shape[-1]  # x / sqrt(sum of squares + epsilon) = x / sqrt(mean of squares + epsilon / E) / sqrt(E)
    return functional.rms_norm(x, (width,), eps=NORM_EPSILON / width) * width**-0.5


def on_plain_cpu(x: torch.Tensor) -> bool:
    """Whether x is on the CPU and nothing is being compiled, as the fast paths with a hand-written backward pass need."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def split_heads(x: torch.Tensor, heads: int, parts: int) -> tuple[torch.Tensor, ...]:
    """Split x (B, n, m HE) into m = parts tensors (B, H, n, E)."""
    width = x.shape[2] // (parts * heads)  # not -1: x may have no rows
    return x.view(*x.shape[:2], parts, heads, width).permute(2, 0, 3, 1, 4).unbind(0)


def merge_heads(x: torch.Tensor) -> torch.Tensor:
    """Concatenate the heads of x (B, H, N, E) into (B, N, HE)."""
    return x.transpose(1, 2).flatten(2)


def project_heads_plain(x: torch.Tensor, weight: torch.Tensor, heads: int, parts: int) -> tuple[torch.Tensor, ...]:
    """Project x (B, N, D) by weight (m HE, D) to m = parts tensors (B, H, N, E), all except the last of unit length."""
    *vectors, value = split_heads(functional.linear(x, weight), heads, parts)
    return *(unit_norm(vector) for vector in vectors), value


class ProjectHeads(torch.autograd.Function):
    """The same as project_heads_plain; backward writes each gradient once, into one buffer."""

    @staticmethod
    def forward(ctx, x, weight, heads, parts):
        y = functional.linear(x, weight).view(*x.shape[:2], parts, heads, -1)  # (B, N, m, H, E)
        exact = torch.promote_types(y.dtype, torch.float32)
        length = torch.linalg.vector_norm(y[:, :, :-1], dim=-1, keepdim=True, dtype=exact)  # one pass, without y's squares
        inverse = length.square_().add_(NORM_EPSILON).rsqrt_().to(y.dtype)  # (B, N, m - 1, H, 1)
        y[:, :, :-1].mul_(inverse)
        outs = tuple(y[:, :, part].transpose(1, 2).contiguous() for part in range(parts))  # (B, H, N, E) each
        ctx.save_for_backward(x, weight, inverse, *outs[:-1])
        return outs

    @staticmethod
    @once_differentiable
    def backward(ctx, *douts):
        x, weight, inverse, *units = ctx.saved_tensors
        dy = x.new_empty(*x.shape[:2], len(douts), *douts[-1].shape[1::2])  # (B, N, m, H, E)
        for part, unit in enumerate(units):
            dunit = douts[part]
            along = (dunit * unit).sum(-1, keepdim=True)
            dpart = torch.addcmul(dunit, unit, along, value=-1).transpose(1, 2)
            torch.mul(dpart, inverse[:, :, part], out=dy[:, :, part])
        dy[:, :, -1] = douts[-1].transpose(1, 2)
        rows = dy.view(-1, weight.shape[0])
        return (rows @ weight).view(x.shape), rows.t() @ x.view(-1, x.shape[-1]), None, None


def project_heads(x: torch.Tensor, weight: torch.Tensor, heads: int, parts: int) -> tuple[torch.Tensor, ...]:
    """The same as project_heads_plain, by the fastest path for x."""
    if on_plain_cpu(x):
        return ProjectHeads.apply(x, weight, heads, parts)
    return project_heads_plain(x, weight, heads, parts)
