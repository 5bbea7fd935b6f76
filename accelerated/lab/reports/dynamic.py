"""eval.py dynamic: the score when training continues on what was scored (Compressive Transformers, section 5.3)."""

import argparse
import math
from collections.abc import Sequence

from torch.nn import Module
from torch.optim import Optimizer

from accelerated.data.tokenizers import Tokenizer
from accelerated.data.windows import Document
from accelerated.evaluation import score as scoring
from accelerated.evaluation.score import Score, TrainedRun, score_lines, score_record
from accelerated.program.errors import InputError
from accelerated.replay import through_time
from accelerated.training.optimization import average_and_clip, make_optimizer, set_learning_rate


def evaluate_dynamically(
    model: Module,
    documents: Sequence[Document],
    tokenizer: Tokenizer,
    lanes: int,
    optimizer: Optimizer,
    clip: float = 0.0,
) -> Score:
    """Score documents in `lanes` lanes (rows of the batch), update the weights after every segment, and return the Score.

    A segment is scored; then `optimizer` takes a step with its gradient, clipped to the norm `clip` unless 0. Dropout is off.
    """
    model.zero_grad()  # old gradients belong to another text
    score, device = Score(), next(model.parameters()).device
    for segment, _, state, made in scoring.carried_through(model, documents, lanes):
        score = scoring.add_segment(score, made, segment, tokenizer)
        if segment.count_scored:
            through_time(model, [segment.to(device)], state)
            average_and_clip(model, 1, clip)
            optimizer.step()
            model.zero_grad()
    return score


def report(run: TrainedRun, options: argparse.Namespace) -> tuple[dict, list[str]]:
    """The score with the run's weights, and with weights that keep training on what was scored."""
    words, total, rate = run.words(), run.count_predictions(), options.learning_rate
    optimizer = make_optimizer(run.model, run.settings.training)
    try:
        optimizer.load_state_dict(run.checkpoint["optimizer"])
    except (KeyError, ValueError):
        raise InputError(
            "dynamic continues with a run's optimiser; give a run of train.py, and leave sizes out"
        ) from None
    set_learning_rate(optimizer, rate)
    read_by = (run.model, run.documents, run.tokenizer, run.lane_count)
    static = scoring.check_score(scoring.evaluate(*read_by))
    dynamic = evaluate_dynamically(*read_by, optimizer, run.settings.training.clip)
    if math.isnan(dynamic.nats):
        raise InputError(
            f"--learning-rate {rate:g}: the predictions become NaN while training continues; give a smaller one"
        )
    before, after = (score_lines(each, words, total) for each in (static, dynamic))
    record = {"static": score_record(static, words), "dynamic": score_record(dynamic, words)}
    return record, [
        "with the weights as they are:",
        *before,
        f"with dynamic evaluation at {rate:g}:",
        *after,
    ]
