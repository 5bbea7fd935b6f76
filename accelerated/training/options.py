"""The command line of train.py: an option for every field of every config, and what cannot go together.

eval.py and the bench build their own parsers from OptionParser.
"""

import argparse
import dataclasses
import difflib
import inspect
import itertools
import sys
from pathlib import Path
from typing import Any

from accelerated.data.corpus import check_data, default_data_dir
from accelerated.data.tasks import TaskConfig
from accelerated.errors import InputError, option_name
from accelerated.models import MODELS
from accelerated.training.checkpoint import checkpoint_path, load_checkpoint
from accelerated.training.settings import (
    DEFAULT_MODEL,
    GPT2_MODEL,
    PREFIXES,
    PRESETS,
    TASK_MODEL,
    Settings,
    by_config,
    check_choice,
    preset_settings,
    settings_from,
)

METAVARS = {int: "INT", float: "FLOAT", str: "NAME", tuple: "INT,..."}
FIXED_IN_A_RUN = {"batch", "optimizer", "beta2", "weight_decay", "seed", "dtype"}  # what a checkpoint's tensors depend on
OF_THE_WEIGHTS = {"width", "layers", "heads", "head_width", "feed_forward", "max_positions"}  # what --init of a run decides
OF_THE_MODULE = {"insertion_layers", "pooling", "pool", "pool_final_norm", "module_layers", "module_width"}


@dataclasses.dataclass
class Beginning:
    """Where a run is kept, and what it begins with: weights drawn from the seed unless one of the others is given."""

    folder: Path
    data_dir: Path
    resumed: dict | None = None  # contents of the run's own checkpoint
    init: str | None = None  # another run, or a GPT-2
    initial: dict | None = None  # contents of the other run's checkpoint

    @property
    def gpt2(self) -> str | None:
        """The GPT-2 to begin with."""
        return None if self.initial else self.init


class OptionParser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line, naming the nearest option if one is unknown."""

    def error(self, message: str) -> None:
        sys.stderr.write(f"{self.prog}: {' '.join(message.split())}\n")
        raise SystemExit(2)

    def parse(self, argv: list[str], elsewhere: dict[str, str] | None = None) -> argparse.Namespace:
        """Read the options of argv; elsewhere {option: model} are those that only another model has."""
        options, unknown = self.parse_known_args(argv)
        if unknown:
            option = unknown[0].split("=")[0]
            if elsewhere and option in elsewhere:
                self.error(f"{option} is an option of --model {elsewhere[option]}; leave it out or choose that model")
            names = [name for action in self._actions for name in action.option_strings]
            nearest = difflib.get_close_matches(option, names, n=1, cutoff=0.0)[0]
            self.error(f"unknown option {unknown[0]}; did you mean {nearest}? --help lists all")
        return options


def field_help(config_class: type) -> dict[str, str]:
    """{field: help} from the Fields part of a config's docstring; every field must be described."""
    lines = inspect.getdoc(config_class).partition("Fields:")[2].splitlines()
    joined = " ".join(line if line.startswith("        ") else "\n" + line.strip() for line in lines)  # deeper lines continue
    described = dict(" ".join(line.split()).split(": ", 1) for line in joined.splitlines() if ": " in line)
    return {field.name: described[field.name] for field in dataclasses.fields(config_class)}


def layer_numbers(text: str) -> tuple[int, ...]:
    """'4,10' -> (4, 10); 'none' -> ()."""
    if text == "none":
        return ()
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}; give numbers joined by commas, like 4,10, or none") from None


def add_options(parser: OptionParser, title: str, config: Any, prefix: str = "", leave_out: tuple[str, ...] = ()) -> None:
    """Add an option for each field of the dataclass instance config, whose values are shown as the defaults."""
    group = parser.add_argument_group(title)
    for field in dataclasses.fields(config):
        if field.name in leave_out:
            continue
        default = getattr(config, field.name)
        shown = (",".join(map(str, default)) or "none") if isinstance(default, tuple) else default
        option = {"dest": prefix + field.name, "default": argparse.SUPPRESS}
        option["help"] = f"{field_help(type(config))[field.name]} (default {shown})".replace("%", "%%")
        if isinstance(default, bool):
            option["action"] = argparse.BooleanOptionalAction
        else:
            kind = layer_numbers if isinstance(default, tuple) else type(default)
            option |= {"type": kind, "metavar": METAVARS[type(default)]}
        group.add_argument(option_name(prefix + field.name), **option)


def add_data_dir(parser: OptionParser) -> None:
    """Add --data-dir."""
    parser.add_argument(
        "--data-dir", metavar="FOLDER", type=Path, default=default_data_dir(),
        help=f"where data sets are looked for and tokenised texts kept (default {default_data_dir()})",
    )  # fmt: skip


def changed(config: Any, values: dict, prefix: str = "") -> Any:
    """dataclasses.replace, with an impossible value as InputError that names its option; prefix is that of the options."""
    try:
        return dataclasses.replace(config, **values)
    except ValueError as error:
        field, _, rest = str(error).partition(" ")
        known = {field.name for field in dataclasses.fields(config)}
        raise InputError(f"{option_name(prefix + field)} {rest}" if field in known else str(error)) from None


def first_options(argv: list[str]) -> argparse.Namespace:
    """--model, --preset, --data, --resume and --init as argv has them, None if it does not: they decide the others' defaults."""
    parser = OptionParser(prog="train.py", add_help=False, allow_abbrev=False)
    for name in ("model", "preset", "data", "resume", "init"):
        parser.add_argument(f"--{name}")
    first = parser.parse_known_args(argv)[0]
    for name in ("init", "resume"):
        if getattr(first, name) == "":
            raise InputError(f"--{name} is empty; give a folder or a file, or leave it out")
    if first.init and first.resume:
        raise InputError("--init begins a new run and --resume continues one; give one of them")
    if first.init and Path(first.init).name == checkpoint_path("").name:
        raise InputError(f"--init {first.init} is a run's checkpoint; give its folder, {Path(first.init).parent}")
    return first


def choose_defaults(first: argparse.Namespace) -> tuple[Settings, dict | None]:
    """(Settings that the options change, contents of the checkpoint that --resume or --init names or None)."""
    path = checkpoint_path(first.resume or first.init or "")
    saved = load_checkpoint(path) if first.resume or (first.init and path.is_file()) else None
    held = saved and settings_from(saved, path)
    if first.resume:
        return held, saved
    implied = held.model if held else GPT2_MODEL if first.init else DEFAULT_MODEL
    model = first.model or implied
    check_choice("--model", model, MODELS, InputError)
    if held and model != implied:
        raise InputError(f"--init {first.init} holds a {implied}; leave --model {model} out, or --init")
    if first.init and model != implied:
        raise InputError(f"--init {first.init} is no run of train.py, and only --model {implied} begins with anything else")
    usual = "recall" if first.data == "recall" else "tiny"
    if first.init:
        usual = "gpt2" if not held else "fine-tune" if "fine-tune" in PRESETS[model] else usual
    preset = first.preset or usual
    check_choice("--preset", preset, PRESETS[model], InputError)
    defaults = preset_settings(model, preset)
    return held._replace(training=defaults.training) if held else defaults, saved


def training_parser(defaults: Settings) -> OptionParser:
    """The parser of train.py, with an option for every field of defaults."""
    parser = OptionParser(
        prog="train.py", allow_abbrev=False, usage="python train.py [options]",
        description="Train a long-memory Transformer, validate it with its memory and without, and sample from it.",
        epilog="The defaults shown are those of the chosen --model, --preset and --data: add them before --help to see others.",
    )  # fmt: skip
    parser.add_argument("--model", default=defaults.model, help=f"one of {', '.join(MODELS)} (default {DEFAULT_MODEL})")
    parser.add_argument(
        "--preset",
        help=f"one of {', '.join(PRESETS[defaults.model])} "
        "(default tiny; with --data recall recall; with --init gpt2 or, from a run of pretrained_recurrence, fine-tune)",
    )
    parser.add_argument(
        "--out", metavar="RUN", help="folder for all that is kept (default a new one, runs/MODEL-DATA-1 and so on)"
    )
    add_data_dir(parser)
    parser.add_argument(
        "--resume", metavar="RUN", help="continue the run in this folder from where it stopped, with its settings"
    )
    parser.add_argument(
        "--init", metavar="PATH",
        help="begin with the weights of another run, its model and its data (training as --preset says); or with a GPT-2 in "
        "safetensors (a file or its folder), for --preset gpt2, gpt2-medium, gpt2-large or gpt2-xl of pretrained_recurrence",
    )  # fmt: skip
    add_options(parser, "data", defaults.data)
    add_options(parser, "recall task (with --data recall)", defaults.recall, prefix="recall_")
    add_options(parser, "training", defaults.training)
    if defaults.model == TASK_MODEL:
        add_options(parser, "training tasks (of the encoder-decoder)", defaults.tasks, prefix="task_")
    add_options(parser, "model", defaults.model_config, leave_out=("vocabulary",))
    return parser


def options_elsewhere(defaults: Settings) -> dict[str, str]:
    """{option: model} of what other models' configs have and this one's does not."""
    own = {field.name for field in dataclasses.fields(defaults.model_config)}
    others = [(name, field.name) for name, model in MODELS.items() for field in dataclasses.fields(model.Config)]
    elsewhere = {option_name(field): name for name, field in others if field not in own}
    if defaults.model != TASK_MODEL:
        elsewhere |= {f"--task-{field.name}": TASK_MODEL for field in dataclasses.fields(TaskConfig)}
    return elsewhere


def parse_training(argv: list[str]) -> tuple[Settings, Beginning]:
    """(Settings, Beginning) of a train.py command line; raises InputError for what can be refused without looking at data."""
    first = first_options(argv)
    defaults, saved = choose_defaults(first)
    options = training_parser(defaults).parse(argv, options_elsewhere(defaults))
    asked = by_config(defaults.model, vars(options))
    if options.resume:
        check_resumed(options, saved["step"], defaults, asked)
    elif saved:
        check_initial(options.init, defaults.model_config, asked)
    adjust(asked)
    if not saved:
        asked["model_config"]["vocabulary"] = changed(defaults.data, asked["data"]).vocabulary
    parts = (changed(getattr(defaults, part), asked[part], prefix) for part, prefix in PREFIXES.items())
    settings = Settings(defaults.model, *parts)
    check_idle(settings, asked)
    check_together(settings)
    if options.resume:
        return settings, Beginning(Path(options.resume), options.data_dir, resumed=saved)
    return settings, Beginning(new_folder(options.out, settings), options.data_dir, init=options.init, initial=saved)


def adjust(asked: dict[str, dict]) -> None:
    """Take back the defaults that an option given makes meaningless."""
    training, data = asked["training"], asked["data"]
    if training.get("optimizer") == "adam":
        training.setdefault("weight_decay", 0.0)
    if "tokenizer" in data or data.get("data") == "recall":
        data.setdefault("train_bpe", 0)
    if data.get("train_bpe"):
        data.setdefault("tokenizer", "bytes")
    if "data" in data:
        data.setdefault("documents", "files")


def new_folder(out: str | None, settings: Settings) -> Path:
    """The folder of a new run: that of --out, or one that is not there yet; never one that already holds a run."""
    if out is None:
        names = (f"runs/{settings.model}-{Path(settings.data.data).stem}-{number}" for number in itertools.count(1))
        return next(folder for folder in map(Path, names) if not folder.exists())
    if checkpoint_path(out).exists():
        raise InputError(f"--out {out} already holds a run; give another folder, or --resume {out} to continue it")
    return Path(out)


def check_resumed(options: argparse.Namespace, step: int, resumed: Settings, asked: dict[str, dict]) -> None:
    """Raise InputError for options that would change the run that --resume continues, or for steps that it already has."""
    run = options.resume
    if options.out:
        raise InputError(f"--resume {run} continues in its own folder; leave --out out, or begin a new run with --init")
    others = [part for part in PREFIXES if part != "training" and asked[part]]
    if others or options.preset or options.model != resumed.model:
        raise InputError("--resume keeps the run's model and data; leave those options out, or start a new run without --resume")
    for name in sorted(asked["training"].keys() & FIXED_IN_A_RUN):
        raise InputError(f"--resume keeps the run's {name}; leave {option_name(name)} out, or start a new run")
    if step >= asked["training"].get("steps", resumed.training.steps):
        raise InputError(f"--resume {run} stands at step {step}; give --steps above that")


def check_initial(init: str, config: Any, asked: dict[str, dict]) -> None:
    """Raise InputError for options that ask for another shape or tokenizer than those of the run that --init names."""
    for name, value in asked["model_config"].items():
        own = getattr(config, name)
        if name in OF_THE_WEIGHTS and value != own:
            raise InputError(f"{option_name(name)} is {value}, the weights of --init {init} have {own}; leave it out")
    if asked["data"].keys() & {"tokenizer", "train_bpe"}:
        raise InputError(f"--init {init} keeps the tokenizer that its weights know; leave --tokenizer and --train-bpe out")


def check_idle(settings: Settings, asked: dict[str, dict]) -> None:
    """Raise InputError for an option that was given although the other settings leave it nothing to do."""
    training = settings.training
    idle = {
        "beta2": (training.optimizer == "adafactor", "--optimizer adafactor has none"),
        "final_fraction": (training.schedule != "cosine", f"--schedule {training.schedule} does not end in one"),
        "update_every_from": (training.update_every == 1, "--update-every is 1"),
    }
    for name, (useless, why) in idle.items():
        if useless and asked["training"].get(name):
            raise InputError(f"{option_name(name)} has no effect: {why}; leave it out")
    if asked["recall"] and settings.data.data != "recall":
        raise InputError(f"--recall-{next(iter(asked['recall']))} needs --data recall; add it or leave the option out")
    if settings.model == GPT2_MODEL and settings.model_config.vectors == 0:
        for name in sorted(asked["model_config"].keys() & OF_THE_MODULE):
            raise InputError(f"{option_name(name)} is of the recurrence module, and --vectors 0 has none; give --vectors 1")


def check_together(settings: Settings) -> None:
    """Raise InputError for settings that are possible each by itself but not together."""
    data, tasks, config = settings.data, settings.tasks, settings.model_config
    if settings.model == "compressive" and config.compression_loss == "bptt" and settings.training.horizon == 1:
        raise InputError(
            "--compression-loss bptt trains the compression by the losses of later segments, and --horizon 1 has none; "
            "give --horizon 2 or more"
        )
    if data.tokenizer != "bytes" and data.train_bpe:
        raise InputError("--tokenizer names a tokenizer and --train-bpe learns one; give one of them")
    if data.data == "recall" and (data.tokenizer != "bytes" or data.train_bpe):
        other = f"--train-bpe is {data.train_bpe}" if data.train_bpe else f"--tokenizer is {data.tokenizer}"
        raise InputError(f"--data recall is made of bytes, {other}; leave one of them out")
    check_data(data.data, data.documents)
    if tasks.continuation_alone:
        return
    if config.encoder_layers == 0:
        raise InputError(
            "--task-infilling and --task-recall need an encoder, and --encoder-layers 0 is the decoder-only model; leave them out"
        )
    if tasks.infilling and config.segment == 1:
        raise InputError("--task-infilling masks a part of every segment, and --segment 1 has no parts; give --segment 2 or more")
    if tasks.infilling and not 0 < tasks.budget(config.segment) < config.segment:
        what = "nothing" if tasks.budget(config.segment) == 0 else "everything"
        raise InputError(
            f"--task-masked {tasks.masked} of a segment of {config.segment} tokens masks {what}; "
            f"give between {1 / config.segment:.3g} and {1 - 1 / config.segment:.3g}, or another --segment"
        )
