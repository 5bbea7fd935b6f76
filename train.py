"""Train a long-memory Transformer: python train.py --help."""

import math
import os
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

from accelerated.allocator import keep_freed_memory
from accelerated.checkpoint import checkpoint_path, load_checkpoint, load_parameters, save_checkpoint
from accelerated.corpus import Lanes, load_splits, longest_document
from accelerated.errors import InputError, run_program
from accelerated.evaluation import carries_nothing, count_bytes, evaluate
from accelerated.generation import continue_text, prompt_from, show_text
from accelerated.gpt2_checkpoint import check_gpt2, load_gpt2
from accelerated.models import MODELS
from accelerated.optimization import learning_rate, make_optimizer, prepare_gradients, set_learning_rate, update_due
from accelerated.protocol import detach, state_from
from accelerated.recall import CHANCE
from accelerated.replay import BACKPROP, count_scored
from accelerated.settings import (
    autocast,
    choose_device,
    named_on,
    parse_training,
    settings_contents,
    settings_from,
)
from accelerated.tasks import MultiTask
from accelerated.tokenizer import TOKENIZERS
from accelerated.windows import overlap_of


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


def make_folder(run):
    """Make sure that checkpoints can be written to run."""
    try:
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder {run}: {error.strerror}; give another --out") from None
    if not os.access(run, os.W_OK):
        raise InputError(f"cannot write to the folder {run}; give another --out")


def warn_of_horizon(horizon, longest):
    """Say what happens to rollouts that no document fills."""
    if horizon > longest:
        print(
            f"warning: --horizon {horizon} is longer than the longest training document ({longest} segments): every rollout runs "
            f"over the start of a document, through which no gradient passes; {longest} would do",
            file=sys.stderr,
        )


def save(run, settings, model, optimizer, state, work, step):
    """Write everything that going on from here needs."""
    contents = settings_contents(settings) | {
        "parameters": model.state_dict(), "optimizer": optimizer.state_dict(), "state": tuple(state),
        "lanes": work.position(), "random": torch.get_rng_state(), "step": step,
    }  # fmt: skip
    save_checkpoint(checkpoint_path(run), contents)


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
    tokens = continue_text(model, prompt.to(device), settings.training.sample, temperature=0.8, generator=generator)
    print("a sample after the opening of a validation document:")
    print(show_text(tokenizer, [*prompt[0].tolist(), *(token.item() for token in tokens)]))


def open_run(argv):
    """(settings, folder, checkpoint to go on from or None, weights to begin with or None) of a command line."""
    resume = named_on(argv).resume
    if not resume:
        settings, options = parse_training(argv)
        if options.init and not checkpoint_path(options.init).is_file():
            check_gpt2(options.init, settings.model_config)
        return settings, new_run(settings, options.out), None, options.init
    path = checkpoint_path(resume)
    saved = load_checkpoint(path)
    settings, options = parse_training(argv, resumed=settings_from(saved, path))
    if saved["step"] >= settings.training.steps:
        raise InputError(f"--resume {options.resume} stands at step {saved['step']}; give --steps above that to go on")
    return settings, Path(options.resume), saved, None


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
    """The model, its optimiser, the state that its lanes carry, and the first step; as they were where a run goes on."""
    training = settings.training
    torch.manual_seed(training.seed)
    torch.set_default_dtype(torch.float64 if training.dtype == "float64" else torch.float32)
    model = MODELS[settings.model](settings.model_config, training.seed).to(device)
    if init:
        start_from(model, init, device)
    optimizer, state = make_optimizer(model, training), detach(model.initial_state(training.batch))
    if not saved:
        return model, optimizer, state, 1
    load_parameters(model, saved["parameters"], checkpoint_path(run))
    optimizer.load_state_dict(saved["optimizer"])
    torch.set_rng_state(saved["random"].cpu())
    return model, optimizer, state_from(state, saved["state"]), saved["step"] + 1


def read(model, segments, state, step, training, auxiliary):
    """One iteration: a rollout of `horizon` segments of every lane adds to the gradients. Returns nats per token and state."""
    with autocast(training.dtype, segments[0].tokens.device):
        loss, state = BACKPROP[training.backprop](model, segments, state)
    for name, value in ({"loss": loss} | auxiliary).items():
        if not torch.isfinite(value):
            raise InputError(
                f"the {name} is {value.item()} at step {step}; what was saved before stands; try a lower --learning-rate"
            )
    return loss.item(), state


def update(model, optimizer, step, iterations, training):
    """One update of the parameters from the gradients that so many iterations gathered."""
    set_learning_rate(optimizer, learning_rate(step, training))
    prepare_gradients(model, iterations, training.clip)
    optimizer.step()
    optimizer.zero_grad()


def main(argv):
    settings, run, saved, init = open_run(argv)
    training, segment = settings.training, settings.model_config.segment

    # the data, and the lanes that read it
    device = choose_device(training.device)
    tokenizer = TOKENIZERS[settings.data.tokenizer]()
    token_bytes = torch.as_tensor(tokenizer.token_bytes, device=device)
    splits = load_splits(settings.data.data, tokenizer, settings.recall, segment)
    overlap = overlap_of(settings.model_config)
    lanes = Lanes(splits["train"], training.batch, segment, training.seed, overlap)
    work = MultiTask(lanes, settings.tasks, getattr(settings.model_config, "special", None), training.seed)
    warn_of_horizon(training.horizon, longest_document(splits["train"], segment, overlap))

    # the model, what trains it, and the state that its lanes carry
    keep_freed_memory()
    model, optimizer, state, first = build(settings, device, run, saved, init)
    if saved:
        work.seek(saved["lanes"])
    make_folder(run)
    size = sum(p.numel() for p in model.parameters()) / 1e6
    if init and checkpoint_path(init).is_file():
        print(f"begins with the weights, the model and the data of {init}, but for what was given")
    print(f"{settings.model}, {size:.2f}M parameters, on {device}; {len(splits['train'])} training documents; run {run}")
    print(model.describe())
    auxiliary = {}  # of the segment computed last
    model.register_forward_hook(lambda model, _, output: auxiliary.update((k, v.detach()) for k, v in output.auxiliary.items()))
    tokens_read, gathered, save_due, begun = 0, 0, False, time.perf_counter()
    bar = tqdm(range(first, training.steps + 1), initial=first - 1, total=training.steps, unit="step", mininterval=1.0)
    for step in bar:
        segments = [part.to(device) for part in work.rollout(training.horizon)]
        loss, state = read(model, segments, state, step, training, auxiliary)
        gathered, save_due = gathered + 1, save_due or step % training.save_every == 0 or step == training.steps
        if update_due(step, training):
            update(model, optimizer, step, gathered, training)
            gathered = 0
        bits = loss * count_scored(segments) / math.log(2) / max(1, count_bytes(segments, token_bytes))
        tokens_read += training.horizon * training.batch * segment
        rate = tokens_read / (time.perf_counter() - begun)
        measure = "bits/byte" if settings.tasks.continuation_alone else "bits/byte over all tasks"
        shown = f", compression loss {sum(auxiliary.values()):.4f}" if auxiliary else ""
        bar.set_postfix_str(f"{bits:.3f} {measure}{shown}, {rate:,.0f} tokens/s", refresh=False)
        if save_due and gathered == 0:  # between updates the gradients would be lost
            save(run, settings, model, optimizer, state, work, step)
            save_due = False

    # what was learned, and what the memory is worth
    with autocast(training.dtype, device):
        report(model, splits["valid"], tokenizer, settings)
        if training.sample:
            sample(model, splits["valid"], tokenizer, settings, device)
    print(f"saved in {run}; evaluate it with: python eval.py {run}")


if __name__ == "__main__":
    run_program("train.py", main)
