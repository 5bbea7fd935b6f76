"""The folder of a run: the names of what it holds. options.py, run.py and eval.py use it; it does not import torch."""

from pathlib import Path

from accelerated.program.errors import InputError


def checkpoint_path(run: str | Path) -> Path:
    """The path of a run folder's last checkpoint."""
    return Path(run) / "checkpoint.pt"


def numbered_checkpoints(run: str | Path) -> dict[int, Path]:
    """Return {step: path} of each step-N.pt in a run folder, sorted by step."""
    found = ((path.stem.removeprefix("step-"), path) for path in Path(run).glob("step-*.pt"))
    return dict(sorted((int(step), path) for step, path in found if step.isdecimal()))


def chosen_checkpoint(run: str | Path, name: str) -> Path:
    """The path of a run folder's checkpoint `name`: last, best or step-N. If it is missing, InputError lists those that exist."""
    path = checkpoint_path(run) if name == "last" else Path(run) / f"{name}.pt"
    if not path.is_file() and checkpoint_path(run).is_file():
        others = [other.stem for other in (Path(run) / "best.pt", *numbered_checkpoints(run).values()) if other.is_file()]
        raise InputError(f"--checkpoint {name}: {run} has {', '.join(['last', *others])}; give one of these")
    return path
