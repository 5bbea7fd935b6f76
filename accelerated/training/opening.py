"""Opening a run: checks of this machine, the tokenizer and the data, the weights, and what is said.

train.py opens its run by `open_run`.
"""

import contextlib
import dataclasses
import math
import os
import shlex
import shutil
from collections.abc import Iterator, Sequence

import torch

from accelerated.data.corpus import Corpus, load_corpus, open_source
from accelerated.data.lanes import Lanes, cut_for_lanes, evenly_spread, joined_for_lanes, truncated
from accelerated.data.tasks import MultiTask
from accelerated.data.tokenizers import (
    Tokenizer,
    open_tokenizer,
    run_tokenizer,
    train_bpe,
    train_words,
)
from accelerated.data.windows import Document, count_windows, lengths_of
from accelerated.models import model_class
from accelerated.program.errors import InputError, counted
from accelerated.program.files import disk_errors, locked, remove_unfinished
from accelerated.protocol import Model, computing_in, overlap_of, repeat_lane
from accelerated.training import process
from accelerated.training.checkpoint import check_tokenizer, load_parameters, parameter_type
from accelerated.training.folder import LOCK, Log, check_new, checkpoint_path, write_settings
from accelerated.training.optimization import backprop_of, count_parameters, make_optimizer
from accelerated.training.options import Start
from accelerated.training.run import Run
from accelerated.training.settings import Settings, TrainingConfig, settings_contents

FILLING = 8  # least number of segments in a validated piece, so that its memory fills


@contextlib.contextmanager
def open_run(settings: Settings, start: Start) -> Iterator[Run]:
    """Yield a new or resumed Run; inside, the processes that train together are connected.

    Raises InputError if training cannot begin; the checks that need no data come first.
    """
    device = check_machine(settings.training)
    with process.process_group(device), own_folder(start):
        tokenizer, corpus = load_data(settings, start)
        process.keep_freed_memory()
        yield build(settings, start, device, tokenizer, corpus)


# This machine


def check_machine(training: TrainingConfig) -> torch.device:
    """The device to train on; raises InputError if this machine cannot run the settings."""
    device = process.choose_device(training.device)
    lanes = process.lane_count(training.batch)
    if lanes % training.accumulate:
        raise InputError(
            f"--accumulate {training.accumulate} does not divide each process's {lanes} lanes"
        )
    check_compiler(training, device)
    return device


def check_compiler(training: TrainingConfig, device: torch.device) -> None:
    """Raise InputError if --compile cannot work on the device."""
    if training.compile == "cudagraphs" and device.type != "cuda":
        raise InputError(
            f"--compile cudagraphs needs --device cuda, and this is {device.type}; "
            "give inductor, or omit --compile"
        )
    if training.compile != "inductor" or device.type != "cpu":
        return
    compiler = os.environ.get("CXX", "g++")
    if not shutil.which(compiler):
        raise InputError(
            f"--compile inductor needs a C++ compiler on a CPU, and {compiler} is not here; "
            "install one and name it in CXX, or omit --compile"
        )
    if training.dtype == "bfloat16":
        raise InputError(
            "--compile inductor with --dtype bfloat16 "
            "crashed on a CPU: torch 2.13 writes beyond its memory; "
            "give one of them"
        )


@contextlib.contextmanager
def own_folder(start: Start) -> Iterator[None]:
    """Context manager: hold the lock of the run's folder, which is made if needed.

    Removes files that a killed process left half-written. Ranks above 0 do nothing.
    """
    if process.rank() > 0:
        yield
        return
    folder = start.folder
    path = checkpoint_path(folder)
    is_new = not folder.exists()
    with disk_errors(folder, "give another --out"):
        folder.mkdir(parents=True, exist_ok=True)
    busy = f"another train.py is writing to {folder}; wait until it ends, or give another folder"
    with locked(folder / LOCK, busy):
        if path.is_file() and path.stat().st_mtime != start.written:
            raise InputError(
                f"another train.py has written {path} meanwhile; "
                "give the command again, or another --out"
            )
        if not start.resumed:
            check_new(folder)
        remove_unfinished(folder)
        try:
            yield
        except InputError:
            if is_new and not path.exists():  # a refused run leaves no folder
                shutil.rmtree(folder)
            raise


# The tokenizer and the data


def load_data(settings: Settings, start: Start) -> tuple[Tokenizer, Corpus]:
    """Return (tokenizer, Corpus); raises InputError if the data of a resumed run has changed."""
    data = settings.data
    with process.rank_zero_first():
        tokenizer = choose_tokenizer(settings, start)
        corpus = load_corpus(data, tokenizer, settings.recall, start.data_dir)
    for split in ("train", "valid"):
        tokens = lengths_of(corpus.splits[split]).sum()
        if tokens < settings.model_config.segment:
            raise InputError(
                f"--data {data.data}: "
                f"the {split} split has {tokens:,} tokens to predict, less than a segment; "
                "give more text or a smaller --segment"
            )
    if start.resumed and start.resumed.contents["corpus"] != corpus.digest:
        init = shlex.quote(str(start.folder))
        raise InputError(
            f"--data {data.data} does not have the tokens that {start.folder} was trained on; "
            f"restore them, or begin a new run with --init {init}"
        )
    return tokenizer, corpus


def choose_tokenizer(settings: Settings, start: Start) -> Tokenizer:
    """The tokenizer: of the resumed run, of the run of --init, learned now, or of --tokenizer.

    A tokenizer that was learned or read from a file is written to the run folder.
    """
    data = settings.data
    is_new = data.tokenizer_file and not start.resumed
    if is_new and process.rank() > 0:  # the first process has written it
        return run_tokenizer(start.folder, data)
    saved = start.resumed or start.initial
    if saved:
        tokenizer = run_tokenizer(saved.path, data)
        check_tokenizer(tokenizer, saved.contents, saved.path)
    elif data.train_bpe:
        tokenizer = train_bpe(open_source(data, start.data_dir), data.train_bpe)
    elif data.train_words:
        tokenizer = train_words(open_source(data, start.data_dir), data.train_words)
    else:
        tokenizer = open_tokenizer(data.tokenizer)
    if is_new:
        tokenizer.save(start.folder / data.tokenizer_file)
    return tokenizer


def documents_of(
    settings: Settings, corpus: Corpus
) -> tuple[Sequence[Document], Sequence[Document]]:
    """The documents to train on, and to validate on, as they are dealt to lanes."""
    training = settings.training
    segment = settings.model_config.segment
    documents = corpus.splits["train"]
    validation = corpus.splits["valid"]
    if training.validation_prefix:
        validation = truncated(validation, training.validation_prefix)
    if settings.data.carry_over_documents:
        documents = joined_for_lanes(training.batch, documents, training.seed)
        validation = joined_for_lanes(training.batch, validation, least=segment)
    else:
        documents = cut_for_lanes(training.batch, documents)
    tokens = training.validation_tokens
    if not tokens:
        return documents, validation
    longest = max(FILLING * segment, math.ceil(tokens / training.batch))
    if settings.data.data == "recall":  # questions need their document's facts
        longest = settings.recall.length
    return documents, evenly_spread(validation, max(tokens, longest), longest)


def epochs_to_steps(settings: Settings, documents: Sequence[Document], start: Start) -> Settings:
    """The Settings with --epochs turned into --steps, if it was given."""
    training = settings.training
    config = settings.model_config
    if not training.epochs:
        return settings
    overlap = overlap_of(config)
    segments = 0
    for predictions in lengths_of(documents).tolist():
        segments += count_windows(predictions + 1, config.segment, overlap)
    read_by_a_step = training.batch * training.horizon
    steps = max(1, math.ceil(round(training.epochs * segments / read_by_a_step, 6)))
    read = f"{counted(segments, 'segment')} in {training.batch} x {training.horizon} a step"
    passes = f"--epochs {training.epochs:g} of {read}"
    step = start.resumed.contents["step"] if start.resumed else 0
    if steps <= step:
        raise InputError(
            f"{passes} are {counted(steps, 'step')}, and {start.folder} is at step {step}; "
            "give more"
        )
    if process.rank() == 0:
        print(f"{passes}: {counted(steps, 'step')}")
    return settings._replace(training=dataclasses.replace(training, steps=steps, epochs=0.0))


# The run


def build(
    settings: Settings, start: Start, device: torch.device, tokenizer: Tokenizer, corpus: Corpus
) -> Run:
    """Make the Run: reader, model, optimiser and state are new, or as a checkpoint saved them."""
    documents, validation = documents_of(settings, corpus)
    settings = epochs_to_steps(settings, documents, start)
    training = settings.training
    config = settings.model_config

    torch.manual_seed(training.seed)
    torch.set_default_dtype(parameter_type(settings))
    model = model_class(settings.model, config)(config, training.seed).to(device)
    with computing_in(model, getattr(torch, training.dtype)):
        state = repeat_lane(model.initial_state(1), process.lane_count(training.batch))
    load_weights_of(start, model)

    is_first = process.rank() == 0
    run = Run(
        settings=settings,
        folder=start.folder,
        data_dir=start.data_dir,
        device=device,
        tokenizer=tokenizer,
        corpus=corpus,
        validation=validation,
        reader=new_reader(settings, documents),
        model=model,
        backprop=backprop_of(model, training),
        optimizer=make_optimizer(model, training),
        state=state,
        log=Log(start.folder, is_first),
    )
    if start.resumed:
        run.restore(start.resumed.contents, start.resumed.path)
        run.log.drop_after(run.step, validated=not run.validation_due)
    else:
        run.save()  # first of all: the folder of a run always has a checkpoint
    if is_first:
        write_settings(start.folder, settings_contents(settings))
        introduce(run)
    start.resumed = None  # frees the tensors
    start.initial = None
    return run


def new_reader(settings: Settings, documents: Sequence[Document]) -> Lanes | MultiTask:
    """What gives the segments of all lanes, from the beginning."""
    training = settings.training
    config = settings.model_config
    lanes = Lanes(documents, training.batch, config.segment, training.seed, overlap_of(config))
    if settings.tasks.continuation_alone:
        return lanes
    return MultiTask(lanes, settings.tasks, config.special, training.seed)


# The weights


def load_weights_of(start: Start, model: Model) -> None:
    """Load the weights of the resumed run or of --init; without either, keep the initial ones.

    A recurrence module is loaded only if both models have one. Otherwise that of --init is left
    out, and the model's own keeps its initial weights.
    """
    if start.resumed:
        load_parameters(model, start.resumed.contents["parameters"], start.resumed.path)
        return
    if not start.initial:
        return
    parameters = start.initial.contents["parameters"]
    ours = recurrence_parameters(model.state_dict())
    theirs = recurrence_parameters(parameters)
    if not (ours and theirs):
        others = {name: value for name, value in parameters.items() if name not in theirs}
        parameters = others | ours
    load_parameters(model, parameters, start.initial.path)


def recurrence_parameters(parameters: dict) -> dict:
    """The parameters of the recurrence module; empty for a model without one."""
    return {name: value for name, value in parameters.items() if name.startswith("module.")}


# What is said


def introduce(run: Run) -> None:
    """Print what will be trained, and on what."""
    size = count_parameters(run.model) / 1e6
    where = str(run.device)
    if process.world_size() > 1:
        where += f", {process.world_size()} processes"
    documents = counted(len(run.corpus.splits["train"]), "training document")
    if run.settings.data.carry_over_documents:
        documents += ", memory carried over them"
    model = f"{run.settings.model}, {size:.2f}M parameters"
    print(f"{model}, on {where}; {documents}; run {run.folder}")
    print(run.model.describe())
    if run.settings.data.data != "recall":
        print(how_much_is_read(run))


def how_much_is_read(run: Run) -> str:
    """The tokens of each split, and how often the run reads those of training."""
    training = run.settings.training
    config = run.settings.model_config
    tokens = {split: lengths_of(texts).sum() for split, texts in run.corpus.splits.items()}
    sizes = ", ".join(f"{split} {count:,}" for split, count in tokens.items())
    segments = training.steps * training.batch * training.horizon
    read = segments * config.segment  # padding and repeated tokens included
    passes = (read - segments * overlap_of(config)) / tokens["train"]
    return f"tokens: {sizes}; {counted(training.steps, 'step')} read {read:,}, {passes:.3g} passes"
