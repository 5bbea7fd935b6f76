"""Presets of the Block-Recurrent Transformer; imports no torch."""

from accelerated.presets import (
    AGREEMENT_SIZES,
    ASSOCIATION,
    BENCHMARK_SIZES,
    BUCKETS,
    ON_A_GPU,
    TEST_SIZES,
)
from reference.block_recurrent import Config

# Block-Recurrent Transformer, section 4. No weight decay, a momentum of 0.9 and dropout before the
# output are its authors' configuration. torch's Adafactor limits the rate to 1/sqrt(step), which is
# the paper's rate from step 1000 on, so a learning_rate above 1.0 changes nothing there
BLOCK_RECURRENT_TRAINING = {
    "optimizer": "adafactor_momentum", "schedule": "inverse_square_root", "warmup": 1000,
    "clip": 0.0, "weight_decay": 0.0,
}  # fmt: skip
# Section 4: 12 layers with recurrence on layer 10, 8 heads of 128, width 1024, MLP 4096, W = S =
# 512, N = 4096, dropout 0.05, 32k tokens; 500k steps, batch 32 (4.2). This is Rec:fixed:skip of
# Table 1, whose other rows are options
BLOCK_RECURRENT = BLOCK_RECURRENT_TRAINING | ON_A_GPU | {
    "width": 1024, "layers": 12, "heads": 8, "head_width": 128, "feed_forward": 4096, "window": 512,
    "segment": 4096, "recurrent_layers": (10,), "states": 512, "dropout": 0.05,
    "attention_scale": 1.0, "output_dropout": True,
    "steps": 500_000, "batch": 32, "learning_rate": 1.0, "train_bpe": 32_000, "accumulate": 2,
}  # fmt: skip

PRESETS = {
    "tiny": {
        "width": 128, "layers": 2, "window": 16, "segment": 256, "recurrent_layers": (2,),
        "states": 32, "dropout": 0.0,
        "steps": 700, "batch": 16, "learning_rate": 4e-3, "validation_tokens": 65_536,
    },
    "paper": BLOCK_RECURRENT | {"data": "pg19"},  # Table 1, PG19 tokens; 43 GB
    "bytes": BLOCK_RECURRENT | {"data": "pg19", "train_bpe": 0},  # Table 1, PG19 bytes; 43 GB
    # Table 2 and 4.5 (Scaling up), Rec:fixed:skip:large: twice the heads and the MLP, four times
    # the replicas, so the batch; 320M parameters without the embedding. The others are
    # --recurrent-layers none --layers 13 (327M) and --gate lstm --configuration single (375M, 50
    # GB)
    "large": BLOCK_RECURRENT | {
        # 48 GB
        "heads": 16, "feed_forward": 8192,
        "steps": 200_000, "batch": 128, "data": "pg19", "accumulate": 16,
    },
    # Section 4 and Table 1, on texts given with --data. On arXiv the learning rate is 0.5. On
    # GitHub it is 0.25, a document is a repository (join its files), the batch is 8 times as large,
    # and 250k steps are made
    "arxiv": BLOCK_RECURRENT | {"learning_rate": 0.5},  # 43 GB
    "github": BLOCK_RECURRENT | {  # 50 GB
        "learning_rate": 0.25, "batch": 256, "steps": 250_000, "accumulate": 16,
    },
} | {
    # 4.1 and 4.2, Table 1: the baselines XL:512, XL:1024 and XL:2048, with as many tokens in a
    # step; 46, 47 and 50 GB
    f"xl-{window}": BLOCK_RECURRENT | {
        "recurrent_layers": (), "window": window, "segment": window,
        "batch": 32 * 4096 // window, "data": "pg19",
    }
    for window in (512, 1024, 2048)
} | {
    "recall": ASSOCIATION | {
        "width": 64, "layers": 2, "head_width": 16, "feed_forward": 256, "segment": 64,
        "recurrent_layers": (2,), "states": 16, "dropout": 0.0, "gate": "lstm", "window": 32,
        "steps": 3000, "batch": 16, "horizon": 3, "learning_rate": 3e-3, "warmup": 50,
    },
}  # fmt: skip

TEST_CONFIG = Config(
    **TEST_SIZES,
    layers=3,
    **BUCKETS,
    width=6,
    head_width=5,
    window=4,
    segment=12,
    recurrent_layers=(2,),
    states=3,
)
BENCHMARK = {  # lab/speed/variants.py says what these are
    "sizes": BENCHMARK_SIZES
    | {
        "layers": 6,
        "head_width": 64,
        "window": 128,
        "segment": 1024,
        "states": 128,
        "recurrent_layers": (4,),
        "dropout": 0.0,
    },
    "small": AGREEMENT_SIZES
    | {"layers": 2, "window": 32, "segment": 128, "states": 32, "recurrent_layers": (2,)},
    "segments": 1,
    "lanes": {"cpu": 4, "cuda": 8},
    "baseline": (
        "Slide with a layer more",
        lambda config: {"layers": config.layers + 1, "recurrent_layers": ()},
    ),
    "horizons": (1, 2, 4, 8),  # of long segments
    "preset": "paper",
}
