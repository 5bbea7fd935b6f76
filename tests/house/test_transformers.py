"""Beside the package transformers: its gated delta rule, and memory replay of one of its decoders.

Importing its models takes seconds. Gated DeltaNet's rule is tested without it, too.
"""

import re

import numpy as np
import pytest
import torch

from tests.conftest import ROOT
from tests.helpers.comparison import assert_agree
from tests.test_gated_deltanet import by_rule, by_tokens, chunks, random_inputs

FLOAT32 = 1e-4  # the package computes in it


@pytest.mark.parametrize("kind", ["recurrent", "chunk"])
def test_its_gated_delta_rule_computes_the_same(kind):
    """Its gated delta rule, of Qwen3-Next, in float32; it scales queries by 1 / sqrt(E) itself."""
    name = "transformers.models.qwen3_next.modeling_qwen3_next"
    package = pytest.importorskip(name, reason="the package transformers has no Qwen3-Next here")
    rule = getattr(package, f"torch_{kind}_gated_delta_rule")

    def theirs(query, key, value, strength, decay, matrix):
        rows = [x.transpose(1, 2) for x in (query * 5**0.5, key, value)]
        gates = [x[..., 0].transpose(1, 2) for x in (decay.log(), strength)]
        read, after = rule(*rows, *gates, initial_state=matrix, output_final_state=True)
        return read.transpose(1, 2), after

    inputs = {n: x.astype(np.float32) for n, x in random_inputs(100).items()}
    rng = np.random.default_rng(1)
    shapes = ((2, 3, 100, 7), (2, 3, 5, 7))
    arriving = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    expected = by_rule(theirs, inputs, arriving)
    exact = {n: x.astype(np.float64) for n, x in inputs.items()}
    assert_agree(expected, by_tokens(exact, arriving), FLOAT32, "reference")
    assert_agree(expected, by_rule(chunks, inputs, arriving), FLOAT32, "chunks")


def test_the_recipe_of_a_decoder_of_transformers():
    """docs/library.md's, which the test of the page leaves out: not everybody has the package."""
    pytest.importorskip("transformers")
    torch.set_default_dtype(torch.float32)
    page = (ROOT / "docs" / "library.md").read_text()
    [code] = re.findall(r"^```py\n(.*?)^```$", page, re.M | re.S)
    exec(code, {})
