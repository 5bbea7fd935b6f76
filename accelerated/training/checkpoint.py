"""Checkpoints: never left half-written, read without executing code, refused in one line.

They are refused if they are damaged, or do not fit what they are loaded into. A checkpoint is a
file of torch.save, a zip archive, which has a checksum of each of its parts.
"""

import zipfile
from pathlib import Path
from typing import Any

import torch

from accelerated.data.tokenizers import Tokenizer, run_tokenizer
from accelerated.models import model_class
from accelerated.program.errors import InputError, optional_package
from accelerated.program.files import RESUME, file_checksum, written_whole
from accelerated.protocol import Model
from accelerated.training.folder import EXPORT, SETTINGS, WEIGHTS, chosen_checkpoint, read_settings
from accelerated.training.settings import Settings

FORMAT = "palimpsest"
MEND = (
    "copy the run's other one, best.pt or checkpoint.pt, over it, or train again with another --out"
)
FOREIGN = "another program or release wrote it; train again with another --out"
EXPORT_FIELDS = (  # what an exported run has, too
    "model",
    "model_config",
    "training",
    "data",
    "recall",
    "tasks",
    "parameters",  # {name: tensor}
    "step",
    "corpus",  # a digest; empty if documents are generated, or unknown
    "tokenizer",  # a fingerprint; empty if it is unknown
)
FIELDS = (  # of the contents of a checkpoint
    *EXPORT_FIELDS,
    "optimizer",  # a state_dict
    "state",  # of all lanes
    "lanes",  # what each lane reads next
    "random",  # the state of torch's generator
    "best",  # lowest validation loss so far in bits per byte
    "gradient_norm",  # of the last update; NaN before the first
    # nats, scored tokens and bytes since the last line of the log; whether a validation is due
    "pending",
)
UNKNOWN = {"step": 0, "corpus": "", "tokenizer": ""}  # what a GPT-2 does not say

# Written and read


def save_checkpoint(path: Path, contents: dict) -> None:
    """Write a checkpoint; a crash while writing leaves the old file intact."""
    with written_whole(path, RESUME) as temporary, open(temporary, "wb") as file:
        torch.save({"format": FORMAT} | contents, file)


def load_checkpoint(path: str | Path) -> dict:
    """The contents of a checkpoint, on the CPU.

    Raises InputError if it is missing, damaged, or not this project's.
    """
    path = Path(path)
    if path.parent.is_file():
        raise InputError(f"{path.parent} is a file; give the folder that it is in")
    if not path.is_file():
        raise InputError(f"no checkpoint at {path}; give a folder that train.py wrote with --out")
    contents = unpickled(path)
    if not isinstance(contents, dict) or contents.get("format") != FORMAT:
        raise InputError(
            f"{path} is not a {FORMAT} checkpoint; give a folder that train.py wrote with --out"
        )
    check_contents(contents, FIELDS, path)
    return contents


def unpickled(path: Path) -> Any:
    """What torch.save has written to a file, if its checksums are right; executes nothing in it."""
    try:
        # Opened once: a run that goes on may put another one in its place
        with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
            if damaged:
                raise ValueError(f"the checksum of {damaged} is wrong")
            file.seek(0)
            return torch.load(file, map_location="cpu", weights_only=True)
    except OSError as error:
        raise InputError(
            f"cannot read {path}: {error.strerror}; change its permissions, or give another run"
        ) from None
    except Exception as error:  # of pickle, zipfile and torch: many types
        reason = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        raise InputError(f"{path} is damaged or not a checkpoint ({reason}); {MEND}") from None


def check_contents(contents: dict, fields: tuple[str, ...], path: Path) -> None:
    """Raise InputError unless contents have these fields."""
    for field in fields:
        if field not in contents:
            raise InputError(f"{path}: {field} is absent; {FOREIGN}")


def load_weights(path: str | Path, checkpoint: str | None = "last") -> dict:
    """Load a run, an exported run or a published decoder as the contents of a checkpoint.

    `checkpoint` is one of a run's, last or best; None is the best, or the last if there was no
    validation. The field `file` of the result is its file's name. The other two kinds have only the
    fields of EXPORT_FIELDS. Raises InputError if path is none of these, or is damaged.
    """
    path = Path(path)
    weights = path if path.suffix == ".safetensors" else path / WEIGHTS
    folder = weights.parent
    described = read_settings(folder)
    if described.get("format") == EXPORT:
        return load_exported(weights, described)
    is_decoder = described.get("model_type", "gpt2") != "gpt2"
    if is_decoder or path == weights or weights.is_file():
        from accelerated.gpt2_weights import load_decoder, load_gpt2  # here: few runs need it

        if is_decoder:
            return UNKNOWN | load_decoder(folder, described)
        return UNKNOWN | load_gpt2(weights, described)
    chosen = chosen_checkpoint(path, checkpoint)
    return load_checkpoint(chosen) | {"file": chosen.name}


def load_exported(weights: Path, described: dict) -> dict:
    """Load what eval.py export wrote as the contents of a checkpoint.

    `described` is its config.json. Raises InputError if it is damaged.
    """
    config = weights.with_name(SETTINGS)
    safetensors = optional_package("safetensors.torch", "an exported run needs", "gpt2")
    if not weights.is_file() or file_checksum(weights) != described.get("sha256"):
        raise InputError(
            f"{weights} is damaged or missing: {config.name} has another checksum; export it again"
        )
    contents = UNKNOWN | described | {"parameters": safetensors.load_file(weights)}
    check_contents(contents, EXPORT_FIELDS, config)
    return contents


# Put into a run


def load_moments(optimizer: torch.optim.Optimizer, saved: dict) -> None:
    """Load the moments of a state_dict; all else is the optimiser's own, as the settings say."""
    optimizer.load_state_dict(optimizer.state_dict() | {"state": saved["state"]})
    if isinstance(optimizer, torch.optim.Adafactor):
        return
    for parameter, moments in optimizer.state.items():
        shapes = {moments["exp_avg"].shape, moments["exp_avg_sq"].shape}
        if shapes != {parameter.shape}:  # a fused step would write beyond them
            raise ValueError("its moments have other shapes")


def check_tokenizer(tokenizer: Tokenizer, checkpoint: dict, path: str | Path) -> None:
    """Raise InputError unless the tokenizer, of the run at path, is the checkpoint's own."""
    if checkpoint["tokenizer"] not in ("", tokenizer.fingerprint):
        raise InputError(
            f"the tokenizer {tokenizer.name} is not the one that {path} was trained with"
            " (damaged, or another run's); restore it"
        )
    size = checkpoint["model_config"]["vocabulary"]
    if tokenizer.vocabulary != size:
        raise InputError(
            f"{path} has {size} tokens, its tokenizer {tokenizer.name} {tokenizer.vocabulary}; "
            "put its own tokenizer's files beside it"
        )


def load_parameters(model: torch.nn.Module, parameters: dict, path: str | Path) -> None:
    """Load a checkpoint's parameters.

    Raises InputError naming the first parameter that is absent, unexpected, of another shape, or
    not finite.
    """
    expected = {name: tuple(x.shape) for name, x in model.state_dict().items()}
    given = {name: tuple(x.shape) for name, x in parameters.items()}
    for name in sorted(expected.keys() | given.keys()):
        ours = expected.get(name, "absent")
        theirs = given.get(name, "absent")
        if ours != theirs:
            raise InputError(
                f"{path} does not fit the model: {name} should be {ours}, is {theirs}; "
                "leave out sizes that it was not trained with"
            )
        if not parameters[name].isfinite().all():
            raise InputError(
                f"{path}: {name} has NaN or infinite values; "
                "give another, or another --checkpoint, or train again"
            )
    model.load_state_dict(parameters)


# Opened without a run


def open_model(
    path: str | Path,
    contents: dict,
    settings: Settings,
    config: Any = None,
    device: str | torch.device = "cpu",
) -> tuple[Model, Tokenizer]:
    """The model of the contents that were loaded from path, in evaluation mode, and its tokenizer.

    config, if given, may have other sizes.
    """
    config = config or settings.model_config
    before = torch.get_default_dtype()
    torch.set_default_dtype(parameter_type(settings))
    try:
        model = model_class(settings.model, config)(config).to(device)
    finally:
        torch.set_default_dtype(before)

    parameters = contents["parameters"]
    if config != settings.model_config:  # other sizes may need fewer parameters
        names = model.state_dict().keys() & parameters.keys()
        parameters = {name: parameters[name] for name in names}
    load_parameters(model, parameters, path)
    tokenizer = run_tokenizer(Path(path), settings.data)
    check_tokenizer(tokenizer, contents, path)
    return model.eval(), tokenizer


def parameter_type(settings: Settings) -> torch.dtype:
    """The type of a run's parameters; with --dtype bfloat16 the model computes with copies."""
    return torch.float64 if settings.training.dtype == "float64" else torch.float32
