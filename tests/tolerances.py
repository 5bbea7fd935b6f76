"""The tolerances for fast paths and devices, compared with plain paths on the CPU."""

import torch

# relative error of outputs and gradients, by device and dtype; the comment is the worst error measured
TOLERANCE = {
    ("cpu", torch.float64): 1e-12,  # 1e-15
    ("cpu", torch.float32): 2e-5,  # 2e-6
    ("cuda", torch.float32): 1e-4,
    ("cuda", torch.bfloat16): 3e-2,
}
LADDER = 1e-9  # accelerated models against references in float64; the worst error measured is 1e-13
