"""The models by the names that --model takes. A name stands for files, which are loaded when they are asked for.

reference/NAME.py, accelerated/NAME.py and accelerated/presets/NAME.py make a model; nothing lists it.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar, Protocol

from accelerated.program.errors import InputError

if TYPE_CHECKING:
    from accelerated.protocol import Model

HERE = Path(__file__).parent
DEFAULT = "block_recurrent"


class ModelConfig(Protocol):
    """What the Config of every model has; it is a frozen dataclass of the model's reference."""

    __dataclass_fields__: ClassVar[dict]

    @property
    def vocabulary(self) -> int: ...  # V
    @property
    def segment(self) -> int: ...  # N
    @property
    def width(self) -> int: ...  # D
    @property
    def dropout(self) -> float: ...


def find_names() -> tuple[str, ...]:
    """The names of all models, in order; raises InputError if a file of presets has no model beside it."""
    names = sorted(file.stem for file in (HERE / "presets").glob("*.py") if file.stem != "__init__")
    for name in names:
        for file in (HERE / f"{name}.py", HERE.parent / "reference" / f"{name}.py"):
            if not file.exists():
                missing = file.relative_to(HERE.parent).as_posix()
                parts = (
                    f"reference/{name}.py, accelerated/{name}.py and accelerated/presets/{name}.py"
                )
                raise InputError(f"{missing} is missing; a model is {parts}")
    return tuple(names)


NAMES = find_names()


def presets_of(name: str) -> ModuleType:
    """accelerated/presets/NAME.py: what others must know of a model, its Config and PRESETS among it. It imports no torch."""
    return importlib.import_module(f"accelerated.presets.{name}")


def model_class(name: str) -> type[Model]:
    """The torch.nn.Module of a model, named as its file: Compressive of accelerated/compressive.py."""
    class_name = name.title().replace("_", "")
    return getattr(importlib.import_module(f"accelerated.{name}"), class_name)
