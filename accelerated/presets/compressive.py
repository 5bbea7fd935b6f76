"""Presets of the Compressive Transformer; imports no torch."""

from accelerated.presets import AGREEMENT_SIZES, ASSOCIATION, BENCHMARK_SIZES, ON_A_GPU, TEST_SIZES
from reference.compressive import Config

EVALUATION_SIZES = ("memory", "compressed_memory")  # eval.py can change them after training

# Compressive Transformer, section 5: Adam from 1e-6 to 3e-4 and back, clipping at 0.1, from
# iteration 60,000 on updates every 4. Appendix E: "trained without state resetting", so memory is
# carried over documents. Algorithm 2 has a norm. Where the paper is silent, its authors' code
# decides, whose dropout is 0.1
COMPRESSIVE_TRAINING = {
    "learning_rate": 3e-4, "initial_fraction": 1 / 300, "final_fraction": 1 / 300,
    "optimizer": "adam", "weight_decay": 0.0, "clip": 0.1, "update_every": 4,
    "update_every_from": 60_000, "carry_over_documents": True,
    "compression_loss": "attention_reconstruction_norm", "authors_code": True, "dropout": 0.1,
}  # fmt: skip
WORDS = COMPRESSIVE_TRAINING | ON_A_GPU | {
    "width": 1024, "heads": 16, "head_width": 64, "feed_forward": 4096, "segment": 512,
    "memory": 512, "compressed_memory": 512,
    "warmup": 16_000, "steps": 516_000, "train_bpe": 32_000,
}  # fmt: skip

# (condition, message): options that do not work together, as those of training/options.py
CHECKS = (
    (
        lambda given: given.model_config.compression_loss == "bptt" and given.training.horizon == 1,
        "--compression-loss bptt trains the compression by the losses of later segments, "
        "and --horizon 1 has none; give --horizon 2 or more",
    ),
)

PRESETS = {
    "tiny": {
        "width": 128, "layers": 3, "segment": 64, "memory": 64, "compressed_memory": 64,
        "compression_rate": 4,
        "steps": 1200, "batch": 32, "learning_rate": 6e-3, "warmup": 80,
        "validation_tokens": 65_536,
    },
    # Section 5.2 and appendix B; 104,000 iterations are 4,000 of warm-up and 100,000 of decay. The
    # paper gives no batch
    "enwik8": COMPRESSIVE_TRAINING | ON_A_GPU | {  # 47 GB
        "width": 1024, "layers": 24, "heads": 8, "head_width": 128, "feed_forward": 3072,
        "segment": 768, "memory": 768, "compressed_memory": 1152, "compression_rate": 3,
        "warmup": 4000, "steps": 104_000, "batch": 32, "data": "enwik8", "accumulate": 2,
    },
    # Section 5.3 and appendix B. It names no cutoffs: these, and the factor of 4, are Baevski and
    # Auli's
    "wikitext-103": WORDS | {  # 54 GB
        "vocabulary": 267_735, "cutoffs": (20_000, 60_000), "div_value": 4, "layers": 18,
        "compression_rate": 4,
        "train_bpe": 0, "train_words": 267_735, "batch": 128, "data": "wikitext-103",
        "accumulate": 4,
    },
    # Section 5.1, which gives depth, memories and batch; the widths are those of wikitext-103
    "pg19": WORDS | {  # 59 GB, of which the memories of 512 lanes take 39
        "layers": 36, "compression_rate": 2,
        "batch": 512, "data": "pg19", "accumulate": 16, "checkpoint_layers": True,
    },
    # Section 5.6: give it --data and --tokenizer. A document has 3,840 samples, five segments. The
    # paper gives no width, and about 40M parameters. The rate is that of the others
    "speech": COMPRESSIVE_TRAINING | ON_A_GPU | {  # 43 GB
        "width": 352, "layers": 20, "heads": 11, "head_width": 32, "feed_forward": 1408,
        "segment": 768, "memory": 768, "compressed_memory": 768, "compression_rate": 4,
        "carry_over_documents": False, "warmup": 4000, "steps": 400_000, "batch": 32,
    },
    # Memformer, section 3.1 and Table 1: its Compressive Transformer 16(16), and as memformer-xl
    # its Transformer-XL base 32; others are --memory. Table 1's parameters fit Transformer-XL's
    # positions, section 3.1 names simplified ones (--positions). Optimiser and steps are those of
    # memformer's wikitext-103
    "memformer": ON_A_GPU | {
        "width": 512, "layers": 12, "heads": 8, "head_width": 64, "feed_forward": 2048,
        "segment": 64, "memory": 16, "compressed_memory": 16, "compression_rate": 4,
        "warmup": 1000, "steps": 150_000, "batch": 64, "learning_rate": 3e-4, "weight_decay": 0.0,
        "data": "wikitext-103", "tokenizer": "gpt2",
    },
    "recall": ASSOCIATION | {
        "width": 64, "layers": 2, "head_width": 16, "feed_forward": 256, "segment": 64,
        "memory": 64, "compressed_memory": 64, "compression_rate": 4,
        "steps": 3000, "batch": 64, "learning_rate": 1e-3, "warmup": 50,
        "recall_questions": 16, "recall_distance": 192,
    },
}  # fmt: skip

# For each NAME there is NAME-xl, the Transformer-XL with as many memory rows; on enwik8 the paper
# gives it more
PRESETS |= {
    f"{name}-xl": preset
    | {"memory": preset["memory"] + preset["compressed_memory"], "compressed_memory": 0}
    for name, preset in PRESETS.items()
}
PRESETS["enwik8-xl"]["memory"] = 2304
# Transformer-XL large of the same Table 1
PRESETS["memformer-large-xl"] = PRESETS["memformer-xl"] | {"layers": 16, "memory": 64}

TEST_CONFIG = Config(
    **TEST_SIZES,
    layers=3,
    width=6,
    head_width=5,
    segment=8,
    memory=12,
    compressed_memory=5,
    compression_rate=4,
)
BENCHMARK = {  # lab/speed/variants.py says what these are
    "sizes": BENCHMARK_SIZES
    | {
        "layers": 6,
        "head_width": 64,
        "segment": 256,
        "memory": 256,
        "compressed_memory": 64,
        "compression_rate": 4,
    },
    "small": AGREEMENT_SIZES | {"layers": 2, "segment": 64, "memory": 64, "compressed_memory": 32},
    "segments": 4,
    "lanes": {"cpu": 4, "cuda": 8},
    "baseline": (
        "Transformer-XL with as many rows",
        lambda config: {"memory": config.memory + config.compressed_memory, "compressed_memory": 0},
    ),
    "preset": "wikitext-103",
}
