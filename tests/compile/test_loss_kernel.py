"""A GPU's kernel for a softmax's loss equals the plain path: here by Triton's interpreter."""

import pytest
import torch

from accelerated.loss import chunks
from tests.compile.test_kernels import DEVICE, DTYPE, ON_A_GPU, needs_kernels

pytest.importorskip("triton", reason="Triton comes with torch's builds for CUDA")
IGNORED = -100


@pytest.mark.parametrize("rows, words, columns", [(5, 7, 7), (3, 4096, 4160), (4, 9001, 9024)])
def test_the_kernel_equals_the_plain_path(rows, words, columns):
    """Nats and gradient: of the first and the last word, of an ignored row, of extreme logits."""
    needs_kernels()
    from accelerated.loss.on_a_gpu import nats_in_place

    torch.manual_seed(0)
    logits = 3 * torch.randn(rows, columns, device=DEVICE)
    logits[0] *= 1e4
    logits = logits.to(DTYPE)
    targets = torch.tensor([words - 1, IGNORED, 0, words // 2, 1][:rows], device=DEVICE)
    expected, gradient = chunks.nats_and_gradient(logits.double(), targets, words, IGNORED)
    gradient[1] = 0.0
    found = nats_in_place(logits, targets, words, IGNORED)
    assert found[1] == 0.0, "an ignored row counts"
    torch.testing.assert_close(found.double().sum(), expected, rtol=1e-5, atol=1e-4)
    tolerance = 5e-3 if ON_A_GPU else 1e-6
    torch.testing.assert_close(logits.double(), gradient, rtol=tolerance, atol=tolerance)
