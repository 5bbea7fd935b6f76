"""Presets of GPT-2 with recurrence; imports no torch."""

from dataclasses import dataclass

from accelerated.presets import AGREEMENT_SIZES, BENCHMARK_SIZES, TEST_SIZES
from reference.pretrained_recurrence import Config

EVALUATION_SIZES = ("segment", "overlap", "pool")  # eval.py can change them after training


@dataclass(frozen=True)
class DecoderConfig(Config):
    """The Config of recurrence in another decoder than GPT-2, whose feed_forward is its own.

    Fields:
        base: config.json of a decoder of the package transformers
    """

    base: str = ""


CHECKS = (
    (
        lambda given: hasattr(given.model_config, "base") and given.training.checkpoint_layers,
        "--checkpoint-layers is for GPT-2's layers; "
        "give --backprop checkpointed or memory_replay, or --accumulate",
    ),
    (
        lambda given: (
            hasattr(given.model_config, "base")
            and given.training.compile in ("inductor", "cudagraphs")
        ),
        "--compile is for GPT-2, and the weights of --init are another decoder's; leave it out",
    ),
)

# Adding Recurrence to Pretrained Transformers, section 5: windows of 300, 20 of them with gradient
# through z, insertion at layer 2, Adam with 100 steps of warm-up, then constant. Ours: learning
# rate and batch (not given), steps (the paper: 2 epochs), clipping (not mentioned) and dropout
# (GPT-2's 0.1). Sizes are GPT-2's published ones
GPT2_SIZES = {
    "gpt2": (12, 768),
    "gpt2-medium": (24, 1024),
    "gpt2-large": (36, 1280),
    "gpt2-xl": (48, 1600),
}  # layers, width
GPT2 = {
    "max_positions": 1024, "segment": 300, "dropout": 0.1,
    "tokenizer": "gpt2", "steps": 10_000, "batch": 8, "horizon": 20, "backprop": "memory_replay",
    "schedule": "constant", "warmup": 100, "learning_rate": 5e-5, "optimizer": "adam",
    "weight_decay": 0.0,
}  # fmt: skip
SMALL_GPT2 = {
    "width": 128,
    "layers": 4,
    "segment": 64,
    "max_positions": 256,
    "warmup": 100,
    "validation_tokens": 65_536,
}

RECALL = {
    "width": 64, "layers": 3, "feed_forward": 256, "segment": 16, "max_positions": 16,
    "module_width": 64,
    "steps": 1500, "batch": 32, "learning_rate": 2e-3, "warmup": 50,
}  # fmt: skip

PRESETS = {
    "tiny": SMALL_GPT2 | {"steps": 800, "batch": 32, "horizon": 2, "learning_rate": 3e-3},
    # The paper's method on a small scale: train a plain GPT-2, then add recurrence and fine-tune
    # with --init
    "pretrain": SMALL_GPT2 | {"vectors": 0, "steps": 1200, "batch": 64, "learning_rate": 2e-3},
    "fine-tune": SMALL_GPT2 | {"steps": 400, "batch": 16, "horizon": 4, "learning_rate": 1e-3},
    # Questions come in the window of the pairs and in the next four
    "recall": RECALL | {
        "horizon": 5, "recall_pairs": 1, "recall_distance": 8, "recall_questions": 16,
    },
    # First of two stages: four facts, asked for in their own window and in the next. Then --init
    # asks for them in later ones
    "recall-4": RECALL | {
        "heads": 8, "data": "recall", "recall_own_values": True, "steps": 700, "horizon": 2,
        "recall_pairs": 4, "recall_distance": 0, "recall_questions": 12, "recall_spacing": 2,
    },
} | {  # the published sizes; their heads are 64 wide
    name: GPT2 | {"width": width, "layers": layers, "heads": width // 64, "feed_forward": 4 * width}
    for name, (layers, width) in GPT2_SIZES.items()
}  # fmt: skip

# Section 5: GPT-2 small, given with --init, for 2 epochs. It is validated every 2 million tokens,
# which 42 steps read; best.pt is what early stopping would choose. Of PG-19 it reads the first 1250
# books, and the first 15,000 tokens of each book to validate on. As gpt2, 5 GB
FINE_TUNING = PRESETS["gpt2"] | {"epochs": 2.0, "validate_every": 42}
PRESETS |= {
    "wikitext-103": FINE_TUNING | {"data": "wikitext-103-raw"},
    "pg19": FINE_TUNING
    | {
        "data": "pg19",
        "training_documents": 1250,
        "validation_prefix": 15_000,
    },
}

TEST_CONFIG = Config(
    **TEST_SIZES,
    layers=3,
    width=10,
    max_positions=9,
    segment=6,
    overlap=2,
    module_width=5,
)
BENCHMARK = {  # lab/speed/variants.py says what these are
    "sizes": BENCHMARK_SIZES | {"layers": 6, "max_positions": 256, "segment": 128},
    "small": AGREEMENT_SIZES | {"layers": 3},
    "segments": 4,
    "lanes": {"cpu": 8, "cuda": 32},
    "baseline": ("plain GPT-2", lambda config: {"vectors": 0}),
    "horizons": (1, 4, 20),  # the paper uses 20
    "preset": "gpt2",
}
