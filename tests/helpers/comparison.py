"""What tests compare, and with what: tensors by name, slow definitions, and finite differences.

A NaN, a missing or extra row, or a row over tolerance is a failure.
"""

import math
from fractions import Fraction

import numpy as np
import torch
from hypothesis import strategies as st

# Of a GPU against plain paths on the CPU: relative error of outputs and gradients, by dtype
TOLERANCE = {
    ("cuda", torch.float32): 1e-4,
    ("cuda", torch.bfloat16): 3e-2,
}
# Accelerated models against references in float64; the worst error measured is 1.1e-12
LADDER = 1e-9
# Finite differences of operations, in every entry of every input
STEP = 1e-5
OPERATION = 1e-6
SHOWN = 4  # of the arrays that differ, in the order of computation
# Of queries: all scores are equal, usual ones, a softmax of nearly 0 and 1
SIZES = st.sampled_from([0.0, 1.0, 30.0])
SEEDS = st.integers(0, 2**31)
RNG = np.random.default_rng(3)


def as_array(value):
    """A tensor, an array or a number as an array in float64."""
    if hasattr(value, "detach"):
        return value.detach().double().cpu().numpy()
    return np.asarray(value, dtype=np.float64)


def named(prefix, state, between="."):
    """A state's fields as {name: tensor}."""
    return {f"{prefix}{between}{name}": field for name, field in state._asdict().items()}


def assert_agree(expected, actual, tolerance, title=""):
    """Fail unless two {name: array or tensor}, or two arrays, agree.

    An error is relative to the largest number of the whole tensor that is expected.
    """
    if not isinstance(expected, dict):
        expected = {"it": expected}
        actual = {"it": actual}
    title = f"{title}: " if title else ""
    assert expected, f"{title}nothing was compared"
    wrong = []
    for name in dict.fromkeys([*expected, *actual]):  # in the order of computation
        if name not in actual:
            wrong.append(f"{name} is missing")
        elif name not in expected:
            wrong.append(f"{name} is not expected")
        else:
            how = difference(as_array(expected[name]), as_array(actual[name]), tolerance)
            wrong += [f"{name} {how}"] if how else []
    verdict = f"{title}{len(wrong)} of {len(expected | actual)} do not agree, the first are"
    assert not wrong, "\n".join([verdict, *wrong[:SHOWN]])


def difference(expected, actual, tolerance):
    """How two arrays differ, in words; None if they agree."""
    if expected.shape != actual.shape:
        return f"has shape {actual.shape}, expected {expected.shape}"
    if expected.size == 0:
        return None
    infinite = ~(np.isfinite(expected) & np.isfinite(actual))
    apart = infinite if infinite.any() else np.abs(actual - expected)
    at = np.unravel_index(apart.argmax(), apart.shape)
    found = f"is {actual[at]:.7g} at {[*map(int, at)]}, expected {expected[at]:.7g}"
    if infinite.any():
        return found
    largest = np.abs(expected).max()
    if largest == 0:  # no relative error is possible: zero must be exactly zero
        return found if apart[at] else None
    error = float(apart[at] / max(largest, 1e-30))
    if error <= tolerance:
        return None
    return f"{found}: a relative error of {error:.1e}, where {tolerance:.1e} is allowed"


# Slow definitions


def brute_force_softmax(scores):
    """The softmax of a list of numbers."""
    exps = [math.exp(score - max(scores)) for score in scores]
    return [value / sum(exps) for value in exps]


def mixture(scores, rows):
    """The mean of rows by the softmax of scores."""
    weights = brute_force_softmax(scores)
    return sum(weight * row for weight, row in zip(weights, rows, strict=True))


def slow_bucket(distance, buckets, furthest):
    """The bucket of one distance by T5's rule, in fractions instead of logarithms.

    Half of the buckets hold one distance each. Of the others it is the k-th with the largest k for
    which (distance / half)^half >= (furthest / half)^k, and the last one from `furthest` on.
    """
    half = buckets // 2
    if distance < half:
        return distance
    ratio = Fraction(distance, half) ** half
    longest = Fraction(furthest, half)
    k = 0
    while half + k < buckets - 1 and ratio >= longest ** (k + 1):
        k += 1
    return half + k


def beside_one(rows):
    """{name: array} flat, with a one at the end, so that errors are relative to at least 1.

    A softmax of nearly 0 and 1, or one that cancels what it is given, leaves gradients that are all
    rounding.
    """
    return {name: np.append(as_array(row).ravel(), 1.0) for name, row in rows.items()}


# Finite differences of the hand-written backward passes, in float64


def draw(*shape):
    """Normal random numbers."""
    return RNG.standard_normal(shape)


def check_operation(objective, inputs, gradients, title):
    """Compare the gradients of objective(inputs) with central differences in every entry."""
    numeric = {}
    for name, value in inputs.items():
        numeric[name] = np.zeros_like(value)
        for index in np.ndindex(value.shape):
            ends = []
            for step in (STEP, -STEP):
                moved = value.copy()
                moved[index] += step
                ends.append(objective(inputs | {name: moved}))
            numeric[name][index] = (ends[0] - ends[1]) / (2 * STEP)
    assert_agree(numeric, gradients, OPERATION, title)
