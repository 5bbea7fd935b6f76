"""Sinusoids of distances, far away."""

import torch

from accelerated.attention import relative_shift as module
from reference import compressive as ref
from tests.helpers.comparison import assert_agree


def test_sinusoids_of_far_distances_are_rounded_once():
    """In float32 the angle itself would be off by 2e-4 at a distance of 4,000."""
    torch.set_default_dtype(torch.float32)
    far = module.distance_sinusoids(4001, 8)
    assert far.dtype == torch.float32
    assert_agree(ref.distance_sinusoids(4001, 8), far, 1e-7, "sinusoids")
