"""Train a long-memory Transformer: python train.py --help."""

import math
import time
from pathlib import Path

import torch
from tqdm import tqdm

from accelerated.allocator import keep_freed_memory
from accelerated.checkpoint import checkpoint_path, load_checkpoint, load_parameters, save_checkpoint
from accelerated.corpus import Lanes, load_splits
from accelerated.errors import InputError, run_program
from accelerated.evaluation import evaluate
from accelerated.generation import continue_text, prompt_from, show_text
from accelerated.models import MODELS
from accelerated.optimization import learning_rate, make_optimizer, set_learning_rate
from accelerated.protocol import detach, state_from
from accelerated.replay import BACKPROP
from accelerated.settings import autocast, choose_device, parse_training, settings_contents, settings_from
from accelerated.tokenizer import TOKENIZERS


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
    try:
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder --out {run}: {error.strerror}") from None
    return run


def report(model, documents, tokenizer, settings):
    """Validate with the state carried through each document and with it cleared at every segment, and print both."""
    limit = settings.training.validation_segments or None
    lanes = settings.training.batch
    carried, cleared = (evaluate(model, documents, tokenizer, lanes, clear, limit) for clear in (False, True))
    print(f"validation on {carried.tokens} tokens, bits per byte: {carried.bits_per_byte:.3f} with the memory, "
          f"{cleared.bits_per_byte:.3f} with it cleared at every segment")  # fmt: skip
    if settings.data.data == "recall":
        print(f"right answers: {carried.accuracy:.1%} with the memory, {cleared.accuracy:.1%} with it cleared (chance 10%)")


def main(argv):
    settings, options = parse_training(argv)
    saved = None
    if options.resume:
        saved = load_checkpoint(checkpoint_path(options.resume))
        settings, options = parse_training(argv, resumed=settings_from(saved, checkpoint_path(options.resume)))
    training = settings.training

    # the data and the lanes that read it
    device = choose_device(training.device)
    tokenizer = TOKENIZERS[settings.data.tokenizer]()
    splits = load_splits(settings.data.data, tokenizer, settings.recall, settings.model_config.segment)
    lanes = Lanes(splits["train"], training.batch, settings.model_config.segment, training.seed)

    # the model and what trains it
    keep_freed_memory()
    torch.manual_seed(training.seed)
    torch.set_default_dtype(torch.float64 if training.dtype == "float64" else torch.float32)
    model = MODELS[settings.model](settings.model_config, training.seed).to(device)
    optimizer = make_optimizer(model, training)
    backprop = BACKPROP[training.backprop]
    state, first = detach(model.initial_state(training.batch)), 1

    if saved:
        run, first = Path(options.resume), saved["step"] + 1
        load_parameters(model, saved["parameters"], checkpoint_path(run))
        optimizer.load_state_dict(saved["optimizer"])
        lanes.seek(saved["lanes"])
        state = state_from(state, saved["state"])
        torch.set_rng_state(saved["random"].cpu())
    else:
        run = new_run(settings, options.out)

    def save(step):
        save_checkpoint(checkpoint_path(run), settings_contents(settings) | {
            "parameters": model.state_dict(), "optimizer": optimizer.state_dict(), "state": tuple(state),
            "lanes": lanes.position(), "random": torch.get_rng_state(), "step": step,
        })  # fmt: skip

    # the training loop: one update is a rollout of `horizon` segments of every lane
    documents, parameters = len(splits["train"]), sum(p.numel() for p in model.parameters())
    print(f"{settings.model}, {parameters / 1e6:.2f}M parameters, on {device}; {documents} training documents; run {run}")
    tokens_read, begun = 0, time.perf_counter()
    bar = tqdm(range(first, training.steps + 1), initial=first - 1, total=training.steps, unit="step", mininterval=1.0)
    for step in bar:
        set_learning_rate(optimizer, learning_rate(step, training))
        segments = [next(lanes).to(device) for _ in range(training.horizon)]
        with autocast(training.dtype, device):
            loss, state = backprop(model, segments, state)
        if not torch.isfinite(loss):
            raise InputError(f"the loss is {loss.item()} at step {step}; the last checkpoint stands; try a lower --learning-rate")
        if training.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), training.clip)
        optimizer.step()
        optimizer.zero_grad()
        tokens_read += training.horizon * training.batch * settings.model_config.segment
        rate = tokens_read / (time.perf_counter() - begun)
        bar.set_postfix_str(f"{loss.item() / math.log(2):.3f} bits/token, {rate:,.0f} tokens/s", refresh=False)
        if step % training.save_every == 0 and step < training.steps:
            save(step)
    save(training.steps)

    # what was learned, and what the memory is worth
    with autocast(training.dtype, device):
        report(model, splits["valid"], tokenizer, settings)
        if training.sample:
            prompt = prompt_from(splits["valid"][0])
            generator = torch.Generator(device).manual_seed(training.seed)
            continuation = continue_text(model, prompt.to(device), training.sample, temperature=0.8, generator=generator)
            print("a sample after the opening of a validation document:")
            print(show_text(tokenizer, [*prompt[0].tolist(), *(token.item() for token in continuation)]))
    print(f"saved in {run}; evaluate it with: python eval.py {run}")


if __name__ == "__main__":
    run_program("train.py", main)
