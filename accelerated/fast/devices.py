"""What a GPU takes: kernels, and products whose matrices are aligned."""

import torch
from torch import Tensor
from torch.nn import functional

from accelerated.attention.heads import HAS_TRITON

ALIGNMENT = 64  # of the columns of a product, on a GPU


def takes_kernels(x: Tensor) -> bool:
    """Whether our kernels in Triton take x: 16-bit numbers on a GPU since Ampere."""
    if x.device.type != "cuda" or x.itemsize != 2 or not HAS_TRITON:
        return False
    return torch.cuda.get_device_properties(x.device).major >= 8


def takes_distance_attention(query: Tensor) -> bool:
    """Whether attention with offsets by distance is one kernel (attention_gpu.py).

    It is if the kernels take the query, and heads are 16, 32, 64 or 128 wide.
    """
    return takes_kernels(query) and query.shape[-1] in (16, 32, 64, 128)


def padding_rows(matrix: Tensor, multiple: int = ALIGNMENT) -> int:
    """How many rows matrices (..., V, D) lack for a GPU's 16-bit products by them to be aligned.

    A product with V = 50,257 takes seven times as long there as one with 50,304.
    """
    if matrix.device.type == "cpu" or matrix.itemsize != 2:
        return 0
    return -matrix.shape[-2] % multiple


def aligned(matrix: Tensor, multiple: int = ALIGNMENT) -> Tensor:
    """The matrix (V, D) with as many rows of zeros as it lacks to a multiple."""
    missing = padding_rows(matrix, multiple)
    return functional.pad(matrix, (0, 0, 0, missing)) if missing else matrix
