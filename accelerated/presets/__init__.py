"""Presets of the models, a file for each, and what several share; imports no torch."""

from typing import Any, ClassVar, Protocol

ON_A_GPU = {"dtype": "bfloat16"}
# Whose key a value is, is learned from few facts and near questions first
ASSOCIATION = {"recall_vary_pairs": True, "recall_vary_distance": True}
# The sizes that lab/speed times on a CPU, and those with which it compares a GPU with a CPU
BENCHMARK_SIZES: dict[str, Any] = {"width": 256, "heads": 4, "feed_forward": 1024}
AGREEMENT_SIZES: dict[str, Any] = {"width": 128, "heads": 2, "feed_forward": 256}
# For each model's TEST_CONFIG, which tests and gradients use: all sizes differ. Some models have
# buckets of distances
TEST_SIZES: dict[str, Any] = {"vocabulary": 11, "heads": 2, "feed_forward": 7}
BUCKETS: dict[str, Any] = {"buckets": 6, "max_distance": 5, "attention_scale": 3.0, "dropout": 0.0}


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
