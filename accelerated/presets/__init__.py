"""One file for each model: all that others must know of it without loading it.

What several share stands here.
"""

from typing import Any, ClassVar, Protocol

ON_A_GPU = {"dtype": "bfloat16"}
# Whose key a value is, is learned from few facts and near questions first
ASSOCIATION = {"recall_vary_pairs": True, "recall_vary_distance": True}
# The first rung: four facts, asked for up to 256 tokens later, of keys with values of their own
FAR = {
    "data": "recall", "recall_distance": 256, "recall_questions": 32, "recall_spacing": 2,
    "recall_vary_distance": True, "recall_own_values": True,
}  # fmt: skip
# The sizes that lab/speed measures on a CPU, and those that it compares with a CPU; each model's
# SPEED has the rest
MEASURED: dict[str, Any] = {"width": 256, "heads": 4, "feed_forward": 1024}
COMPARED: dict[str, Any] = {"width": 128, "heads": 2, "feed_forward": 256}
# Of each model's SMALL, which tests and gradients use: all sizes differ. Some models have buckets
# of distances
TESTED: dict[str, Any] = {"vocabulary": 11, "heads": 2, "feed_forward": 7}
BUCKETED: dict[str, Any] = {"buckets": 6, "max_distance": 5, "attention_scale": 3.0, "dropout": 0.0}


class ModelConfig(Protocol):
    """What the Config of every model has; it is a frozen dataclass of the model's reference."""

    __dataclass_fields__: ClassVar[dict]

    @property
    def vocabulary(self) -> int: ...  # V
    @property
    def segment(self) -> int: ...  # N
    @property
    def width(self) -> int: ...  # D
    @property
    def dropout(self) -> float: ...
