"""The folder of a run: the names of what it holds, its settings to be read, and its measurements.

checkpoint.pt is the last checkpoint, best.pt the one with the lowest validation loss; checkpoint.py
writes them. metrics.jsonl has a JSON object a line. Everything that reads or writes a run uses this
file. It does not import torch.
"""

import contextlib
import json
import shlex
from pathlib import Path

from accelerated.program.errors import InputError
from accelerated.program.files import RESUME, UNFINISHED, disk_errors, written_whole

LOCK = ".lock"
SETTINGS = "config.json"
METRICS = "metrics.jsonl"
CHECKPOINTS = ("checkpoint.pt", "best.pt")
# File of a run's tokenizer, unless --tokenizer names an encoding
TOKENIZERS = ("tokenizer.json", "tokenizer.tiktoken")
EXPORT = "palimpsest-export-1"  # what the config.json of an exported run says that it is
WEIGHTS = "model.safetensors"  # of an exported run, and of a published GPT-2


def checkpoint_path(run: str | Path) -> Path:
    """The path of a run folder's last checkpoint."""
    return Path(run) / "checkpoint.pt"


def check_new(run: Path) -> None:
    """Raise InputError unless a run can begin in a folder: nothing in it would be replaced.

    It is new, or empty, or a start was killed there before its first checkpoint.
    """
    if not run.is_dir():
        return
    names = {path.name for path in run.iterdir() if not path.match(UNFINISHED)}
    if LOCK in names:
        names -= {LOCK, *TOKENIZERS}
    if not names:
        return
    advice = "give a folder that is new or empty"
    if not names.isdisjoint(CHECKPOINTS):
        advice += f", or --resume {shlex.quote(str(run))}"
    raise InputError(f"--out {run} already holds {min(names)}, and nothing is replaced; {advice}")


def chosen_checkpoint(run: str | Path, name: str | None) -> Path:
    """The path of a run folder's checkpoint `name`: last, best, or another NAME.pt.

    Without a name it is the best, or the last if nothing was validated. Raises InputError if it is
    missing.
    """
    path = checkpoint_path(run) if name == "last" else Path(run) / f"{name or 'best'}.pt"
    if not name and not path.is_file():
        path = checkpoint_path(run)
    if not path.is_file() and checkpoint_path(run).is_file():
        raise InputError(
            f"--checkpoint {name}: {run} has no {path.name}; give last, or leave it out"
        )
    return path


# Settings


def write_settings(run: Path, settings: dict, advice: str = "give another --out") -> None:
    """Write a run's settings to config.json, to be read by people.

    The checkpoint has them too, and is what is resumed.
    """
    with written_whole(run / SETTINGS, advice) as path:
        path.write_bytes(json.dumps(settings, indent=2).encode() + b"\n")


def read_settings(run: Path) -> dict:
    """What a folder's config.json holds, with tuples for lists; {} if it is no such file."""
    try:
        held = json.loads((run / SETTINGS).read_bytes(), object_hook=with_tuples)
    except (OSError, ValueError, RecursionError):
        return {}
    return held if isinstance(held, dict) else {}


def with_tuples(values: dict) -> dict:
    """The values with lists turned into tuples, which JSON does not have."""
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
    }


# Measurements


def read_metrics(run: str | Path) -> list[dict]:
    """The records of a run's metrics.jsonl, [] if there is no such file.

    A line that a crash cut off, or that is no record of a step, is left out.
    """
    path = Path(run) / METRICS
    if not path.exists():
        return []
    records = []
    for line in path.read_text("utf-8", "replace").splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            record = json.loads(line)
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                records.append(record)
    return records


def is_finished(run: str | Path, step: int) -> bool:
    """Whether a run's log has the last report, made after this step."""
    return any(record.get("final") and record["step"] == step for record in read_metrics(run))


class Log:
    """Writes a run's metrics.jsonl; only the process of rank 0 does."""

    def __init__(self, run: Path, writing: bool = True):
        self.path = run / METRICS
        self.writing = writing

    def drop_after(self, step: int, validated: bool) -> None:
        """Drop the lines of later steps, and that step's validation unless it was `validated`."""
        if not self.writing:
            return
        kept = []
        for record in read_metrics(self.path.parent):
            is_redone = record["step"] == step and "validation_loss" in record and not validated
            if record["step"] <= step and not is_redone:
                kept.append(json.dumps(record) + "\n")
        with written_whole(self.path, RESUME) as temporary:
            temporary.write_bytes("".join(kept).encode())

    def write(self, **record: float) -> None:
        """Write one line."""
        if self.writing:
            with disk_errors(self.path, RESUME), open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
