"""Compressive Transformer, the reference: operations against finite differences and against their definitions."""

import dataclasses
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from reference import compressive as ref
from tests.helpers.variants import PAPERS

PAPER = PAPERS["compressive"]
variant = PAPER.variant
random_params, random_state = PAPER.random_params, PAPER.random_state


# Definitions


@given(n=st.integers(1, 6), before=st.integers(0, 6), seed=st.integers(0, 99))
def test_the_backward_shift_is_the_adjoint(n, before, seed):
    """<shift x, y> = <x, shift' y> for y that is zero where the mask hides; row 0 of the gradient begins with n - 1 zeros."""
    rng = np.random.default_rng(seed)
    x, y = rng.standard_normal((2, 1, 1, n, before + n))
    y = y * ref.causal_mask(n, before + n)
    shifted, back = ref.relative_shift_forward(x)[0], ref.relative_shift_backward(y, None)
    assert math.isclose((shifted * y).sum(), (x * back).sum(), rel_tol=1e-12, abs_tol=1e-12)
    for i in range(n):
        assert not back[0, 0, i, : n - 1 - i].any()


def test_usage_is_the_mean_attention_at_eviction():
    """The rows that most_used keeps are those with the largest column sums of this segment's own attention."""
    config, rng = dataclasses.replace(variant("most_used-none"), layers=1), np.random.default_rng(4)
    params, state = random_params(config, rng), random_state(config, rng, 2)
    tokens = rng.integers(11, size=(2, 8))
    _, after, (_, caches, _) = ref.forward(params, config, tokens, state)
    (attend_cache, *_), *_ = caches[0]
    weights = attend_cache[1].weights  # (B, H, N, K)
    assert weights.shape == (2, 2, 8, 25)
    for b in range(2):
        sums = [sum(weights[b, h, i, 5 + row] for h in range(2) for i in range(8)) for row in range(8)]
        kept = sorted(sorted(range(8), key=lambda row: -sums[row])[:2])
        assert (after.compressed[b, 0, -2:] == state.memory[b, 0, kept]).all()
