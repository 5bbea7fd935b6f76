"""A GPU gives a CPU's numbers. Its branches on a CPU: attention/test_sdpa.py."""

import dataclasses

import numpy as np
import pytest
import torch

from tests.helpers.comparison import TOLERANCE, assert_agree
from tests.helpers.reading import computed
from tests.helpers.variants import EVERY_VARIANT, PAPERS, over, variant

LANES = 16
# By how much a GPU's numbers in bfloat16 may be further from float32 than a CPU's are. Of the tiny
# models some are ill-conditioned: a ReLU near zero flips, and the gradients' error is 0.3
FURTHER = 2.0
BESIDES = 0.01


def results(paper, name, device, kind):
    """What a variant computes on a device: (outputs, gradients), each by name."""
    config = dataclasses.replace(variant(paper, name), dropout=0.0)
    shape = (2, LANES, config.segment)
    tokens = torch.tensor(np.random.default_rng(5).integers(config.vocabulary, size=shape))
    model = PAPERS[paper].model(config, seed=9).to(device)
    return computed(model, tokens.to(device), kind)


def mean_error(expected, found):
    """The mean over tensors of their relative error, each at most 1.

    A tensor that is rounding beside the others does not count.
    """
    total = torch.cat([tensor.flatten() for tensor in expected.values()]).norm()
    errors = []
    for name, tensor in expected.items():
        if tensor.norm() > 1e-6 * total:
            error = (tensor - found[name]).norm() / tensor.norm()
            errors.append(min(1.0, error.item()))
    return sum(errors) / len(errors)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@over(EVERY_VARIANT)
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_gpu_gives_what_the_cpu_gives(paper, name, kind):
    """Logits, states, losses and gradients, and a Stepper's logits.

    In float32 they are a CPU's, in bfloat16 as near to these as a CPU comes.
    """
    torch.set_default_dtype(torch.float32)
    cpu = torch.device("cpu")
    exact = results(paper, name, cpu, torch.float32)
    rough = results(paper, name, cpu, kind)
    found = results(paper, name, torch.device("cuda"), kind)
    for what, *rows in zip(("outputs", "gradients"), exact, rough, found, strict=True):
        expected, of_a_cpu, given = rows
        if kind == torch.float32:
            assert_agree(expected, given, TOLERANCE["cuda", kind], f"{name}, {what}")
            continue
        own = mean_error(expected, of_a_cpu)
        error = mean_error(expected, given)
        message = f"the {what} have a mean error of {error:.3f}, on a CPU of {own:.3f}"
        assert error <= FURTHER * own + BESIDES, message
