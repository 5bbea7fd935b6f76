"""Settings of every test: deterministic examples, double precision by default, two threads."""

import pytest
import torch
from hypothesis import settings

settings.register_profile("deterministic", deadline=None, derandomize=True, max_examples=25, print_blob=True)
settings.load_profile("deterministic")
torch.set_num_threads(2)


@pytest.fixture(autouse=True)
def double_precision():
    """Models are built in float64 unless a test says otherwise."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)
