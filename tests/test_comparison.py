"""The comparison table fails when it should."""

import numpy as np
import pytest

from tests.helpers.comparison import assert_agree

ONE = {"a": np.ones((2, 3))}


def test_equal_tensors_pass():
    assert_agree(ONE, {"a": np.ones((2, 3))}, 1e-12)


@pytest.mark.parametrize(
    "actual",
    [
        {"a": np.ones((2, 3)) * (1 + 1e-6)},
        {"a": np.full((2, 3), np.nan)},
        {"a": np.ones((3, 2))},
        {},
        {"a": np.ones((2, 3)), "b": np.ones(1)},
    ],
    ids=["over tolerance", "NaN", "shape", "missing row", "extra row"],
)
def test_disagreement_fails(actual):
    with pytest.raises(AssertionError):
        assert_agree(ONE, actual, 1e-9)


def test_nan_on_both_sides_fails():
    with pytest.raises(AssertionError):
        assert_agree({"a": np.array([np.nan])}, {"a": np.array([np.nan])}, 1e-9)


def test_nothing_compared_fails():
    with pytest.raises(AssertionError):
        assert_agree({}, {}, 1e-9)


def test_expected_zero_must_be_zero():
    with pytest.raises(AssertionError):
        assert_agree({"a": np.zeros(2)}, {"a": np.array([0, 1e-20])}, 1e-9)
