"""Layer norm over a module's scale and bias, and unit length; one epsilon, that of the references but GPT-2's."""

import torch
from torch.nn import functional

NORM_EPSILON = 1e-6  # under the square roots


def layer_norm(x, p, epsilon=NORM_EPSILON):
    return functional.layer_norm(x, (x.shape[-1],), p.scale, p.bias, epsilon)


def unit_norm(x):
    """Unit length over the last axis: query-key normalisation."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPSILON)
