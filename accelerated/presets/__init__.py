"""One file for each model: all that others must know of it without loading it.

What several share stands here.
"""

from typing import Any

ON_A_GPU = {"dtype": "bfloat16"}
# Four facts that are asked for 256 tokens later. Recurrent models learn it only if most questions
# are nearer
FAR = {
    "data": "recall", "recall_distance": 256, "recall_questions": 32, "recall_spacing": 2,
    "recall_vary_distance": True,
}  # fmt: skip
# The sizes that lab/speed measures on a CPU, and those that it compares with a CPU; each model's
# SPEED has the rest
MEASURED: dict[str, Any] = {"width": 256, "heads": 4, "feed_forward": 1024}
COMPARED: dict[str, Any] = {"width": 128, "heads": 2, "feed_forward": 256}
# Of each model's SMALL, which tests and gradients use: all sizes differ. Some models have buckets
# of distances
TESTED: dict[str, Any] = {"vocabulary": 11, "heads": 2, "feed_forward": 7}
BUCKETED: dict[str, Any] = {"buckets": 6, "max_distance": 5, "attention_scale": 3.0, "dropout": 0.0}
