"""The command line of train.py: an option for every field of every config, and what cannot go together."""

import argparse
import dataclasses
import difflib
import inspect
import sys
from pathlib import Path

from accelerated.data.corpus import check_data, default_data_dir
from accelerated.data.tasks import TaskConfig
from accelerated.errors import InputError, option_name
from accelerated.models import MODELS
from accelerated.training.checkpoint import checkpoint_path, load_checkpoint
from accelerated.training.settings import (
    DEFAULT_MODEL,
    GPT2_MODEL,
    PRESETS,
    TASK_MODEL,
    Settings,
    check_choice,
    default_preset,
    preset_settings,
    settings_from,
)

METAVARS = {int: "INT", float: "FLOAT", str: "NAME", tuple: "INT,..."}
FIXED_IN_A_RUN = {"batch", "optimizer", "beta2", "weight_decay", "seed", "dtype"}  # what a checkpoint's tensors depend on
OF_THE_WEIGHTS = {"width", "layers", "heads", "head_width", "feed_forward", "max_positions"}  # what --init of a run decides
OF_THE_MODULE = {"insertion_layers", "pooling", "pool", "pool_final_norm", "module_layers", "module_width"}


class OptionParser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line, naming the nearest option where one is unknown."""

    def error(self, message):
        sys.stderr.write(f"{self.prog}: {' '.join(message.split())}\n")
        raise SystemExit(2)

    def parse(self, argv, elsewhere=None):
        """Options of argv; elsewhere {option: model} are those that only another model has."""
        options, unknown = self.parse_known_args(argv)
        if unknown and (model := (elsewhere or {}).get(unknown[0].split("=")[0])):
            self.error(f"{unknown[0].split('=')[0]} is an option of --model {model}; leave it out or choose that model")
        if unknown:
            names = [name for action in self._actions for name in action.option_strings]
            nearest = difflib.get_close_matches(unknown[0].split("=")[0], names, n=1, cutoff=0.0)[0]
            self.error(f"unknown option {unknown[0]}; did you mean {nearest}? --help lists all")
        return options


def field_help(config_class):
    """{field: help} from the Fields part of a config's docstring; every field must be described."""
    lines = inspect.getdoc(config_class).partition("Fields:")[2].splitlines()
    joined = " ".join(line if line.startswith("        ") else "\n" + line.strip() for line in lines)  # deeper lines go on
    described = dict(" ".join(line.split()).split(": ", 1) for line in joined.splitlines() if ": " in line)
    return {field.name: described[field.name] for field in dataclasses.fields(config_class)}


def layer_numbers(text):
    """'4,10' -> (4, 10); 'none' -> ()."""
    if text == "none":
        return ()
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}; give numbers joined by commas, like 4,10, or none") from None


def add_options(parser, title, config, prefix="", leave_out=()):
    """An option for each field of the dataclass instance config, whose values are shown as the defaults."""
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


def given(options, config, prefix=""):
    """The fields of config that the command line set."""
    names = (field.name for field in dataclasses.fields(config))
    return {name: getattr(options, prefix + name) for name in names if hasattr(options, prefix + name)}


def changed(config, values, prefix=""):
    """dataclasses.replace, with an impossible value as InputError that names its option; prefix is that of the options."""
    try:
        return dataclasses.replace(config, **values)
    except ValueError as error:
        field, _, rest = str(error).partition(" ")
        known = {field.name for field in dataclasses.fields(config)}
        raise InputError(f"{option_name(prefix + field)} {rest}" if field in known else str(error)) from None


def named_on(argv):
    """--model, --preset, --data, --resume and --init as a command line has them, None where it does not; not both of the last."""
    parser = OptionParser(prog="train.py", add_help=False, allow_abbrev=False)
    for name in ("model", "preset", "data", "resume", "init"):
        parser.add_argument(f"--{name}")
    chosen = parser.parse_known_args(argv)[0]
    for name in ("init", "resume"):
        if getattr(chosen, name) == "":
            raise InputError(f"--{name} is empty; give a folder or a file, or leave it out")
    if chosen.init and chosen.resume:
        raise InputError("--init begins a new run and --resume goes on with one; give one of them")
    return chosen


def choose_model_and_preset(argv):
    """What named_on gives, with the model and the preset that it implies: they decide what the other options' defaults are.

    `initial` holds the Settings of the run that --init names, None where it names a GPT-2, which implies a model and a preset.
    """
    chosen = named_on(argv)
    if chosen.init and Path(chosen.init).name == checkpoint_path("").name:
        raise InputError(f"--init {chosen.init} is a run's checkpoint; give its folder, {Path(chosen.init).parent}")
    chosen.initial = run_settings(chosen.init) if chosen.init else None
    implied = (chosen.initial.model if chosen.initial else GPT2_MODEL) if chosen.init else DEFAULT_MODEL
    chosen.model = chosen.model or implied
    try:
        check_choice("model", chosen.model, tuple(MODELS))
    except ValueError as error:
        raise InputError(str(error)) from None
    if chosen.initial and chosen.model != implied:
        raise InputError(f"--init {chosen.init} holds a {implied}; leave --model {chosen.model} out, or --init")
    if chosen.init and chosen.model != implied:
        raise InputError(f"--init {chosen.init} is no run of train.py, and only --model {implied} begins with anything else")
    try:
        chosen.preset = chosen.preset or implied_preset(chosen)
        check_choice("preset", chosen.preset, tuple(PRESETS[chosen.model]))
    except ValueError as error:
        raise InputError(str(error)) from None
    return chosen


def implied_preset(chosen):
    """The preset where none is named."""
    if chosen.init and not chosen.initial:
        return "gpt2"
    return "fine-tune" if chosen.initial and "fine-tune" in PRESETS[chosen.model] else default_preset(chosen.data)


def run_settings(run):
    """The Settings of a run folder; None where it holds no checkpoint."""
    path = checkpoint_path(run)
    return settings_from(load_checkpoint(path), path) if path.is_file() else None


def training_parser(defaults):
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
    parser.add_argument("--resume", metavar="RUN", help="go on with the run in this folder where it stopped, with its settings")
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


def options_elsewhere(defaults):
    """{option: model} of what other models' configs have and this one's does not."""
    own = {field.name for field in dataclasses.fields(defaults.model_config)}
    others = [(name, field.name) for name, model in MODELS.items() for field in dataclasses.fields(model.Config)]
    elsewhere = {option_name(field): name for name, field in others if field not in own}
    if defaults.model != TASK_MODEL:
        elsewhere |= {f"--task-{field.name}": TASK_MODEL for field in dataclasses.fields(TaskConfig)}
    return elsewhere


def parse_training(argv, resumed=None):
    """(Settings, options) of a train.py command line.

    resumed gives the Settings of a run to go on with, whose model and data then must not be changed.
    """
    chosen = choose_model_and_preset(argv)
    defaults = resumed or preset_settings(chosen.model, chosen.preset)
    if chosen.initial:
        defaults = chosen.initial._replace(training=defaults.training)
    options = training_parser(defaults).parse(argv, options_elsewhere(defaults))
    data, recall = given(options, defaults.data), given(options, defaults.recall, "recall_")
    model, tasks = given(options, defaults.model_config), given(options, defaults.tasks, "task_")
    training = given(options, defaults.training)
    if training.get("optimizer") == "adam":
        training.setdefault("weight_decay", 0.0)
    check_used(training, changed(defaults.training, training))
    if data.get("tokenizer", "bytes") != "bytes" and data.get("train_bpe"):
        raise InputError("--tokenizer names a tokenizer and --train-bpe learns one; give one of them")
    if "tokenizer" in data or data.get("data") == "recall":
        data.setdefault("train_bpe", 0)
    if data.get("train_bpe"):
        data.setdefault("tokenizer", "bytes")
    if resumed and options.out:
        raise InputError(f"--resume {options.resume} goes on in its own folder; leave --out out, or begin a new run with --init")
    if resumed and (data or recall or tasks or model or options.preset or options.model != resumed.model):
        raise InputError("--resume keeps the run's model and data; leave those options out, or start a new run without --resume")
    if chosen.initial:
        check_initial(chosen.init, defaults.model_config, model)
        if data.keys() & {"tokenizer", "train_bpe"}:
            raise InputError(
                f"--init {chosen.init} keeps the tokenizer that its weights know; leave --tokenizer and --train-bpe out"
            )
    if defaults.model == GPT2_MODEL and model.get("vectors", defaults.model_config.vectors) == 0:
        useless = sorted(model.keys() & OF_THE_MODULE)
        if useless:
            raise InputError(f"{option_name(useless[0])} is of the recurrence module, and --vectors 0 has none; give --vectors 1")
    fixed = sorted(given(options, defaults.training).keys() & FIXED_IN_A_RUN) if resumed else []
    if fixed:
        raise InputError(f"--resume keeps the run's {fixed[0]}; leave {option_name(fixed[0])} out, or start a new run")
    if recall and data.get("data", defaults.data.data) != "recall":
        raise InputError(f"--recall-{next(iter(recall))} needs --data recall; add it or leave the option out")
    data_config = changed(defaults.data, data)
    vocabulary = {} if resumed or chosen.initial else {"vocabulary": data_config.vocabulary}
    settings = Settings(
        defaults.model,
        changed(defaults.model_config, model | vocabulary),
        changed(defaults.training, training),
        data_config,
        changed(defaults.recall, recall, "recall_"),
        changed(defaults.tasks, tasks, "task_"),
    )
    check_together(settings)
    return settings, options


def check_used(given, config):
    """Raise InputError for a training option, of those given, that the others leave nothing to do."""
    idle = {
        "beta2": (config.optimizer == "adafactor", "--optimizer adafactor has none"),
        "final_fraction": (config.schedule != "cosine", f"--schedule {config.schedule} does not end in one"),
        "update_every_from": (config.update_every == 1, "--update-every is 1"),
    }
    for name in idle.keys() & given.keys():
        if idle[name][0] and given[name]:
            raise InputError(f"{option_name(name)} has no effect: {idle[name][1]}; leave it out")


def check_initial(init, config, model):
    """Raise InputError where the options, {field: value}, ask for another shape than that of the run that --init names."""
    for name in OF_THE_WEIGHTS & model.keys():
        if model[name] != getattr(config, name):
            own = getattr(config, name)
            raise InputError(f"{option_name(name)} is {model[name]}, the weights of --init {init} have {own}; leave it out")


def check_together(settings):
    """Raise InputError for settings that are possible each by itself but not together."""
    if getattr(settings.model_config, "compression_loss", None) == "bptt" and settings.training.horizon == 1:
        raise InputError(
            "--compression-loss bptt trains the compression by the losses of later segments, and --horizon 1 has none; "
            "give --horizon 2 or more"
        )
    data = settings.data
    if data.data == "recall" and (data.tokenizer != "bytes" or data.train_bpe):
        other = f"--train-bpe is {data.train_bpe}" if data.train_bpe else f"--tokenizer is {data.tokenizer}"
        raise InputError(f"--data recall is made of bytes, {other}; leave one of them out")
    check_data(data.data)
    tasks, config = settings.tasks, settings.model_config
    if tasks.continuation_alone:
        return
    if config.encoder_layers == 0:
        raise InputError(
            "--task-infilling and --task-recall need an encoder, and --encoder-layers 0 is the decoder-only model; leave them out"
        )
    if tasks.infilling and not 0 < tasks.budget(config.segment) < config.segment:
        what = "nothing" if tasks.budget(config.segment) == 0 else "everything"
        raise InputError(
            f"--task-masked {tasks.masked} of a segment of {config.segment} tokens masks {what}; "
            f"give between {1 / config.segment:.3g} and {1 - 1 / config.segment:.3g}, or another --segment"
        )


def add_data_dir(parser):
    parser.add_argument(
        "--data-dir", metavar="FOLDER",
        help=f"where data sets are looked for and tokenised texts kept (default {default_data_dir()})",
    )  # fmt: skip
