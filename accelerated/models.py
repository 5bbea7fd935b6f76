"""The models by the names that --model takes; their files are loaded when they are asked for.

A model is reference/NAME.py, accelerated/NAME.py and accelerated/presets/NAME.py. Nothing lists it.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from accelerated.presets import ModelConfig
from accelerated.program.errors import InputError

if TYPE_CHECKING:
    from accelerated.protocol import Model

HERE = Path(__file__).parent
DEFAULT = "block_recurrent"


def find_names() -> tuple[str, ...]:
    """The names of all models, in order; raises InputError if one of a model's files is missing."""
    names = []
    for presets in sorted((HERE / "presets").glob("[!_]*.py")):
        name = presets.stem
        for folder in ("reference", "accelerated"):
            if not (HERE.parent / folder / f"{name}.py").exists():
                raise InputError(
                    f"accelerated/presets/{name}.py has no {folder}/{name}.py beside it; "
                    "a model has a file in all three folders"
                )
        names.append(name)
    return tuple(names)


NAMES = find_names()


def presets_of(name: str) -> ModuleType:
    """The module of a model's presets, which has its Config and PRESETS; imports no torch."""
    return importlib.import_module(f"accelerated.presets.{name}")


def model_class(name: str, config: ModelConfig | None = None) -> type[Model]:
    """The class of a model, named as its file: Compressive of accelerated/compressive.py.

    If config has a `base`, a decoder of the package transformers, it is AnyDecoder.
    """
    if hasattr(config, "base"):
        name = "any_decoder"
    class_name = name.title().replace("_", "")
    return getattr(importlib.import_module(f"accelerated.{name}"), class_name)
