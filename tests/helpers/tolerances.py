"""The tolerances for fast paths and devices, compared with plain paths on the CPU; and for models against references."""

from accelerated.lab.speed.agreement import TOLERANCE

__all__ = ["LADDER", "TOLERANCE"]

LADDER = 1e-9  # accelerated models against references in float64; the worst error measured is 1.1e-12
