"""Checkpoints: never left half-written, read without executing code, refused in one line if damaged or if they do not fit.

A checkpoint is a file of torch.save followed by MARK and the SHA-256 of all before it.
"""

import math
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import torch

from accelerated.data.tokenizers import Tokenizer, run_tokenizer
from accelerated.models import model_class
from accelerated.program.errors import InputError, optional_package
from accelerated.program.files import checksum_of, file_checksum, written_whole
from accelerated.training.folder import EXPORT, SETTINGS, WEIGHTS, chosen_checkpoint, read_settings
from accelerated.training.settings import Settings, is_of_type

FORMAT = "palimpsest"
MEND = (
    "remove it and copy the run's other one, best.pt or checkpoint.pt, to its name, or train again"
)
VERSION, EARLIER = 2, 1  # the earlier one has no checksum
MARK = b"\npalimpsest sha256 "
END = len(MARK) + 64  # bytes
NOT_IN_EARLIER = {"corpus": "", "tokenizer": "", "best": math.inf, "pending": (0.0, 0, 0)}
NEVER_TRAINED = NOT_IN_EARLIER | {
    "optimizer": {},
    "state": (),
    "lanes": {},
    "random": torch.empty(0),
    "step": 0,
}
DICTS = ("model_config", "training_config", "data_config", "parameters", "optimizer", "lanes")
FIELDS = {
    "model": str,
    "state": tuple,
    "random": torch.Tensor,
    "step": int,
    **dict.fromkeys(DICTS, dict),
}
FIELDS |= {name: type(value) for name, value in NOT_IN_EARLIER.items()}


def save_checkpoint(path: str | Path, contents: dict) -> None:
    """Write a checkpoint; a crash while writing leaves the old file intact."""
    with written_whole(path, "an earlier checkpoint there stays as it was") as temporary:
        with open(temporary, "wb") as file:
            torch.save({"format": FORMAT, "version": VERSION} | contents, file)
        with open(temporary, "ab") as file:
            file.write(MARK + file_checksum(temporary).encode())


def load_checkpoint(path: str | Path) -> dict:
    """The contents of a checkpoint, on the CPU; raises InputError if it is missing, damaged in any bit, or not this project's."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"no checkpoint at {path}; give a folder that train.py wrote with --out")
    with open(path, "rb") as file:  # once: a run that goes on may put another one in its place
        file.seek(max(0, file.seek(0, os.SEEK_END) - END))
        end = file.read()
        checksum = end.removeprefix(MARK).decode(errors="replace") if end.startswith(MARK) else ""
        if checksum and checksum != checksum_of(file, end=END):
            raise InputError(f"{path} is damaged: its checksum is wrong; {MEND}")
        file.seek(0)
        try:
            contents = torch.load(file, map_location="cpu", weights_only=True)
        except (
            OSError,
            RuntimeError,
            EOFError,
            ValueError,
            LookupError,
            TypeError,
            pickle.UnpicklingError,
        ) as error:
            reason = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
            raise InputError(
                f"{path} is truncated or not a checkpoint ({reason}); {MEND}"
            ) from None
    if not isinstance(contents, dict) or contents.get("format") != FORMAT:
        raise InputError(
            f"{path} is not a {FORMAT} checkpoint; give a folder that train.py wrote with --out"
        )
    if contents.get("version") == EARLIER:
        print(
            f"warning: {path} has no checksum, because an earlier release wrote it; it is used as it is",
            file=sys.stderr,
        )
        contents = NOT_IN_EARLIER | contents | {"version": VERSION}
    elif not checksum:
        raise InputError(f"{path} is damaged: its end is not a checksum; {MEND}")
    check_contents(contents, path)
    return contents


def load_exported(folder: str | Path) -> dict | None:
    """The contents, as of a checkpoint, of a folder that eval.py export wrote, or None; raises InputError if it is damaged."""
    config, weights, described = (
        Path(folder) / SETTINGS,
        Path(folder) / WEIGHTS,
        read_settings(Path(folder)),
    )
    if described.get("format") != EXPORT:
        return None
    safetensors = optional_package(
        "safetensors.torch", "an exported run needs", "gpt2", "safetensors"
    )
    if not weights.is_file() or file_checksum(weights) != described.get("sha256"):
        raise InputError(
            f"{weights} is damaged or missing: {config.name} has another checksum; export it again"
        )
    contents = (
        NEVER_TRAINED
        | described
        | {"version": VERSION, "parameters": safetensors.load_file(weights)}
    )
    check_contents(contents, config)
    return contents


def load_weights(path: str | Path, checkpoint: str = "last") -> dict:
    """The contents, as of a checkpoint, of a run's checkpoint (last or best), an exported run, or a published GPT-2.

    What an export and a GPT-2 lack is empty: optimizer, state, lanes. Raises InputError if it is none of these, or is damaged.
    """
    if (contents := load_exported(path)) is not None:
        return contents
    if Path(path).suffix == ".safetensors" or (Path(path) / WEIGHTS).is_file():
        from accelerated.gpt2_weights import load_gpt2  # here: few runs need it

        return NEVER_TRAINED | load_gpt2(path)
    return load_checkpoint(chosen_checkpoint(path, checkpoint))


def check_contents(contents: dict, path: Path) -> None:
    """Raise InputError unless contents are those of a checkpoint of this version, with fields of the right types."""
    if (version := contents.get("version")) != VERSION:
        raise InputError(
            f"{path} has version {version}, this program reads {VERSION}; use the release that wrote it"
        )
    wrong = [field for field, kind in FIELDS.items() if not is_of_type(contents.get(field), kind)]
    parameters = {} if wrong else contents["parameters"]
    wrong += [
        name
        for name, x in parameters.items()
        if not (isinstance(x, torch.Tensor) and x.layout == torch.strided)
    ]
    if wrong:
        raise InputError(
            f"{path} lacks {', '.join(wrong)}, or holds them in a wrong type; it is damaged; {MEND}"
        )


def restore(
    contents: dict,
    path: Path,
    optimizer: torch.optim.Optimizer,
    state: tuple,
    reader: Any,
    batch: int,
) -> None:
    """Put a new run's optimiser, random numbers and reader where the contents of its checkpoint left them.

    Raises InputError unless they fit a run of `batch` lanes; state is a new run's, of any number of lanes.
    """
    try:
        if [((batch, *x.shape[1:]), x.dtype) for x in state] != [
            ((*x.shape,), x.dtype) for x in contents["state"]
        ]:
            raise ValueError("its state has other shapes or types")
        torch.set_rng_state(contents["random"].cpu())
        reader.seek(contents["lanes"])
        load_moments(optimizer, contents["optimizer"])
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(
            f"{path} holds what does not fit this run ({error}); it is damaged; {MEND}"
        ) from None


def load_moments(optimizer: torch.optim.Optimizer, saved: dict) -> None:
    """Load the moments and the last learning rate of a state_dict; all else is the optimiser's own, as the settings say."""
    groups = zip(optimizer.state_dict()["param_groups"], saved["param_groups"], strict=True)
    groups = [group | {"lr": theirs["lr"]} for group, theirs in groups]
    optimizer.load_state_dict({"state": saved["state"], "param_groups": groups})
    adam = {} if isinstance(optimizer, torch.optim.Adafactor) else optimizer.state
    if any(
        {moments["exp_avg"].shape, moments["exp_avg_sq"].shape} != {p.shape}
        for p, moments in adam.items()
    ):
        raise ValueError("its moments have other shapes")  # a fused step would write beyond them


def check_tokenizer(tokenizer: Tokenizer, checkpoint: dict, path: str | Path) -> None:
    """Raise InputError unless tokenizer, of the run at path, is the one that the checkpoint was trained with."""
    if checkpoint["tokenizer"] not in ("", tokenizer.fingerprint):
        raise InputError(
            f"the tokenizer {tokenizer.name} is not the one that {path} was trained with (damaged, or another run's); restore it"
        )
    if tokenizer.vocabulary != (size := checkpoint["model_config"]["vocabulary"]):
        words = f"{path} has {size} tokens, its tokenizer {tokenizer.name} {tokenizer.vocabulary}"
        raise InputError(f"{words}; put its own tokenizer's files beside it")


def open_model(
    path: str | Path,
    contents: dict,
    settings: Settings,
    config: Any = None,
    device: str | torch.device = "cpu",
) -> tuple[torch.nn.Module, Tokenizer]:
    """Return (the model of these contents of `path`, in evaluation mode; its tokenizer). config, if given, may have other sizes.

    Parameters are float64 if they were trained so, otherwise float32.
    """
    config, before = config or settings.model_config, torch.get_default_dtype()
    torch.set_default_dtype(
        torch.float64 if settings.training.dtype == "float64" else torch.float32
    )
    try:
        model = model_class(settings.model)(config).to(device)
    finally:
        torch.set_default_dtype(before)
    parameters, needed = contents["parameters"], model.state_dict().keys()
    if config != settings.model_config:  # other sizes may need fewer parameters
        if untrained := sorted(needed - parameters.keys()):
            raise InputError(
                f"with these sizes the model needs {untrained[0]}, which {path} does not have; leave the sizes out"
            )
        parameters = {name: parameters[name] for name in needed}
    load_parameters(model, parameters, path)
    for parameter, values in model.state_dict().items():
        if not values.isfinite().all():
            raise InputError(
                f"{path}: {parameter} has NaN or infinite values; give another --checkpoint, or train again"
            )
    check_tokenizer(tokenizer := run_tokenizer(path, settings.data), contents, path)
    return model.eval(), tokenizer


def load_parameters(model: torch.nn.Module, parameters: dict, path: str | Path) -> None:
    """Load a checkpoint's parameters into model; raises InputError that names the first name or shape that differs."""
    expected, given = (
        {name: tuple(x.shape) for name, x in side.items()}
        for side in (model.state_dict(), parameters)
    )
    for name in sorted(expected.keys() | given.keys()):
        ours, theirs = expected.get(name, "absent"), given.get(name, "absent")
        if ours != theirs:
            raise InputError(f"{path} does not fit the model: {name} should be {ours}, is {theirs}")
    model.load_state_dict(parameters)
