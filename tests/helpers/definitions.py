"""Slow definitions, one number at a time, to compare reference and accelerated code with."""

import math


def brute_force_softmax(scores):
    """The softmax of a list of numbers."""
    exps = [math.exp(score) for score in scores]
    return [value / sum(exps) for value in exps]


def slow_bucket(distance, buckets, furthest):
    """The bucket of one distance by T5's rule."""
    half = buckets // 2
    if distance < half:
        return distance
    step = int(math.log(distance / half) / math.log(furthest / half) * (buckets - half) + 1e-12)
    return min(half + step, buckets - 1)
