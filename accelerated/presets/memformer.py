"""Presets of Memformer; imports no torch."""

from accelerated.presets import (
    AGREEMENT_SIZES,
    ASSOCIATION,
    BENCHMARK_SIZES,
    ON_A_GPU,
    TEST_SIZES,
)
from reference.memformer import Config

# Memformer, section 3.1: segments of 64, the widths and heads of all its models, no dropout. The
# paper gives no optimiser, rates, batch or number of steps: those are ours
MEMFORMER = {
    "width": 512, "heads": 8, "head_width": 64, "feed_forward": 2048, "segment": 64, "slots": 32,
    "max_distance": 64,
    "batch": 64, "backprop": "memory_replay", "warmup": 1000, "learning_rate": 3e-4,
    "weight_decay": 0.0,
}  # fmt: skip

TAKES_TASKS = True  # the options --task-...
# (condition, message): options that do not work together, as those of training/options.py
CHECKS = (
    (
        lambda given: not given.tasks.continuation_alone and given.model_config.encoder_layers == 0,
        "--task-infilling and --task-recall need an encoder, "
        "and --encoder-layers 0 is the decoder-only model; leave them out",
    ),
    (
        lambda given: given.tasks.infilling and given.model_config.segment == 1,
        "--task-infilling masks a part of every segment, and --segment 1 has no parts; "
        "give --segment 2 or more",
    ),
    (
        lambda given: given.tasks.masked_only and not given.tasks.infilling,
        "--task-masked-only is for --task-infilling, which is 0; give it, or leave both out",
    ),
)

PRESETS = {
    "tiny": {
        "width": 128, "encoder_layers": 1, "decoder_layers": 3, "segment": 64, "slots": 16,
        "steps": 600, "batch": 16, "horizon": 4, "backprop": "memory_replay", "learning_rate": 4e-3,
        "validation_tokens": 65_536,
    },
    # Section 3.1, Table 1: a 4-layer encoder and an 8-layer decoder, 32 slots; 2.3: the fractions
    # of tasks, and which tokens infilling predicts. The horizon is the longest of Figure 3b
    "wikitext-103": MEMFORMER | ON_A_GPU | {  # 4 GB
        "encoder_layers": 4, "decoder_layers": 8, "slot_value": "projected",
        "steps": 150_000, "horizon": 32, "data": "wikitext-103", "tokenizer": "gpt2",
        "task_infilling": 0.3, "task_recall": 0.1, "task_masked_only": True,
    },
    # Section 3.4.2, Table 3: the decoder of 12 layers, horizon 4
    "decoder": MEMFORMER | ON_A_GPU | {  # 3 GB
        "encoder_layers": 0, "decoder_layers": 12, "slot_value": "projected",
        "steps": 150_000, "horizon": 4,
    },
    "recall": ASSOCIATION | {
        "width": 64, "encoder_layers": 1, "decoder_layers": 1, "head_width": 16,
        "feed_forward": 256, "segment": 16, "slots": 8, "max_distance": 16,
        "steps": 3000, "batch": 32, "horizon": 13, "backprop": "memory_replay",
        "learning_rate": 2e-3, "warmup": 50, "recall_distance": 136, "recall_questions": 16,
    },
}  # fmt: skip

TEST_CONFIG = Config(
    **TEST_SIZES,
    width=10,
    encoder_layers=2,
    decoder_layers=3,
    head_width=3,
    segment=6,
    slots=4,
    max_distance=9,
)
BENCHMARK = {  # lab/speed/variants.py says what these are
    "sizes": BENCHMARK_SIZES
    | {"encoder_layers": 3, "decoder_layers": 3, "head_width": 64, "segment": 64, "slots": 32},
    "small": AGREEMENT_SIZES | {"encoder_layers": 1, "decoder_layers": 2},
    "segments": 16,
    "backprop": "memory_replay",
    "lanes": {"cpu": 8, "cuda": 32},
    "replayed": {  # section 3.4.2, Table 3
        "encoder-decoder, 4+8 layers": {"encoder_layers": 4, "decoder_layers": 8},
        "decoder-only, 12 layers": {"encoder_layers": 0, "decoder_layers": 12},
    },
    "preset": "wikitext-103",
}
