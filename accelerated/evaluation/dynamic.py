"""eval.py dynamic: a model goes on training on the text that it is scored on, each token scored before it is trained on."""

import argparse
import math

import torch
from torch.nn import Module

from accelerated.data.lanes import Segment
from accelerated.errors import InputError
from accelerated.evaluation.score import EMPTY, Report, Run, Score, add_segment, evaluate, number, read, score_lines, score_record
from accelerated.replay import through_time
from accelerated.training.optimization import make_optimizer, average_and_clip, set_learning_rate


def evaluate_dynamically(
    model: Module, documents, tokenizer, lanes: int, optimizer: torch.optim.Optimizer, clip: float = 0.0
) -> Score:
    """Read documents in `lanes` lanes, update the weights after every segment, and return the Score.

    "Continuing training over one epoch of the test set" (Compressive Transformers, section 5.3; Graves 2013; Krause et al. 2019).
    A segment is scored with the weights as they are, and only then takes one step of `optimizer` along the gradient of its mean
    loss and auxiliary losses, limited to the norm `clip` unless that is 0. The state that is carried is that of the scoring.
    Dropout is off throughout. The model keeps the weights that it ends with: not those that it was given.
    """
    model.zero_grad()  # what was left there is of another text
    score = EMPTY
    for segment, _, state, logits in read(model, documents, lanes):
        score = add_segment(score, logits, segment, tokenizer)
        if segment.scored.any():
            update(model, segment, state, optimizer, clip)
    return score


def update(model: Module, segment: Segment, state: tuple, optimizer: torch.optim.Optimizer, clip: float) -> None:
    """One step of the optimiser on a segment read from `state`; no gradients are left."""
    torch.clear_autocast_cache()  # older torch would reuse weights that it cast without gradient
    through_time(model, [segment], state)
    average_and_clip(model, 1, clip)
    optimizer.step()
    model.zero_grad()
    torch.clear_autocast_cache()  # its copies are of the weights before this step


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--learning-rate", type=number(float, lambda rate: 0 < rate < math.inf, "positive and finite"), metavar="RATE",
        required=True, help="of the run's optimiser, which trains on; a tenth of the run's own is a start",
    )  # fmt: skip


def report(run: Run, options: argparse.Namespace) -> tuple[dict, list[str]]:
    """The score with the weights as they are, and with weights that go on learning from what was scored."""
    training, words, rate = run.settings.training, run.words(), options.learning_rate
    optimizer = make_optimizer(run.model, training)
    try:
        optimizer.load_state_dict(run.contents["optimizer"])
    except ValueError:
        raise InputError("dynamic continues with the run's optimiser, which has other parameters; leave sizes out") from None
    set_learning_rate(optimizer, rate)
    read_by = (run.model, run.documents, run.tokenizer, run.lanes)
    static = evaluate(*read_by)
    dynamic = evaluate_dynamically(*read_by, optimizer, training.clip)
    lines = ["with the weights as they are:", *score_lines(static, words), f"with dynamic evaluation at {rate:g}:"]
    return {"static": score_record(static, words), "dynamic": score_record(dynamic, words)}, lines + score_lines(dynamic, words)


REPORT = Report("the score when training goes on along the text that is scored", "RUN --learning-rate 2e-4", report, add_options)
