"""What a training run carries along, how it is opened and how it is saved. For train.py, whose loop uses all of it."""

import argparse
import contextlib
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from accelerated.data.corpus import Corpus, check_length, default_data_dir, load_corpus, open_source
from accelerated.data.lanes import Lanes, cut_for_lanes, longest_document
from accelerated.data.tasks import MultiTask
from accelerated.data.tokenizers import check_package, open_tokenizer, run_tokenizer, save_ranks, train_bpe
from accelerated.data.windows import overlap_of
from accelerated.errors import InputError, disk_errors
from accelerated.models import MODELS
from accelerated.protocol import detach, keep_lanes, state_from
from accelerated.training import process
from accelerated.training.checkpoint import checkpoint_path, load_parameters, save_in_run
from accelerated.training.gpt2_weights import check_gpt2, load_gpt2
from accelerated.training.log import Log, figure_class
from accelerated.training.optimization import check_finite, make_optimizer
from accelerated.training.settings import Settings, settings_contents


@dataclass
class Run:
    """What a training run carries along from iteration to iteration."""

    settings: Settings
    folder: Path  # where all is kept
    device: torch.device
    tokenizer: object
    token_bytes: torch.Tensor  # (V,) bytes of text that each token spells
    corpus: Corpus
    lanes: MultiTask  # deals the segments of all lanes, with their tasks
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    state: tuple  # that this process's lanes carry
    log: Log
    repeat: str = ""  # the option that a later command must repeat
    step: int = 0  # iterations done
    best: float = math.inf  # lowest validation loss in bits per byte
    gathered: int = 0  # iterations since the last update
    gradient_norm: float = 0.0  # of the last update
    auxiliary: dict = field(default_factory=dict)  # {name: loss} of the segment that the model computed last
    tokens: int = 0  # read since the run was opened, those of padding and overlaps among them
    begun: float = field(default_factory=time.perf_counter)
    saved: float = field(default_factory=time.perf_counter)  # when

    def tokens_per_second(self) -> float:
        """How many tokens all processes have read in a second, on average since the run was opened."""
        return self.tokens / (time.perf_counter() - self.begun)

    def time_to_save(self) -> bool:
        """Whether --save-minutes have passed since the last checkpoint."""
        minutes = self.settings.training.save_minutes
        return bool(minutes) and time.perf_counter() - self.saved > 60 * minutes


@contextlib.contextmanager
def open_run(settings: Settings, options: argparse.Namespace) -> Iterator[Run]:
    """Yield a Run of the options of parse_training: a new one, or as it was when it was saved. Its processes are joined inside.

    Raises InputError for all that can be refused before training begins, first what needs no data.
    """
    check_before_reading(settings, options)
    device = process.choose_device(settings.training.device)
    with process.joined(device):
        if process.rank() == 0:
            with disk_errors(options.folder, "give another --out"):
                options.folder.mkdir(parents=True, exist_ok=True)
        try:
            tokenizer, corpus = load_data(settings, options)
        except InputError:
            with contextlib.suppress(OSError):
                options.folder.rmdir()  # if there is nothing in it
            raise
        process.keep_freed_memory()
        yield build(settings, options, device, tokenizer, corpus)


def save(run: Run, is_best: bool = False) -> None:
    """Write everything that resuming from here needs; never in place of a good checkpoint what is NaN or infinite."""
    check_finite(run.step, parameters=sum(float(p.detach().abs().max()) for p in run.model.parameters() if p.numel()))
    contents = settings_contents(run.settings) | {
        "parameters": run.model.state_dict(), "optimizer": run.optimizer.state_dict(),
        "state": tuple(process.all_lanes(run.state)), "lanes": run.lanes.position(), "random": torch.get_rng_state(),
        "step": run.step, "corpus": run.corpus.digest, "best": run.best, "pending": run.log.pending,
    }  # fmt: skip
    if process.rank() == 0:
        save_in_run(run.folder, contents, run.settings.training.keep, is_best)
    run.saved = time.perf_counter()


def check_before_reading(settings: Settings, options: argparse.Namespace) -> None:
    """Raise InputError for what this machine cannot do with the settings, and for weights that do not fit them."""
    training = settings.training
    if options.init and not options.saved:
        check_gpt2(options.init, settings.model_config)
    check_writable(options.folder, "--resume" if options.resume else "--out")
    if settings.data.data != "recall" and not (options.data_dir / "tokens").is_dir():  # what is there may be all that is needed
        check_writable(options.data_dir, "--data-dir")
    lanes = process.own_lanes(training.batch)
    if (lanes.stop - lanes.start) % training.accumulate:
        raise InputError(f"--accumulate {training.accumulate} does not divide the {lanes.stop - lanes.start} lanes a process")
    if training.plot:
        figure_class()
    if settings.data.train_bpe and not options.saved:
        check_package()
    compiler = any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++")))
    if training.compile == "inductor" and not compiler and process.choose_device(training.device).type == "cpu":
        raise InputError("--compile inductor needs a C++ compiler on a CPU, and there is none; install g++, or leave it out")


def check_writable(folder: Path, option: str) -> None:
    """Raise InputError unless folder, or the nearest folder above it that there is, can be written to."""
    above = folder.absolute()
    while not above.exists():
        above = above.parent
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise InputError(f"cannot write to {above}; give another {option} than {folder}")


def choose_tokenizer(settings: Settings, options: argparse.Namespace) -> object:
    """The tokenizer of a resumed run, of the run that weights come from, learned, or named; the run keeps its ranks."""
    data = settings.data
    if options.resume or (process.rank() > 0 and data.own_ranks):  # the first process has written them
        return run_tokenizer(options.folder, data)
    if options.saved:
        tokenizer = run_tokenizer(options.init, data)
    elif data.train_bpe:
        tokenizer = train_bpe(open_source(data.data, options.data_dir, data.documents), data.train_bpe)
    else:
        tokenizer = open_tokenizer(data.tokenizer)
    if data.own_ranks:
        save_ranks(options.folder, tokenizer)
    return tokenizer


def load_data(settings: Settings, options: argparse.Namespace) -> tuple[object, Corpus]:
    """(tokenizer, Corpus) of a run; raises InputError if a resumed run would read something else than before."""
    data = settings.data
    with process.first_process_first():
        tokenizer = choose_tokenizer(settings, options)
        corpus = load_corpus(data.data, tokenizer, settings.recall, options.data_dir, data.documents)
    check_length(data.data, corpus.splits, settings.model_config.segment)
    if options.resume and options.saved.get("corpus", corpus.digest) != corpus.digest:
        raise InputError(
            f"--data {data.data} is no longer what {options.resume} was trained on; bring it back as it was, or begin a new "
            f"run with --init {options.resume}"
        )
    return tokenizer, corpus


def build(settings: Settings, options: argparse.Namespace, device: torch.device, tokenizer: object, corpus: Corpus) -> Run:
    """The Run: lanes, model, optimiser and state at the start, or as they were saved."""
    training, config = settings.training, settings.model_config
    documents, overlap = cut_for_lanes(training.batch, corpus.splits["train"]), overlap_of(config)
    lanes = Lanes(documents, training.batch, config.segment, training.seed, overlap)
    lanes = MultiTask(lanes, settings.tasks, getattr(config, "special", None), training.seed)
    torch.manual_seed(training.seed)
    torch.set_default_dtype(torch.float64 if training.dtype == "float64" else torch.float32)
    model = MODELS[settings.model](config, training.seed).to(device)
    if options.init:
        begin_with(model, options)
    optimizer, state = make_optimizer(model, training), detach(model.initial_state(training.batch))
    saved = options.saved if options.resume else {}
    if saved:
        load_parameters(model, saved["parameters"], checkpoint_path(options.folder))
        optimizer.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["random"].cpu())
        state = state_from(state, saved["state"])
        lanes.seek(saved["lanes"])
    step, first = saved.get("step", 0), process.rank() == 0
    run = Run(
        settings, options.folder, device, tokenizer, torch.as_tensor(tokenizer.token_bytes, device=device), corpus, lanes, model,
        optimizer,
        keep_lanes(state, process.own_lanes(training.batch)),
        Log(options.folder, step, training.plot, saved.get("pending", (0.0, 0, 0)), writing=first),
        "" if options.data_dir == default_data_dir() else f" --data-dir {options.data_dir}", step, saved.get("best", math.inf),
    )  # fmt: skip
    if first:
        introduce(run, options)
        warn_of_horizon(run, longest_document(documents, config.segment, overlap))
    options.saved = None  # the tensors in it take memory
    model.register_forward_hook(  # back-propagation returns the loss alone
        lambda _, inputs, output: run.auxiliary.update({name: loss.detach() for name, loss in output.auxiliary.items()})
    )
    compile_forward(model, training)
    return run


def begin_with(model: torch.nn.Module, options: argparse.Namespace) -> None:
    """Take the weights of a run, or of a GPT-2; what is added to a plain GPT-2 stays as it starts."""
    if not options.saved:
        load_gpt2(model, options.init)
        return
    parameters = options.saved["parameters"]
    theirs, ours = (any(name.startswith("module.") for name in names) for names in (parameters, model.state_dict()))
    unused, fresh = None if ours else "module.", None if theirs else "module."
    load_parameters(model, parameters, checkpoint_path(options.init), unused, fresh)


def introduce(run: Run, options: argparse.Namespace) -> None:
    """Say what is going to be trained, and on what."""
    size = sum(p.numel() for p in run.model.parameters()) / 1e6
    if options.init and options.saved:
        print(f"begins with the weights, the model and the data of {options.init}, except for what was given")
    where = f"{run.device}, {process.ranks()} processes" if process.ranks() > 1 else str(run.device)
    documents = len(run.corpus.splits["train"])
    print(f"{run.settings.model}, {size:.2f}M parameters, on {where}; {documents} training documents; run {run.folder}")
    print(run.model.describe())


def warn_of_horizon(run: Run, longest: int) -> None:
    """Warn of a horizon that no document of at most `longest` segments fills, or across which no gradient passes."""
    horizon = run.settings.training.horizon
    if horizon > longest:
        print(
            f"warning: --horizon {horizon} is longer than the longest training document ({longest} segments): every rollout runs "
            f"over the start of a document, through which no gradient passes; {longest} would do",
            file=sys.stderr,
        )
    if horizon > 1 and not gradient_passes(run.model):
        print(
            f"warning: --horizon {horizon} only takes memory: no gradient passes between segments through this model's state; "
            f"--horizon 1 --update-every {horizon} would do",
            file=sys.stderr,
        )


def gradient_passes(model: torch.nn.Module) -> bool:
    """Whether the state that a segment leaves carries gradient, to learn from later segments' losses."""
    tokens = torch.zeros(1, model.config.segment, dtype=torch.long, device=next(model.parameters()).device)
    model.eval()  # draws no random numbers
    state = model(tokens, model.initial_state(1)).state
    model.train()
    return any(field.requires_grad for field in state)


def compile_forward(model: torch.nn.Module, training) -> None:
    """Let torch.compile make the model's forward faster, if --compile says so.

    Memory replay's first pass, `advance`, is not compiled and must drop out what the compiled forward does: then compiled code
    draws its random numbers as the uncompiled code does, and not, faster, by its own generator.
    """
    if training.compile != "none":
        torch._inductor.config.fallback_random = training.backprop == "memory_replay"
        model.compile(backend=training.compile, dynamic=False)
