"""Opening a run: checks of this machine, the tokenizer and the data, epochs as steps, the weights, and what is printed of it."""

import contextlib
import math
import os
import shlex
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from accelerated.data.corpus import Corpus, load_corpus, open_source
from accelerated.data.lanes import Lanes, cut_for_lanes, joined_for_lanes, spread
from accelerated.data.tasks import MultiTask
from accelerated.data.tokenizers import (
    Tokenizer,
    open_tokenizer,
    run_tokenizer,
    tokenizers_package,
    train_bpe,
    train_words,
)
from accelerated.data.windows import Document, count_windows, lengths_of
from accelerated.models import model_class
from accelerated.program.errors import InputError, counted
from accelerated.program.files import disk_errors, locked, remove_unfinished
from accelerated.protocol import computing_in, overlap_of, repeat_lane, state_from
from accelerated.training import process
from accelerated.training.checkpoint import check_tokenizer, load_parameters, restore
from accelerated.training.folder import LOCK, checkpoint_path, read_settings, write_settings
from accelerated.training.log import Log
from accelerated.training.optimization import TrainedModel, make_optimizer
from accelerated.training.options import Start
from accelerated.training.run import Run
from accelerated.training.settings import Settings, settings_contents


@contextlib.contextmanager
def open_run(settings: Settings, start: Start) -> Iterator[Run]:
    """Yield a new or resumed Run; inside the block, the processes that train together are connected.

    Raises InputError if training cannot begin; the checks that need no data come first.
    """
    device = check_machine(settings, start)
    with process.connected(device), own_folder(start):
        tokenizer, corpus = load_data(settings, start)
        process.keep_freed_memory()
        yield build(settings, start, device, tokenizer, corpus)


def check_machine(settings: Settings, start: Start) -> torch.device:
    """The device to train on; raises InputError if this machine cannot run the settings."""
    if (settings.data.train_bpe or settings.data.train_words) and not (
        start.resumed or start.initial
    ):
        tokenizers_package("--train-bpe" if settings.data.train_bpe else "--train-words")
    training = settings.training
    device, lanes = process.choose_device(training.device), process.own_lanes(training.batch)
    if (size := lanes.stop - lanes.start) % training.accumulate:
        raise InputError(
            f"--accumulate {training.accumulate} does not divide each process's {size} lanes"
        )
    config, tokens = (
        settings.model_config,
        training.batch * training.horizon * settings.model_config.segment,
    )
    layers = getattr(config, "decoder_layers", getattr(config, "layers", 1))
    # Bytes at least: int64 inputs and targets; value and two moments of the parameters of the embedding and the feed-forwards
    least = 16 * tokens + 12 * config.width * (
        config.vocabulary + 2 * layers * getattr(config, "feed_forward", 0)
    )
    if hasattr(os, "sysconf") and least > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
        raise InputError(
            f"a model of these sizes, or a step of {tokens:,} tokens, does not fit into memory; give smaller ones"
        )
    if training.compile == "cudagraphs" and device.type != "cuda":
        raise InputError(
            f"--compile cudagraphs needs --device cuda, and this is {device.type}; give inductor or none"
        )
    if training.compile == "inductor" and device.type == "cpu":
        if not any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))):
            raise InputError(
                "--compile inductor needs a C++ compiler on a CPU, and there is none; install g++ or omit --compile"
            )
        if training.dtype == "bfloat16":
            crashed = "crashed on a CPU: torch 2.13 writes beyond its memory"
            raise InputError(
                f"--compile inductor with --dtype bfloat16 {crashed}; give one of them"
            )
    return device


@contextlib.contextmanager
def own_folder(start: Start) -> Iterator[None]:
    """Inside, the run's folder exists, no other process writes to it, and what a killed one left half-written is gone."""
    if process.rank() > 0:
        yield
        return
    with disk_errors(start.folder, "give another --out"):
        start.folder.mkdir(parents=True, exist_ok=True)
    busy = (
        f"another train.py is writing to {start.folder}; wait until it ends, or give another folder"
    )
    with locked(start.folder / LOCK, busy):
        remove_unfinished(start.folder)
        if (
            path := checkpoint_path(start.folder)
        ).is_file() and path.stat().st_mtime != start.written:
            raise InputError(
                f"another train.py has written {path} meanwhile; give the command again, or another --out"
            )
        yield


def choose_tokenizer(settings: Settings, start: Start) -> Tokenizer:
    """The tokenizer: of the resumed run, of the run of --init, learned now, or named by --tokenizer.

    A tokenizer that was learned or read from a file is written to the run folder.
    """
    data = settings.data
    if start.resumed or (
        process.rank() > 0 and data.tokenizer_file
    ):  # the first process has written it
        tokenizer = run_tokenizer(start.folder, data)
        if start.resumed:
            check_tokenizer(tokenizer, start.resumed, start.folder)
        return tokenizer
    if start.initial:
        tokenizer = run_tokenizer(start.init, data)
        check_tokenizer(tokenizer, start.initial, start.init)
    elif data.train_bpe:
        tokenizer = train_bpe(open_source(data, start.data_dir), data.train_bpe)
    elif data.train_words:
        tokenizer = train_words(open_source(data, start.data_dir), data.train_words)
    else:
        tokenizer = open_tokenizer(data.tokenizer)
    if data.tokenizer_file:
        tokenizer.save(start.folder / data.tokenizer_file)
    return tokenizer


def load_data(settings: Settings, start: Start) -> tuple[Tokenizer, Corpus]:
    """Return (tokenizer, Corpus); raises InputError if the data of a resumed run has changed."""
    data = settings.data
    with process.first_process_first():
        tokenizer = choose_tokenizer(settings, start)
        corpus = load_corpus(data, tokenizer, settings.recall, start.data_dir)
    for split in ("train", "valid"):
        if (tokens := lengths_of(corpus.splits[split]).sum()) < settings.model_config.segment:
            what = f"the {split} split has {tokens:,} tokens to predict, less than a segment"
            raise InputError(f"--data {data.data}: {what}; give more text or a smaller --segment")
    if start.resumed and start.resumed["corpus"] not in ("", corpus.digest):
        raise InputError(
            f"--data {data.data} does not have the tokens that {start.folder} was trained on; restore them, or begin a new "
            f"run with --init {shlex.quote(str(start.folder))}"
        )
    return tokenizer, corpus


def build(
    settings: Settings, start: Start, device: torch.device, tokenizer: Tokenizer, corpus: Corpus
) -> Run:
    """Make the Run: reader, model, optimiser and state are new, or as a checkpoint saved them."""
    documents, validation = documents_of(settings, corpus)
    settings = with_steps(settings, documents, start)
    training, config = settings.training, settings.model_config
    lanes = Lanes(documents, training.batch, config.segment, training.seed, overlap_of(config))
    reader = lanes
    if not settings.tasks.continuation_alone:
        reader = MultiTask(lanes, settings.tasks, config.special, training.seed)
    torch.manual_seed(training.seed)
    torch.set_default_dtype(torch.float64 if training.dtype == "float64" else torch.float32)
    own_lanes = process.own_lanes(training.batch)
    model = model_class(settings.model)(config, training.seed).to(device)
    with computing_in(model, getattr(torch, training.dtype)):
        state = repeat_lane(model.initial_state(1), own_lanes.stop - own_lanes.start)
    plain = take_weights(model, start)
    optimizer = make_optimizer(model, training)
    saved, first = start.resumed or {}, process.rank() == 0
    if saved:
        restore(saved, checkpoint_path(start.folder), optimizer, state, reader, training.batch)
        state = state_from(state, [field[own_lanes].clone() for field in saved["state"]])
    step, validated = (
        saved.get("step", 0),
        saved.get("training_config", {}).get("validation_segments", 0),
    )
    run = Run(
        settings=settings,
        folder=start.folder,
        data_dir=start.data_dir,
        device=device,
        tokenizer=tokenizer,
        corpus=corpus,
        validation=validation,
        reader=reader,
        model=model,
        trained=TrainedModel(model, training),
        optimizer=optimizer,
        state=state,
        log=Log(start.folder, step, saved.get("pending", (0.0, 0, 0)), first),
        step=step,
        best=saved["best"]
        if saved and validated == training.validation_segments
        else math.inf,  # of the same text
        plain=plain,
    )
    if first:
        init = start.init or read_settings(start.folder).get("init")
        write_settings(start.folder, settings_contents(settings) | ({"init": init} if init else {}))
        introduce(run, start)
    if not training.steps:
        run.save()
    start.resumed = start.initial = None  # frees their tensors
    return run


def documents_of(
    settings: Settings, corpus: Corpus
) -> tuple[Sequence[Document], Sequence[Document]]:
    """The documents to train on, and to validate on, as they are dealt to lanes."""
    training, segment = settings.training, settings.model_config.segment
    documents, validation = corpus.splits["train"], corpus.splits["valid"]
    if settings.data.carry_over_documents:
        documents = joined_for_lanes(training.batch, documents, training.seed)
        validation = joined_for_lanes(training.batch, validation, least=segment)
    else:
        documents = cut_for_lanes(training.batch, documents)
    if limit := training.validation_segments * segment:
        longest = (
            settings.recall.length if settings.data.data == "recall" else limit
        )  # questions need their document's facts
        validation = spread(validation, max(limit * training.batch, longest), longest)
    return documents, validation


def with_steps(settings: Settings, documents: Sequence[Document], start: Start) -> Settings:
    """The Settings with --epochs turned into --steps, each of which reads batch x horizon segments of the documents.

    --validate-every -1 becomes a tenth of the steps.
    """
    training, config, resumed = settings.training, settings.model_config, start.resumed
    if training.epochs:
        segments = sum(
            count_windows(size + 1, config.segment, overlap_of(config))
            for size in lengths_of(documents).tolist()
        )
        steps = max(
            1, math.ceil(round(training.epochs * segments / (training.batch * training.horizon), 6))
        )
        passes = f"--epochs {training.epochs:g} of {counted(segments, 'segment')} in {training.batch} x {training.horizon} a step"
        if resumed and steps <= resumed["step"]:
            raise InputError(
                f"{passes} are {counted(steps, 'step')}, and {start.folder} is at step {resumed['step']}; give more"
            )
        if process.rank() == 0:
            print(f"{passes}: {counted(steps, 'step')}")
        training = replace(training, steps=steps, epochs=0.0)
    if training.validate_every < 0:
        training = replace(training, validate_every=math.ceil(training.steps / 10))
    return settings._replace(training=training)


def take_weights(model: torch.nn.Module, start: Start) -> torch.nn.Module | None:
    """Load the weights of the resumed run, or those of --init; otherwise keep the initial ones.

    If recurrence is added to the weights of --init, returns their own model without it, otherwise None.
    """
    if start.resumed:
        load_parameters(model, start.resumed["parameters"], checkpoint_path(start.folder))
    elif start.initial:
        initial, parameters = model.state_dict(), start.initial["parameters"]
        ours, theirs = (
            {name: side[name] for name in side if name.startswith("module.")}
            for side in (initial, parameters)
        )
        added = bool(ours and not theirs)
        if not (
            ours and theirs
        ):  # one side has no recurrence module: theirs is ignored, ours keeps its initial weights
            parameters = {
                name: value for name, value in parameters.items() if name not in theirs
            } | ours
        load_parameters(model, parameters, start.init)
        if added:
            plain = type(model)(replace(model.config, vectors=0)).to(next(model.parameters()))
            load_parameters(
                plain,
                {name: value for name, value in parameters.items() if name not in ours},
                start.init,
            )
            return plain
    return None


def introduce(run: Run, start: Start) -> None:
    """Print what will be trained, and on what."""
    size = sum(p.numel() for p in run.model.parameters()) / 1e6
    where = (
        f"{run.device}, {process.world_size()} processes"
        if process.world_size() > 1
        else str(run.device)
    )
    carried = ", memory carried over them" if run.settings.data.carry_over_documents else ""
    documents = f"{counted(len(run.corpus.splits['train']), 'training document')}{carried}"
    print(
        f"{run.settings.model}, {size:.2f}M parameters, on {where}; {documents}; run {run.folder}"
    )
    print(run.model.describe())
    if run.settings.data.data != "recall":
        print(how_much_is_read(run))


def how_much_is_read(run: Run) -> str:
    """The tokens of each split, and how often the run reads those of training."""
    sizes = (
        f"{split} {lengths_of(documents).sum():,}" for split, documents in run.corpus.splits.items()
    )
    training, whole = run.settings.training, int(lengths_of(run.corpus.splits["train"]).sum())
    read = (
        training.steps * training.batch * training.horizon * run.settings.model_config.segment
    )  # padding included
    return f"tokens: {', '.join(sizes)}; {counted(training.steps, 'step')} read {read:,}, {read / whole:.3g} passes"
