"""The comparison table fails when it should."""

import numpy as np
import pytest

from tests.helpers.comparison import assert_agree

ONE = {"a": np.ones((2, 3))}
WRONG = {  # {what is wrong: (expected, actual)}
    "over tolerance": (ONE, {"a": np.ones((2, 3)) * (1 + 1e-6)}),
    "NaN": (ONE, {"a": np.full((2, 3), np.nan)}),
    "NaN on both sides": ({"a": np.array([np.nan])}, {"a": np.array([np.nan])}),
    "shape": (ONE, {"a": np.ones((3, 2))}),
    "missing row": (ONE, {}),
    "extra row": (ONE, ONE | {"b": np.ones(1)}),
    "nothing compared": ({}, {}),
    "not exactly zero": ({"a": np.zeros(2)}, {"a": np.array([0, 1e-20])}),
}


@pytest.mark.parametrize("what", WRONG)
def test_disagreement_fails(what):
    with pytest.raises(AssertionError):
        assert_agree(*WRONG[what], 1e-9)
    assert_agree(ONE, {"a": np.ones((2, 3)) * (1 + 1e-10)}, 1e-9)
