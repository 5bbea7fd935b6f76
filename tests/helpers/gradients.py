"""Finite differences for the references' hand-written backward passes, in float64."""

import numpy as np

from tests.helpers.comparison import assert_agree

STEP = 1e-5  # of central differences of operations
MODEL_STEP = 3e-6  # of differences along directions through models, where all entries move at once
TOLERANCE = 1e-6  # of full Jacobians of operations
MODEL_TOLERANCE = 2e-5  # of random directions through whole models; the worst measured is 3.4e-6


def numeric_gradient(function, value):
    """Central differences of the scalar function at every entry of value."""
    gradient = np.zeros_like(value)
    for index in np.ndindex(value.shape):
        shifted = value.copy()
        shifted[index] += STEP
        above = function(shifted)
        shifted[index] -= 2 * STEP
        gradient[index] = (above - function(shifted)) / (2 * STEP)
    return gradient


def check_jacobian(function, inputs, gradients, title):
    """Compare {name: gradient} with central differences of the scalar function(**inputs) in every entry of every input."""
    numeric = {
        name: numeric_gradient(lambda shifted, name=name: function(**(inputs | {name: shifted})), value)
        for name, value in inputs.items()
    }
    assert_agree(numeric, {name: gradients[name] for name in inputs}, TOLERANCE, title)


def check_directions(function, inputs, gradients, rng, title):
    """Compare derivatives along one random direction of every input, for functions too large for a full Jacobian."""
    numeric, analytic = {}, {}
    for name, value in inputs.items():
        direction = rng.standard_normal(value.shape)
        ends = [function(inputs | {name: value + sign * MODEL_STEP * direction}) for sign in (1, -1)]
        numeric[name] = np.array([(ends[0] - ends[1]) / (2 * MODEL_STEP)])
        analytic[name] = np.array([(gradients[name] * direction).sum()])
    assert_agree(numeric, analytic, MODEL_TOLERANCE, title)


RNG = np.random.default_rng(3)


def draw(*shape):
    return RNG.standard_normal(shape)


def check_operation(forward, backward, inputs, title):
    """Check backward(dout, cache) -> {name: gradient} of forward(**inputs) -> (out, cache)."""
    out, cache = forward(**inputs)
    dout = draw(*np.shape(out))
    gradients = backward(dout, cache)
    check_jacobian(lambda **given_inputs: (forward(**given_inputs)[0] * dout).sum(), inputs, gradients, title)


def flat(gradients, names):
    """Turn (dx, dy, {name: dparam}) into {name: gradient}, with the given names for the leading entries."""
    *leading, params = gradients
    return dict(zip(names, leading, strict=True)) | params


def movable(inputs):
    """The inputs that have a gradient: all except key biases, which have their own test."""
    return {name: value for name, value in inputs.items() if not name.endswith("key_bias")}


def nested(params):
    """Replace dots in names, so that the names can be keyword arguments."""
    return {name.replace(".", "__"): value for name, value in params.items()}


def dotted(params):
    """The inverse of nested."""
    return {name.replace("__", "."): value for name, value in params.items()}
