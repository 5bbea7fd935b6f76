"""Layer norm over a module's scale and bias, and unit length; one epsilon, that of the references."""

import torch
from torch.nn import functional

NORM_EPSILON = 1e-6  # under the square roots


def layer_norm(x, p):
    return functional.layer_norm(x, (x.shape[-1],), p.scale, p.bias, NORM_EPSILON)


def unit_norm(x):
    """Unit length over the last axis: query-key normalisation."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPSILON)
