"""Checkpoints: never left half-written, read without executing code, refused in one line if they do not fit.

For run.py, options.py and eval.py. A run folder holds checkpoint.pt, the last checkpoint; step-N.pt, the last few checkpoints
including that one; and best.pt, the one with the lowest validation loss.
"""

import os
import pickle
import shutil
from pathlib import Path

import torch

from accelerated.program.errors import InputError
from accelerated.program.files import written_whole
from accelerated.training.folder import checkpoint_path, numbered_checkpoints

FORMAT = "palimpsest"
VERSION = 1
FIELDS = (
    "model", "model_config", "training_config", "data_config", "parameters", "optimizer", "state", "lanes", "random", "step",
)  # fmt: skip


def save_checkpoint(path: str | Path, contents: dict) -> None:
    """Write a checkpoint; a crash while writing leaves the old file intact."""
    with written_whole(path, "the previous checkpoint, if any, is intact") as temporary, open(temporary, "wb") as file:
        torch.save({"format": FORMAT, "version": VERSION} | contents, file)


def copy_checkpoint(path: Path, other: Path) -> None:
    """Copy the checkpoint at path to other; takes no space if the disk has hard links."""
    with written_whole(other, f"{path} is intact") as temporary:
        temporary.unlink(missing_ok=True)  # a crash may have left a link here: writing to it would change an older checkpoint
        try:
            os.link(path, temporary)
        except OSError:
            shutil.copyfile(path, temporary)


def save_in_run(run: str | Path, contents: dict, keep: int, best: bool = False) -> None:
    """Save contents as the last checkpoint, and as the best if `best`; if keep > 1, keep the last `keep` as step-N.pt."""
    path = checkpoint_path(run)
    save_checkpoint(path, contents)
    if keep > 1:
        copy_checkpoint(path, Path(run) / f"step-{contents['step']}.pt")
    if best:
        copy_checkpoint(path, Path(run) / "best.pt")
    steps = numbered_checkpoints(run)
    earlier = [step for step in steps if step <= contents["step"]]  # later ones are from before the run was resumed here
    kept = earlier[-keep:] if keep > 1 else []
    for step, old in steps.items():
        if step not in kept:
            old.unlink(missing_ok=True)


def load_checkpoint(path: str | Path) -> dict:
    """The contents of a checkpoint, on the CPU; raises InputError if it is missing, broken, or not this project's."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"no checkpoint at {path}; give a folder that train.py wrote with --out")
    try:
        contents = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        raise InputError(
            f"{path} is truncated or not a checkpoint ({reason}); use another copy (a step-N.pt) or train again"
        ) from None
    if not isinstance(contents, dict) or contents.get("format") != FORMAT:
        raise InputError(f"{path} is not a {FORMAT} checkpoint; give a folder that train.py wrote with --out")
    if contents.get("version") != VERSION:
        version = contents.get("version")
        raise InputError(f"{path} has version {version}, this program reads {VERSION}; use the release that wrote it")
    missing = [field for field in FIELDS if field not in contents]
    if missing:
        raise InputError(f"{path} lacks {', '.join(missing)}; it is damaged, use another copy or train again")
    return contents


def load_parameters(model: torch.nn.Module, parameters: dict, path: str | Path, unused: str | None = None) -> None:
    """Load a checkpoint's parameters into model; raises InputError that names the first name or shape that differs.

    unused: the model may lack a checkpoint's parameters that have this in their names.
    """
    own = model.state_dict()
    if unused:
        parameters = {name: value for name, value in parameters.items() if name in own or unused not in name}
    expected = {name: tuple(value.shape) for name, value in own.items()}
    found = {name: tuple(value.shape) for name, value in parameters.items()}
    for name in sorted(expected.keys() | found.keys()):
        ours, theirs = expected.get(name, "absent"), found.get(name, "absent")
        if ours != theirs:
            raise InputError(f"{path} does not fit the model: {name} should be {ours}, is {theirs}")
    model.load_state_dict(parameters)
