"""A training run: what its loop in train.py needs, how it is opened and how it is saved."""

import contextlib
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from accelerated.data.config import default_data_dir
from accelerated.data.corpus import Corpus, check_length, load_corpus, open_source
from accelerated.data.lanes import Lanes, cut_for_lanes, joined_for_lanes, longest_document, spread
from accelerated.data.tasks import MultiTask
from accelerated.data.tokenizers import open_tokenizer, run_tokenizer, tokenizers_package, train_bpe, train_words
from accelerated.data.windows import count_windows, lengths_of, overlap_of
from accelerated.models import model_class
from accelerated.program.errors import InputError, counted
from accelerated.program.files import disk_errors, nearest_existing
from accelerated.program.progress import Progress
from accelerated.protocol import computing_in, repeat_lane, state_from
from accelerated.training import process
from accelerated.training.checkpoint import check_tokenizer, checksum_at_end, load_parameters, save_in_run
from accelerated.training.folder import checkpoint_path, only_writer, remove_new_run, write_settings
from accelerated.training.gpt2_weights import check_gpt2, load_gpt2
from accelerated.training.log import Log, figure_class, title_of, validations_since_best
from accelerated.training.optimization import check_finite, learning_rate, make_optimizer
from accelerated.training.options import Beginning
from accelerated.training.settings import Settings, TrainingConfig, settings_contents


@dataclass
class Run:
    """Everything that a training run keeps from one iteration to the next."""

    settings: Settings
    folder: Path  # for checkpoints and the log
    device: torch.device
    tokenizer: object
    corpus: Corpus
    validation: Sequence  # the documents to validate on, joined if memory is carried over documents
    reader: MultiTask  # gives the segments of all lanes, with their tasks
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    state: tuple  # of this process's lanes
    log: Log
    data_dir_option: str = ""  # the end of later commands for this run
    step: int = 0  # iterations done
    best: float = math.inf  # lowest validation loss in bits per byte
    since_best: int = 0  # validations after the best one
    gathered: int = 0  # iterations since the last update
    gradient_norm: float = 0.0  # of the last update
    auxiliary: dict = field(default_factory=dict)  # {name: scalar loss} of the segment that was computed last
    tokens: int = 0  # read since the run was opened, padding and overlaps included
    opened: float = field(default_factory=time.perf_counter)
    last_save: float = field(default_factory=time.perf_counter)
    validation_due: bool = False  # after this step; left open by a signal
    validated: Any = None  # the validation's Score after this step

    def computing(self) -> contextlib.AbstractContextManager:
        """Inside, the model computes in the type of --dtype."""
        return computing_in(self.model, getattr(torch, self.settings.training.dtype))

    @property
    def lanes_at_once(self) -> int:
        """How many lanes this process computes at a time."""
        return self.settings.training.batch // process.world_size() // self.settings.training.accumulate

    def tokens_per_second(self) -> float:
        """Tokens that all processes read per second, on average since the run was opened."""
        return self.tokens / (time.perf_counter() - self.opened)

    @property
    def ended(self) -> bool:
        """Whether nothing is left to train: the last step is done, or --stop-after validations brought no better score."""
        training = self.settings.training
        return self.step >= training.steps or 0 < training.stop_after <= self.since_best

    @property
    def stopped_early(self) -> bool:
        """Whether --stop-after ended the training before its last step."""
        return self.ended and self.step < self.settings.training.steps

    def log_due(self) -> bool:
        """Whether a line of the log is due after this step: one in --log-every, one at the end, one before each validation."""
        training, validates = self.settings.training, self.validation_due and not self.gathered
        return validates or self.step % training.log_every == 0 or self.step == training.steps

    def saved(self) -> str:
        """What can be gone back to, for messages."""
        path = checkpoint_path(self.folder)
        return f"{path} stays as it was" if path.exists() else "nothing was saved before"

    @property
    def validation_share(self) -> float:
        """How much of the validation split is read."""
        return lengths_of(self.validation).sum() / lengths_of(self.corpus.splits["valid"]).sum()

    @contextlib.contextmanager
    def timeout(self, bar: Progress) -> Iterator[None]:
        """Leave the time inside the block out of the rates."""
        began = time.perf_counter()
        with bar.paused():
            yield
        self.opened += time.perf_counter() - began

    def time_to_save(self) -> bool:
        """Whether --save-minutes have passed since the last checkpoint."""
        minutes = self.settings.training.save_minutes
        return bool(minutes) and time.perf_counter() - self.last_save > 60 * minutes


@contextlib.contextmanager
def open_run(settings: Settings, beginning: Beginning) -> Iterator[Run]:
    """Yield a new or resumed Run; inside the block, the processes that train together are connected.

    Raises InputError if training cannot begin; the checks that need no data come first.
    """
    check_before_reading(settings, beginning)
    device = process.choose_device(settings.training.device, settings.training.dtype)
    new = not beginning.folder.exists()
    with process.joined(device), own_folder(beginning):
        try:
            tokenizer, corpus = load_data(settings, beginning)
            process.keep_freed_memory()
            run = build(settings, beginning, device, tokenizer, corpus)
        except BaseException:
            if new and process.rank() == 0:
                remove_new_run(beginning.folder)
            raise
        yield run


@contextlib.contextmanager
def own_folder(beginning: Beginning) -> Iterator[None]:
    """Inside, the run's folder exists and no other run writes to it."""
    if process.rank() > 0:
        yield
        return
    folder = beginning.folder
    with disk_errors(folder, "give another --out"):
        folder.mkdir(parents=True, exist_ok=True)
    with only_writer(folder):
        if beginning.resumed and checksum_at_end(checkpoint_path(folder)) != beginning.checksum:
            raise InputError(f"another process has continued {folder} meanwhile; give the command again")
        yield


def save(run: Run, is_best: bool = False) -> None:
    """Write all that resuming needs; raises InputError instead if a parameter is NaN or infinite: the last checkpoint stays."""
    largest = torch.stack([p.detach().abs().max() for p in run.model.parameters() if p.numel()])
    check_finite(run.step, {"parameters": largest.sum().item()}, run.saved)
    contents = settings_contents(run.settings) | {
        "parameters": run.model.state_dict(), "optimizer": run.optimizer.state_dict(),
        "state": tuple(process.all_lanes(run.state)), "lanes": run.reader.position(), "random": torch.get_rng_state(),
        "step": run.step, "corpus": run.corpus.digest, "tokenizer": run.tokenizer.fingerprint, "best": run.best,
        "pending": run.log.pending, "validation_due": run.validation_due,
    }  # fmt: skip
    if process.rank() == 0:
        save_in_run(run.folder, contents, run.settings.training.keep, is_best)
    run.last_save = time.perf_counter()


def check_before_reading(settings: Settings, beginning: Beginning) -> None:
    """Raise InputError if this machine cannot run the settings, or if the given weights do not fit them."""
    training = settings.training
    if beginning.gpt2:
        check_gpt2(beginning.gpt2, settings.model_config)
    check_folder(beginning.folder, "--resume" if beginning.resumed else "--out")
    if settings.data.data != "recall" and not beginning.data_dir.is_dir():  # one that exists may hold what is needed
        check_folder(beginning.data_dir, "--data-dir")
    lanes = process.own_lanes(training.batch)
    if (lanes.stop - lanes.start) % training.accumulate:
        raise InputError(f"--accumulate {training.accumulate} does not divide each process's {lanes.stop - lanes.start} lanes")
    if training.plot:
        figure_class()
    if settings.data.train_bpe and not (beginning.resumed or beginning.initial):
        tokenizers_package()
    device = process.choose_device(training.device, training.dtype)
    compiler = any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++")))
    if training.compile == "inductor" and not compiler and device.type == "cpu":
        raise InputError("--compile inductor needs a C++ compiler on a CPU, and there is none; install g++ or omit --compile")
    if training.checkpoint_layers and settings.model_config.dropout and device.type == "mps":
        raise InputError(
            "--checkpoint-layers needs --dropout 0 on mps, where torch cannot repeat it; give that or omit --checkpoint-layers"
        )
    if training.compile == "inductor" and training.dtype == "bfloat16" and device.type == "cpu":
        raise InputError(
            "--compile inductor with --dtype bfloat16 crashed on a CPU: torch 2.13 writes beyond its memory; give one of them"
        )
    if training.compile == "cudagraphs" and device.type != "cuda":
        raise InputError(f"--compile cudagraphs needs --device cuda, and this is {device.type}; give inductor or none")


def check_folder(folder: Path, option: str) -> None:
    """Raise InputError unless folder, or its nearest parent that exists, can be written to."""
    above = nearest_existing(folder)
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise InputError(f"cannot write to {above}; give another {option} than {folder}")


def choose_tokenizer(settings: Settings, beginning: Beginning) -> object:
    """The tokenizer: of the resumed run, of the run of --init, learned now, or named by --tokenizer.

    A tokenizer that was learned or read from a file is written to the run folder.
    """
    data = settings.data
    if beginning.resumed or (process.rank() > 0 and data.tokenizer_file):  # the first process has written it
        tokenizer = run_tokenizer(beginning.folder, data)
        if beginning.resumed:
            check_tokenizer(tokenizer, beginning.resumed, beginning.folder)
        return tokenizer
    if beginning.initial:
        tokenizer = run_tokenizer(beginning.init, data)
        check_tokenizer(tokenizer, beginning.initial, beginning.init)
    elif data.train_bpe:
        tokenizer = train_bpe(open_source(data, beginning.data_dir), data.train_bpe)
    elif data.train_words:
        tokenizer = train_words(open_source(data, beginning.data_dir), data.train_words)
    else:
        tokenizer = open_tokenizer(data.tokenizer)
    if data.tokenizer_file:
        tokenizer.save(beginning.folder)
    return tokenizer


def load_data(settings: Settings, beginning: Beginning) -> tuple[object, Corpus]:
    """Return (tokenizer, Corpus); raises InputError if the data of a resumed run has changed."""
    data = settings.data
    with process.first_process_first():
        tokenizer = choose_tokenizer(settings, beginning)
        corpus = load_corpus(data, tokenizer, settings.recall, beginning.data_dir)
    check_length(data.data, corpus.splits, settings.model_config.segment, settings.training.batch)
    if beginning.resumed and beginning.resumed["corpus"] not in ("", corpus.digest):
        raise InputError(
            f"--data {data.data} does not have the tokens that {beginning.folder} was trained on; restore them, or begin a new "
            f"run with --init {beginning.folder}"
        )
    return tokenizer, corpus


def build(settings: Settings, beginning: Beginning, device: torch.device, tokenizer: object, corpus: Corpus) -> Run:
    """Make the Run: reader, model, optimiser and state are new, or as a checkpoint saved them."""
    training, config = settings.training, settings.model_config
    documents, validation, overlap = corpus.splits["train"], corpus.splits["valid"], overlap_of(config)
    if settings.data.carry_over_documents:
        documents = joined_for_lanes(training.batch, documents, training.seed)
        validation = joined_for_lanes(training.batch, validation)
    else:
        documents = cut_for_lanes(training.batch, documents)
    if limit := training.validation_segments * config.segment:
        longest = settings.recall.length if settings.data.data == "recall" else limit  # questions need their document's facts
        validation = spread(validation, max(limit * training.batch, longest), longest)
    settings = with_steps(settings, documents, beginning)
    training = settings.training
    lanes = Lanes(documents, training.batch, config.segment, training.seed, overlap)
    reader = MultiTask(lanes, settings.tasks, getattr(config, "special", None), training.seed)
    torch.manual_seed(training.seed)
    torch.set_default_dtype(torch.float64 if training.dtype == "float64" else torch.float32)
    model = model_class(settings.model)(config, training.seed).to(device)
    take_weights(model, beginning)
    optimizer, own = make_optimizer(model, training), process.own_lanes(training.batch)
    with computing_in(model, getattr(torch, training.dtype)):
        state = repeat_lane(model.initial_state(1), own.stop - own.start)
    saved = beginning.resumed or {}
    if saved:
        optimizer.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["random"].cpu())
        state = state_from(state, [field[own].clone() for field in saved["state"]])
        reader.seek(saved["lanes"])
    step, first = saved.get("step", 0), process.rank() == 0
    run = Run(
        settings=settings, folder=beginning.folder, device=device, tokenizer=tokenizer,
        corpus=corpus, validation=validation, reader=reader,
        model=model, optimizer=optimizer, state=state,
        log=Log(beginning.folder, step, training.plot, saved.get("pending", (0.0, 0, 0)), first, title_of(settings)),
        data_dir_option="" if beginning.data_dir == default_data_dir() else f" --data-dir {beginning.data_dir}",
        step=step, best=saved.get("best", math.inf), validation_due=(due := saved.get("validation_due", False)),
        since_best=validations_since_best(beginning.folder, step - due),
    )  # fmt: skip
    if first:
        write_settings(beginning.folder, settings_contents(settings))
        introduce(run, beginning)
        warn_of_warmup(training)
        warn_of_horizon(run, longest_document(documents, config.segment, overlap))
    beginning.resumed = beginning.initial = None  # frees their tensors
    if training.checkpoint_layers:
        recompute_layers(model)
    compile_model(model, training)
    keep_auxiliary(run)
    return run


def with_steps(settings: Settings, documents: Sequence, beginning: Beginning) -> Settings:
    """The Settings with --epochs turned into --steps, each of which reads batch x horizon segments of the documents."""
    training, config, resumed = settings.training, settings.model_config, beginning.resumed
    if not training.epochs:
        return settings
    segments = sum(count_windows(size + 1, config.segment, overlap_of(config)) for size in lengths_of(documents).tolist())
    steps = max(1, math.ceil(round(training.epochs * segments / (training.batch * training.horizon), 6)))
    passes = f"--epochs {training.epochs:g} of {counted(segments, 'segment')} in {training.batch} x {training.horizon} a step"
    if resumed and steps <= resumed["step"]:
        raise InputError(f"{passes} are {counted(steps, 'step')}, and {beginning.folder} is at step {resumed['step']}; give more")
    if process.rank() == 0:
        print(f"{passes}: {counted(steps, 'step')}")
    return settings._replace(training=replace(training, steps=steps, epochs=0.0))


def take_weights(model: torch.nn.Module, beginning: Beginning) -> None:
    """Load the weights of the resumed run, of another run, or of a GPT-2; otherwise keep the initial ones."""
    if beginning.gpt2:
        load_gpt2(model, beginning.gpt2)
    elif beginning.resumed:
        load_parameters(model, beginning.resumed["parameters"], checkpoint_path(beginning.folder))
    elif beginning.initial:
        own, parameters = model.state_dict(), beginning.initial["parameters"]
        ours, theirs = ({name: side[name] for name in side if name.startswith("module.")} for side in (own, parameters))
        if not (ours and theirs):  # one side has no recurrence module: theirs is ignored, ours keeps its initial weights
            parameters = {name: value for name, value in parameters.items() if name not in theirs} | ours
        load_parameters(model, parameters, beginning.init)


def introduce(run: Run, beginning: Beginning) -> None:
    """Print what will be trained, and on what."""
    size = sum(p.numel() for p in run.model.parameters()) / 1e6
    if beginning.initial:
        print(f"starts with the weights, model and data of {beginning.init}, except for the options given")
    where = f"{run.device}, {process.world_size()} processes" if process.world_size() > 1 else str(run.device)
    joined = ", memory carried over them" if run.settings.data.carry_over_documents else ""
    documents = f"{counted(len(run.corpus.splits['train']), 'training document')}{joined}"
    print(f"{run.settings.model}, {size:.2f}M parameters, on {where}; {documents}; run {run.folder}")
    print(run.model.describe())
    if run.stopped_early:
        print(f"{counted(run.since_best, 'validation')} in a row brought no better score: only the last report is left")
    if run.validation_share < 1:
        print(f"validation reads {run.validation_share:.1%} of its split, from all over it; --validation-segments 0 reads all")


def validates_after(step: int, training: TrainingConfig) -> bool:
    """Whether a validation is due after this step: after every --validate-every-th, and after the last."""
    return training.validate_every > 0 and (step % training.validate_every == 0 or step == training.steps)


def final_lines(run: Run, carried: Any, cleared: Any = None) -> str:
    """What is printed of the last validation's Score, and of the one with the memory cleared; None if there is no memory."""
    share = f" ({run.validation_share:.1%} of the split)" if run.validation_share < 1 else ""
    what, bits = f"validation on {counted(carried.tokens, 'token')}{share}", f"{carried.bits_per_byte:.3f}"
    if not cleared:
        return f"{what}: {bits} bits per byte; this model carries no memory"
    bits = f"{what}, bits per byte: {bits} with the memory, {cleared.bits_per_byte:.3f} cleared each segment"
    if run.settings.data.data != "recall":
        return bits
    right = f"{carried.accuracy:.1%} with the memory, {cleared.accuracy:.1%} with it cleared"
    return f"{bits}\nright answers: {right} (chance {run.settings.recall.chance:.0%})"


def warn_of_horizon(run: Run, longest: int) -> None:
    """Warn if the horizon is longer than the longest document (in segments), or if no gradient passes between its segments."""
    horizon = run.settings.training.horizon
    document = "part of the joined text" if run.settings.data.carry_over_documents else "document"
    if horizon > longest:
        print(
            f"warning: --horizon {horizon} is longer than the longest training {document} ({longest} segments): every rollout "
            f"(the segments of one iteration) crosses the start of a {document}, where gradient stops; {longest} is enough",
            file=sys.stderr,
        )
    if horizon > 1 and not gradient_passes(run.model):
        print(
            f"warning: --horizon {horizon} only takes memory: no gradient passes between segments through this model's state; "
            f"use --horizon 1 --update-every {horizon}",
            file=sys.stderr,
        )


def warn_of_warmup(training: TrainingConfig) -> None:
    """Warn if the warm-up does not end within the run."""
    if training.warmup > training.steps:
        reached = learning_rate(training.steps, training) / training.learning_rate
        print(
            f"warning: --warmup {training.warmup:,} is longer than --steps {training.steps:,}: the learning rate ends at "
            f"{reached:.0%} of --learning-rate",
            file=sys.stderr,
        )


def gradient_passes(model: torch.nn.Module) -> bool:
    """Whether gradient flows from later segments' losses through the state into a segment."""
    tokens = torch.zeros(1, model.config.segment, dtype=torch.long, device=next(model.parameters()).device)
    model.eval()  # draws no random numbers
    state = model.advance(tokens, model.initial_state(1))
    model.train()
    return any(part.requires_grad for part in state)


def recompute_layers(model: torch.nn.Module) -> None:
    """Make every layer keep only its inputs for the backward pass, which computes the layer again with the same dropout.

    Without gradient a layer computes once, as before.
    """
    again = partial(checkpoint, use_reentrant=False, preserve_rng_state=model.config.dropout > 0)
    for stack in (module for module in model.modules() if isinstance(module, torch.nn.ModuleList)):
        for layer in stack:
            layer.forward = partial(again, layer.forward)


def compile_model(model: torch.nn.Module, training: TrainingConfig) -> None:
    """Compile the model's `read`, all of a training step except the loss, with torch.compile, if --compile says so.

    With memory replay its first pass, `advance`, is compiled too. Both must drop the same, so compiled code then draws its random
    numbers as uncompiled code does, which is slower than its own generator.
    """
    if training.compile == "none":
        return
    replays = training.backprop == "memory_replay"
    torch._inductor.config.fallback_random = replays
    for name in ("read", "advance") if replays else ("read",):
        setattr(model, name, compiled_in_training(model, getattr(model, name), graphs=training.compile == "cudagraphs"))


def compiled_in_training(model: torch.nn.Module, function: Callable, graphs: bool) -> Callable:
    """The function, compiled as one graph while the model is in training mode.

    It is compiled at most three times, all in the first two iterations: for a state with gradient, for one without and for one
    that documents begin. Evaluation is not compiled: its lanes end one after another, and each number of lanes would be compiled
    again. A CUDA graph writes its next results where it wrote the last ones, so its results are copied.
    """
    compiled = torch.compile(function, fullgraph=True, dynamic=False, mode="reduce-overhead" if graphs else None)

    def by_mode(*given):
        if not model.training:
            return function(*given)
        return tree_map(torch.clone, compiled(*given)) if graphs else compiled(*given)

    return by_mode


def keep_auxiliary(run: Run) -> None:
    """Make the model's `read` leave its auxiliary losses in run.auxiliary too: back-propagation returns only the loss."""
    read = run.model.read

    def read_and_keep(*given):
        reading = read(*given)
        run.auxiliary = {name: loss.detach() for name, loss in reading.auxiliary.items()}
        return reading

    run.model.read = read_and_keep
