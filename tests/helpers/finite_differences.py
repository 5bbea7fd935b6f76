"""Finite differences for the references' hand-written backward passes, in float64."""

import numpy as np

from tests.helpers.comparison import assert_agree

STEP, TOLERANCE = 1e-5, 1e-6  # of operations: every entry of every input
MODEL_STEPS, MODEL_TOLERANCE = (1e-6, 1e-7), 2e-6  # of models; the second step is for a kink of ReLU inside the first
RNG = np.random.default_rng(3)


def draw(*shape):
    """Normal random numbers."""
    return RNG.standard_normal(shape)


def numeric_gradient(function, value):
    """Central differences of the scalar function at every entry of value."""
    gradient = np.zeros_like(value)
    for index in np.ndindex(value.shape):
        ends = []
        for sign in (1, -1):
            shifted = value.copy()
            shifted[index] += sign * STEP
            ends.append(function(shifted))
        gradient[index] = (ends[0] - ends[1]) / (2 * STEP)
    return gradient


def check_operation(forward, backward, inputs, title=""):
    """Compare an operation's backward with central differences in every entry of every input.

    forward(**inputs) returns (out, cache). backward(dout, cache) returns {input: gradient}, one gradient, or gradients in the
    order of the inputs, of which the last may be a dict of all that remain.
    """
    out, cache = forward(**inputs)
    dout = draw(*np.shape(out))
    found = backward(dout, cache)
    if not isinstance(found, dict):
        *first, last = found if isinstance(found, tuple) else (found,)
        leading, rest = (first, last) if isinstance(last, dict) else ([*first, last], {})
        found = dict(zip(inputs, leading, strict=False)) | rest
    numeric = {
        name: numeric_gradient(lambda shifted, name=name: (forward(**(inputs | {name: shifted}))[0] * dout).sum(), value)
        for name, value in inputs.items()
    }
    assert_agree(numeric, found, TOLERANCE, title)


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
        ends = [objective(inputs | {n: inputs[n] + sign * step * directions[n] for n in names}) for sign in (1, -1)]
        return (ends[0] - ends[1]) / (2 * step)

    size, total = np.sqrt(len(inputs)), sum(by_hand.values())  # size: what the sum's error is relative to
    found = min((numeric(inputs, step) for step in MODEL_STEPS), key=lambda value: abs(value - total))
    if not abs(found - total) <= MODEL_TOLERANCE * size:
        apart = {name: np.array([1.0, numeric([name], MODEL_STEPS[1])]) for name in inputs}
        assert_agree(apart, {name: np.array([1.0, by_hand[name]]) for name in inputs}, MODEL_TOLERANCE, title)
    assert_agree({"derivative": np.array([size, found])}, {"derivative": np.array([size, total])}, MODEL_TOLERANCE, title)
