"""All settings of a run with their defaults, and checks of their values.

options.py offers them, checkpoints store them, presets change them; eval.py and lab/ read them too.
It does not import torch, so that a wrong option is answered at once.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from accelerated.data.config import DataConfig, TaskConfig
from accelerated.data.recall import RecallConfig
from accelerated.models import NAMES, presets_of
from accelerated.program.errors import InputError, check_choice

COMPILERS = ("auto", "none", "inductor", "cudagraphs")
DEVICES = ("auto", "cpu", "cuda")
CHOICES = {
    "backprop": ("through_time", "checkpointed", "memory_replay"),  # the functions of replay.py
    "optimizer": ("adamw", "adam", "adafactor", "adafactor_momentum"),
    "schedule": ("cosine", "inverse_square_root", "constant"),
    "device": DEVICES,
    "dtype": ("float32", "bfloat16", "float64"),
    "compile": COMPILERS,
}
LEAST = {  # smallest value of a field; 0 for all others
    "batch": 1,
    "horizon": 1,
    "accumulate": 1,
    "update_every": 1,
    "save_every": 1,
    "validate_every": -1,
    "log_every": 1,
}
PREFIXES = {  # of the options of a part of the Settings
    "model_config": "",
    "training": "",
    "data": "",
    "recall": "recall_",
    "tasks": "task_",
}


@dataclass(frozen=True)
class TrainingConfig:
    """How a model is trained; an impossible value raises a ValueError that names the field.

    Fields:
        steps: iterations; in each, every lane (see --batch) reads --horizon segments
        epochs: passes through the training split, which become --steps when the data is read; 0 to
            give --steps
        batch: B, lanes: documents that are read side by side
        horizon: K, segments per iteration; gradient flows through the state between them, if the
            model's state passes it on
        clear_memory: empty the memory before each segment, in validation too, for a control that
            never learns to use it
        backprop: through_time (full BPTT), checkpointed (gradient checkpointing) or memory_replay
            (MRBP)
        checkpoint_layers: keep only the layers' inputs and compute each layer again in the backward
            pass, to save memory
        accumulate: groups of lanes that are computed one after another, with their gradients
            summed, to save memory
        optimizer: adamw, adam (second-moment decay 0.999 instead of 0.99, no weight decay),
            adafactor, or adafactor_momentum (0.9)
        schedule: cosine, inverse_square_root or constant
        learning_rate: peak learning rate; with inverse_square_root, the factor of 1/sqrt(step)
        warmup: iterations of linear warm-up
        initial_fraction: learning rate at the start of warm-up, as a fraction of the peak
        final_fraction: learning rate at the end of the cosine, as a fraction of the peak
        weight_decay: weight decay, not of adam, for parameters of two or more axes
        clip: largest norm of the gradient, 0 for no limit; parameters that only an auxiliary loss
            trains are clipped separately
        update_every: iterations whose gradients are averaged into one update, after the first
            --update-every-from
        update_every_from: number of iterations at the beginning that each make an update
        seed: seed of the weights, the order of documents and dropout
        device: auto (a GPU if there is one), cpu or cuda
        dtype: float32, float64, or bfloat16 (computed in bfloat16, with float32 parameters)
        compile: auto (on a GPU cudagraphs, and inductor from 20M parameters on), none, inductor
            (parts of layers by torch.compile; on a CPU it needs a C++ compiler), or cudagraphs (the
            GPU replays captured CUDA graphs)
        save_every: iterations between checkpoints; one is always written at the end
        validate_every: iterations between validations, which choose the best checkpoint; 0: only at
            the end, -1: a tenth of --steps
        validation_tokens: about how many tokens to validate on, taken from all over the split; 0
            for the whole split
        validation_prefix: validate on only the first N tokens of each document; 0 for all
        log_every: iterations between the lines of metrics.jsonl; its losses are means over these
            iterations
        sample: tokens of sample text to print at the end
    """

    steps: int = 400
    epochs: float = 0.0
    batch: int = 8
    horizon: int = 1
    clear_memory: bool = False
    backprop: str = "through_time"
    checkpoint_layers: bool = False
    accumulate: int = 1
    optimizer: str = "adamw"
    schedule: str = "cosine"
    learning_rate: float = 2e-3
    warmup: int = 40
    initial_fraction: float = 0.0
    final_fraction: float = 0.05
    weight_decay: float = 0.01
    clip: float = 1.0
    update_every: int = 1
    update_every_from: int = 0
    seed: int = 0
    device: str = "auto"
    dtype: str = "float32"
    compile: str = "auto"
    save_every: int = 200
    validate_every: int = -1
    validation_tokens: int = 0
    validation_prefix: int = 0
    log_every: int = 10
    sample: int = 200

    def __post_init__(self):
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(
                f"learning_rate is {self.learning_rate}; it must be positive and finite"
            )
        for name, value in vars(self).items():
            least = LEAST.get(name, 0)
            if name not in CHOICES and not least <= value < math.inf:
                raise ValueError(f"{name} is {value}; it must be finite and at least {least}")
        if self.optimizer == "adam" and self.weight_decay:
            raise ValueError(
                f"weight_decay is {self.weight_decay}, and adam has none; give adamw, or 0"
            )
        for name in ("initial_fraction", "final_fraction"):
            if getattr(self, name) > 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must lie in 0..1")
        if self.validation_prefix == 1:
            raise ValueError("validation_prefix is 1, of which nothing is predicted; give more")
        for name, possible in CHOICES.items():
            check_choice(name, getattr(self, name), possible)


class Settings(NamedTuple):
    """All settings of a run."""

    model: str
    model_config: Any  # the model's own Config
    training: TrainingConfig
    data: DataConfig
    recall: RecallConfig
    tasks: TaskConfig


def config_classes(model: str) -> dict[str, type]:
    """{part of the Settings: its class} for a model."""
    return {
        "model_config": presets_of(model).Config,
        "training": TrainingConfig,
        "data": DataConfig,
        "recall": RecallConfig,
        "tasks": TaskConfig,
    }


def by_config(model: str, values: dict) -> dict[str, dict]:
    """Sort {option's name: value} into {part of the Settings: {field of its config: value}}."""
    found = {}
    for part, kind in config_classes(model).items():
        names = {field.name: PREFIXES[part] + field.name for field in dataclasses.fields(kind)}
        found[part] = {field: values[name] for field, name in names.items() if name in values}
    return found


def settings_of(model: str, values: dict[str, dict]) -> Settings:
    """The Settings of {part: {field: value}}; raises TypeError or ValueError that names a field."""
    classes = config_classes(model)
    if "base" in values["model_config"]:
        classes["model_config"] = presets_of(model).DecoderConfig
    return Settings(model, **{part: kind(**values[part]) for part, kind in classes.items()})


def preset_settings(model: str, preset: str) -> Settings:
    """The Settings of a preset."""
    return settings_of(model, by_config(model, presets_of(model).PRESETS[preset]))


def settings_contents(settings: Settings) -> dict:
    """Settings as plain values, for a checkpoint: {part: {field: value}}, and the model's name."""
    parts = {part: dataclasses.asdict(getattr(settings, part)) for part in PREFIXES}
    return {"model": settings.model} | parts


def settings_from(contents: dict, path: Any) -> Settings:
    """The Settings in a checkpoint's contents.

    Raises InputError if this program cannot use them.
    """
    model = contents["model"]
    if model not in NAMES:
        known = ", ".join(NAMES)
        raise InputError(f"{path} holds a model {model!r}; this program knows {known}")
    try:
        return settings_of(model, contents)
    except (AttributeError, TypeError, ValueError) as error:
        raise InputError(f"{path} has settings that this program cannot use: {error}") from None
