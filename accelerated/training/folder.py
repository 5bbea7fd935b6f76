"""The folder of a run: the names of what it holds, its readable settings, and its lock. It does not import torch.

checkpoint.pt is the last checkpoint; best.pt has the lowest validation loss.
Everything that reads or writes a run uses this file.
"""

import itertools
import json
import shlex
from pathlib import Path

from accelerated.program.errors import InputError
from accelerated.program.files import written_whole

LOCK = ".lock"
SETTINGS = "config.json"
METRICS = "metrics.jsonl"
EXPORT = "palimpsest-export-1"  # what the config.json of an exported run says that it is
WEIGHTS = "model.safetensors"  # of an exported run, and of a published GPT-2


def checkpoint_path(run: str | Path) -> Path:
    """The path of a run folder's last checkpoint."""
    return Path(run) / "checkpoint.pt"


def chosen_checkpoint(run: str | Path, name: str) -> Path:
    """The path of a run folder's checkpoint `name`: last, best, or another NAME.pt; raises InputError if it is missing."""
    path = checkpoint_path(run) if name == "last" else Path(run) / f"{name}.pt"
    if not path.is_file() and checkpoint_path(run).is_file():
        raise InputError(
            f"--checkpoint {name}: {run} has no {path.name}; give last, or leave it out"
        )
    return path


def new_folder(out: str | None, stem: str) -> Path:
    """The folder of a new run: --out, or else runs/STEM-1, -2 ...; raises InputError if --out already holds one, or weights."""
    if out is None:
        names = (f"runs/{stem}-{number}" for number in itertools.count(1))
        return next(folder for folder in map(Path, names) if not folder.exists())
    if checkpoint_path(out).exists() or (Path(out) / WEIGHTS).exists():
        raise InputError(
            f"--out {out} already holds a run or weights; give another, or, if a run, --resume {shlex.quote(out)}"
        )
    return Path(out)


def write_settings(run: Path, settings: dict, advice: str = "give another --out") -> None:
    """Write a run's settings to config.json, to be read by people; the checkpoint has them too, and is what is resumed."""
    with written_whole(run / SETTINGS, advice) as path:
        path.write_text(json.dumps(settings, indent=2) + "\n")


def read_settings(run: Path) -> dict:
    """What a folder's config.json holds, with tuples, which JSON has as lists; {} if it is no such file."""

    def with_tuples(values: dict) -> dict:
        return {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
        }

    try:
        held = json.loads((run / SETTINGS).read_text(), object_hook=with_tuples)
    except (OSError, ValueError, RecursionError):
        return {}
    return held if isinstance(held, dict) else {}
