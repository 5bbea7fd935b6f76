"""Named settings: per model and preset, what differs from the defaults of its Config and of TrainingConfig."""

# Block-Recurrent Transformer, section 4
BLOCK_RECURRENT_TRAINING = {"optimizer": "adafactor", "schedule": "inverse_square_root", "warmup": 1000, "clip": 0.0}

# Compressive Transformer, section 5: Adam from 1e-6 to 3e-4 and back, clipping at 0.1, from iteration 60,000 on updates every 4
COMPRESSIVE_TRAINING = {
    "learning_rate": 3e-4, "initial_fraction": 1 / 300, "final_fraction": 1 / 300, "optimizer": "adam", "beta2": 0.999,
    "weight_decay": 0.0, "clip": 0.1, "update_every": 4, "update_every_from": 60_000,
}  # fmt: skip
CHARACTERS = COMPRESSIVE_TRAINING | {"warmup": 4000, "steps": 104_000}
WORDS = COMPRESSIVE_TRAINING | {"warmup": 16_000, "steps": 516_000}
WORD_MODEL = {
    "width": 1024, "heads": 16, "head_width": 64, "feed_forward": 4096, "segment": 512, "memory": 512, "compressed_memory": 512,
}  # fmt: skip


# Memformer, section 3.1: segments of 64, widths and heads of every model there, no dropout; 2.3: the tasks' shares. The paper has
# no optimiser, rates, batch or number of steps: those are ours. The horizon of 32 is Figure 3b's longest
MEMFORMER_MODEL = {
    "width": 512, "heads": 8, "head_width": 64, "feed_forward": 2048, "segment": 64, "slots": 32, "max_distance": 64,
}  # fmt: skip
MEMFORMER_TRAINING = {"backprop": "memory_replay", "warmup": 1000, "learning_rate": 3e-4, "weight_decay": 0.0}
MULTI_TASK = {"infilling": 0.3, "recall": 0.1}


# Adding Recurrence to Pretrained Transformers, section 5: windows of 300, 20 of them with gradient through z, insertion at layer
# 2, Adam with 100 steps of warm-up, then constant. Ours: learning rate and batch (not given), steps (the paper: 2 epochs),
# clipping (not mentioned) and dropout (GPT-2's 0.1). Sizes are GPT-2's published ones
GPT2_SIZES = {"gpt2": (12, 768), "gpt2-medium": (24, 1024), "gpt2-large": (36, 1280), "gpt2-xl": (48, 1600)}  # layers, width
SMALL_GPT2 = {"width": 128, "layers": 4, "segment": 64, "max_positions": 256}
GPT2_TRAINING = {
    "steps": 10_000, "batch": 8, "horizon": 20, "backprop": "memory_replay", "schedule": "constant", "warmup": 100,
    "learning_rate": 5e-5, "optimizer": "adam", "beta2": 0.999, "weight_decay": 0.0,
}  # fmt: skip


def gpt2_preset(layers, width):
    """A published GPT-2 with the paper's recurrence; its heads are 64 wide."""
    model = {
        "width": width, "layers": layers, "heads": width // 64, "feed_forward": 4 * width, "max_positions": 1024, "segment": 300,
        "dropout": 0.1,
    }  # fmt: skip
    return {"model": model, "training": GPT2_TRAINING, "data": {"tokenizer": "gpt2"}}


def with_transformer_xl(presets, memories=None):
    """Every preset of the Compressive Transformer and, as NAME-xl, the Transformer-XL that attends to as many rows.

    memories {name: M} gives the Transformer-XL's memory where the paper's differs from that.
    """
    both = {}
    for name, preset in presets.items():
        model = preset["model"]
        memory = (memories or {}).get(name, model["memory"] + model["compressed_memory"])
        both[name] = preset
        both[f"{name}-xl"] = preset | {"model": model | {"memory": memory, "compressed_memory": 0}}
    return both


PRESETS = {
    "block_recurrent": {
        "tiny": {
            "model": {
                "width": 128, "layers": 2, "window": 16, "segment": 256, "recurrent_layers": (2,), "states": 32, "dropout": 0.0,
            },
            "training": {"steps": 700, "batch": 16, "learning_rate": 4e-3, "validation_segments": 40},
        },
        "small": {
            "model": {
                "width": 512, "layers": 8, "heads": 8, "head_width": 64, "feed_forward": 2048, "window": 256, "segment": 2048,
                "recurrent_layers": (6,), "states": 256, "dropout": 0.05,
            },
            "training": {"steps": 20_000, "batch": 16, "learning_rate": 6e-4, "warmup": 1000},
        },
        # Section 4: 12 layers with recurrence on layer 10, 8 heads of 128, width 1024, MLP 4096, W = S = 512, N = 4096;
        # Adafactor at 1.0 / sqrt(step), 1000 warm-up steps, dropout 0.05, batch 32, 500k steps
        "paper": {
            "model": {
                "width": 1024, "layers": 12, "heads": 8, "head_width": 128, "feed_forward": 4096, "window": 512, "segment": 4096,
                "recurrent_layers": (10,), "states": 512, "dropout": 0.05, "attention_scale": 1.0,
            },
            "training": BLOCK_RECURRENT_TRAINING | {"steps": 500_000, "batch": 32, "learning_rate": 1.0},
            "data": {"data": "pg19", "train_bpe": 32_000},
        },
        "recall": {
            "model": {
                "width": 64, "layers": 2, "head_width": 16, "feed_forward": 256, "window": 32, "segment": 64,
                "recurrent_layers": (2,), "states": 16, "dropout": 0.0,
            },
            "training": {"steps": 1500, "batch": 16, "horizon": 3, "learning_rate": 3e-3, "warmup": 50},
        },
    },
    "compressive": with_transformer_xl(
        {
            "tiny": {
                "model": {
                    "width": 128, "layers": 3, "segment": 64, "memory": 64, "compressed_memory": 64, "compression_rate": 4,
                },
                "training": {"steps": 1200, "batch": 32, "learning_rate": 6e-3, "warmup": 80, "validation_segments": 160},
            },
            "small": {
                "model": {
                    "width": 512, "layers": 8, "heads": 8, "head_width": 64, "feed_forward": 2048, "segment": 512, "memory": 512,
                    "compressed_memory": 512, "compression_rate": 4,
                },
                "training": {"steps": 20_000, "batch": 16, "learning_rate": 5e-4, "warmup": 1000, "clip": 0.25},
            },
            # Section 5.2 and appendix B; 104,000 iterations are 4,000 of warm-up and 100,000 of decay. The paper gives no batch
            "enwik8": {
                "model": {
                    "width": 1024, "layers": 24, "heads": 8, "head_width": 128, "feed_forward": 3072, "segment": 768,
                    "memory": 768, "compressed_memory": 1152, "compression_rate": 3,
                },
                "training": CHARACTERS | {"batch": 32},
                "data": {"data": "enwik8"},
            },
            # Section 5.3 and appendix B; the paper's adaptive inputs are not here, so the embedding is a whole one
            "wikitext-103": {
                "model": WORD_MODEL | {"layers": 18, "compression_rate": 4},
                "training": WORDS | {"batch": 128},
                "data": {"data": "wikitext-103", "train_bpe": 32_000},
            },
            # Section 5.1, which gives depth, memories and batch; the widths are those of wikitext-103
            "pg19": {
                "model": WORD_MODEL | {"layers": 36, "compression_rate": 2},
                "training": WORDS | {"batch": 512},
                "data": {"data": "pg19", "train_bpe": 32_000},
            },
            "recall": {
                "model": {
                    "width": 64, "layers": 2, "head_width": 16, "feed_forward": 256, "segment": 16, "memory": 16,
                    "compressed_memory": 64, "compression_rate": 4,
                },
                "training": {"steps": 4000, "batch": 64, "learning_rate": 1.5e-3, "warmup": 50},
                "recall": {"distance": 192, "questions": 16},
            },
        },
        memories={"enwik8": 2304},
    ),
    "memformer": {
        "tiny": {
            "model": {
                "width": 128, "encoder_layers": 1, "decoder_layers": 3, "segment": 64, "slots": 16, "retention": 4.0,
            },
            "training": {
                "steps": 600, "batch": 16, "horizon": 4, "backprop": "memory_replay", "learning_rate": 4e-3, "warmup": 40,
                "validation_segments": 160,
            },
        },
        "small": {
            "model": MEMFORMER_MODEL | {"encoder_layers": 4, "decoder_layers": 4, "retention": 4.0},
            "training": MEMFORMER_TRAINING | {"steps": 20_000, "batch": 64, "horizon": 8, "learning_rate": 6e-4},
        },
        # Section 3.1, Table 1: a 4-layer encoder and an 8-layer decoder, 32 slots
        "wikitext-103": {
            "model": MEMFORMER_MODEL | {"encoder_layers": 4, "decoder_layers": 8},
            "training": MEMFORMER_TRAINING | {"steps": 150_000, "batch": 64, "horizon": 32},
            "data": {"data": "wikitext-103", "tokenizer": "gpt2"},
            "tasks": MULTI_TASK,
        },
        # Section 3.4.2, Table 3: the decoder of 12 layers, horizon 4
        "decoder": {
            "model": MEMFORMER_MODEL | {"encoder_layers": 0, "decoder_layers": 12},
            "training": MEMFORMER_TRAINING | {"steps": 150_000, "batch": 64, "horizon": 4},
        },
        "recall": {
            "model": {
                "width": 64, "encoder_layers": 1, "decoder_layers": 1, "head_width": 16, "feed_forward": 256, "segment": 16,
                "slots": 8, "max_distance": 16, "retention": 4.0,
            },
            "training": {
                "steps": 500, "batch": 32, "horizon": 13, "backprop": "memory_replay", "learning_rate": 2e-3, "warmup": 50,
            },
            "recall": {"distance": 136, "questions": 16},
        },
    },
    "pretrained_recurrence": {
        "tiny": {
            "model": SMALL_GPT2,
            "training": {
                "steps": 800, "batch": 32, "horizon": 2, "learning_rate": 3e-3, "warmup": 100, "validation_segments": 160,
            },
        },
        # The paper's way in the small: a plain GPT-2 first, recurrence added when it is fine-tuned with --init
        "pretrain": {
            "model": SMALL_GPT2 | {"vectors": 0},
            "training": {"steps": 1200, "batch": 64, "learning_rate": 2e-3, "warmup": 100, "validation_segments": 160},
        },
        "fine-tune": {
            "model": SMALL_GPT2,
            "training": {
                "steps": 400, "batch": 16, "horizon": 4, "learning_rate": 1e-3, "warmup": 100, "validation_segments": 160,
            },
        },
        "small": {
            "model": {"width": 512, "layers": 8, "heads": 8, "feed_forward": 2048, "segment": 256, "max_positions": 1024},
            "training": {
                "steps": 20_000, "batch": 16, "horizon": 8, "backprop": "memory_replay", "learning_rate": 6e-4, "warmup": 1000,
            },
        },
        "recall": {
            "model": {"width": 64, "layers": 3, "feed_forward": 256, "segment": 16, "max_positions": 16, "module_width": 64},
            "training": {"steps": 1500, "batch": 32, "horizon": 5, "learning_rate": 2e-3, "warmup": 50},
            "recall": {"pairs": 1, "distance": 8, "questions": 16},  # asked for in the same window first, then up to four later
        },
    } | {name: gpt2_preset(*size) for name, size in GPT2_SIZES.items()},
}  # fmt: skip


def default_preset(data):
    """The preset that --data implies where --preset is not given."""
    return "recall" if data == "recall" else "tiny"
