"""The comparison of tensors fails when it should, and says what differs, where, and by how much."""

import re

import numpy as np
import pytest

from tests.helpers.comparison import assert_agree
from tests.helpers.rollouts import both_sides, check_rollout, random_rows

ONE = {"a": np.ones((2, 3))}
BIGGER = np.array([[1.0, 1.0, 1.0], [1.0, 1.5, 1.0]])
NAN = {"a": np.array([np.nan])}
WRONG = {  # {what is wrong: (expected, actual, a part of the message)}
    "over tolerance": (ONE, {"a": np.ones((2, 3)) * (1 + 1e-6)}, "a relative error of 1.0e-06"),
    "one number": (ONE, {"a": BIGGER}, "a is 1.5 at [1, 1], expected 1:"),
    "NaN on both sides": (NAN, NAN, "a is nan at [0], expected nan"),
    "infinity": (ONE, {"a": BIGGER * np.inf}, "a is inf at [0, 0], expected 1"),
    "shape": (ONE, {"a": np.ones((3, 2))}, "a has shape (3, 2), expected (2, 3)"),
    "missing row": (ONE, {}, "a is missing"),
    "extra row": (ONE, ONE | {"b": np.ones(1)}, "b is not expected"),
    "nothing compared": ({}, {}, "nothing was compared"),
    "not exactly zero": ({"a": np.zeros(2)}, {"a": np.array([0, 1e-20])}, "a is 1e-20 at [1]"),
}


@pytest.mark.parametrize("what", WRONG)
def test_disagreement_fails(what):
    expected, actual, words = WRONG[what]
    with pytest.raises(AssertionError, match=re.escape(words)):
        assert_agree(expected, actual, 1e-9)


def test_the_first_module_that_differs_from_numpys_functions_is_named():
    """A layer of Memformer takes the writer's norm for that of its MLP."""
    sides = both_sides("memformer", "decoder-only")
    layer = sides.model.decoder.layers[1]
    layer.mlp_norm = layer.writer.norm
    words = "the first of PyTorch's results that NumPy has not is that of .*heads.LayerNorm"
    with pytest.raises(AssertionError, match=words):
        check_rollout("memformer", sides, random_rows(sides.config, sides.rng, count=1), "")
