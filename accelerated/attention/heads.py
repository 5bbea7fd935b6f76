"""Parameters, norms and the splitting into heads, shared by all models and attentions."""

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

NORM_EPSILON = 1e-6  # added under the square roots


def parameter(*shape: int) -> nn.Parameter:
    """An uninitialised parameter; its model later loads the reference's initial values."""
    return nn.Parameter(torch.empty(shape))


class LayerNorm(nn.Module):
    """Layer norm over the last axis; its parameters have the references' names."""

    def __init__(self, width: int, epsilon: float = NORM_EPSILON):
        super().__init__()
        self.scale = parameter(width)  # (D,)
        self.bias = parameter(width)  # (D,)
        self.epsilon = epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, self.scale.shape, self.scale, self.bias, self.epsilon)


def unit_norm(x: torch.Tensor) -> torch.Tensor:
    """x with unit length over the last axis: query-key normalisation."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPSILON)


def on_plain_cpu(x: torch.Tensor) -> bool:
    """Whether x is on the CPU without autocast, as the fast paths with a hand-written backward pass need."""
    return x.device.type == "cpu" and not torch.is_autocast_enabled("cpu")


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
        length = torch.linalg.vector_norm(y[:, :, :-1], dim=-1, keepdim=True)  # one pass, without a tensor of y's squares
        inverse = length.square_().add_(NORM_EPSILON).rsqrt_()  # (B, N, m - 1, H, 1)
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
