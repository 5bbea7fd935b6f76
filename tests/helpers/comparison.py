"""What tests compare, and with what: a table of tensors, slow definitions one number at a time, and finite differences.

In the table NaN, a missing or extra row, or a row over tolerance is a failure.
"""

import math
from fractions import Fraction

import numpy as np
import torch
from hypothesis import strategies as st

# Of fast paths and devices against plain paths on the CPU: relative error of outputs and gradients,
# by device and dtype. The comment is the worst error measured
TOLERANCE = {
    ("cpu", torch.float64): 1e-12,  # 1e-15
    ("cpu", torch.float32): 2e-5,  # 2e-6
    ("cpu", torch.bfloat16): 3e-2,  # 2.6e-2
    ("cuda", torch.float32): 1e-4,
    ("cuda", torch.bfloat16): 3e-2,
}
LADDER = (
    1e-9  # accelerated models against references in float64; the worst error measured is 1.1e-12
)
STEP, OPERATION = (
    1e-5,
    1e-6,
)  # finite differences of operations: every entry of every input; the tolerance
MODEL_STEPS, MODEL_TOLERANCE = (
    (1e-6, 1e-7),
    2e-6,
)  # of models; the second step is for a kink of ReLU inside the first
SIZES = st.sampled_from(
    [0.0, 1.0, 30.0]
)  # of queries: all scores are equal, usual ones, a softmax of nearly 0 and 1
RNG = np.random.default_rng(3)


def as_array(value):
    return (
        value.detach().double().cpu().numpy()
        if hasattr(value, "detach")
        else np.asarray(value, dtype=np.float64)
    )


def relative_error(expected, actual):
    """The largest difference divided by the largest expected magnitude of the whole tensor."""
    if expected.size == 0:
        return 0.0
    return float(np.abs(actual - expected).max() / max(np.abs(expected).max(), 1e-30))


def measured(error, tolerance):
    """Called with the error of every tensor that is compared; tests/tools/trust.py gathers them."""


def row(name, expected, actual, tolerance):
    """A line of the table, which ends with FAIL if the two do not agree; None is a missing row."""
    if expected is None or actual is None:
        return f"{name:<44} only in {'actual' if expected is None else 'expected'}  FAIL"
    expected, actual = as_array(expected), as_array(actual)
    if expected.shape != actual.shape:
        return f"{name:<44} shape {actual.shape}, expected {expected.shape}  FAIL"
    if not (np.isfinite(expected).all() and np.isfinite(actual).all()):
        return f"{name:<44} not finite  FAIL"
    if not expected.any():  # no relative error possible: zero must be exactly zero
        return f"{name:<44} exactly zero{'  FAIL' if actual.any() else ''}"
    error = relative_error(expected, actual)
    measured(error, tolerance)
    at = ",".join(map(str, np.unravel_index(np.abs(actual - expected).argmax(), expected.shape)))
    return f"{name:<44} {error:.1e} at [{at}], {error / tolerance:.1%} of tolerance{'' if error <= tolerance else '  FAIL'}"


def assert_agree(expected, actual, tolerance, title=""):
    """Compare two {name: array or tensor}; print the table, and fail unless all rows are present and within tolerance."""
    assert expected, f"{title}: nothing was compared"
    lines = [
        row(name, expected.get(name), actual.get(name), tolerance)
        for name in sorted(expected.keys() | actual.keys())
    ]
    print(title, *lines, sep="\n")
    failed = [line for line in lines if line.endswith("FAIL")]
    assert not failed, "\n".join([title, *failed])


def named(prefix, state, between="."):
    """A state's fields as {name: tensor}."""
    return {
        f"{prefix}{between}{name}": field for name, field in zip(state._fields, state, strict=True)
    }


# Slow definitions


def brute_force_softmax(scores):
    """The softmax of a list of numbers."""
    exps = [math.exp(score - max(scores)) for score in scores]
    return [value / sum(exps) for value in exps]


def slow_bucket(distance, buckets, furthest):
    """The bucket of one distance by T5's rule, in fractions: log(distance / half) / log(furthest / half) needs no logarithm.

    Half of the buckets hold one distance each. Of the others it is the k-th with the largest k for which
    (distance / half)^half >= (furthest / half)^k, and the last one from `furthest` on.
    """
    half = buckets // 2
    if distance < half:
        return distance
    ratio, longest = Fraction(distance, half) ** half, Fraction(furthest, half)
    return min(
        half + next(k for k in range(half + 1) if k == half or ratio < longest ** (k + 1)),
        buckets - 1,
    )


def beside_one(rows):
    """{name: array} flat, with a one at the end, so that errors are relative to at least 1.

    A softmax of nearly 0 and 1, or one that cancels what it is given, leaves gradients that are all rounding.
    """
    return {name: np.append(as_array(row).ravel(), 1.0) for name, row in rows.items()}


# Finite differences of the hand-written backward passes, in float64


def draw(*shape):
    """Normal random numbers."""
    return RNG.standard_normal(shape)


def check_operation(forward, backward, inputs, title=""):
    """Compare an operation's backward with central differences in every entry of every input.

    forward(**inputs) returns (out, cache). backward(dout, cache) returns {input: gradient}, one gradient, or gradients in the
    order of the inputs, of which the last may be a dict of all that remain.
    """
    out, cache = forward(**inputs)
    dout = draw(*np.shape(out))
    found = backward(dout, cache)
    *first, last = found if isinstance(found, tuple) else (found,)
    leading, rest = (first, last) if isinstance(last, dict) else ([*first, last], {})
    found = dict(zip(inputs, leading, strict=False)) | rest
    numeric = {name: np.zeros_like(value) for name, value in inputs.items()}
    for name, value in inputs.items():
        for index in np.ndindex(value.shape):
            ends = [value.copy(), value.copy()]
            ends[0][index] -= STEP
            ends[1][index] += STEP
            below, above = ((forward(**inputs | {name: end})[0] * dout).sum() for end in ends)
            numeric[name][index] = (above - below) / (2 * STEP)
    assert_agree(numeric, found, OPERATION, title)


def check_directions(objective, inputs, gradients, rng, title=""):
    """Compare the derivative of objective(inputs) along a random direction through all inputs with that by gradients.

    An input moves by as much as makes its share of the derivative about 1, so that none hides behind another. If the sums differ,
    each input is compared by itself, so that the wrong one is named.
    """
    inputs = {name: value for name, value in inputs.items() if value.size}
    directions, by_hand = {}, {}
    for name, value in inputs.items():
        scale = min(10.0, 1 / max(np.linalg.norm(gradients[name]), 1e-9))
        directions[name] = scale * rng.standard_normal(value.shape)
        by_hand[name] = (gradients[name] * directions[name]).sum()

    def numeric(names, step):
        ends = [
            objective(inputs | {n: inputs[n] + sign * step * directions[n] for n in names})
            for sign in (1, -1)
        ]
        return (ends[0] - ends[1]) / (2 * step)

    size, total = (
        np.sqrt(len(inputs)),
        sum(by_hand.values()),
    )  # size: what the sum's error is relative to
    found = min(
        (numeric(inputs, step) for step in MODEL_STEPS), key=lambda value: abs(value - total)
    )
    if not abs(found - total) <= MODEL_TOLERANCE * size:
        apart = {name: np.array([1.0, numeric([name], MODEL_STEPS[1])]) for name in inputs}
        assert_agree(
            apart, {name: np.array([1.0, by_hand[name]]) for name in inputs}, MODEL_TOLERANCE, title
        )
    assert_agree(
        {"derivative": np.array([size, found])},
        {"derivative": np.array([size, total])},
        MODEL_TOLERANCE,
        title,
    )
