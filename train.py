"""Train a long-memory Transformer: python train.py --help."""

import contextlib
import math
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch
from tqdm import tqdm

from accelerated.data.corpus import check_length, default_data_dir, load_corpus, open_source
from accelerated.data.lanes import Lanes, enough_for, longest_document
from accelerated.data.recall import CHANCE
from accelerated.data.tasks import MultiTask
from accelerated.data.tokenizers import check_package, open_tokenizer, run_tokenizer, save_ranks, train_bpe
from accelerated.data.windows import overlap_of
from accelerated.errors import InputError, disk_errors, run_program
from accelerated.evaluation.generation import Sampling, continue_text, prompt_from, show_text
from accelerated.evaluation.score import carries_nothing, count_bytes, evaluate
from accelerated.models import MODELS
from accelerated.protocol import detach, keep_lanes, state_from
from accelerated.replay import BACKPROP, count_scored
from accelerated.training import process as distributed
from accelerated.training.checkpoint import checkpoint_path, load_checkpoint, load_parameters, save_in_run
from accelerated.training.gpt2_weights import check_gpt2, load_gpt2
from accelerated.training.log import Metrics, figure_class
from accelerated.training.optimization import learning_rate, make_optimizer, prepare_gradients, set_learning_rate, update_due
from accelerated.training.options import named_on, parse_training
from accelerated.training.process import Interruption, autocast, choose_device, keep_freed_memory
from accelerated.training.settings import settings_contents, settings_from


def new_run(settings, out):
    """The folder of a new run; never one that already holds a checkpoint."""
    if out is None:
        stem, number = f"runs/{settings.model}-{Path(settings.data.data).stem}", 1
        while Path(f"{stem}-{number}").exists():
            number += 1
        out = f"{stem}-{number}"
    run = Path(out)
    if checkpoint_path(run).exists():
        raise InputError(f"--out {run} already holds a run; give another folder, or --resume {run} to go on with it")
    return run


def make_folder(run, settings, options):
    """Make the run's folder and return it; another where a run that began at the same time has taken a default one."""
    with disk_errors(run, "give another --out"):
        run.parent.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                run.mkdir(exist_ok=bool(options.out or options.resume))
                return run
            except FileExistsError:
                run = new_run(settings, None)


def check_writable(folder, option):
    """Raise InputError unless folder, or the nearest folder above it that there is, can be written to."""
    above = Path(folder).absolute()
    while not above.exists():
        above = above.parent
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise InputError(f"cannot write to {above}; give another {option} than {folder}")


def warn_of_horizon(horizon, longest):
    """Say what happens to rollouts that no document fills."""
    if horizon > longest:
        print(
            f"warning: --horizon {horizon} is longer than the longest training document ({longest} segments): every rollout runs "
            f"over the start of a document, through which no gradient passes; {longest} would do",
            file=sys.stderr,
        )


def save(run, settings, model, optimizer, state, work, step, digest, best, pending, is_best):
    """Write everything that going on from here needs; never in place of a good checkpoint what is no number."""
    check_finite(step, parameters=sum(float(p.detach().abs().max()) for p in model.parameters() if p.numel()))
    contents = settings_contents(settings) | {
        "parameters": model.state_dict(), "optimizer": optimizer.state_dict(), "state": tuple(distributed.all_lanes(state)),
        "lanes": work.position(), "random": torch.get_rng_state(), "step": step, "corpus": digest, "best": best,
        "pending": pending,
    }  # fmt: skip
    if distributed.rank() == 0:
        save_in_run(run, contents, settings.training.keep, is_best)


def report(model, documents, tokenizer, settings):
    """Validate with the state carried through each document and with it cleared at every segment, and print both."""
    limit, lanes = settings.training.validation_segments or None, settings.training.batch
    carried = evaluate(model, documents, tokenizer, lanes, segments=limit)
    if carried.tokens == 0:
        print(
            f"validation: the first {limit} segments of every lane score nothing; give more --validation-segments, or 0 for all"
        )
        return
    if carries_nothing(model):
        print(f"validation on {carried.tokens} tokens: {carried.bits_per_byte:.3f} bits per byte; this model carries no memory")
        return
    cleared = evaluate(model, documents, tokenizer, lanes, clear_memory=True, segments=limit)
    print(f"validation on {carried.tokens} tokens, bits per byte: {carried.bits_per_byte:.3f} with the memory, "
          f"{cleared.bits_per_byte:.3f} with it cleared at every segment")  # fmt: skip
    if settings.data.data == "recall":
        print(
            f"right answers: {carried.accuracy:.1%} with the memory, {cleared.accuracy:.1%} with it cleared (chance {CHANCE:.0%})"
        )


def sample(model, documents, tokenizer, settings, device):
    """Print a continuation of the opening of a validation document."""
    prompt = prompt_from(next(document for document in documents if len(document.inputs)))
    generator = torch.Generator(device).manual_seed(settings.training.seed)
    tokens = continue_text(model, prompt.to(device), settings.training.sample, Sampling(temperature=0.8), generator)
    print("a sample after the opening of a validation document:")
    print(show_text(tokenizer, [*prompt[0].tolist(), *(token.item() for token in tokens)]))


def open_run(argv):
    """(settings, options, folder, checkpoint to go on from or None, weights to begin with or None) of a command line.

    Whatever can be refused without looking at data is refused here.
    """
    resume = named_on(argv).resume
    path = checkpoint_path(resume) if resume else None
    saved = load_checkpoint(path) if resume else None
    settings, options = parse_training(argv, resumed=settings_from(saved, path) if resume else None)
    if not resume and options.init and not checkpoint_path(options.init).is_file():
        check_gpt2(options.init, settings.model_config)
    if resume and saved["step"] >= settings.training.steps:
        raise InputError(f"--resume {options.resume} stands at step {saved['step']}; give --steps above that to go on")
    run = Path(options.resume) if resume else new_run(settings, options.out)
    options.data_dir = Path(options.data_dir or default_data_dir())
    check_writable(run, "--resume" if resume else "--out")
    if settings.data.data != "recall" and not (options.data_dir / "tokens").is_dir():  # what is there may be all that is needed
        check_writable(options.data_dir, "--data-dir")
    lanes = distributed.own_lanes(settings.training.batch)
    if (lanes.stop - lanes.start) % settings.training.accumulate:
        raise InputError(
            f"--accumulate {settings.training.accumulate} does not divide the {lanes.stop - lanes.start} lanes a process"
        )
    if settings.training.plot:
        figure_class()
    if settings.data.train_bpe and not saved and not options.init:
        check_package()
    if settings.training.compile == "inductor" and choose_device(settings.training.device).type == "cpu":
        check_compiler()
    return settings, options, run, saved, options.init


def choose_tokenizer(settings, run, saved, init, data_dir):
    """The tokenizer: of the run that goes on, of the one that weights come from, learned, or named; its ranks are kept in run."""
    written = saved or (distributed.rank() > 0 and settings.data.own_ranks)  # by the first process, where there are several
    if written or (init and checkpoint_path(init).is_file()):
        tokenizer = run_tokenizer(run if written else init, settings.data)
    elif settings.data.train_bpe:
        with disk_errors(data_dir):
            data_dir.mkdir(parents=True, exist_ok=True)
            workspace = tempfile.TemporaryDirectory(dir=data_dir)
        with workspace:
            tokenizer = train_bpe(open_source(settings.data.data, data_dir), settings.data.train_bpe, workspace.name)
    else:
        tokenizer = open_tokenizer(settings.data.tokenizer)
    if settings.data.own_ranks and not written:
        save_ranks(run, tokenizer)
    return tokenizer


def load_data(settings, run, saved, init, data_dir):
    """(tokenizer, Corpus) of a run; InputError where a run that goes on would read something else than before."""
    with distributed.first_rank_first():
        tokenizer = choose_tokenizer(settings, run, saved, init, data_dir)
        corpus = load_corpus(settings.data.data, tokenizer, settings.recall, data_dir)
    check_length(settings.data.data, corpus.splits, settings.model_config.segment)
    if saved and saved.get("corpus", corpus.digest) != corpus.digest:
        raise InputError(
            f"--data {settings.data.data} is no longer what {run} was trained on; bring it back as it was, or begin a new "
            f"run with --init {run}"
        )
    return tokenizer, corpus


def deal(documents, settings):
    """The lanes that read the training documents, with the tasks that they are to do."""
    training, config = settings.training, settings.model_config
    documents, overlap = enough_for(training.batch, documents), overlap_of(config)
    if distributed.rank() == 0:
        warn_of_horizon(training.horizon, longest_document(documents, config.segment, overlap))
    lanes = Lanes(documents, training.batch, config.segment, training.seed, overlap)
    return MultiTask(lanes, settings.tasks, getattr(config, "special", None), training.seed)


def start_from(model, init, device):
    """Take the weights of a run, or of a GPT-2; what is added to a plain GPT-2 stays as it starts."""
    path = checkpoint_path(init)
    if not path.is_file():
        load_gpt2(model, init)
        return
    parameters = load_checkpoint(path, device)["parameters"]
    theirs, ours = (any(name.startswith("module.") for name in names) for names in (parameters, model.state_dict()))
    load_parameters(model, parameters, path, unused=None if ours else "module.", fresh=None if theirs else "module.")


def build(settings, device, run, saved, init):
    """The model, its optimiser, the state that this process's lanes carry; as they were where a run goes on."""
    training = settings.training
    torch.manual_seed(training.seed)
    torch.set_default_dtype(torch.float64 if training.dtype == "float64" else torch.float32)
    model = MODELS[settings.model](settings.model_config, training.seed).to(device)
    if init:
        start_from(model, init, device)
    optimizer, state = make_optimizer(model, training), detach(model.initial_state(training.batch))
    if saved:
        load_parameters(model, saved["parameters"], checkpoint_path(run))
        optimizer.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["random"].cpu())
        state = state_from(state, saved["state"])
    return model, optimizer, keep_lanes(state, distributed.own_lanes(training.batch))


def read(model, segments, state, training, scored):
    """One iteration: a rollout of `horizon` segments of every lane adds to the gradients. Returns nats per token and state.

    scored is what the summed loss is divided by. The lanes are read in `accumulate` groups.
    """
    size = len(segments[0].tokens) // training.accumulate
    loss, states = 0.0, []
    for first in range(0, len(segments[0].tokens), size):
        rows = slice(first, first + size)
        with autocast(training.dtype, segments[0].tokens.device):
            part, after = BACKPROP[training.backprop](
                model, [s.lanes(rows) for s in segments], keep_lanes(state, rows), scored, 1 / training.accumulate
            )
        loss, states = loss + part.item(), [*states, after]
    return loss, states[0] if len(states) == 1 else type(state)(*map(torch.cat, zip(*states, strict=True)))


def check_finite(step, **values):
    """Stop where a loss or a gradient is no number: what was saved before stands."""
    for name, value in values.items():
        if not math.isfinite(value):
            raise InputError(f"the {name} is {value} at step {step}; what was saved before stands; try a lower --learning-rate")


def update(model, optimizer, average, step, iterations, training, device):
    """One update of the parameters from the gradients that so many iterations gathered; returns their norm."""
    average(device)
    set_learning_rate(optimizer, learning_rate(step, training))
    norm = prepare_gradients(model, iterations, training.clip)
    check_finite(step, **{"gradient's norm": norm})
    optimizer.step()
    optimizer.zero_grad()
    return norm


def validate(model, corpus, tokenizer, training, step, metrics, best, device):
    """Validate in the first process while the others wait; returns the lowest bits per byte so far, infinity in the others."""
    if distributed.rank() == 0:
        with autocast(training.dtype, device):
            limit = training.validation_segments or None
            score = evaluate(model, corpus.splits["valid"], tokenizer, training.batch, segments=limit)
        if score.tokens:
            best = min(best, score.bits_per_byte)
            metrics.write(step=step, validation_bits_per_byte=score.bits_per_byte, validation_loss=score.nats / score.tokens)
    distributed.wait_for_all()
    return best


def check_compiler():
    """Raise InputError where torch.compile would find no C++ compiler."""
    if not any(shutil.which(name) for name in (os.environ.get("CXX", "c++"), "g++", "clang++")):
        raise InputError("--compile inductor needs a C++ compiler on a CPU, and there is none; install g++, or leave it out")


def compile_forward(model, backend):
    """Let torch.compile make the model's forward faster, by one of its backends."""
    if backend != "none":
        model.compile(backend=backend, dynamic=False)


def introduce(model, settings, corpus, run, init, device):
    """Say what is going to be trained, and on what."""
    size = sum(p.numel() for p in model.parameters()) / 1e6
    if init and checkpoint_path(init).is_file():
        print(f"begins with the weights, the model and the data of {init}, but for what was given")
    where = f"{device}, {distributed.ranks()} processes" if distributed.ranks() > 1 else str(device)
    print(f"{settings.model}, {size:.2f}M parameters, on {where}; {len(corpus.splits['train'])} training documents; run {run}")
    print(model.describe())


class Clock:
    """What is due by time, and how fast it goes."""

    def __init__(self, training):
        self.begun = self.saved = time.perf_counter()
        self.minutes, self.tokens = training.save_minutes, 0

    def save_due(self):
        return bool(self.minutes) and time.perf_counter() - self.saved > 60 * self.minutes

    def rate(self):
        """Tokens per second, those of padding and overlaps among them."""
        return self.tokens / (time.perf_counter() - self.begun)


def progress_text(nats, text_bytes, auxiliary, rate, settings):
    """What the progress bar shows of one iteration."""
    bits = nats / math.log(2) / max(1, text_bytes)
    measure = "bits/byte" if settings.tasks.continuation_alone else "bits/byte over all tasks"
    shown = f", compression loss {sum(auxiliary.values()):.4f}" if auxiliary else ""
    return f"{bits:.3f} {measure}{shown}, {rate:,.0f} tokens/s"


def learn(model, optimizer, state, work, tokenizer, corpus, settings, run, saved, device):
    """Train to the last step, saving and measuring on the way; returns what stopped it before that, or None."""
    training, first, best = settings.training, 1, math.inf
    if saved:
        first, best = saved["step"] + 1, saved.get("best", math.inf)
    alone, own = distributed.rank() == 0, distributed.own_lanes(training.batch)
    token_bytes = torch.as_tensor(tokenizer.token_bytes, device=device)
    average, auxiliary = distributed.GradientAverage(model), {}  # auxiliary: of the segment computed last
    hook = model.register_forward_hook(
        lambda model, _, output: auxiliary.update((k, v.detach()) for k, v in output.auxiliary.items())
    )
    pending = saved.get("pending", (0.0, 0, 0)) if saved else (0.0, 0, 0)
    metrics = Metrics(run, first - 1, training.plot, pending) if alone else None
    clock, gathered, norm, save_due, validation_due = Clock(training), 0, 0.0, False, False
    bar = tqdm(range(first, training.steps + 1), initial=first - 1, total=training.steps, unit="step", mininterval=1.0,
               disable=not alone)  # fmt: skip
    with Interruption() as interruption:
        for step in bar:
            segments = [part.lanes(own).to(device) for part in work.rollout(training.horizon)]
            [scored] = distributed.summed([count_scored(segments)], device)
            loss, state = read(model, segments, state, training, scored / distributed.ranks())
            nats, text_bytes, signals, out_of_time = distributed.summed(
                [loss * scored / distributed.ranks(), count_bytes(segments, token_bytes), bool(interruption.signal),
                 alone and clock.save_due()], device,
            )  # fmt: skip
            others = {name: value.item() for name, value in auxiliary.items()}
            check_finite(step, loss=nats, **others)
            gathered, clock.tokens = gathered + 1, clock.tokens + training.horizon * training.batch * segments[0].tokens.shape[1]
            if update_due(step, training):
                norm = update(model, optimizer, average, step, gathered, training, device)
                gathered = 0
            if alone:
                metrics.add(nats, scored, text_bytes)
                bar.set_postfix_str(progress_text(nats, text_bytes, others, clock.rate(), settings), refresh=False)
                if step % training.log_every == 0 or step == training.steps:
                    metrics.record(step, learning_rate=learning_rate(step, training), gradient_norm=norm,
                                   tokens_per_second=clock.rate(), **others)  # fmt: skip
            validation_due = validation_due or (training.validate_every > 0 and step % training.validate_every == 0)
            save_due = save_due or bool(out_of_time) or step % training.save_every == 0 or step == training.steps
            if gathered:  # between updates the gradients would be lost
                continue
            is_best = False
            if validation_due:
                before, best = best, validate(model, corpus, tokenizer, training, step, metrics, best, device)
                is_best = best < before
            if save_due or validation_due or signals:
                save(
                    run, settings, model, optimizer, state, work, step, corpus.digest, best, metrics and metrics.pending, is_best
                )
                clock.saved, save_due, validation_due = time.perf_counter(), False, False
            if signals:
                break
    hook.remove()
    if alone:
        metrics.close()
    return (interruption.signal or "a signal") if signals and step < training.steps else None


def main(argv):
    settings, options, run, saved, init = open_run(argv)
    elsewhere = "" if options.data_dir == default_data_dir() else f" --data-dir {options.data_dir}"
    device = choose_device(settings.training.device)
    with distributed.joined(device):
        run = distributed.agreed(make_folder(run, settings, options) if distributed.rank() == 0 else run)
        try:
            tokenizer, corpus = load_data(settings, run, saved, init, options.data_dir)
        except InputError:
            with contextlib.suppress(OSError):
                run.rmdir()  # if there is nothing in it
            raise
        work = deal(corpus.splits["train"], settings)
        keep_freed_memory()
        model, optimizer, state = build(settings, device, run, saved, init)
        if saved:
            work.seek(saved["lanes"])
            saved = {name: saved[name] for name in ("step", "best", "pending") if name in saved}  # the rest takes memory
        if distributed.rank() == 0:
            introduce(model, settings, corpus, run, init, device)
        compile_forward(model, settings.training.compile)
        stopped = learn(model, optimizer, state, work, tokenizer, corpus, settings, run, saved, device)
        if distributed.rank() > 0:
            return
        if stopped:
            print(f"stopped by {stopped} and saved; go on with: python train.py --resume {run}{elsewhere}")
            return
        with autocast(settings.training.dtype, device):
            report(model, corpus.splits["valid"], tokenizer, settings)
            if settings.training.sample:
                sample(model, corpus.splits["valid"], tokenizer, settings, device)
        print(f"saved in {run}; evaluate it with: python eval.py {run}{elsewhere}")


if __name__ == "__main__":
    run_program("train.py", main)
