"""All settings of a run with their defaults, and all presets.

options.py makes the command line of train.py from them; checkpoints store them; eval.py and the bench read them. It does not
import torch, so that a wrong option is answered at once.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from accelerated.data.config import DataConfig, TaskConfig
from accelerated.data.recall import RecallConfig
from accelerated.program.errors import InputError, check_choice
from reference.block_recurrent import Config as BlockRecurrentConfig
from reference.compressive import Config as CompressiveConfig
from reference.memformer import Config as MemformerConfig
from reference.memorizing import Config as MemorizingConfig
from reference.pretrained_recurrence import Config as PretrainedRecurrenceConfig

CONFIGS = {  # of the models by the names that --model takes; models.py has the models, which need torch
    "block_recurrent": BlockRecurrentConfig,
    "compressive": CompressiveConfig,
    "memformer": MemformerConfig,
    "memorizing": MemorizingConfig,
    "pretrained_recurrence": PretrainedRecurrenceConfig,
}
DEFAULT_MODEL = "block_recurrent"
TASK_MODEL = "memformer"  # the only model with training tasks
GPT2_MODEL = "pretrained_recurrence"  # the only model that takes GPT-2's weights
BACKPROP = ("through_time", "checkpointed", "memory_replay")  # the functions of replay.py
OPTIMIZERS = ("adamw", "adam", "adafactor")
SCHEDULES = ("cosine", "inverse_square_root", "constant")
COMPILERS = ("none", "inductor", "cudagraphs")
DEVICES = ("auto", "cpu", "cuda", "mps")
PREFIXES = {"model_config": "", "training": "", "data": "", "recall": "recall_", "tasks": "task_"}  # of the options


@dataclass(frozen=True)
class TrainingConfig:
    """How a model is trained; an impossible value raises a ValueError that names the field.

    Fields:
        steps: iterations; in each, every lane (see --batch) reads --horizon segments
        epochs: passes through the training split, which become --steps when the data is read; 0 to give --steps
        batch: B, lanes: documents that are read side by side
        horizon: K, segments per iteration; gradient flows through the state between them (for a compressive model only with
            --compression-loss bptt, for pretrained_recurrence not with --vectors 0)
        backprop: through_time (full BPTT), checkpointed (gradient checkpointing) or memory_replay (MRBP)
        checkpoint_layers: keep only the layers' inputs and compute each layer again in the backward pass, to save memory
        accumulate: groups of lanes that are computed one after another, with their gradients summed, to save memory
        optimizer: adamw, adam (without weight decay) or adafactor
        schedule: cosine, inverse_square_root or constant
        learning_rate: peak learning rate; with inverse_square_root, the factor of 1/sqrt(step)
        warmup: iterations of linear warm-up
        initial_fraction: learning rate at the start of warm-up, as a fraction of the peak
        final_fraction: learning rate at the end of the cosine, as a fraction of the peak
        beta2: second-moment decay of adamw and adam
        weight_decay: weight decay of adamw and adafactor, for parameters of two or more axes
        clip: largest norm of the gradient, 0 for no limit; parameters that only an auxiliary loss trains are clipped separately
        update_every: iterations whose gradients are averaged into one update, after the first --update-every-from
        update_every_from: number of iterations at the beginning that each make an update
        seed: seed of the weights, the order of documents and dropout
        device: auto (a GPU if there is one), cpu, cuda, or mps (Apple's GPU; never run on one, it lacks float64)
        dtype: float32, float64, or bfloat16 (computed in bfloat16, with float32 parameters)
        compile: none, inductor (torch.compile makes forward and backward faster; on a CPU it needs a C++ compiler), or
            cudagraphs (inductor, and the GPU repeats recorded launches; with --horizon 1 or --backprop memory_replay)
        save_every: iterations between checkpoints; one is always written at the end
        save_minutes: most minutes between checkpoints, 0 for no limit
        keep: number of last checkpoints to keep; the best one is kept too
        validate_every: iterations between validations, which choose the best checkpoint; 0 validates only at the end
        stop_after: stop when so many validations in a row brought no better score, 0 for never; needs --validate-every
        validation_segments: segments in each lane to validate on, taken from all over the split, 0 for the whole split
        log_every: iterations between the lines of metrics.jsonl; its losses are means over these iterations
        plot: draw the curves of metrics.jsonl in RUN/curves.png, twice a minute
        sample: tokens of sample text to print at the end
    """

    steps: int = 400
    epochs: float = 0.0
    batch: int = 8
    horizon: int = 1
    backprop: str = "through_time"
    checkpoint_layers: bool = False
    accumulate: int = 1
    optimizer: str = "adamw"
    schedule: str = "cosine"
    learning_rate: float = 2e-3
    warmup: int = 40
    initial_fraction: float = 0.0
    final_fraction: float = 0.05
    beta2: float = 0.99
    weight_decay: float = 0.01
    clip: float = 1.0
    update_every: int = 1
    update_every_from: int = 0
    seed: int = 0
    device: str = "auto"
    dtype: str = "float32"
    compile: str = "none"
    save_every: int = 200
    save_minutes: float = 15.0
    keep: int = 2
    validate_every: int = 0
    stop_after: int = 0
    validation_segments: int = 0
    log_every: int = 10
    plot: bool = False
    sample: int = 200

    def __post_init__(self):
        positive = ("steps", "batch", "horizon", "accumulate", "save_every", "update_every", "keep", "log_every")
        others = ("warmup", "weight_decay", "clip", "seed", "validation_segments", "sample", "update_every_from", "save_minutes",
                  "validate_every", "epochs", "stop_after")  # fmt: skip
        for name in positive + others:
            if not int(name in positive) <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {int(name in positive)}")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate is {self.learning_rate}; it must be positive and finite")
        if self.optimizer == "adam" and self.weight_decay:
            raise ValueError(f"weight_decay is {self.weight_decay}, and adam has none; give adamw, or weight_decay 0")
        for name in ("initial_fraction", "final_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must lie in 0..1")
        if not 0 <= self.beta2 < 1:
            raise ValueError(f"beta2 is {self.beta2}; it must be at least 0 and below 1")
        if self.seed >= 2**63:
            raise ValueError(f"seed is {self.seed}; it must be below 2^63")
        choices = {"backprop": BACKPROP, "optimizer": OPTIMIZERS, "schedule": SCHEDULES, "device": DEVICES,
                   "dtype": ("float32", "bfloat16", "float64"), "compile": COMPILERS}  # fmt: skip
        for name, possible in choices.items():
            check_choice(name, getattr(self, name), possible)


class Settings(NamedTuple):
    """All settings of a run."""

    model: str
    model_config: Any  # the model's own Config
    training: TrainingConfig
    data: DataConfig
    recall: RecallConfig
    tasks: TaskConfig


# A preset sets options, named as on the command line. First what several presets of one paper share.
# The papers' sizes fit a GPU of 80 GB: they compute in bfloat16, and accumulate divides the lanes until a step takes 60 GB at
# most, without what torch keeps in reserve. The number of GB, in a comment, is counted on tensors without data
ON_A_GPU = {"dtype": "bfloat16"}
# Block-Recurrent Transformer, section 4; no weight decay. torch's Adafactor limits the rate to 1/sqrt(step), which is the
# paper's rate from step 1000 on, so a learning_rate above 1.0 changes nothing there
BLOCK_RECURRENT_TRAINING = {
    "optimizer": "adafactor", "schedule": "inverse_square_root", "warmup": 1000, "clip": 0.0, "weight_decay": 0.0,
}  # fmt: skip
# Section 4: 12 layers with recurrence on layer 10, 8 heads of 128, width 1024, MLP 4096, W = S = 512, N = 4096, dropout 0.05,
# 32k tokens; 500k steps, batch 32 (4.2). This is Rec:fixed:skip of Table 1, whose other rows are options
BLOCK_RECURRENT = BLOCK_RECURRENT_TRAINING | ON_A_GPU | {
    "width": 1024, "layers": 12, "heads": 8, "head_width": 128, "feed_forward": 4096, "window": 512, "segment": 4096,
    "recurrent_layers": (10,), "states": 512, "dropout": 0.05, "attention_scale": 1.0,
    "steps": 500_000, "batch": 32, "learning_rate": 1.0, "train_bpe": 32_000, "accumulate": 2,
}  # fmt: skip
# The same, section 4.6 and Table 1: "all hyperparameters were all set identically to the XL:512 baseline", and a memory of 32k.
# The Memorizing Transformer's own paper has 32 keys a query and the lookup in layer 9 of 12
MEMORIZING = {name: value for name, value in BLOCK_RECURRENT.items() if name not in ("window", "recurrent_layers", "states")} | {
    "segment": 512, "memory_layer": 9, "memory": 32_768, "retrieved": 32, "batch": 256, "accumulate": 8,  # 60 GB
}  # fmt: skip
# Compressive Transformer, section 5: Adam from 1e-6 to 3e-4 and back, clipping at 0.1, from iteration 60,000 on updates every 4.
# Appendix E: "trained without state resetting", so memory is carried over documents
COMPRESSIVE_TRAINING = {
    "learning_rate": 3e-4, "initial_fraction": 1 / 300, "final_fraction": 1 / 300, "optimizer": "adam", "beta2": 0.999,
    "weight_decay": 0.0, "clip": 0.1, "update_every": 4, "update_every_from": 60_000,
    "carry_over_documents": True,
}  # fmt: skip
WORDS = COMPRESSIVE_TRAINING | ON_A_GPU | {
    "width": 1024, "heads": 16, "head_width": 64, "feed_forward": 4096, "segment": 512, "memory": 512, "compressed_memory": 512,
    "warmup": 16_000, "steps": 516_000, "train_bpe": 32_000,
}  # fmt: skip
# Memformer, section 3.1: segments of 64, the widths and heads of all its models, no dropout. The paper gives no optimiser, rates,
# batch or number of steps: those are ours
MEMFORMER = {
    "width": 512, "heads": 8, "head_width": 64, "feed_forward": 2048, "segment": 64, "slots": 32, "max_distance": 64,
    "batch": 64, "backprop": "memory_replay", "warmup": 1000, "learning_rate": 3e-4, "weight_decay": 0.0,
}  # fmt: skip
# Adding Recurrence to Pretrained Transformers, section 5: windows of 300, 20 of them with gradient through z, insertion at layer
# 2, Adam with 100 steps of warm-up, then constant. Ours: learning rate and batch (not given), steps (the paper: 2 epochs),
# clipping (not mentioned) and dropout (GPT-2's 0.1). Sizes are GPT-2's published ones
GPT2_SIZES = {"gpt2": (12, 768), "gpt2-medium": (24, 1024), "gpt2-large": (36, 1280), "gpt2-xl": (48, 1600)}  # layers, width
GPT2 = {
    "max_positions": 1024, "segment": 300, "dropout": 0.1, "tokenizer": "gpt2",
    "steps": 10_000, "batch": 8, "horizon": 20, "backprop": "memory_replay", "schedule": "constant", "warmup": 100,
    "learning_rate": 5e-5, "optimizer": "adam", "beta2": 0.999, "weight_decay": 0.0,
}  # fmt: skip
# Four facts that are asked for 256 tokens later. Recurrent models learn it only if most questions are nearer
FAR = {
    "data": "recall", "recall_distance": 256, "recall_questions": 32, "recall_spacing": 2, "recall_vary_distance": True,
}  # fmt: skip
SMALL_GPT2 = {"width": 128, "layers": 4, "segment": 64, "max_positions": 256, "warmup": 100, "validation_segments": 160}


PRESETS = {
    "block_recurrent": {
        "tiny": {
            "width": 128, "layers": 2, "window": 16, "segment": 256, "recurrent_layers": (2,), "states": 32, "dropout": 0.0,
            "steps": 700, "batch": 16, "learning_rate": 4e-3, "validation_segments": 40,
        },
        "small": {
            "width": 512, "layers": 8, "heads": 8, "head_width": 64, "feed_forward": 2048, "window": 256, "segment": 2048,
            "recurrent_layers": (6,), "states": 256, "dropout": 0.05,
            "steps": 20_000, "batch": 16, "learning_rate": 6e-4, "warmup": 1000,
        },
        "paper": BLOCK_RECURRENT | {"data": "pg19"},  # Table 1, PG19 tokens; 42 GB
        "bytes": BLOCK_RECURRENT | {"data": "pg19", "train_bpe": 0},  # Table 1, PG19 bytes; 42 GB
        # Table 2 and 4.5 (Scaling up), Rec:fixed:skip:large: twice the heads and the MLP, four times the replicas, so the batch;
        # 320M parameters without the embedding. The others are --recurrent-layers none --layers 13 (327M) and --gate lstm
        # --configuration single (375M, 48 GB)
        "large": BLOCK_RECURRENT | {
            "heads": 16, "feed_forward": 8192, "steps": 200_000, "batch": 128, "data": "pg19", "accumulate": 16,  # 46 GB
        },
        # Section 4 and Table 1, on texts given with --data. On arXiv the learning rate is 0.5. On GitHub it is 0.25, a document
        # is a repository, the batch is 8 times as large, and 250k steps are made
        "arxiv": BLOCK_RECURRENT | {"learning_rate": 0.5},  # 42 GB
        "github": BLOCK_RECURRENT | {
            "learning_rate": 0.25, "batch": 256, "steps": 250_000, "documents": "folders", "accumulate": 16,  # 48 GB
        },
    } | {
        # 4.1 and 4.2, Table 1: the baselines XL:512, XL:1024 and XL:2048, with as many tokens in a step; 44, 45 and 49 GB
        f"xl-{window}": BLOCK_RECURRENT | {
            "recurrent_layers": (), "window": window, "segment": window, "batch": 32 * 4096 // window, "data": "pg19",
        }
        for window in (512, 1024, 2048)
    } | {
        "recall": {
            "width": 64, "layers": 2, "head_width": 16, "feed_forward": 256, "window": 32, "segment": 64,
            "recurrent_layers": (2,), "states": 16, "dropout": 0.0,
            "steps": 1500, "batch": 16, "horizon": 3, "learning_rate": 3e-3, "warmup": 50,
        },
        "recall-16": FAR | {
            "width": 64, "layers": 2, "head_width": 16, "feed_forward": 256, "window": 16, "segment": 64,
            "recurrent_layers": (2,), "states": 16, "dropout": 0.0,
            "steps": 1000, "batch": 16, "horizon": 6, "learning_rate": 3e-3, "warmup": 50,
        },
    },
    "compressive": {
        "tiny": {
            "width": 128, "layers": 3, "segment": 64, "memory": 64, "compressed_memory": 64, "compression_rate": 4,
            "steps": 1200, "batch": 32, "learning_rate": 6e-3, "warmup": 80, "validation_segments": 160,
        },
        "small": {
            "width": 512, "layers": 8, "heads": 8, "head_width": 64, "feed_forward": 2048, "segment": 512, "memory": 512,
            "compressed_memory": 512, "compression_rate": 4,
            "steps": 20_000, "batch": 16, "learning_rate": 5e-4, "warmup": 1000, "clip": 0.25,
        },
        # Section 5.2 and appendix B; 104,000 iterations are 4,000 of warm-up and 100,000 of decay. The paper gives no batch
        "enwik8": COMPRESSIVE_TRAINING | ON_A_GPU | {
            "width": 1024, "layers": 24, "heads": 8, "head_width": 128, "feed_forward": 3072, "segment": 768,
            "memory": 768, "compressed_memory": 1152, "compression_rate": 3,
            "warmup": 4000, "steps": 104_000, "batch": 32, "data": "enwik8", "accumulate": 2,  # 45 GB
        },
        # Section 5.3 and appendix B. It names no cutoffs: these, and the factor of 4, are Baevski and Auli's
        "wikitext-103": WORDS | {
            "vocabulary": 267_735, "train_bpe": 0, "train_words": 267_735, "cutoffs": (20_000, 60_000), "div_value": 4,
            "layers": 18, "compression_rate": 4, "batch": 128, "data": "wikitext-103", "accumulate": 4,  # 51 GB
        },
        # Section 5.1, which gives depth, memories and batch; the widths are those of wikitext-103
        "pg19": WORDS | {
            "layers": 36, "compression_rate": 2, "batch": 512, "data": "pg19",
            "accumulate": 16, "checkpoint_layers": True,  # 60 GB, of which the memories of 512 lanes take 39
        },
        # Section 5.6: give it --data; the paper gives no width, and about 40M parameters. The rate is that of the other presets
        "speech": COMPRESSIVE_TRAINING | ON_A_GPU | {
            "width": 352, "layers": 20, "heads": 11, "head_width": 32, "feed_forward": 1408, "segment": 768, "memory": 768,
            "compressed_memory": 768, "compression_rate": 4, "tokenizer": "mu-law", "carry_over_documents": False,
            "warmup": 4000, "steps": 400_000, "batch": 32,  # 40 GB
        },
        "recall": {
            "width": 64, "layers": 2, "head_width": 16, "feed_forward": 256, "segment": 16, "memory": 16,
            "compressed_memory": 64, "compression_rate": 4,
            "steps": 4000, "batch": 64, "learning_rate": 1.5e-3, "warmup": 50,
            "recall_distance": 192, "recall_questions": 16,
        },
        "recall-16": {
            "width": 64, "layers": 2, "head_width": 16, "feed_forward": 256, "segment": 16, "memory": 16,
            "compressed_memory": 80, "compression_rate": 4,
            "steps": 6000, "batch": 64, "learning_rate": 1.5e-3, "warmup": 50,
            "data": "recall", "recall_distance": 256, "recall_questions": 16,
        },
    },
    "memformer": {
        "tiny": {
            "width": 128, "encoder_layers": 1, "decoder_layers": 3, "segment": 64, "slots": 16, "retention": 4.0,
            "steps": 600, "batch": 16, "horizon": 4, "backprop": "memory_replay", "learning_rate": 4e-3,
            "validation_segments": 160,
        },
        "small": MEMFORMER | {
            "encoder_layers": 4, "decoder_layers": 4, "retention": 4.0, "steps": 20_000, "horizon": 8, "learning_rate": 6e-4,
        },
        # Section 3.1, Table 1: a 4-layer encoder and an 8-layer decoder, 32 slots; 2.3: the fractions of tasks. The
        # horizon is the longest of Figure 3b
        "wikitext-103": MEMFORMER | ON_A_GPU | {  # 4 GB
            "encoder_layers": 4, "decoder_layers": 8, "steps": 150_000, "horizon": 32,
            "data": "wikitext-103", "tokenizer": "gpt2", "task_infilling": 0.3, "task_recall": 0.1,
        },
        # Section 3.4.2, Table 3: the decoder of 12 layers, horizon 4
        "decoder": MEMFORMER | ON_A_GPU | {"encoder_layers": 0, "decoder_layers": 12, "steps": 150_000, "horizon": 4},  # 3 GB
        "recall": {
            "width": 64, "encoder_layers": 1, "decoder_layers": 1, "head_width": 16, "feed_forward": 256, "segment": 16,
            "slots": 8, "max_distance": 16, "retention": 4.0,
            "steps": 500, "batch": 32, "horizon": 13, "backprop": "memory_replay", "learning_rate": 2e-3, "warmup": 50,
            "recall_distance": 136, "recall_questions": 16,
        },
        "recall-16": FAR | {
            "width": 64, "encoder_layers": 1, "decoder_layers": 1, "head_width": 16, "feed_forward": 256, "segment": 16,
            "slots": 8, "max_distance": 16, "retention": 4.0,
            "steps": 1000, "batch": 16, "horizon": 21, "backprop": "memory_replay", "learning_rate": 3e-3, "warmup": 50,
        },
    },
    "memorizing": {
        "tiny": {
            "width": 128, "layers": 3, "segment": 64, "memory_layer": 2, "memory": 1024, "retrieved": 16, "dropout": 0.0,
            "steps": 1000, "batch": 32, "learning_rate": 4e-3, "validation_segments": 160,
        },
        "small": {
            "width": 512, "layers": 8, "heads": 8, "head_width": 64, "feed_forward": 2048, "segment": 256, "memory_layer": 6,
            "memory": 8192, "retrieved": 32, "steps": 20_000, "batch": 32, "learning_rate": 6e-4, "warmup": 1000,
        },
        "paper": MEMORIZING | {"data": "pg19"},
    } | {
        name: {
            "width": 64, "layers": 2, "head_width": 16, "feed_forward": 256, "segment": 64, "memory_layer": 2, "memory": 512,
            "retrieved": 8, "dropout": 0.0, "steps": 3000, "batch": 16, "learning_rate": 3e-3, "warmup": 50,
        } | task
        for name, task in {"recall": {"recall_vary_distance": True}, "recall-16": FAR}.items()
    },
    "pretrained_recurrence": {
        "tiny": SMALL_GPT2 | {"steps": 800, "batch": 32, "horizon": 2, "learning_rate": 3e-3},
        # The paper's method on a small scale: train a plain GPT-2, then add recurrence and fine-tune with --init
        "pretrain": SMALL_GPT2 | {"vectors": 0, "steps": 1200, "batch": 64, "learning_rate": 2e-3},
        "fine-tune": SMALL_GPT2 | {"steps": 400, "batch": 16, "horizon": 4, "learning_rate": 1e-3},
        "small": {
            "width": 512, "layers": 8, "heads": 8, "feed_forward": 2048, "segment": 256, "max_positions": 1024,
            "steps": 20_000, "batch": 16, "horizon": 8, "backprop": "memory_replay", "learning_rate": 6e-4, "warmup": 1000,
        },
        "recall": {  # questions come in the window of the pairs and in the next four
            "width": 64, "layers": 3, "feed_forward": 256, "segment": 16, "max_positions": 16, "module_width": 64,
            "steps": 1500, "batch": 32, "horizon": 5, "learning_rate": 2e-3, "warmup": 50,
            "recall_pairs": 1, "recall_distance": 8, "recall_questions": 16,
        },
    } | {  # the published sizes; their heads are 64 wide
        name: GPT2 | {"width": width, "layers": layers, "heads": width // 64, "feed_forward": 4 * width}
        for name, (layers, width) in GPT2_SIZES.items()
    },
}  # fmt: skip

# Section 5: GPT-2 small, given with --init, for 2 epochs. It is validated every 2 million tokens, which 42 steps read; best.pt is
# what early stopping would choose. Of PG-19 the first 1250 books, and 15,000 tokens of each validation book. As gpt2, 5 GB
FINE_TUNING = PRESETS["pretrained_recurrence"]["gpt2"] | {"epochs": 2.0, "validate_every": 42}
PRESETS["pretrained_recurrence"] |= {
    "wikitext-103": FINE_TUNING | {"data": "wikitext-103-raw"},
    "pg19": FINE_TUNING | {"data": "pg19", "training_documents": 1250, "validation_tokens": 15_000},
}

# For each NAME there is NAME-xl, the Transformer-XL with as many memory rows; on enwik8 the paper gives it more
PRESETS["compressive"] |= {
    f"{name}-xl": preset | {"memory": preset["memory"] + preset["compressed_memory"], "compressed_memory": 0}
    for name, preset in PRESETS["compressive"].items()
}
PRESETS["compressive"]["enwik8-xl"]["memory"] = 2304


def by_config(model: str, values: dict) -> dict[str, dict]:
    """Sort {option's name: value} into {field of Settings: {field of its config: value}}."""
    classes = (CONFIGS[model], TrainingConfig, DataConfig, RecallConfig, TaskConfig)
    return {
        part: {f.name: values[prefix + f.name] for f in dataclasses.fields(config_class) if prefix + f.name in values}
        for (part, prefix), config_class in zip(PREFIXES.items(), classes, strict=True)
    }


def is_of_type(value: object, kind: type) -> bool:
    """Whether a saved value has this type; a whole number may stand for a float, true and false only for a bool."""
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def known_fields(config_class: type, values: dict) -> Any:
    """A config of saved values; ignores fields that no longer exist, and gives new fields their defaults."""
    return config_class(**{field.name: values[field.name] for field in dataclasses.fields(config_class) if field.name in values})


def check_types(config_class: type, values: dict) -> None:
    """Raise TypeError that names the first of the values whose type is not that of the config's field."""
    for field in dataclasses.fields(config_class):
        kind, value = type(field.default), values.get(field.name, field.default)
        if not is_of_type(value, kind):
            raise TypeError(f"{field.name} is {value!r}, expected {kind.__name__}")


def assembled(model: str, model_config: dict, training: dict, data: dict, recall: dict, tasks: dict) -> Settings:
    """The Settings of these values. All of model_config must be known, because it decides what the model computes."""
    configs = [*zip((TrainingConfig, DataConfig, RecallConfig, TaskConfig), (training, data, recall, tasks), strict=True)]
    for pair in (CONFIGS[model], model_config), *configs:
        check_types(*pair)
    return Settings(model, CONFIGS[model](**model_config), *(known_fields(*pair) for pair in configs))


def preset_settings(model: str, preset: str) -> Settings:
    """The Settings of a preset."""
    return assembled(model, **by_config(model, PRESETS[model][preset]))


def settings_contents(settings: Settings) -> dict:
    """Settings as plain values, for a checkpoint."""
    model_config, training, data, recall, tasks = map(dataclasses.asdict, settings[1:])
    return {
        "model": settings.model, "model_config": model_config, "training_config": training,
        "data_config": data | {"recall": recall, "tasks": tasks},
    }  # fmt: skip


def settings_from(contents: dict, path: Any) -> Settings:
    """The Settings in a checkpoint's contents; raises InputError if this program cannot use them."""
    if contents["model"] not in CONFIGS:
        raise InputError(f"{path} holds a model {contents['model']!r}; this program knows {', '.join(CONFIGS)}")
    training, data = dict(contents["training_config"]), contents["data_config"]
    if training.get("compile") in ("eager", "aot_eager"):  # earlier releases had them; they compute the same as none
        training["compile"] = "none"
    try:
        return assembled(contents["model"], contents["model_config"], training, data, data["recall"], data.get("tasks", {}))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path} has settings that this program cannot use: {error}") from None
