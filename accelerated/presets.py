"""Named settings: per model and preset, what differs from the defaults of its Config and of TrainingConfig."""

PAPER_TRAINING = {"optimizer": "adafactor", "schedule": "inverse_square_root", "warmup": 1000, "clip": 0.0}

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
            "training": PAPER_TRAINING | {"steps": 500_000, "batch": 32, "learning_rate": 1.0},
        },
        "recall": {
            "model": {
                "width": 64, "layers": 2, "head_width": 16, "feed_forward": 256, "window": 32, "segment": 64,
                "recurrent_layers": (2,), "states": 16, "dropout": 0.0,
            },
            "training": {"steps": 1500, "batch": 16, "horizon": 3, "learning_rate": 3e-3, "warmup": 50},
        },
    }
}  # fmt: skip


def default_preset(data):
    """The preset that --data implies where --preset is not given."""
    return "recall" if data == "recall" else "tiny"
