"""The models by the names that --model takes. A name stands for files, which are loaded when they are asked for."""

import importlib
from types import ModuleType

NAMES = ("block_recurrent", "compressive", "memformer", "memorizing", "pretrained_recurrence")
DEFAULT = "block_recurrent"


def presets_of(name: str) -> ModuleType:
    """accelerated/presets/NAME.py: what others must know of a model, its Config and PRESETS among it. It imports no torch."""
    return importlib.import_module(f"accelerated.presets.{name}")


def model_class(name: str) -> type:
    """The torch.nn.Module of a model, named as its file: Compressive of accelerated/compressive.py."""
    return getattr(importlib.import_module(f"accelerated.{name}"), name.title().replace("_", ""))
