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
from accelerated.models import NAMES, presets_of
from accelerated.program.errors import InputError, check_choice

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


def by_config(model: str, values: dict) -> dict[str, dict]:
    """Sort {option's name: value} into {field of Settings: {field of its config: value}}."""
    classes = (presets_of(model).Config, TrainingConfig, DataConfig, RecallConfig, TaskConfig)
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
    for pair in (presets_of(model).Config, model_config), *configs:
        check_types(*pair)
    return Settings(model, presets_of(model).Config(**model_config), *(known_fields(*pair) for pair in configs))


def preset_settings(model: str, preset: str) -> Settings:
    """The Settings of a preset."""
    return assembled(model, **by_config(model, presets_of(model).PRESETS[preset]))


def settings_contents(settings: Settings) -> dict:
    """Settings as plain values, for a checkpoint."""
    model_config, training, data, recall, tasks = map(dataclasses.asdict, settings[1:])
    return {
        "model": settings.model, "model_config": model_config, "training_config": training,
        "data_config": data | {"recall": recall, "tasks": tasks},
    }  # fmt: skip


def settings_from(contents: dict, path: Any) -> Settings:
    """The Settings in a checkpoint's contents; raises InputError if this program cannot use them."""
    if contents["model"] not in NAMES:
        raise InputError(f"{path} holds a model {contents['model']!r}; this program knows {', '.join(NAMES)}")
    training, data = dict(contents["training_config"]), contents["data_config"]
    if training.get("compile") in ("eager", "aot_eager"):  # earlier releases had them; they compute the same as none
        training["compile"] = "none"
    try:
        return assembled(contents["model"], contents["model_config"], training, data, data["recall"], data.get("tasks", {}))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path} has settings that this program cannot use: {error}") from None
