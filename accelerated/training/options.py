"""The command line of train.py: an option for every field of every config, and checks that the options fit together.

eval.py and the bench build their own parsers from OptionParser.
"""

import argparse
import dataclasses
import difflib
import inspect
import math
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from accelerated.data.config import (
    CORPORA,
    ENCODINGS,
    MU_LAW,
    OF_FILES,
    OF_TEXTS,
    DataConfig,
    TaskConfig,
    check_carry_over,
    check_data,
    default_data_dir,
)
from accelerated.models import DEFAULT, NAMES, presets_of
from accelerated.program.errors import InputError, check_choice, counted, option_name
from accelerated.training.folder import SETTINGS, checkpoint_path, is_exported, new_folder
from accelerated.training.log import is_finished, validations_since_best
from accelerated.training.settings import (
    GPT2_MODEL,
    PREFIXES,
    TASK_MODEL,
    Settings,
    by_config,
    preset_settings,
    settings_from,
)

METAVARS = {int: "INT", float: "FLOAT", str: "NAME", tuple: "INT,..."}
FIXED_IN_A_RUN = {"batch", "optimizer", "beta2", "weight_decay", "seed", "dtype"}  # a checkpoint's tensors depend on them
# --init of a run decides these
OF_THE_WEIGHTS = {"width", "layers", "heads", "head_width", "feed_forward", "max_positions", "cutoffs", "div_value"}
OF_THE_MODULE = {"insertion_layers", "pooling", "pool", "pool_final_norm", "module_layers", "module_width"}


@dataclasses.dataclass
class Beginning:
    """The folder of a run, and the weights it starts from: drawn from the seed unless `resumed` or `init` is set."""

    folder: Path
    data_dir: Path
    resumed: dict | None = None  # contents of the run's own checkpoint
    checksum: str = ""  # of that checkpoint
    init: str | None = None  # another run, or a GPT-2
    initial: dict | None = None  # contents of the other run's checkpoint

    @property
    def gpt2(self) -> str | None:
        """The path of the GPT-2 to start from, or None."""
        return None if self.initial else self.init


class OptionParser(argparse.ArgumentParser):
    """An ArgumentParser with errors of one line; for an unknown option the error names the nearest one."""

    def error(self, message: str) -> None:
        sys.stderr.write(f"{self.prog}: {' '.join(message.split())}\n")
        raise SystemExit(2)

    def parse(self, argv: list[str], elsewhere: dict[str, list[str]] | None = None) -> argparse.Namespace:
        """Read the options of argv; elsewhere is {option: models} for options that only other models have."""
        options, unknown = self.parse_known_args(argv)
        if unknown:
            option = unknown[0].split("=")[0]
            similar = [name for name in self._option_string_actions if name.endswith(option.lstrip("-"))]
            if elsewhere and option in elsewhere:
                advice = f"give {' or '.join(similar)}" if similar else "leave it out or choose that model"
                self.error(f"{option} is an option of --model {' or '.join(elsewhere[option])}; {advice}")
            self.refuse(unknown[0], self._option_string_actions)
        return options

    def refuse(self, option: str, names: Iterable[str]) -> None:
        """End with the error of an unknown option; it names the nearest of names."""
        nearest = difflib.get_close_matches(option.split("=")[0], names, n=1, cutoff=0.0)[0]
        self.error(f"unknown option {option}; did you mean {nearest}? --help lists all")


def field_help(config_class: type) -> dict[str, str]:
    """Return {field: help} from the Fields part of a config's docstring; every field must be described."""
    lines = inspect.getdoc(config_class).partition("Fields:")[2].splitlines()
    joined = " ".join(line if line.startswith("        ") else "\n" + line.strip() for line in lines)  # indented more: continues
    described = dict(" ".join(line.split()).split(": ", 1) for line in joined.splitlines() if ": " in line)
    return {field.name: described[field.name] for field in dataclasses.fields(config_class)}


def layer_numbers(text: str) -> tuple[int, ...]:
    """Convert '4,10' to (4, 10) and 'none' to ()."""
    if text == "none":
        return ()
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}; give numbers joined by commas, like 4,10, or none") from None


def add_options(parser: OptionParser, title: str, config: Any, prefix: str = "", leave_out: tuple[str, ...] = ()) -> None:
    """Add an option for each field of config, a dataclass instance; its values are shown as defaults."""
    group = parser.add_argument_group(title)
    for field in dataclasses.fields(config):
        if field.name in leave_out:
            continue
        default = getattr(config, field.name)
        shown = "none" if default in ((), "") else ",".join(map(str, default)) if isinstance(default, tuple) else default
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
        help=f"folder of downloaded data sets and tokenised texts (default {default_data_dir()})",
    )  # fmt: skip


def changed(config: Any, values: dict, prefix: str = "") -> Any:
    """Return config with these values; an impossible value raises InputError that names its option, prefix included."""
    try:
        return dataclasses.replace(config, **values)
    except ValueError as error:
        field, _, rest = str(error).partition(" ")
        known = {field.name for field in dataclasses.fields(config)}
        raise InputError(f"{option_name(prefix + field)} {rest}" if field in known else str(error)) from None


def first_options(argv: list[str]) -> argparse.Namespace:
    """Parse --out and (None if not given) --model, --preset, --data, --resume and --init, which decide others' defaults."""
    parser = OptionParser(prog="train.py", add_help=False, allow_abbrev=False)
    for name in ("model", "preset", "data", "resume", "init", "out"):
        parser.add_argument(f"--{name}")
    first = parser.parse_known_args(argv)[0]
    for name in ("init", "resume", "out"):
        if getattr(first, name) == "":
            raise InputError(f"--{name} is empty; give a folder or a file, or leave it out")
    if first.init and first.resume:
        raise InputError("--init begins a new run and --resume continues one; give one of them")
    if first.init and Path(first.init).name == checkpoint_path("").name:
        raise InputError(f"--init {first.init} is a run's checkpoint; give its folder, {Path(first.init).parent}")
    return first


def refuse_unknown(argv: list[str]) -> None:
    """Refuse an option that no model has, before the checkpoint that decides the model is read, which takes seconds."""
    parsers = [training_parser(preset_settings(model, "tiny")) for model in NAMES]
    known = {name for parser in parsers for name in parser._option_string_actions}
    for word in argv:
        if word.startswith("--") and word.split("=")[0] not in known:
            parsers[0].refuse(word, sorted(known))


def choose_defaults(first: argparse.Namespace) -> tuple[Settings, dict | None, str]:
    """Return (Settings before options change them, contents of the checkpoint of --resume or --init, or None, its checksum)."""
    path, saved, checksum = checkpoint_path(first.resume or first.init or ""), None, ""
    if first.resume or (first.init and path.is_file()):
        from accelerated.training.checkpoint import checksum_at_end, load_checkpoint  # here: it imports torch

        checksum, saved = checksum_at_end(path), load_checkpoint(path)
    elif first.init and is_exported(first.init):
        from accelerated.training.checkpoint import load_exported

        path, saved = Path(first.init) / SETTINGS, load_exported(first.init)
    held = saved and settings_from(saved, path)
    if first.resume:
        return held, saved, checksum
    implied = held.model if held else GPT2_MODEL if first.init else DEFAULT
    model = first.model or implied
    check_choice("--model", model, NAMES, InputError)
    if held and model != implied:
        raise InputError(f"--init {first.init} holds a {implied}; leave --model {model} out, or --init")
    if first.init and model != implied:
        raise InputError(f"--init {first.init} is not a run of train.py; only --model {implied} can start from other weights")
    usual = "recall" if first.data == "recall" else "tiny"
    if first.init:
        usual = "gpt2" if not held else "fine-tune" if "fine-tune" in presets_of(model).PRESETS else usual
    preset = first.preset or usual
    check_choice("--preset", preset, presets_of(model).PRESETS, InputError)
    defaults = preset_settings(model, preset)
    return held._replace(training=defaults.training) if held else defaults, saved, checksum


def training_parser(defaults: Settings) -> OptionParser:
    """The parser of train.py, with an option for every field of defaults."""
    parser = OptionParser(
        prog="train.py", allow_abbrev=False, usage="python train.py [options]",
        description="Train a long-memory Transformer, validate it with and without its memory, and sample from it.",
        epilog="Defaults depend on --model, --preset and --data: give these with --help to see other defaults.",
    )  # fmt: skip
    parser.add_argument("--model", default=defaults.model, help=f"one of {', '.join(NAMES)} (default {DEFAULT})")
    parser.add_argument(
        "--preset",
        help=f"one of {', '.join(presets_of(defaults.model).PRESETS)} "
        "(default tiny; recall with --data recall; with --init gpt2, or fine-tune for a run of pretrained_recurrence)",
    )
    parser.add_argument(
        "--out", metavar="RUN", help="folder for checkpoints and the log (default a new one: runs/MODEL-DATA-1, -2 ...)"
    )
    add_data_dir(parser)
    parser.add_argument("--resume", metavar="RUN", help="continue the run in this folder, with its settings")
    parser.add_argument(
        "--init", metavar="PATH",
        help="start from the weights, model and data of another run, or of one that eval.py exported (--preset sets the "
        "training); or from a GPT-2 in safetensors (a file or its folder), for --preset gpt2, gpt2-medium, gpt2-large or "
        "gpt2-xl of pretrained_recurrence",
    )  # fmt: skip
    add_options(parser, "data", defaults.data)
    add_options(parser, "recall task (with --data recall)", defaults.recall, prefix="recall_")
    add_options(parser, "training", defaults.training)
    if defaults.model == TASK_MODEL:
        add_options(parser, "training tasks (of the encoder-decoder)", defaults.tasks, prefix="task_")
    add_options(parser, "model", defaults.model_config, leave_out=("vocabulary",))
    return parser


def options_of(settings: Settings) -> list[str]:
    """The command line of train.py that gives these settings, without --out."""
    preset = "recall" if settings.data.data == "recall" else "tiny"
    usual, words = preset_settings(settings.model, preset), ["--model", settings.model]
    for part, prefix in PREFIXES.items():
        own, default = getattr(settings, part), getattr(usual, part)
        for field in dataclasses.fields(own):
            value = getattr(own, field.name)
            if value == getattr(default, field.name) or (part, field.name) == ("model_config", "vocabulary"):
                continue
            option = option_name(prefix + field.name)
            if isinstance(value, bool):
                words.append(option if value else f"--no-{option[2:]}")
            else:
                text = (",".join(map(str, value)) or "none") if isinstance(value, tuple) else str(value)
                words += [f"{option}={text}"] if text.startswith("-") else [option, text]
    return words


def options_elsewhere(defaults: Settings) -> dict[str, list[str]]:
    """Return {option: models} for options that other models have and this one does not."""
    own = {field.name for field in dataclasses.fields(defaults.model_config)}
    elsewhere: dict[str, list[str]] = {}
    for name in NAMES:
        for field in dataclasses.fields(presets_of(name).Config):
            if field.name not in own:
                elsewhere.setdefault(option_name(field.name), []).append(name)
    if defaults.model != TASK_MODEL:
        elsewhere |= {f"--task-{field.name}": [TASK_MODEL] for field in dataclasses.fields(TaskConfig)}
    return elsewhere


def parse(argv: list[str]) -> tuple[Settings, Beginning]:
    """Return (Settings, Beginning) of a train.py command line; raises InputError for errors that show without reading data."""
    first = first_options(argv)
    if first.resume or first.init:
        refuse_unknown(argv)
    defaults, saved, checksum = choose_defaults(first)
    options = training_parser(defaults).parse(argv, options_elsewhere(defaults))
    asked = by_config(defaults.model, vars(options))
    make_absolute(asked["data"])
    if options.resume:
        check_resumed(options, saved["step"], defaults, asked)
    elif saved:
        check_initial(options.init, defaults.model_config, asked)
    if not options.resume:
        adjust(asked, other_data=bool(saved))
    if not saved:
        data = changed(defaults.data, asked["data"])
        asked["model_config"]["vocabulary"] = vocabulary_of(data)
        if defaults.data.train_words and not data.train_words:  # a preset's cutoffs are those of its words
            asked["model_config"].setdefault("cutoffs", ())
    parts = (changed(getattr(defaults, part), asked[part], prefix) for part, prefix in PREFIXES.items())
    settings = Settings(defaults.model, *parts)
    check_idle(settings, asked)
    check_together(settings)
    if options.resume:
        return settings, Beginning(Path(options.resume), options.data_dir, resumed=saved, checksum=checksum)
    folder = new_folder(options.out, f"{settings.model}-{Path(settings.data.data).stem}")
    return settings, Beginning(folder, options.data_dir, init=options.init, initial=saved)


def vocabulary_of(data: DataConfig) -> int:
    """How many ids the tokenizer of a DataConfig has; fetches nothing."""
    if data.train_bpe or data.train_words or data.tokenizer in ENCODINGS:
        return data.train_bpe or data.train_words or ENCODINGS[data.tokenizer]
    from accelerated.data.tokenizers import tokenizer_of_file  # here: it imports tiktoken

    return tokenizer_of_file(data.tokenizer).vocabulary


def make_absolute(data: dict) -> None:
    """Make the paths among the given options of the data absolute, so that a run can be resumed from any folder."""
    for name in data.keys() & {"data", "tokenizer"}:
        if data[name] not in (*CORPORA, *ENCODINGS) and os.path.exists(data[name]):
            data[name] = os.path.abspath(data[name])


def adjust(asked: dict[str, dict], other_data: bool = False) -> None:
    """Replace defaults that make no sense with a given option; other_data: whether the data's defaults are those of a run."""
    training, data = asked["training"], asked["data"]
    if "steps" in training:
        training.setdefault("epochs", 0.0)
    if training.get("optimizer") == "adam":
        training.setdefault("weight_decay", 0.0)
    if data.get("data", "").lower().endswith(".wav") and not other_data:
        data.setdefault("tokenizer", MU_LAW)
    if "tokenizer" in data or data.get("data") == "recall":
        data.setdefault("train_bpe", 0)
        data.setdefault("train_words", 0)
    if data.get("data") == "recall":
        for name in ("carry_over_documents", *OF_TEXTS):
            data.setdefault(name, getattr(DataConfig, name))
    for name, other in (("train_bpe", "train_words"), ("train_words", "train_bpe")):
        if data.get(name):
            data.setdefault("tokenizer", "bytes")
            data.setdefault(other, 0)
    if "data" in data and other_data:
        for name in ("documents", *OF_TEXTS, *OF_FILES):  # of the data before
            data.setdefault(name, getattr(DataConfig, name))


def check_resumed(options: argparse.Namespace, step: int, resumed: Settings, asked: dict[str, dict]) -> None:
    """Raise InputError for options that would change the resumed run, or if it has already reached --steps."""
    run = options.resume
    if options.out:
        raise InputError(f"--resume {run} continues in its own folder; leave --out out, or begin a new run with --init")
    others = [part for part in PREFIXES if part != "training" and asked[part]]
    moved = others == ["data"] and asked["data"].keys() == {"data"} and "recall" not in (resumed.data.data, options.data)
    if (others and not moved) or options.preset or options.model != resumed.model:
        raise InputError(
            "--resume keeps the run's model and data; leave those options out (except --data, if its files have moved), "
            "or start a new run without --resume"
        )
    if not moved and os.path.isabs(data := resumed.data.data) and not os.path.exists(data):
        raise InputError(f"{data}, which {run} was trained on, is not there; if it has moved, give --data with its new place")
    for name in sorted(asked["training"].keys() & FIXED_IN_A_RUN):
        raise InputError(f"--resume keeps the run's {name}; leave {option_name(name)} out, or start a new run")
    training, finished, count = asked["training"], is_finished(run, step), validations_since_best(run, step)
    if training.get("epochs") and training.get("horizon", resumed.training.horizon) != resumed.training.horizon:
        raise InputError("--epochs counts passes at the run's own --horizon; give --steps with another one")
    steps = math.inf if training.get("epochs") else training.get("steps", resumed.training.steps)
    if step > steps or (step == steps and finished):
        raise InputError(f"--resume {run} is at step {step}; give --steps above that")
    if finished and 0 < training.get("stop_after", resumed.training.stop_after) <= count:
        raise InputError(
            f"--resume {run} stopped at step {step}: {counted(count, 'validation')} in a row brought no better score; give a "
            "larger --stop-after, or 0, to continue"
        )


def check_initial(init: str, config: Any, asked: dict[str, dict]) -> None:
    """Raise InputError for options that ask for other shapes or another tokenizer than the run of --init has."""
    for name, value in asked["model_config"].items():
        own = getattr(config, name)
        if name in OF_THE_WEIGHTS and value != own:
            raise InputError(f"{option_name(name)} is {value}, the weights of --init {init} have {own}; leave it out")
    if asked["data"].keys() & {"tokenizer", "train_bpe", "train_words"}:
        raise InputError(f"--init {init} keeps the tokenizer of its weights; leave --tokenizer and --train-... out")


def check_idle(settings: Settings, asked: dict[str, dict]) -> None:
    """Raise InputError for a given option that has no effect with the other settings."""
    training = settings.training
    idle = {
        "beta2": (training.optimizer == "adafactor", "--optimizer adafactor has none"),
        "final_fraction": (training.schedule != "cosine", f"--schedule {training.schedule} has none"),
        "update_every_from": (training.update_every == 1, "--update-every is 1"),
    }
    for name, (useless, why) in idle.items():
        if useless and asked["training"].get(name):
            raise InputError(f"{option_name(name)} has no effect: {why}; leave it out")
    if "steps" in asked["training"] and asked["training"].get("epochs"):
        raise InputError("--steps and --epochs both say how long to train; give one of them")
    if asked["recall"] and settings.data.data != "recall":
        raise InputError(f"--recall-{next(iter(asked['recall']))} needs --data recall; add it or leave the option out")
    if settings.model == GPT2_MODEL and settings.model_config.vectors == 0:
        for name in sorted(asked["model_config"].keys() & OF_THE_MODULE):
            raise InputError(f"{option_name(name)} sets the recurrence module, and --vectors 0 has none; give --vectors 1")


def check_together(settings: Settings) -> None:
    """Raise InputError for settings that do not work together."""
    data, tasks, config = settings.data, settings.tasks, settings.model_config
    if settings.model == "compressive" and config.compression_loss == "bptt" and settings.training.horizon == 1:
        raise InputError(
            "--compression-loss bptt trains the compression by the losses of later segments, and --horizon 1 has none; "
            "give --horizon 2 or more"
        )
    training = settings.training
    if training.stop_after and not training.validate_every:
        raise InputError(f"--stop-after {training.stop_after} counts validations, and --validate-every is 0; give it too")
    if training.compile == "cudagraphs" and training.horizon > 1 and training.backprop != "memory_replay":
        raise InputError(
            f"--compile cudagraphs needs a segment's backward pass before the next is read, and --backprop {training.backprop} "
            f"reads all {training.horizon} of --horizon first; give --horizon 1 or --backprop memory_replay"
        )
    learned = "--train-bpe" if data.train_bpe else "--train-words" if data.train_words else ""
    if (data.tokenizer != "bytes" and learned) or (data.train_bpe and data.train_words):
        named = "--train-words learns a tokenizer" if data.train_bpe and data.train_words else "--tokenizer names a tokenizer"
        raise InputError(f"{named} and {learned} learns one; give one of them")
    if data.data == "recall" and (data.tokenizer != "bytes" or learned):
        other = f"{learned} is {data.train_bpe or data.train_words}" if learned else f"--tokenizer is {data.tokenizer}"
        raise InputError(f"--data recall is made of bytes, {other}; leave one of them out")
    check_carry_over(data.data, data.carry_over_documents)
    check_data(data)
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
