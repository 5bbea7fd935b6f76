"""Checkpoints: written whole or not at all, read without executing anything, refused in one line when they do not fit.

A run folder holds checkpoint.pt, the last one; step-N.pt, those of the last few iterations that had one, the last among them;
and best.pt, the one with the lowest validation loss.
"""

import os
import pickle
import shutil
from pathlib import Path

import torch

from accelerated.errors import InputError

FORMAT = "palimpsest"
VERSION = 1
SETTINGS = ("model", "model_config", "training_config", "data_config")
FIELDS = (*SETTINGS, "parameters", "optimizer", "state", "lanes", "random", "step")


def checkpoint_path(run):
    """The last checkpoint of a run folder."""
    return Path(run) / "checkpoint.pt"


def best_path(run):
    """The checkpoint of a run folder with the lowest validation loss."""
    return Path(run) / "best.pt"


def numbered_checkpoints(run):
    """{step: path} of the step-N.pt in a run folder, by step."""
    found = ((path.stem.removeprefix("step-"), path) for path in Path(run).glob("step-*.pt"))
    return dict(sorted((int(step), path) for step, path in found if step.isdecimal()))


def copy_checkpoint(path, other):
    """The checkpoint at path at another place too, whole or not at all; takes no room where the disk has hard links."""
    temporary = other.with_name(other.name + ".writing")
    temporary.unlink(missing_ok=True)
    try:
        try:
            os.link(path, temporary)
        except OSError:
            shutil.copyfile(path, temporary)
        os.replace(temporary, other)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise InputError(f"cannot write {other}: {error}; {path} is whole") from None


def save_in_run(run, contents, keep, best=False):
    """Save the checkpoint of contents["step"]: the last, one of the `keep` last, and where it is the best that too."""
    path = checkpoint_path(run)
    save_checkpoint(path, contents)
    if keep > 1:
        copy_checkpoint(path, Path(run) / f"step-{contents['step']}.pt")
    if best:
        copy_checkpoint(path, best_path(run))
    steps = numbered_checkpoints(run)
    kept = sorted(step for step in steps if step <= contents["step"])[-keep:] if keep > 1 else []  # later ones are of before
    for step, old in steps.items():
        if step not in kept:
            old.unlink(missing_ok=True)


def chosen_checkpoint(run, name):
    """The checkpoint of a run folder that `name` means: last, best or step-N; InputError says which there are."""
    path = checkpoint_path(run) if name == "last" else Path(run) / f"{name}.pt"
    if not path.is_file() and checkpoint_path(run).is_file():
        others = ["last", *(["best"] if best_path(run).is_file() else []), *(p.stem for p in numbered_checkpoints(run).values())]
        raise InputError(f"--checkpoint {name}: {run} has {', '.join(others)}")
    return path


def save_checkpoint(path, contents):
    """Write contents beside path, flush it to the disk, then rename: a crash in mid-write leaves the old file whole."""
    path = Path(path)
    temporary = path.with_name(path.name + ".writing")
    try:
        with open(temporary, "wb") as file:
            torch.save({"format": FORMAT, "version": VERSION} | contents, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:
        temporary.unlink(missing_ok=True)
        raise InputError(f"cannot write {path}: {error}; the checkpoint before it, if any, is untouched") from None


def load_checkpoint(path, device="cpu"):
    """The contents of a checkpoint; raises InputError where it is missing, broken, or not this project's."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"no checkpoint at {path}; give a folder that train.py wrote with --out")
    try:
        contents = torch.load(path, map_location=device, weights_only=True)
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


def load_parameters(model, parameters, path, unused=None, fresh=None):
    """Put a checkpoint's parameters into model; raises InputError naming the first name or shape that differs.

    unused: parameters with this in their names may be in the checkpoint without the model having them.
    fresh: parameters whose names begin so may be in the model without the checkpoint having them; they stay as they are.
    """
    own = model.state_dict()
    if unused:
        parameters = {name: value for name, value in parameters.items() if name in own or unused not in name}
    if fresh:
        parameters = {name: value for name, value in own.items() if name.startswith(fresh)} | parameters
    expected = {name: tuple(value.shape) for name, value in own.items()}
    found = {name: tuple(value.shape) for name, value in parameters.items()}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise InputError(
                f"{path} does not fit the model: {name} should be {expected.get(name, 'absent')}, is {found.get(name, 'absent')}"
            )
    model.load_state_dict(parameters)
