"""NumPy and PyTorch are one function, in every variant of every model.

A few segments are read in the middle of a document, while other documents begin in other lanes.
The reference's backward pass was written by hand; PyTorch's gradients are those of autograd. Both
must have the same logits, states, losses, auxiliary losses, gradients of every parameter, and the
gradient of the state that comes in. What differs first, in the order of computation, is named.
"""

import pytest
from hypothesis import given, note
from hypothesis import strategies as st

from accelerated.models import NAMES
from tests.conftest import examples
from tests.helpers.culprit import blaming
from tests.start_here.strategies import (
    by_numpy,
    compare,
    largest,
    plain_bptt,
    rollouts,
    settings_of,
)

RELATIVE = 1e-9  # to an array's largest number; float64 rounds at 1e-16
ABSOLUTE = 1e-10
MEANING = "PyTorch's is not NumPy's"


@pytest.mark.parametrize("name", NAMES)
@examples(5)
@given(data=st.data())
def test_numpy_equals_pytorch(name, data):
    """Logits, states, losses and every gradient, of drawn sizes."""
    setting = data.draw(settings_of(name))
    segments = data.draw(rollouts(setting))
    note(f"{setting.config}")
    expected = by_numpy(setting, segments)
    found = plain_bptt(setting, segments)
    assert found.keys() == expected.keys(), (
        f"one side alone has {sorted(found.keys() ^ expected.keys())}"
    )
    with blaming(setting, segments, plain_bptt):
        for key, right in expected.items():
            tolerance = RELATIVE * largest(right) + ABSOLUTE
            compare(f"{name}'s {key}", found[key], right, tolerance, MEANING)
