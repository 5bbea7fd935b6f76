"""Presets of Gated DeltaNet; imports no torch."""

from accelerated.presets import AGREEMENT_SIZES, ASSOCIATION, BENCHMARK_SIZES, TEST_SIZES
from reference.gated_deltanet import Config

PRESETS = {
    "tiny": {
        "width": 128, "layers": 3, "segment": 64, "dropout": 0.0,
        "steps": 1000, "batch": 32, "learning_rate": 4e-3, "validation_tokens": 65_536,
    },
    "recall": ASSOCIATION | {
        "width": 64, "layers": 2, "head_width": 16, "value_width": 32, "feed_forward": 128,
        "segment": 64, "dropout": 0.0,
        "steps": 3000, "batch": 64, "learning_rate": 3e-3, "warmup": 50,
    },
}  # fmt: skip

TEST_CONFIG = Config(**TEST_SIZES, layers=3, width=6, head_width=5, value_width=8, segment=4)
BENCHMARK = {  # lab/speed/variants.py says what these are
    "sizes": BENCHMARK_SIZES
    | {"layers": 6, "head_width": 64, "value_width": 64, "segment": 128, "dropout": 0.0},
    "small": AGREEMENT_SIZES | {"layers": 2, "segment": 32},
    "segments": 8,
    "lanes": {"cpu": 4, "cuda": 8},
}
