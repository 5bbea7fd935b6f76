"""The command line of train.py: an option for every field of every config, and checks that the options fit together.

eval.py and lab/ build their own parsers from OptionParser.
"""

import argparse
import dataclasses
import difflib
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from accelerated.data.config import (
    CORPORA,
    ENCODINGS,
    MU_LAW,
    OF_TEXTS,
    RECORDING,
    DataConfig,
    TaskConfig,
    check_data,
    default_data_dir,
)
from accelerated.models import DEFAULT, NAMES, presets_of
from accelerated.program.errors import InputError, check_choice, option_name
from accelerated.training.folder import SETTINGS, checkpoint_path, is_exported, new_folder
from accelerated.training.log import is_finished
from accelerated.training.settings import PREFIXES, Settings, TrainingConfig, by_config, preset_settings, settings_from

METAVARS = {int: "INT", float: "FLOAT", str: "NAME", tuple: "INT,..."}
FIXED_IN_A_RUN = ("batch", "optimizer", "weight_decay", "seed", "dtype")  # a checkpoint's tensors depend on them
# --init of a run decides these
OF_THE_WEIGHTS = ("width", "layers", "heads", "head_width", "feed_forward", "max_positions", "cutoffs", "div_value")
NO_OPTIONS = {"model_config": ("vocabulary",), "recall": ("shared_values", "documents")}  # fields that only programs set
RECALL = "recall"  # the --data that has options of its own, and needs none of a text's
BYTES = ENCODINGS["bytes"]


@dataclasses.dataclass
class Start:
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


class Given(NamedTuple):
    """What the conditions of CHECKS look at, and their messages name."""

    config: Any  # the model's
    training: TrainingConfig
    data: DataConfig
    recall: Any
    tasks: TaskConfig
    asked: dict  # {field: value} of the options that were given
    resume: str | None = None  # a run
    init: str | None = None  # a run
    held: Settings | None = None  # the settings of either run
    step: int = 0  # of the resumed run
    finished: bool = False  # whether the resumed run has made its last report


def asked_of_model_and_data(given: Given) -> set[str]:
    """The given options that a resumed run cannot take, because it keeps its model and data; a text may have moved."""
    takes = {field.name for field in dataclasses.fields(TrainingConfig)} | {"resume", "init", "out", "data_dir"}
    takes |= {"model"} if given.asked.get("model") == given.held.model else set()
    takes |= {"data"} if RECALL not in (given.held.data.data, given.data.data) else set()
    return given.asked.keys() - takes


# (condition, message): options that do not work together, or not with the run of --resume or --init. The first that holds is
# refused. CHECKS of a model's presets follow
CHECKS = (
    (
        lambda given: given.resume and "out" in given.asked,
        "--resume {resume} continues in its own folder; leave --out out, or begin a new run with --init",
    ),
    (
        lambda given: given.resume and asked_of_model_and_data(given),
        "--resume keeps the run's model and data; leave those options out (except --data, if its files have moved), or start a "
        "new run without --resume",
    ),
    (
        lambda given: given.resume and os.path.isabs(given.data.data) and not os.path.exists(given.data.data),
        "{data.data}, which {resume} was trained on, is not there; if it has moved, give --data with its new place",
    ),
    *(
        (
            lambda given, name=name: given.resume and name in given.asked,
            f"--resume keeps the run's {name}; leave {option_name(name)} out, or start a new run",
        )
        for name in FIXED_IN_A_RUN
    ),
    (
        lambda given: given.resume and given.asked.get("epochs") and given.training.horizon != given.held.training.horizon,
        "--epochs counts passes at the run's own --horizon; give --steps with another one",
    ),
    (
        lambda given: given.resume and not given.asked.get("epochs") and given.step + given.finished > given.training.steps,
        "--resume {resume} is at step {step}; give --steps above that",
    ),
    *(
        (
            lambda given, name=name: (
                given.init and given.asked.get(name) not in (None, getattr(given.held.model_config, name, None))
            ),
            f"{option_name(name)} is {{config.{name}}}, the weights of --init {{init}} have {{held.model_config.{name}}}; "
            "leave it out",
        )
        for name in OF_THE_WEIGHTS
    ),
    (
        lambda given: given.init and given.asked.keys() & {"tokenizer", "train_bpe", "train_words"},
        "--init {init} keeps the tokenizer of its weights; leave --tokenizer and --train-... out",
    ),
    (
        lambda given: given.data.data == RECALL and given.config.vocabulary != BYTES,
        "--data recall is made of bytes, and the weights of --init {init} have another tokenizer; leave one of them out",
    ),
    (
        lambda given: sum(map(bool, (given.data.train_bpe, given.data.train_words, given.data.tokenizer != "bytes"))) > 1,
        "--tokenizer names a tokenizer, --train-bpe and --train-words learn one; give one of them",
    ),
    (
        lambda given: "steps" in given.asked and given.asked.get("epochs"),
        "--steps and --epochs both say how long to train; give one of them",
    ),
    (
        lambda given: given.training.schedule != "cosine" and given.asked.get("final_fraction"),
        "--final-fraction has no effect: --schedule {training.schedule} has none; leave it out",
    ),
    (
        lambda given: given.training.update_every == 1 and given.asked.get("update_every_from"),
        "--update-every-from has no effect: --update-every is 1; leave it out",
    ),
    (
        lambda given: (
            given.training.compile == "cudagraphs" and given.training.horizon > 1 and given.training.backprop != "memory_replay"
        ),
        "--compile cudagraphs needs a segment's backward pass before the next is read, and --backprop {training.backprop} "
        "reads all {training.horizon} of --horizon first; give --horizon 1 or --backprop memory_replay",
    ),
)


class OptionParser(argparse.ArgumentParser):
    """An ArgumentParser with errors of one line; for an unknown option the error names the nearest one."""

    def error(self, message: str) -> None:
        sys.stderr.write(f"{self.prog}: {' '.join(message.split())}\n")
        raise SystemExit(2)

    def parse(self, argv: list[str], place_of: Callable[[str], str] = lambda option: "") -> argparse.Namespace:
        """Read the options of argv; place_of says what has an option that is unknown here, "" if nothing has."""
        options, unknown = self.parse_known_args(argv)
        if unknown:
            option = unknown[0].split("=")[0]
            if place := place_of(option):
                similar = [name for name in self._option_string_actions if name.endswith(option.lstrip("-"))]
                advice = f"give {' or '.join(similar)}" if similar else "leave it out or choose that"
                self.error(f"{option} is an option of {place}; {advice}")
            self.refuse(option)
        return options

    def refuse(self, option: str) -> None:
        """End with the error of an unknown option; it names the nearest one."""
        nearest = difflib.get_close_matches(option, self._option_string_actions, n=1, cutoff=0.0)[0]
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
    usual = default_data_dir()
    text = f"folder of downloaded data sets and tokenised texts (default {usual})"
    parser.add_argument("--data-dir", metavar="FOLDER", type=Path, default=usual, help=text)


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


def place_of(option: str) -> str:
    """What has an option that not every run has: models, or --data; "" if nothing has."""
    name = option.removeprefix("--").replace("-", "_")
    if option != option_name(name):
        return ""
    if name in {field.name for field in dataclasses.fields(DataConfig)}:
        return "--data with texts"
    if by_config(DEFAULT, {name: None})[RECALL]:
        return f"--data {RECALL}"
    models = [model for model in NAMES if name in names_of_options(model)]
    return f"--model {' or '.join(models)}" if models else ""


def names_of_options(model: str) -> set[str]:
    """The fields that only some models' options set, of this one."""
    tasks = {f"task_{field.name}" for field in dataclasses.fields(TaskConfig)} if takes_tasks(model) else set()
    return tasks | {field.name for field in dataclasses.fields(presets_of(model).Config)}


def takes_tasks(model: str) -> bool:
    """Whether a model has training tasks."""
    return getattr(presets_of(model), "TAKES_TASKS", False)


def refuse_unknown(argv: list[str]) -> None:
    """Refuse an option that no run has, before the checkpoint that decides the model is read, which takes seconds."""
    parser = training_parser(preset_settings(DEFAULT, "tiny"))
    for option in (word.split("=")[0] for word in argv if word.startswith("--")):
        if option not in parser._option_string_actions and not place_of(option):
            parser.refuse(option)


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
    model = first.model or (held.model if held else model_of_gpt2() if first.init else DEFAULT)
    check_choice("--model", model, NAMES, InputError)
    if held and model != held.model:
        raise InputError(f"--init {first.init} holds a {held.model}; leave --model {model} out, or --init")
    if first.init and not held and model != model_of_gpt2():
        raise InputError(
            f"--init {first.init} is not a run of train.py; only --model {model_of_gpt2()} can start from other weights"
        )
    presets, usual = presets_of(model).PRESETS, RECALL if first.data == RECALL else "tiny"
    if first.init:
        usual = "gpt2" if not held else "fine-tune" if "fine-tune" in presets else usual
    preset = first.preset or usual
    check_choice("--preset", preset, presets, InputError)
    defaults = preset_settings(model, preset)
    defaults = held._replace(training=defaults.training) if held else defaults
    return defaults._replace(data=data_before_options(defaults.data, first.data, bool(held))), saved, checksum


def model_of_gpt2() -> str:
    """The model that a published GPT-2 can begin."""
    return next(name for name in NAMES if getattr(presets_of(name), "TAKES_GPT2", False))


def data_before_options(data: DataConfig, asked: str | None, of_weights: bool) -> DataConfig:
    """The defaults of the data if --data asks for this: other data than a run's has none of its parts.

    of_weights: whether they are the data of a run, whose tokenizer stays.
    """
    if asked == RECALL and not of_weights:
        return DataConfig(RECALL)
    usual = DataConfig(asked or data.data)
    if asked == RECALL:
        return dataclasses.replace(usual, tokenizer=data.tokenizer, train_bpe=data.train_bpe, train_words=data.train_words)
    parts = {name: getattr(usual, name) for name in ("documents", *OF_TEXTS)} if asked and of_weights else {}
    return dataclasses.replace(data, **parts)


def training_parser(defaults: Settings) -> OptionParser:
    """The parser of train.py, with an option for every field of defaults that its model and its data use."""
    parser = OptionParser(
        prog="train.py",
        allow_abbrev=False,
        usage="python train.py [options]",
        description="Train a long-memory Transformer, validate it with and without its memory, and sample from it.",
        epilog="Options and defaults depend on --model, --preset and --data: give these with --help to see others.",
    )
    presets = ", ".join(presets_of(defaults.model).PRESETS)
    usual = "default tiny; recall with --data recall; with --init gpt2, or fine-tune for a run of pretrained_recurrence"
    for option, metavar, text in (
        ("--model", "NAME", f"one of {', '.join(NAMES)} (default {DEFAULT})"),
        ("--preset", "NAME", f"one of {presets} ({usual})"),
        ("--out", "RUN", "folder for checkpoints and the log (default a new one: runs/MODEL-DATA-1, -2 ...)"),
        ("--resume", "RUN", "continue the run in this folder, with its settings"),
        (
            "--init",
            "PATH",
            "start from the weights, model and data of another run, or of one that eval.py exported (--preset sets the "
            "training); or from a GPT-2 in safetensors (a file or its folder), for --preset gpt2, gpt2-medium, gpt2-large or "
            "gpt2-xl of pretrained_recurrence",
        ),
    ):
        parser.add_argument(option, metavar=metavar, default=argparse.SUPPRESS, help=text)
    add_data_dir(parser)
    if defaults.data.data == RECALL:
        of_texts = tuple(field.name for field in dataclasses.fields(DataConfig) if field.name != "data")
        add_options(parser, "data", defaults.data, leave_out=of_texts)
        add_options(parser, "recall task", defaults.recall, prefix="recall_", leave_out=NO_OPTIONS["recall"])
    else:
        add_options(parser, "data (--data recall has options of its own)", defaults.data)
    add_options(parser, "training", defaults.training)
    if takes_tasks(defaults.model):
        add_options(parser, "training tasks (of the encoder-decoder)", defaults.tasks, prefix="task_")
    add_options(parser, "model", defaults.model_config, leave_out=NO_OPTIONS["model_config"])
    return parser


def options_of(settings: Settings) -> list[str]:
    """The command line of train.py that gives these settings, without --out."""
    of_recall = settings.data.data == RECALL
    usual, words = preset_settings(settings.model, RECALL if of_recall else "tiny"), ["--model", settings.model]
    for part, prefix in PREFIXES.items():
        config, default = getattr(settings, part), getattr(usual, part)
        for field in dataclasses.fields(config) if part != "recall" or of_recall else ():
            value = getattr(config, field.name)
            if value == getattr(default, field.name) or field.name in NO_OPTIONS.get(part, ()):
                continue
            option = option_name(prefix + field.name)
            if isinstance(value, bool):
                words.append(option if value else f"--no-{option[2:]}")
            else:
                text = (",".join(map(str, value)) or "none") if isinstance(value, tuple) else str(value)
                words += [f"{option}={text}"] if text.startswith("-") else [option, text]
    return words


def parse(argv: list[str]) -> tuple[Settings, Start]:
    """Return (Settings, Start) of a train.py command line; raises InputError for errors that show without reading data."""
    first = first_options(argv)
    if first.resume or first.init:
        refuse_unknown(argv)
    defaults, saved, checksum = choose_defaults(first)
    options = vars(training_parser(defaults).parse(argv, place_of))
    asked = by_config(defaults.model, options)
    make_absolute(asked["data"])
    if not first.resume:
        adjust(asked)
    if not saved:
        data = changed(defaults.data, asked["data"])
        asked["model_config"]["vocabulary"] = vocabulary_of(data)
        if getattr(defaults.model_config, "cutoffs", ()) and not data.train_words:  # a preset's are those of its words
            asked["model_config"].setdefault("cutoffs", ())
    settings = Settings(defaults.model, *(changed(getattr(defaults, p), asked[p], prefix) for p, prefix in PREFIXES.items()))
    given = Given(*settings[1:], options)
    if saved:
        finished = bool(first.resume) and is_finished(first.resume, saved["step"])
        given = given._replace(resume=first.resume, init=first.init, held=defaults, step=saved["step"], finished=finished)
    for condition, message in (*CHECKS, *getattr(presets_of(settings.model), "CHECKS", ())):
        if condition(given):
            raise InputError(message.format(**given._asdict()))
    check_data(settings.data)
    if first.resume:
        return settings, Start(Path(first.resume), options["data_dir"], resumed=saved, checksum=checksum)
    folder = new_folder(first.out, f"{settings.model}-{Path(settings.data.data).stem}")
    return settings, Start(folder, options["data_dir"], init=first.init, initial=saved)


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


def adjust(asked: dict[str, dict]) -> None:
    """Replace defaults that make no sense with a given option."""
    training, data = asked["training"], asked["data"]
    if "steps" in training:
        training.setdefault("epochs", 0.0)
    if training.get("optimizer") == "adam":
        training.setdefault("weight_decay", 0.0)
    if data.get("data", "").lower().endswith(RECORDING):
        data.setdefault("tokenizer", MU_LAW)
    if "tokenizer" in data:
        data.setdefault("train_bpe", 0)
        data.setdefault("train_words", 0)
    for name, other in (("train_bpe", "train_words"), ("train_words", "train_bpe")):
        if data.get(name):
            data.setdefault("tokenizer", "bytes")
            data.setdefault(other, 0)
