"""The relative shift: its backward is its adjoint; and its sinusoids far away."""

import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelerated.attention import relative_shift as module
from reference import compressive as ref
from tests.helpers.comparison import assert_agree


@given(n=st.integers(1, 6), before=st.integers(0, 6), seed=st.integers(0, 99))
def test_the_backward_shift_is_the_adjoint(n, before, seed):
    """<shift x, y> = <x, shift' y> for y that is zero where the mask hides.

    Row i of the gradient begins with n - 1 - i zeros.
    """
    rng = np.random.default_rng(seed)
    x, y = rng.standard_normal((2, 1, 1, n, before + n))
    y = y * ref.causal_mask(n, before + n)
    shifted, _ = ref.relative_shift_forward(x)
    back = ref.relative_shift_backward(y, None)
    assert math.isclose((shifted * y).sum(), (x * back).sum(), rel_tol=1e-12, abs_tol=1e-12)
    for i in range(n):
        assert not back[0, 0, i, : n - 1 - i].any(), (
            f"row {i} does not begin with {n - 1 - i} zeros"
        )


def test_sinusoids_of_far_distances_are_rounded_once():
    """In float32 the angle itself would be off by 2e-4 at a distance of 4,000."""
    torch.set_default_dtype(torch.float32)
    far = module.distance_sinusoids(4001, 8)
    assert far.dtype == torch.float32
    assert_agree(ref.distance_sinusoids(4001, 8), far, 1e-7, "sinusoids")
