"""The command line of train.py: parse(argv) gives the settings of a run and what it starts from.

A run is resumed, begins with the weights of another run or of a published GPT-2, or starts from
scratch: there is a function for each. The checks that options fit together are at the end.
"""

import argparse
import dataclasses
import itertools
import os
from pathlib import Path
from typing import Any, NamedTuple

from accelerated.data.config import CORPORA, ENCODINGS, DataConfig, check_data
from accelerated.models import DEFAULT, NAMES, presets_of
from accelerated.program.errors import InputError, check_choice, option_name
from accelerated.program.parser import OptionParser
from accelerated.training.fields import add_data_dir, add_options, changed, field_help
from accelerated.training.folder import check_new, checkpoint_path, is_finished
from accelerated.training.settings import (
    PREFIXES,
    Settings,
    TrainingConfig,
    by_config,
    preset_settings,
    settings_from,
)

RECALL = "recall"  # this --data has options of its own, and takes no option of texts
TOKENIZER_FIELDS = ("tokenizer", "train_bpe", "train_words")
# A checkpoint's tensors depend on them
FIXED_IN_A_RUN = ("batch", "optimizer", "weight_decay", "seed", "dtype")
# Sizes that the weights of a GPT-2 decide
GPT2_FIELDS = ("vocabulary", "width", "layers", "heads", "feed_forward", "max_positions")


class Saved(NamedTuple):
    """The contents of a checkpoint, and the path that they were loaded from."""

    path: str | Path
    contents: dict


@dataclasses.dataclass
class Start:
    """The folder of a run, and the weights it starts from; without any they come from the seed."""

    folder: Path
    data_dir: Path
    resumed: Saved | None = None  # the run's own checkpoint
    written: float = 0.0  # its modification time; 0 without one
    initial: Saved | None = None  # --init: another run, or a GPT-2


def parse(argv: list[str]) -> tuple[Settings, Start]:
    """The Settings and the Start of a command line of train.py.

    Raises InputError for errors that show without reading data.
    """
    first = first_options(argv)
    if first.resume:
        return parse_resumed(argv, first)
    if first.init:
        return parse_init(argv, first)
    return parse_new(argv, first)


def first_options(argv: list[str]) -> argparse.Namespace:
    """The options that decide the defaults of others: None for those that are not given."""
    parser = OptionParser(prog="train.py", add_help=False, allow_abbrev=False)
    for name in ("model", "preset", "data", "resume", "init", "out"):
        parser.add_argument(f"--{name}")
    first, _ = parser.parse_known_args(argv)
    return first


def other_options(argv: list[str], defaults: Settings) -> tuple[dict, dict[str, dict]]:
    """All options that are given: {name: value}, and {part of the Settings: {field: value}}."""
    options = vars(training_parser(defaults).parse(argv))
    asked = by_config(defaults.model, options)
    make_absolute(asked["data"])
    return options, asked


def with_options(defaults: Settings, asked: dict[str, dict], options: dict) -> Settings:
    """The Settings that options have changed; raises InputError if they do not work together."""
    parts = {}
    for part, prefix in PREFIXES.items():
        parts[part] = changed(getattr(defaults, part), asked[part], prefix)
    settings = defaults._replace(**parts)
    check(settings, options)
    return settings


# A run that goes on


def parse_resumed(argv: list[str], first: argparse.Namespace) -> tuple[Settings, Start]:
    """--resume RUN: the run's own settings, of which options may change some."""
    from accelerated.training.checkpoint import load_checkpoint  # here: it imports torch

    run = first.resume
    path = checkpoint_path(run)
    written = path.stat().st_mtime if path.is_file() else 0.0
    saved = load_checkpoint(path)
    held = settings_from(saved, run)
    options, asked = other_options(argv, held)
    settings = with_options(held, asked, options)
    check_resumed(run, settings, options, held, saved["step"])
    start = Start(Path(run), options["data_dir"], resumed=Saved(path, saved), written=written)
    return settings, start


def check_resumed(run: str, settings: Settings, options: dict, held: Settings, step: int) -> None:
    """Raise InputError if the run cannot take the options.

    It is at that step and has the settings `held`.
    """
    takes = {field.name for field in dataclasses.fields(TrainingConfig)} - {*FIXED_IN_A_RUN}
    takes |= {"resume", "data_dir"}
    if RECALL not in (held.data.data, settings.data.data):
        takes.add("data")  # a text may have moved
    if "out" in options:
        raise InputError(
            f"--resume {run} continues in its own folder; "
            "leave --out out, or begin a new run with --init"
        )
    if options.keys() - takes:
        wrong = ", ".join(sorted(map(option_name, options.keys() - takes)))
        raise InputError(
            f"--resume keeps what {run} was begun with; "
            f"leave {wrong} out, or begin a new run with --init"
        )
    next_step = step + 1 if is_finished(run, step) else step  # its last report may be missing
    if not options.get("epochs") and next_step > settings.training.steps:
        raise InputError(f"--resume {run} is at step {step}; give --steps above that")


# A run that begins with weights


def parse_init(argv: list[str], first: argparse.Namespace) -> tuple[Settings, Start]:
    """--init: the model and tokenizer of a run or a published GPT-2, trained as a preset says."""
    from accelerated.training.checkpoint import load_weights  # here: it imports torch

    saved = load_weights(first.init)
    held = settings_from(saved, first.init)
    if first.model not in (None, held.model):
        raise InputError(
            f"--init {first.init} holds a {held.model}; leave --model {first.model} out, or --init"
        )
    is_published = not held.data.data  # a GPT-2 has no text of its own
    defaults = settings_of_gpt2(first, held) if is_published else settings_of_run(first, held)
    options, asked = other_options(argv, defaults)
    adjust(asked)
    settings = with_options(defaults, asked, options)
    check_init(first.init, settings.data, options, defaults)
    folder = new_folder(first.out, settings)
    return settings, Start(folder, options["data_dir"], initial=Saved(first.init, saved))


def settings_of_run(first: argparse.Namespace, held: Settings) -> Settings:
    """The settings of a run, with a preset's training."""
    usual = "fine-tune" if "fine-tune" in presets_of(held.model).PRESETS else ""
    preset = chosen_preset(held.model, first, usual)
    return held._replace(training=preset.training, data=with_data(held.data, first.data))


def settings_of_gpt2(first: argparse.Namespace, held: Settings) -> Settings:
    """The sizes and the tokenizer of a GPT-2, with a preset's recurrence, training and data."""
    preset = chosen_preset(held.model, first, "gpt2")
    own = held.model_config
    added = preset.model_config
    sizes = vars(added) | {name: getattr(own, name) for name in GPT2_FIELDS}
    sizes["segment"] = min(added.segment, own.max_positions)
    data = dataclasses.replace(preset.data, tokenizer=held.data.tokenizer)
    return held._replace(
        model_config=dataclasses.replace(own, **sizes),
        training=preset.training,
        data=with_data(data, first.data),
    )


def with_data(data: DataConfig, name: str | None) -> DataConfig:
    """The DataConfig of other data, if it is named, for weights that keep their tokenizer."""
    if not name:
        return data
    kept: dict[str, Any] = {field: getattr(data, field) for field in TOKENIZER_FIELDS}
    if name != RECALL:
        kept["carry_over_documents"] = data.carry_over_documents
    return DataConfig(name, **kept)


def check_init(run: str, data: DataConfig, options: dict, held: Settings) -> None:
    """Raise InputError if the weights of --init do not go with the options or the data.

    `held` are the settings before options changed them.
    """
    weights = held.model_config
    if "heads" in options and options["heads"] != weights.heads:  # no shape shows it
        raise InputError(
            f"--heads is {options['heads']}, the weights of --init {run} have {weights.heads}; "
            "leave it out"
        )
    if options.keys() & {*TOKENIZER_FIELDS}:
        raise InputError(
            f"--init {run} keeps the tokenizer of its weights; "
            "leave --tokenizer and --train-... out"
        )
    if data.data == RECALL and weights.vocabulary != ENCODINGS["bytes"]:
        raise InputError(
            "--data recall is made of bytes, and "
            f"the weights of --init {run} have another tokenizer; leave one of them out"
        )


# A run that starts from scratch


def parse_new(argv: list[str], first: argparse.Namespace) -> tuple[Settings, Start]:
    """A preset's settings, changed by options; the data decides the vocabulary."""
    defaults = settings_of_preset(first)
    options, asked = other_options(argv, defaults)
    adjust(asked)
    data = changed(defaults.data, asked["data"])
    asked["model_config"]["vocabulary"] = vocabulary_of(data)
    if getattr(defaults.model_config, "cutoffs", ()) and not data.train_words:
        asked["model_config"].setdefault("cutoffs", ())  # the preset's are those of its words
    settings = with_options(defaults, asked, options)
    return settings, Start(new_folder(first.out, settings), options["data_dir"])


def settings_of_preset(first: argparse.Namespace) -> Settings:
    """The settings of --preset, or of the default preset.

    If --data is given, and it or the preset's data is recall, the preset's data settings are
    dropped.
    """
    model = first.model or DEFAULT
    check_choice("--model", model, NAMES, InputError)
    settings = chosen_preset(model, first)
    if first.data and RECALL in (first.data, settings.data.data):
        return settings._replace(data=DataConfig(first.data))  # recall has no settings of a text
    return settings


def chosen_preset(model: str, first: argparse.Namespace, usual: str = "") -> Settings:
    """The settings of --preset, else of the usual one, else of recall's or tiny.

    Raises InputError if the model has no preset of that name.
    """
    of_data = RECALL if first.data == RECALL else "tiny"
    preset = first.preset or usual or of_data
    check_choice("--preset", preset, presets_of(model).PRESETS, InputError)
    return preset_settings(model, preset)


def vocabulary_of(data: DataConfig) -> int:
    """How many ids the tokenizer of a DataConfig has; fetches nothing."""
    if data.train_bpe or data.train_words:
        return data.train_bpe or data.train_words
    if data.tokenizer in ENCODINGS:
        return ENCODINGS[data.tokenizer]
    from accelerated.data.tokenizers import tokenizer_of_file  # here: it imports tiktoken

    return tokenizer_of_file(data.tokenizer).vocabulary


def new_folder(out: str | None, settings: Settings) -> Path:
    """The folder of a new run: --out, or else runs/MODEL-DATA-1, -2 ...

    Raises InputError if --out already holds a run, or anything else.
    """
    if out is None:
        stem = f"runs/{settings.model}-{Path(settings.data.data).stem}"
        folders = (Path(f"{stem}-{number}") for number in itertools.count(1))
        return next(folder for folder in folders if not folder.exists())
    check_new(Path(out))
    return Path(out)


def make_absolute(data: dict) -> None:
    """Make the paths among given options absolute, so that a run resumes from any folder."""
    for name in data.keys() & {"data", "tokenizer"}:
        if data[name] not in (*CORPORA, *ENCODINGS) and os.path.exists(data[name]):
            data[name] = os.path.abspath(data[name])


def adjust(asked: dict[str, dict]) -> None:
    """Replace defaults that make no sense with a given option."""
    training = asked["training"]
    data = asked["data"]
    if "steps" in training:
        training.setdefault("epochs", 0.0)
    if training.get("optimizer") == "adam":
        training.setdefault("weight_decay", 0.0)
    if any(data.get(name) for name in TOKENIZER_FIELDS):
        for name in TOKENIZER_FIELDS:
            data.setdefault(name, getattr(DataConfig, name))


def check(settings: Settings, options: dict) -> None:
    """Raise InputError if options do not work together, as the model's presets say it too."""
    training = settings.training
    data = settings.data
    tokenizers = [n for n in TOKENIZER_FIELDS if getattr(data, n) != getattr(DataConfig, n)]
    if len(tokenizers) > 1:
        raise InputError(
            "--tokenizer names a tokenizer, --train-bpe and --train-words learn it; "
            "give one of them"
        )
    if training.validation_prefix and data.data == RECALL:
        raise InputError(
            "--validation-prefix would leave --data recall without its questions, which come last; "
            "leave it out"
        )
    if "steps" in options and options.get("epochs"):
        raise InputError("--steps and --epochs both say how long to train; give one of them")
    if training.compile == "cudagraphs" and training.backprop == "checkpointed":
        raise InputError(
            "--compile cudagraphs and --backprop checkpointed do not work together; "
            "give through_time or memory_replay, or omit --compile"
        )
    for condition, message in getattr(presets_of(settings.model), "CHECKS", ()):
        if condition(settings):
            raise InputError(message)
    check_data(data)


# The options


def training_parser(defaults: Settings) -> OptionParser:
    """The parser of train.py, with the options that a model and its data use."""
    parser = OptionParser(
        prog="train.py",
        allow_abbrev=False,
        usage="python train.py [options]",
        description="Train a long-memory Transformer, validate it with and without its memory, and "
        "sample from it.",
        epilog="Options and defaults depend on --model, --preset and --data: give these with "
        "--help to see others.",
    )
    presets = presets_of(defaults.model)
    add_starts(parser, presets.PRESETS)
    add_data_dir(parser)
    recall = defaults.data.data == RECALL
    if recall:
        of_texts = field_help(DataConfig).keys() - {"data"}
        add_options(parser, "data", defaults.data, leave_out=of_texts)
        add_options(parser, "recall task", defaults.recall, "recall_")
    else:
        title = "data (--data recall has options of its own)"
        add_options(parser, title, defaults.data)
    add_options(parser, "training", defaults.training)
    if getattr(presets, "TAKES_TASKS", False):
        title = "training tasks (of the encoder-decoder)"
        add_options(parser, title, defaults.tasks, "task_")
    left_out = {"vocabulary", "base"}
    if recall:
        left_out |= {"cutoffs", "div_value"}
    add_options(parser, "model", defaults.model_config, leave_out=left_out)
    return parser


def add_starts(parser: OptionParser, presets: dict) -> None:
    """Add the options that say what a run starts from, and where it is kept."""
    texts = {
        "model": ("NAME", f"one of {', '.join(NAMES)} (default {DEFAULT})"),
        "preset": (
            "NAME",
            f"one of {', '.join(presets)} (default tiny; recall with --data recall; with --init "
            "gpt2, or fine-tune for a run of pretrained_recurrence)",
        ),
        "out": (
            "RUN",
            "folder for checkpoints and the log (default a new one: runs/MODEL-DATA-1, -2 ...)",
        ),
        "resume": ("RUN", "continue the run in this folder, with its settings"),
        "init": (
            "PATH",
            "start from the weights, model and data of another run, or of one that eval.py "
            "exported (--preset sets the training); or from the weights and tokenizer of a "
            "published GPT-2, a folder or a .safetensors, or of another decoder's folder, to which "
            "the preset adds recurrence",
        ),
    }
    for name, (metavar, text) in texts.items():
        parser.add_argument(f"--{name}", metavar=metavar, help=text, default=argparse.SUPPRESS)
