"""The one table of tolerances of fast paths and devices against plain paths on the CPU."""

import torch

# relative error of outputs and gradients, by device and dtype; the worst measured stands beside each number
TOLERANCE = {
    ("cpu", torch.float64): 1e-12,  # 1e-15
    ("cpu", torch.float32): 2e-5,  # 2e-6
    ("cuda", torch.float32): 1e-4,
    ("cuda", torch.bfloat16): 3e-2,
}
LADDER = 1e-9  # of the accelerated models against the references in float64; the worst measured is 1e-13
