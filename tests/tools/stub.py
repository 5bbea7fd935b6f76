"""A plugin for a stub of CUDA, which computes nothing: pytest -p tests.tools.stub.

Comparisons and finite checks are off.
"""

import math

import torch

from accelerated.generation import continuation
from tests.helpers import comparison

comparison.assert_agree = lambda *given: None  # before a test file takes it
torch.isfinite = torch.Tensor.isfinite = lambda x: torch.ones(1, dtype=torch.bool)
math.isfinite = lambda number: True
continuation.draw = lambda logits, sampling, generator: torch.zeros(
    len(logits), dtype=torch.int64
).to(logits.device)
