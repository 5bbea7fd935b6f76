"""The gradients in reference/ are written by hand. Finite differences show that they are right.

Every model reads some segments in the middle of a document, while other documents begin in other
lanes. All parameters and the first state move along a random direction, by a small step h either
way. Then (loss(+h) - loss(-h)) / 2h must be the sum of gradient times direction. One wrong number
in any gradient would show; the failure then says which. `pytest -s` prints both sums.

Some papers stop gradients: Compressive's memories, for example, are written without gradient. Such
values are constants here: they are held fixed while everything else moves.
"""

import numpy as np
import pytest
from hypothesis import given, note
from hypothesis import strategies as st

from accelerated.models import NAMES
from reference.gradients import Case, holding_what_is_stopped, inputs_of, worst_entry
from reference.rollout import rollout_backward, rollout_forward
from tests.conftest import examples
from tests.start_here.strategies import rollouts, settings_of

STEPS = (1e-6, 1e-7, 1e-8)  # h; a ReLU's kink, or a key of length 0, may lie inside the first
TOLERANCE = 2e-6  # the largest error of an array whose share is about 1; NumPy computes in float64


@pytest.mark.parametrize("name", NAMES)
@examples(5)
@given(data=st.data())
def test_hand_written_gradients_are_finite_differences(name, data):
    """Of every parameter and of the first state, of the loss and all auxiliary losses."""
    setting = data.draw(settings_of(name))
    segments = data.draw(rollouts(setting))
    note(f"{setting.config}")
    check_gradients(name, Case(*setting[:4], segments), setting.rng)


def check_gradients(name, case, rng):
    """Fail, naming the number, unless the sums by hand and by differences are equal."""
    reference, config, params, state, segments = case
    _, caches, _ = rollout_forward(reference, params, config, segments, state)
    by_hand = inputs_of(*rollout_backward(reference, params, config, caches))
    inputs = inputs_of(params, state)
    assert by_hand.keys() == inputs.keys(), f"{name}: not all has a gradient, or more has"

    direction = {}
    for key, grad in by_hand.items():
        scale = min(10.0, 1 / max(np.linalg.norm(grad), 1e-9))  # so that no array hides another
        direction[key] = scale * rng.standard_normal(grad.shape)
    share = {key: (grad * direction[key]).sum() for key, grad in by_hand.items()}
    total = sum(share.values())
    with holding_what_is_stopped(case) as objective:
        for step in STEPS:
            numeric = derivative(objective, inputs, direction, step)
            if abs(numeric - total) <= TOLERANCE * np.sqrt(len(inputs)):
                print(f"\n{name:<24} by hand {total:+.9e}  differences {numeric:+.9e}", end="")
                return
        apart = {}
        for key in inputs:
            alone = derivative(objective, inputs, {key: direction[key]}, STEPS[1])
            apart[key] = np.nan_to_num(abs(alone - share[key]), nan=np.inf)
    worst = max(apart, key=apart.get)
    _, at, wrong, right = worst_entry(case, worst, by_hand[worst])
    raise AssertionError(
        f"{name}: {worst} at {[*map(int, at)]} is {wrong:.6g} by hand and {right:.6g} by "
        "differences. A backward function on the way there is not the derivative of its forward: "
        f"see python -m {reference.__name__} --check"
    )


def derivative(objective, inputs, direction, step):
    """(objective(+h) - objective(-h)) / 2h along {name: direction}."""
    ends = []
    for sign in (1, -1):
        moved = {key: inputs[key] + sign * step * array for key, array in direction.items()}
        ends.append(objective(inputs | moved))
    return (ends[0] - ends[1]) / (2 * step)
