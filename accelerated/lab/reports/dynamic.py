"""eval.py dynamic: the score when training continues on what was scored (Compressive Transformers, section 5.3)."""

import argparse
import math
from collections.abc import Sequence

from torch.nn import Module
from torch.optim import Optimizer

from accelerated.evaluation.score import Score, TrainedRun, add_segment, check_score, evaluate, read, score_lines, score_record
from accelerated.program.errors import InputError
from accelerated.replay import through_time
from accelerated.training.optimization import average_and_clip, make_optimizer, set_learning_rate


def evaluate_dynamically(
    model: Module, documents: Sequence, tokenizer: object, lanes: int, optimizer: Optimizer, clip: float = 0.0
) -> Score:
    """Score documents in `lanes` lanes (rows of the batch), update the weights after every segment, and return the Score.

    "Continuing training over one epoch of the test set" (Compressive Transformers, section 5.3; Graves 2013; Krause et al. 2019).
    A segment is scored first; then `optimizer` takes one step with the gradient of its mean loss and auxiliary losses, clipped
    to the norm `clip` unless that is 0. The carried state comes from scoring. Dropout is off. The model keeps its last weights.
    """
    model.zero_grad()  # old gradients belong to another text
    score, device = Score(), next(model.parameters()).device
    for segment, _, state, found in read(model, documents, lanes, title="dynamic evaluation"):
        score = add_segment(score, found, segment, tokenizer)
        if segment.count_scored:
            through_time(model, [segment.to(device)], state)
            average_and_clip(model, 1, clip)
            optimizer.step()
            model.zero_grad()
    return score


def check_learned(score: Score, rate: float) -> Score:
    """Return the score; raises InputError if it is NaN, which training at this learning rate has then made."""
    if math.isnan(score.nats):
        raise InputError(f"--learning-rate {rate:g}: the predictions become NaN while training continues; give a smaller one")
    return score


def report(run: TrainedRun, options: argparse.Namespace) -> tuple[dict, list[str]]:
    """The score with the run's weights, and with weights that keep training on what was scored."""
    words, total, rate = run.words(), run.count_predictions(), options.learning_rate
    optimizer = make_optimizer(run.model, run.settings.training)
    try:
        optimizer.load_state_dict(run.checkpoint["optimizer"])
    except ValueError:
        raise InputError("dynamic continues with the run's optimiser, which needs the run's own sizes; leave sizes out") from None
    set_learning_rate(optimizer, rate)
    read_by = (run.model, run.documents, run.tokenizer, run.lane_count)
    static = check_score(evaluate(*read_by))
    dynamic = check_learned(evaluate_dynamically(*read_by, optimizer, run.settings.training.clip), rate)
    before, after = (score_lines(found, words, total, run.tokenizer.spells_text) for found in (static, dynamic))
    record = {"static": score_record(static, words), "dynamic": score_record(dynamic, words)}
    return record, ["with the weights as they are:", *before, f"with dynamic evaluation at {rate:g}:", *after]
