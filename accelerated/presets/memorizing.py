"""Presets of the Memorizing Transformer; imports no torch."""

from accelerated.presets import (
    AGREEMENT_SIZES,
    ASSOCIATION,
    BENCHMARK_SIZES,
    BUCKETS,
    TEST_SIZES,
)
from accelerated.presets.block_recurrent import BLOCK_RECURRENT
from reference.memorizing import Config

EVALUATION_SIZES = ("memory",)  # eval.py can change them after training

# The same, section 4.6 and Table 1: "all hyperparameters were all set identically to the XL:512
# baseline", and a memory of 32k. The Memorizing Transformer's own paper has 32 keys a query and the
# lookup in layer 9 of 12
LEFT_OUT = ("window", "recurrent_layers", "states")
SHARED = {name: value for name, value in BLOCK_RECURRENT.items() if name not in LEFT_OUT}
MEMORIZING = SHARED | {  # 61 GB
    "segment": 512, "memory_layer": 9, "memory": 32_768, "retrieved": 32,
    "batch": 256, "accumulate": 8,
}  # fmt: skip

RECALL = {
    "width": 64, "layers": 2, "head_width": 16, "feed_forward": 256, "segment": 64,
    "memory_layer": 2, "memory": 512, "retrieved": 8, "dropout": 0.0,
    "steps": 3000, "learning_rate": 3e-3, "warmup": 50,
}  # fmt: skip

PRESETS = {
    "tiny": {
        "width": 128, "layers": 3, "segment": 64, "memory_layer": 2, "memory": 1024,
        "retrieved": 16, "dropout": 0.0,
        "steps": 1000, "batch": 32, "learning_rate": 4e-3, "validation_tokens": 65_536,
    },
    "paper": MEMORIZING | {"data": "pg19"},
    "recall": RECALL | ASSOCIATION | {"batch": 64},
    # The first rung: four facts, asked for up to 256 tokens later, of keys with values of their own
    "recall-16": RECALL | {
        "batch": 16, "data": "recall", "recall_distance": 256, "recall_questions": 32,
        "recall_spacing": 2, "recall_vary_distance": True, "recall_own_values": True,
    },
}  # fmt: skip

TEST_CONFIG = Config(
    **TEST_SIZES,
    layers=3,
    **BUCKETS,
    width=6,
    head_width=5,
    segment=4,
    memory_layer=2,
    memory=13,
    retrieved=10,
)
BENCHMARK = {  # lab/speed/variants.py says what these are
    "sizes": BENCHMARK_SIZES
    | {
        "layers": 6,
        "head_width": 64,
        "segment": 128,
        "memory_layer": 4,
        "memory": 2048,
        "retrieved": 32,
        "dropout": 0.0,
    },
    "small": AGREEMENT_SIZES | {"layers": 2, "segment": 32, "memory_layer": 2, "memory": 48},
    "segments": 8,
    "lanes": {"cpu": 4, "cuda": 8},
    "baseline": ("Transformer-XL", lambda config: {"memory": 0}),
    "preset": "paper",
}
