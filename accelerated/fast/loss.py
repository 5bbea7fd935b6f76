"""Summed -log p of targets, with gradients at once: no logits are kept for a backward pass.

It replaces a softmax whose logits are made a second time in the backward pass. On a GPU one kernel
makes a chunk's loss and gradient (loss_gpu.py).
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from accelerated.fast.devices import aligned, takes_kernels
from accelerated.replay import IGNORED

CHUNK_OF_KERNEL = 2**28  # logits at once, if the kernel takes them: half a GB in 16 bits


class ChunkedCrossEntropy(torch.autograd.Function):
    """Summed -log p of targets (R,) from hidden (R, D) and the output matrix (V, D), in chunks.

    It keeps no logits (R, V). Each chunk's logits give its gradients at once, so that they need not
    be made again; backward only scales the gradients.
    """

    @staticmethod
    def forward(ctx, hidden, matrix, targets, rows):
        exact = torch.promote_types(matrix.dtype, torch.float32)  # of sums over chunks
        words = len(matrix)
        matrix = aligned(matrix)  # (V', D)
        counts = (targets != IGNORED)[:, None]  # (R, 1)
        counted = hidden * counts  # ignored rows are zero
        total = 0.0
        dhidden = torch.empty_like(hidden)
        dmatrix: Any = None  # until the first chunk; split gives one even of no rows
        given = (hidden, targets, counted, dhidden)
        for chunk, of_chunk, rows_counted, dchunk in zip(
            *(x.split(rows) for x in given), strict=True
        ):
            logits = functional.linear(chunk, matrix)  # (n, V')
            nats, dlogits = loss_and_gradient(logits, of_chunk, words)
            total = total + nats
            torch.mm(dlogits, matrix, out=dchunk)
            product = dlogits.T @ rows_counted
            dmatrix = product if dmatrix is None else dmatrix.to(exact).add_(product)
        dhidden *= counts
        ctx.save_for_backward(dhidden, dmatrix[:words].to(matrix.dtype))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, dnats):
        dhidden, dmatrix = ctx.saved_tensors
        return dhidden * dnats, dmatrix * dnats, None, None


def loss_and_gradient(logits: Tensor, targets: Tensor, words: int) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy in nats, float32 or better, and its gradient w.r.t. logits (n, V').

    The gradient is softmax(logits), less 1 at the target. Columns from `words` on are padding.
    Logits may be overwritten. A row whose target is IGNORED adds nothing to the sum; its gradient
    is zero from the kernel, and meaningless from the plain path.
    """
    if takes_kernels(logits):
        from accelerated.fast.loss_gpu import loss_in_place  # Triton: on a GPU alone

        return loss_in_place(logits, targets, words, IGNORED).sum(), logits

    if logits.shape[1] > words:
        logits[:, words:] = -math.inf
    exact = torch.promote_types(logits.dtype, torch.float32)
    logs = logits.log_softmax(-1, dtype=exact)
    nats = functional.nll_loss(logs, targets, reduction="sum", ignore_index=IGNORED)
    p = logs.exp_()
    target = targets.clamp(min=0)[:, None]
    # Not scatter_add_: a GPU adds by atomics
    return nats, p.scatter_(1, target, p.gather(1, target) - 1).to(logits.dtype)
