"""Every setting is a dataclass field, and every field a command-line option with the help its docstring gives."""

import argparse
import dataclasses
import difflib
import inspect
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from accelerated.checkpoint import checkpoint_path, load_checkpoint
from accelerated.corpus import check_data, default_data_dir
from accelerated.errors import InputError, option_name
from accelerated.models import MODELS
from accelerated.optimization import OPTIMIZERS, SCHEDULES
from accelerated.presets import PRESETS, default_preset
from accelerated.recall import RecallConfig
from accelerated.replay import BACKPROP
from accelerated.tasks import TaskConfig
from accelerated.tokenizer import ENCODINGS, vocabulary_of

METAVARS = {int: "INT", float: "FLOAT", str: "NAME", tuple: "INT,..."}
FIXED_IN_A_RUN = {"batch", "optimizer", "beta2", "weight_decay", "seed", "dtype"}  # what a checkpoint's tensors depend on
DEFAULT_MODEL = "block_recurrent"
TASK_MODEL = "memformer"  # the one that trains on several tasks
GPT2_MODEL = "pretrained_recurrence"  # the one that takes GPT-2's weights
OF_THE_WEIGHTS = {"width", "layers", "heads", "head_width", "feed_forward", "max_positions"}  # what --init of a run decides
OF_THE_MODULE = {"insertion_layers", "pooling", "pool", "pool_final_norm", "module_layers", "module_width"}
DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("float32", "bfloat16", "float64")
COMPILERS = ("none", "inductor", "aot_eager", "eager")  # the last two to find out where a fault lies


def check_choice(name, value, choices):
    """Raise ValueError naming the nearest of choices unless value is one of them."""
    if value not in choices:
        nearest = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.0)[0]
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(choices)} (nearest: {nearest})")


@dataclass(frozen=True)
class TrainingConfig:
    """How a model is trained; impossible values raise ValueError naming the field.

    Fields:
        steps: iterations, each reading `horizon` segments of every lane
        batch: B, lanes that each read a document of their own
        horizon: K, segments per iteration, with gradient through the state that links them
        backprop: through_time (full BPTT), checkpointed (gradient checkpointing) or memory_replay (MRBP)
        accumulate: groups that the lanes are read in, one after another, before their summed gradient is used: less memory
        optimizer: adamw, adam (without weight decay) or adafactor
        schedule: cosine, inverse_square_root or constant
        learning_rate: peak learning rate; under inverse_square_root the factor before 1/sqrt(step)
        warmup: iterations of linear warm-up
        initial_fraction: fraction of the peak at which the warm-up starts
        final_fraction: fraction of the peak at which the cosine ends
        beta2: AdamW's and Adam's second-moment decay
        weight_decay: AdamW's and Adafactor's decay of parameters with two axes
        clip: largest norm of the gradient, 0 for no limit; what only an auxiliary loss trains is limited apart
        update_every: iterations whose gradients are averaged into one update, after --update-every-from
        update_every_from: iteration up to which every one is followed by an update
        seed: of weights, order of documents and dropout
        device: auto takes a GPU where there is one
        dtype: float32, float64, or bfloat16 (autocast over float32 parameters)
        compile: none, or a backend of torch.compile for the model's forward: inductor (needs a C++ compiler), aot_eager, eager
        save_every: iterations between checkpoints; one is always written at the end
        save_minutes: minutes after which a checkpoint is written whatever the iteration, 0 for never
        keep: checkpoints kept, the last one among them; the best is kept besides
        validate_every: iterations between validations, each of which may make the best checkpoint; 0 for one at the end alone
        validation_segments: segments of every lane read to validate (a lane for each document at most), 0 for the whole split
        log_every: iterations between the lines of metrics.jsonl, whose losses are means over them
        plot: refresh RUN/curves.png with the curves of metrics.jsonl twice a minute
        sample: tokens of text to print at the end
    """

    steps: int = 400
    batch: int = 8
    horizon: int = 1
    backprop: str = "through_time"
    accumulate: int = 1
    optimizer: str = "adamw"
    schedule: str = "cosine"
    learning_rate: float = 2e-3
    warmup: int = 40
    initial_fraction: float = 0.0
    final_fraction: float = 0.05
    beta2: float = 0.99
    weight_decay: float = 0.01
    clip: float = 1.0
    update_every: int = 1
    update_every_from: int = 0
    seed: int = 0
    device: str = "auto"
    dtype: str = "float32"
    compile: str = "none"
    save_every: int = 200
    save_minutes: float = 15.0
    keep: int = 2
    validate_every: int = 0
    validation_segments: int = 0
    log_every: int = 10
    plot: bool = False
    sample: int = 200

    def __post_init__(self):
        for name in ("steps", "batch", "horizon", "accumulate", "save_every", "update_every", "keep", "log_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("warmup", "weight_decay", "clip", "seed", "validation_segments", "sample", "update_every_from",
                     "save_minutes", "validate_every"):  # fmt: skip
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 0")
        if not 0 < self.learning_rate < float("inf"):
            raise ValueError(f"learning_rate is {self.learning_rate}; it must be positive and finite")
        if self.batch % self.accumulate:
            raise ValueError(f"accumulate is {self.accumulate}; it must divide the batch of {self.batch} lanes")
        if self.optimizer == "adam" and self.weight_decay:
            raise ValueError(f"weight_decay is {self.weight_decay}, and adam has none; give adamw, or weight_decay 0")
        for name in ("initial_fraction", "final_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must lie in 0..1")
        if not 0 <= self.beta2 < 1:
            raise ValueError(f"beta2 is {self.beta2}; it must be at least 0 and below 1")
        if self.seed >= 2**63:
            raise ValueError(f"seed is {self.seed}; it must be below 2^63")
        check_choice("backprop", self.backprop, tuple(BACKPROP))
        check_choice("optimizer", self.optimizer, OPTIMIZERS)
        check_choice("schedule", self.schedule, SCHEDULES)
        check_choice("device", self.device, DEVICES)
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("compile", self.compile, COMPILERS)


@dataclass(frozen=True)
class DataConfig:
    """What is read.

    Fields:
        data: stdlib (the source of Python's standard library), recall (the synthetic task), enwik8, wikitext-103 or pg19 (fetched
            if absent), a text file, a .jsonl (field `text`), .gz or .zip, or a folder of them
        tokenizer: how text becomes tokens: bytes, an encoding of tiktoken (gpt2, cl100k_base, ...), or a file of ranks
        train_bpe: tokens of a byte-level BPE to learn from the training split instead (at least 257), 0 for none
    """

    data: str = "stdlib"
    tokenizer: str = "bytes"
    train_bpe: int = 0

    def __post_init__(self):
        if self.train_bpe and self.train_bpe < 257:
            raise ValueError(f"train_bpe is {self.train_bpe}; it must be 0, or more than the 256 bytes")

    @property
    def vocabulary(self):
        """How many ids the tokenizer has."""
        return self.train_bpe or vocabulary_of(self.tokenizer)

    @property
    def own_ranks(self):
        """Whether the run keeps its tokenizer's ranks beside its checkpoint."""
        return bool(self.train_bpe) or self.tokenizer not in ("bytes", *ENCODINGS)


class Settings(NamedTuple):
    """Everything a run is made of."""

    model: str
    model_config: object
    training: TrainingConfig
    data: DataConfig
    recall: RecallConfig
    tasks: TaskConfig


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


def preset_settings(model, preset):
    """The settings that a preset stands for."""
    chosen = PRESETS[model][preset]
    return Settings(
        model,
        MODELS[model].Config(**chosen["model"]),
        TrainingConfig(**chosen["training"]),
        DataConfig(**chosen.get("data", {})),
        RecallConfig(**chosen.get("recall", {})),
        TaskConfig(**chosen.get("tasks", {})),
    )


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


def settings_contents(settings):
    """Settings as plain values, for a checkpoint."""
    return {
        "model": settings.model,
        "model_config": dataclasses.asdict(settings.model_config),
        "training_config": dataclasses.asdict(settings.training),
        "data_config": dataclasses.asdict(settings.data)
        | {"recall": dataclasses.asdict(settings.recall), "tasks": dataclasses.asdict(settings.tasks)},
    }


def settings_from(contents, path):
    """The Settings in a checkpoint's contents; raises InputError where this program cannot hold them."""
    if contents["model"] not in MODELS:
        raise InputError(f"{path} holds a model {contents['model']!r}; this program knows {', '.join(MODELS)}")
    data = dict(contents["data_config"])
    recall, tasks = data.pop("recall"), data.pop("tasks", {})
    try:
        return Settings(
            contents["model"],
            MODELS[contents["model"]].Config(**contents["model_config"]),
            TrainingConfig(**contents["training_config"]),
            DataConfig(**data),
            RecallConfig(**recall),
            TaskConfig(**tasks),
        )
    except (TypeError, ValueError) as error:
        raise InputError(f"{path} has settings that this program cannot use: {error}") from None


def add_data_dir(parser):
    parser.add_argument(
        "--data-dir", metavar="FOLDER",
        help=f"where data sets are looked for and tokenised texts kept (default {default_data_dir()})",
    )  # fmt: skip


def choose_device(name):
    """The torch device of --device, of its own for each process of torchrun; raises InputError for a GPU that is not there."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise InputError("--device cuda: torch finds no GPU here; use --device cpu or auto")
    if not available or name == "cpu":
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", torch.cuda.current_device()))
    if local >= torch.cuda.device_count():
        raise InputError(f"torchrun started {local + 1} processes or more here, torch finds {torch.cuda.device_count()} GPUs")
    return torch.device("cuda", local)


def autocast(dtype, device):
    """The autocast context of --dtype: bfloat16 computes in it over float32 parameters, the others change nothing."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == "bfloat16")
