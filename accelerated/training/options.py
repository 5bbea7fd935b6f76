"""The command line of train.py: an option for every field of every config, and checks that the options fit together.

eval.py and lab/ build their own parsers from OptionParser.
"""

import argparse
import dataclasses
import difflib
import functools
import inspect
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerated.data.config import (
    CORPORA,
    ENCODINGS,
    DataConfig,
    check_data,
    default_data_dir,
)
from accelerated.models import DEFAULT, NAMES, presets_of
from accelerated.program.errors import InputError, check_choice, option_name
from accelerated.training.folder import checkpoint_path, new_folder
from accelerated.training.log import is_finished
from accelerated.training.settings import (
    PREFIXES,
    Settings,
    TrainingConfig,
    by_config,
    preset_settings,
    settings_from,
)

METAVARS = {int: "INT", float: "FLOAT", str: "NAME", tuple: "INT,..."}
RECALL = "recall"  # the --data that has options of its own, and needs none of a text's
OF_A_TOKENIZER = ("tokenizer", "train_bpe", "train_words")
FIXED_IN_A_RUN = (
    "batch",
    "optimizer",
    "weight_decay",
    "seed",
    "dtype",
)  # a checkpoint's tensors depend on them
OF_A_GPT2 = (
    "vocabulary",
    "width",
    "layers",
    "heads",
    "feed_forward",
    "max_positions",
)  # sizes that its weights decide


@dataclasses.dataclass
class Start:
    """The folder of a run, and the weights it starts from: drawn from the seed unless `resumed` or `init` is set."""

    folder: Path
    data_dir: Path
    resumed: dict | None = None  # contents of the run's own checkpoint
    written: float = 0.0  # when that checkpoint was written, as its file says; 0 if there is none
    init: str | None = None  # another run, or a GPT-2
    initial: dict | None = None  # contents of that run's checkpoint


class OptionParser(argparse.ArgumentParser):
    """An ArgumentParser with errors of one line; for an unknown option the error names the nearest one."""

    def error(self, message: str) -> None:
        sys.stderr.write(f"{self.prog}: {' '.join(message.split())}\n")
        raise SystemExit(2)

    def parse(
        self, argv: list[str], place_of: Callable[[str], str] = lambda option: ""
    ) -> argparse.Namespace:
        """Read the options of argv; place_of names the model or data of an option that is unknown here, or says ""."""
        options, unknown = self.parse_known_args(argv)
        if unknown:
            option, known = unknown[0].split("=")[0], self._option_string_actions
            if not difflib.get_close_matches(option, known, cutoff=0.85) and (
                place := place_of(option)
            ):
                self.error(f"{option} is an option of {place}; leave it out or choose that")
            nearest = difflib.get_close_matches(option, known, n=1, cutoff=0.0)[0]
            if "--data" in known and not option.startswith("-"):  # a file alone
                nearest = f"--data {shlex.quote(option)}"
            self.error(f"unknown option {option}; did you mean {nearest}? --help lists all")
        return options


@functools.cache
def field_help(config_class: type) -> dict[str, str]:
    """Return {field: help} of a config, as each field or the docstring's part Fields says it."""
    described = {
        field.name: field.metadata.get("help") for field in dataclasses.fields(config_class)
    }
    if all(described.values()):
        return described
    lines = inspect.getdoc(config_class).partition("Fields:")[2].splitlines()
    joined = " ".join(
        line if line.startswith("        ") else "\n" + line.strip() for line in lines
    )  # indented more: continues
    described = dict(
        " ".join(line.split()).split(": ", 1) for line in joined.splitlines() if ": " in line
    )
    return {field.name: described[field.name] for field in dataclasses.fields(config_class)}


def whole_numbers(text: str) -> tuple[int, ...]:
    """Convert '4,10' to (4, 10) and 'none' to (): layers, cutoffs, dilations or overlaps."""
    if text == "none":
        return ()
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r}; give numbers joined by commas, like 4,10, or none"
        ) from None


def add_options(
    parser: OptionParser, title: str, config: Any, prefix: str = "", leave_out: tuple[str, ...] = ()
) -> None:
    """Add an option for each field of config, a dataclass instance; its values are shown as defaults."""
    group = parser.add_argument_group(title)
    for field in dataclasses.fields(config):
        if field.name in leave_out:
            continue
        default = getattr(config, field.name)
        shown = (
            "none"
            if default in ((), "")
            else ",".join(map(str, default))
            if isinstance(default, tuple)
            else default
        )
        option = {"dest": prefix + field.name, "default": argparse.SUPPRESS}
        option["help"] = f"{field_help(type(config))[field.name]} (default {shown})".replace(
            "%", "%%"
        )
        if isinstance(default, bool):
            option["action"] = argparse.BooleanOptionalAction
        else:
            kind = whole_numbers if isinstance(default, tuple) else type(default)
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
        raise InputError(
            f"{option_name(prefix + field)} {rest}" if field in known else str(error)
        ) from None


def first_options(argv: list[str]) -> argparse.Namespace:
    """Parse --out and (None if not given) --model, --preset, --data, --resume, --init: they decide other defaults."""
    parser = OptionParser(prog="train.py", add_help=False, allow_abbrev=False)
    for name in ("model", "preset", "data", "resume", "init", "out"):
        parser.add_argument(f"--{name}")
    first = parser.parse_known_args(argv)[0]
    for name in ("init", "resume", "out"):
        if getattr(first, name) == "":
            raise InputError(f"--{name} is empty; give a folder or a file, or leave it out")
    return first


def place_of(option: str) -> str:
    """The model or data that an option belongs to, in words; "" if every run has it or none."""
    if option.startswith("--recall-"):
        return "--data recall"
    if option in map(option_name, field_help(DataConfig)):
        return "--data with texts"
    takes_tasks = [
        name
        for name in NAMES
        if option.startswith("--task-") and getattr(presets_of(name), "TAKES_TASKS", False)
    ]
    having = [
        name
        for name in NAMES
        if option in map(option_name, {*field_help(presets_of(name).Config)} - {"vocabulary"})
    ]
    return f"--model {' or '.join(takes_tasks or having)}" if takes_tasks or having else ""


def choose_defaults(first: argparse.Namespace) -> tuple[Settings, dict | None]:
    """Return (Settings before options change them, the checkpoint of --resume or --init, or None)."""
    run, saved = first.resume or first.init, None
    if run:
        from accelerated.training.checkpoint import (
            load_checkpoint,
            load_weights,
        )  # here: it imports torch

        saved = load_checkpoint(checkpoint_path(run)) if first.resume else load_weights(run)
    held = saved and settings_from(saved, run)
    if first.resume:
        return held, saved
    published = bool(held and not held.data.data)  # a GPT-2, which has no text of its own
    model = first.model or (held.model if held else DEFAULT)
    check_choice("--model", model, NAMES, InputError)
    if held and model != held.model:
        raise InputError(
            f"--init {first.init} holds a {held.model}; leave --model {model} out, or --init"
        )
    presets, usual = presets_of(model).PRESETS, RECALL if first.data == RECALL else "tiny"
    usual = "gpt2" if published else "fine-tune" if held and "fine-tune" in presets else usual
    preset = first.preset or usual
    check_choice("--preset", preset, presets, InputError)
    defaults = preset_settings(model, preset)
    chosen = (held or defaults)._replace(training=defaults.training)
    if published:  # its sizes, with the preset's recurrence
        sizes = {name: getattr(held.model_config, name) for name in OF_A_GPT2}
        sizes["insertion_layers"] = tuple(
            sorted({min(n, sizes["layers"]) for n in defaults.model_config.insertion_layers})
        )
        sizes["segment"] = min(defaults.model_config.segment, held.model_config.max_positions)
        data = dataclasses.replace(defaults.data, tokenizer=held.data.tokenizer)
        chosen = chosen._replace(
            model_config=dataclasses.replace(defaults.model_config, **sizes), data=data
        )
    if first.data and (first.data == RECALL or held or chosen.data.data == RECALL):
        kept = (
            *(OF_A_TOKENIZER if held else ()),
            *(() if first.data == RECALL else ("carry_over_documents",)),
        )
        chosen = chosen._replace(
            data=DataConfig(first.data, **{name: getattr(chosen.data, name) for name in kept})
        )
    return chosen, saved


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
    init = (
        "start from the weights, model and data of another run, or of one that eval.py exported (--preset sets the training); or "
        "from the weights and tokenizer of a published GPT-2, a folder or a .safetensors, to which the preset adds recurrence"
    )
    add = functools.partial(parser.add_argument, default=argparse.SUPPRESS)
    add("--model", metavar="NAME", help=f"one of {', '.join(NAMES)} (default {DEFAULT})")
    add("--preset", metavar="NAME", help=f"one of {presets} ({usual})")
    add(
        "--out",
        metavar="RUN",
        help="folder for checkpoints and the log (default a new one: runs/MODEL-DATA-1, -2 ...)",
    )
    add("--resume", metavar="RUN", help="continue the run in this folder, with its settings")
    add("--init", metavar="PATH", help=init)
    add_data_dir(parser)
    if defaults.data.data == RECALL:
        of_texts = tuple(
            field.name for field in dataclasses.fields(DataConfig) if field.name != "data"
        )
        add_options(parser, "data", defaults.data, leave_out=of_texts)
        add_options(parser, "recall task", defaults.recall, prefix="recall_")
    else:
        add_options(parser, "data (--data recall has options of its own)", defaults.data)
    add_options(parser, "training", defaults.training)
    if getattr(presets_of(defaults.model), "TAKES_TASKS", False):
        add_options(
            parser, "training tasks (of the encoder-decoder)", defaults.tasks, prefix="task_"
        )
    of_words = (
        ("cutoffs", "div_value") if defaults.data.data == RECALL else ()
    )  # recall is made of bytes
    add_options(parser, "model", defaults.model_config, leave_out=("vocabulary", *of_words))
    return parser


def parse(argv: list[str]) -> tuple[Settings, Start]:
    """Return (Settings, Start) of a train.py command line; raises InputError for errors that show without reading data."""
    first = first_options(argv)
    written = (
        path.stat().st_mtime
        if first.resume and (path := checkpoint_path(first.resume)).is_file()
        else 0.0
    )
    defaults, saved = choose_defaults(first)
    options = vars(training_parser(defaults).parse(argv, place_of))
    asked = by_config(defaults.model, options)
    make_absolute(asked["data"])
    if not first.resume:
        adjust(asked)
    if not saved:
        data = changed(defaults.data, asked["data"])
        asked["model_config"]["vocabulary"] = vocabulary_of(data)
        if (
            getattr(defaults.model_config, "cutoffs", ()) and not data.train_words
        ):  # those of a preset's words
            asked["model_config"].setdefault("cutoffs", ())
    settings = Settings(
        defaults.model,
        *(changed(getattr(defaults, p), asked[p], prefix) for p, prefix in PREFIXES.items()),
    )
    if first.resume:
        check_resumed(first.resume, settings, options, defaults, saved["step"])
    elif saved:
        check_begun(first.init, settings.data, options, defaults)
    check(settings, options)
    check_data(settings.data)
    if first.resume:
        return settings, Start(
            Path(first.resume), options["data_dir"], resumed=saved, written=written
        )
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
    if any(map(data.get, OF_A_TOKENIZER)):
        for name in OF_A_TOKENIZER:
            data.setdefault(name, getattr(DataConfig, name))


def check_resumed(run: str, settings: Settings, asked: dict, held: Settings, step: int) -> None:
    """Raise InputError if the run, which is at that step and has the settings `held`, cannot take the options asked for."""
    training, data = settings.training, settings.data
    takes = {field.name for field in dataclasses.fields(TrainingConfig)} - {*FIXED_IN_A_RUN} | {
        "resume",
        "data_dir",
    }
    takes |= {"model"} if asked.get("model") == held.model else set()
    takes |= (
        {"data"} if RECALL not in (held.data.data, data.data) else set()
    )  # a text may have moved
    if "out" in asked:
        raise InputError(
            f"--resume {run} continues in its own folder; leave --out out, or begin a new run with --init"
        )
    if asked.keys() - takes:
        wrong = ", ".join(sorted(map(option_name, asked.keys() - takes)))
        raise InputError(
            f"--resume keeps what {run} was begun with; leave {wrong} out, or begin a new run with --init"
        )
    if not asked.get("epochs") and step + is_finished(run, step) > training.steps:
        raise InputError(f"--resume {run} is at step {step}; give --steps above that")


def check_begun(run: str, data: DataConfig, asked: dict, held: Settings) -> None:
    """Raise InputError if the weights of --init, a run with the settings `held`, do not go with the options or the data."""
    weights = held.model_config
    if asked.get("heads", weights.heads) != weights.heads:  # no shape shows it
        raise InputError(
            f"--heads is {asked['heads']}, the weights of --init {run} have {weights.heads}; leave it out"
        )
    if asked.keys() & {*OF_A_TOKENIZER}:
        raise InputError(
            f"--init {run} keeps the tokenizer of its weights; leave --tokenizer and --train-... out"
        )
    if data.data == RECALL and weights.vocabulary != ENCODINGS["bytes"]:
        other = f"the weights of --init {run} have another tokenizer; leave one of them out"
        raise InputError(f"--data recall is made of bytes, and {other}")


def check(settings: Settings, asked: dict) -> None:
    """Raise InputError if options do not work together; the last checks are those of the model's presets."""
    training, data = settings.training, settings.data
    if sum(getattr(data, name) != getattr(DataConfig, name) for name in OF_A_TOKENIZER) > 1:
        raise InputError(
            "--tokenizer names a tokenizer, --train-bpe and --train-words learn it; give one of them"
        )
    if "steps" in asked and asked.get("epochs"):
        raise InputError("--steps and --epochs both say how long to train; give one of them")
    if (
        training.compile == "cudagraphs"
        and training.horizon > 1
        and training.backprop != "memory_replay"
    ):
        reads = f"--backprop {training.backprop} reads all {training.horizon} of --horizon first"
        needs = "--compile cudagraphs needs a segment's backward pass before the next is read"
        raise InputError(f"{needs}, and {reads}; give --horizon 1 or --backprop memory_replay")
    for condition, message in getattr(presets_of(settings.model), "CHECKS", ()):
        if condition(settings):
            raise InputError(message)
