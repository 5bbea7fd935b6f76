"""What a training run carries along, how it is opened and how it is saved. For train.py, whose loop uses all of it."""

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
from accelerated.training.options import Beginning
from accelerated.training.settings import Settings, TrainingConfig, settings_contents


@dataclass
class Run:
    """What a training run carries along from iteration to iteration."""

    settings: Settings
    folder: Path  # where all is kept
    device: torch.device
    tokenizer: object
    token_bytes: torch.Tensor  # (V,) bytes of text that each token spells
    corpus: Corpus
    reader: MultiTask  # deals the segments of all lanes, with their tasks
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    state: tuple  # that this process's lanes carry
    log: Log
    data_dir_option: str = ""  # what later commands about this run must end in
    step: int = 0  # iterations done
    best: float = math.inf  # lowest validation loss in bits per byte
    gathered: int = 0  # iterations since the last update
    gradient_norm: float = 0.0  # of the last update
    auxiliary: dict = field(default_factory=dict)  # {name: loss} of one segment of the rollout, the one computed last
    tokens: int = 0  # read since the run was opened, padding and overlaps included
    opened: float = field(default_factory=time.perf_counter)
    last_save: float = field(default_factory=time.perf_counter)

    def tokens_per_second(self) -> float:
        """How many tokens all processes have read in a second, on average since the run was opened."""
        return self.tokens / (time.perf_counter() - self.opened)

    def time_to_save(self) -> bool:
        """Whether --save-minutes have passed since the last checkpoint."""
        minutes = self.settings.training.save_minutes
        return bool(minutes) and time.perf_counter() - self.last_save > 60 * minutes


@contextlib.contextmanager
def open_run(settings: Settings, beginning: Beginning) -> Iterator[Run]:
    """Yield a new Run, or a resumed one; inside, the processes that train together are connected.

    Raises InputError for all that can be refused before training begins, first what needs no data.
    """
    check_before_reading(settings, beginning)
    device = process.choose_device(settings.training.device)
    with process.joined(device):
        if process.rank() == 0:
            with disk_errors(beginning.folder, "give another --out"):
                beginning.folder.mkdir(parents=True, exist_ok=True)
        try:
            tokenizer, corpus = load_data(settings, beginning)
        except InputError:
            with contextlib.suppress(OSError):
                beginning.folder.rmdir()  # if there is nothing in it
            raise
        process.keep_freed_memory()
        yield build(settings, beginning, device, tokenizer, corpus)


def save(run: Run, is_best: bool = False) -> None:
    """Write everything that resuming from here needs; refuses NaN and infinite parameters, so that the last good one stays."""
    check_finite(run.step, {"parameters": sum(float(p.detach().abs().max()) for p in run.model.parameters() if p.numel())})
    contents = settings_contents(run.settings) | {
        "parameters": run.model.state_dict(), "optimizer": run.optimizer.state_dict(),
        "state": tuple(process.all_lanes(run.state)), "lanes": run.reader.position(), "random": torch.get_rng_state(),
        "step": run.step, "corpus": run.corpus.digest, "best": run.best, "pending": run.log.pending,
    }  # fmt: skip
    if process.rank() == 0:
        save_in_run(run.folder, contents, run.settings.training.keep, is_best)
    run.last_save = time.perf_counter()


def check_before_reading(settings: Settings, beginning: Beginning) -> None:
    """Raise InputError for what this machine cannot do with the settings, and for weights that do not fit them."""
    training = settings.training
    if beginning.gpt2:
        check_gpt2(beginning.gpt2, settings.model_config)
    check_writable(beginning.folder, "--resume" if beginning.resumed else "--out")
    if settings.data.data != "recall" and not (beginning.data_dir / "tokens").is_dir():  # what is there may be enough
        check_writable(beginning.data_dir, "--data-dir")
    lanes = process.own_lanes(training.batch)
    if (lanes.stop - lanes.start) % training.accumulate:
        raise InputError(f"--accumulate {training.accumulate} does not divide the {lanes.stop - lanes.start} lanes a process")
    if training.plot:
        figure_class()
    if settings.data.train_bpe and not (beginning.resumed or beginning.initial):
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


def choose_tokenizer(settings: Settings, beginning: Beginning) -> object:
    """The tokenizer: the resumed run's, that of the run behind --init, one learned here, or a named one.

    If it has no name, its ranks are kept in the run.
    """
    data = settings.data
    if beginning.resumed or (process.rank() > 0 and data.own_ranks):  # the first process has written them
        return run_tokenizer(beginning.folder, data)
    if beginning.initial:
        tokenizer = run_tokenizer(beginning.init, data)
    elif data.train_bpe:
        tokenizer = train_bpe(open_source(data.data, beginning.data_dir, data.documents), data.train_bpe)
    else:
        tokenizer = open_tokenizer(data.tokenizer)
    if data.own_ranks:
        save_ranks(beginning.folder, tokenizer)
    return tokenizer


def load_data(settings: Settings, beginning: Beginning) -> tuple[object, Corpus]:
    """(tokenizer, Corpus) of a run; raises InputError if a resumed run would read something else than before."""
    data = settings.data
    with process.first_process_first():
        tokenizer = choose_tokenizer(settings, beginning)
        corpus = load_corpus(data.data, tokenizer, settings.recall, beginning.data_dir, data.documents)
    check_length(data.data, corpus.splits, settings.model_config.segment)
    if beginning.resumed and beginning.resumed.get("corpus", corpus.digest) != corpus.digest:
        raise InputError(
            f"--data {data.data} is no longer what {beginning.folder} was trained on; bring it back as it was, or begin a new "
            f"run with --init {beginning.folder}"
        )
    return tokenizer, corpus


def build(settings: Settings, beginning: Beginning, device: torch.device, tokenizer: object, corpus: Corpus) -> Run:
    """The Run: reader, model, optimiser and state at the start, or as they were saved."""
    training, config = settings.training, settings.model_config
    documents, overlap = cut_for_lanes(training.batch, corpus.splits["train"]), overlap_of(config)
    lanes = Lanes(documents, training.batch, config.segment, training.seed, overlap)
    reader = MultiTask(lanes, settings.tasks, getattr(config, "special", None), training.seed)
    torch.manual_seed(training.seed)
    torch.set_default_dtype(torch.float64 if training.dtype == "float64" else torch.float32)
    model = MODELS[settings.model](config, training.seed).to(device)
    take_weights(model, beginning)
    optimizer, state = make_optimizer(model, training), detach(model.initial_state(training.batch))
    saved = beginning.resumed or {}
    if saved:
        optimizer.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["random"].cpu())
        state = state_from(state, saved["state"])
        reader.seek(saved["lanes"])
    step, first = saved.get("step", 0), process.rank() == 0
    run = Run(
        settings=settings, folder=beginning.folder, device=device, tokenizer=tokenizer,
        token_bytes=torch.as_tensor(tokenizer.token_bytes, device=device), corpus=corpus, reader=reader, model=model,
        optimizer=optimizer, state=keep_lanes(state, process.own_lanes(training.batch)),
        log=Log(beginning.folder, step, training.plot, saved.get("pending", (0.0, 0, 0)), writing=first),
        data_dir_option="" if beginning.data_dir == default_data_dir() else f" --data-dir {beginning.data_dir}",
        step=step, best=saved.get("best", math.inf),
    )  # fmt: skip
    if first:
        introduce(run, beginning)
        warn_of_horizon(run, longest_document(documents, config.segment, overlap))
    beginning.resumed = beginning.initial = None  # the tensors in them take memory
    model.register_forward_hook(  # back-propagation returns the loss alone
        lambda _, inputs, output: run.auxiliary.update({name: loss.detach() for name, loss in output.auxiliary.items()})
    )
    compile_forward(model, training)
    return run


def take_weights(model: torch.nn.Module, beginning: Beginning) -> None:
    """Load the weights of the resumed run, of another run, or of a GPT-2; without any of them the model stays as drawn."""
    if beginning.gpt2:
        load_gpt2(model, beginning.gpt2)
    elif beginning.resumed:
        load_parameters(model, beginning.resumed["parameters"], checkpoint_path(beginning.folder))
    elif beginning.initial:
        own, parameters = model.state_dict(), beginning.initial["parameters"]
        ours, theirs = ({name: side[name] for name in side if name.startswith("module.")} for side in (own, parameters))
        if not (ours and theirs):  # one side lacks GPT-2's recurrence: theirs is left out, ours stays as it starts
            parameters = {name: value for name, value in parameters.items() if name not in theirs} | ours
        load_parameters(model, parameters, checkpoint_path(beginning.init))


def introduce(run: Run, beginning: Beginning) -> None:
    """Say what is going to be trained, and on what."""
    size = sum(p.numel() for p in run.model.parameters()) / 1e6
    if beginning.initial:
        print(f"begins with the weights, the model and the data of {beginning.init}, except for what was given")
    where = f"{run.device}, {process.world_size()} processes" if process.world_size() > 1 else str(run.device)
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
    state = model.advance(tokens, model.initial_state(1))
    model.train()
    return any(part.requires_grad for part in state)


def compile_forward(model: torch.nn.Module, training: TrainingConfig) -> None:
    """Let torch.compile make the model's forward faster, if --compile says so.

    Memory replay's first pass, `advance`, is not compiled and must drop out what the compiled forward does: then compiled code
    draws its random numbers as the uncompiled code does, and not, faster, by its own generator.
    """
    if training.compile != "none":
        torch._inductor.config.fallback_random = training.backprop == "memory_replay"
        model.compile(backend=training.compile, dynamic=False)
