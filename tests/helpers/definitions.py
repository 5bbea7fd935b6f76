"""Slow definitions, one number at a time, to compare reference and accelerated code with, and sizes of what they read."""

import math
from fractions import Fraction

import numpy as np
from hypothesis import strategies as st

from tests.helpers.comparison import as_array

SIZES = st.sampled_from([0.0, 1.0, 30.0])  # of queries: all scores are equal, usual ones, a softmax of nearly 0 and 1


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
    return min(half + next(k for k in range(half + 1) if k == half or ratio < longest ** (k + 1)), buckets - 1)


def beside_one(rows):
    """{name: array} flat, with a one at the end, so that errors are relative to at least 1.

    A softmax of nearly 0 and 1, or one that cancels what it is given, leaves gradients that are all rounding.
    """
    return {name: np.append(as_array(row).ravel(), 1.0) for name, row in rows.items()}
