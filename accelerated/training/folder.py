"""The folder of a run: the names of what it holds, its settings to be read, and its measurements.

checkpoint.pt is the last checkpoint, best.pt the one with the lowest validation loss; checkpoint.py
writes them. metrics.jsonl has a JSON object a line. Everything that reads or writes a run uses this
file. It does not import torch.
"""

import json
from pathlib import Path

from accelerated.program.errors import InputError
from accelerated.program.files import disk_errors, written_whole

LOCK = ".lock"
SETTINGS = "config.json"
METRICS = "metrics.jsonl"
EXPORT = "palimpsest-export-1"  # what the config.json of an exported run says that it is
WEIGHTS = "model.safetensors"  # of an exported run, and of a published GPT-2
ADVICE = "make it writable, then --resume"


def checkpoint_path(run: str | Path) -> Path:
    """The path of a run folder's last checkpoint."""
    return Path(run) / "checkpoint.pt"


def chosen_checkpoint(run: str | Path, name: str) -> Path:
    """The path of a run folder's checkpoint `name`: last, best, or another NAME.pt.

    Raises InputError if it is missing.
    """
    path = checkpoint_path(run) if name == "last" else Path(run) / f"{name}.pt"
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
        path.write_text(json.dumps(settings, indent=2) + "\n")


def read_settings(run: Path) -> dict:
    """What a folder's config.json holds, with tuples for lists; {} if it is no such file."""
    try:
        held = json.loads((run / SETTINGS).read_text(), object_hook=with_tuples)
    except (OSError, ValueError, RecursionError):
        return {}
    return held if isinstance(held, dict) else {}


def with_tuples(values: dict) -> dict:
    """The values, of which JSON had lists for tuples."""
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
    }


# Measurements


def read_metrics(run: str | Path) -> list[dict]:
    """The records of a run's metrics.jsonl, [] if there is no such file.

    A line that a crash cut off is left out.
    """
    path = Path(run) / METRICS
    if not path.exists():
        return []
    records = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
    return records


def is_finished(run: str | Path, step: int) -> bool:
    """Whether a run's log has the last report, made after this step."""
    return any(record.get("final") and record["step"] == step for record in read_metrics(run))


class Log:
    """Writes a run's metrics.jsonl, in the first of several processes alone.

    If the run resumes at `step`, the lines of later steps are dropped first.
    """

    def __init__(self, run: Path, step: float = 0, writing: bool = True):
        self.path = run / METRICS
        self.writing = writing
        if writing:
            kept = [record for record in read_metrics(run) if record["step"] <= step]
            with written_whole(self.path, ADVICE) as temporary:
                temporary.write_text("".join(json.dumps(record) + "\n" for record in kept))

    def write(self, **record: float) -> None:
        """Write one line."""
        if self.writing:
            with disk_errors(self.path, ADVICE), open(self.path, "a") as file:
                file.write(json.dumps(record) + "\n")
