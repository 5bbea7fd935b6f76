"""eval.py dynamic: the score when training continues on what was scored.

That is dynamic evaluation (Compressive Transformers, section 5.3).
"""

import argparse
import math
from collections.abc import Sequence

from torch.optim import Optimizer

from accelerated.data.tokenizers import Tokenizer
from accelerated.data.windows import Document
from accelerated.evaluation import score as scoring
from accelerated.evaluation.score import Answer, Score, TrainedRun, score_lines, score_record
from accelerated.program.errors import InputError
from accelerated.protocol import Model
from accelerated.replay import through_time
from accelerated.training.optimization import average_and_clip, make_optimizer, set_learning_rate


def evaluate_dynamically(
    model: Model,
    documents: Sequence[Document],
    tokenizer: Tokenizer,
    lanes: int,
    optimizer: Optimizer,
    clip: float = 0.0,
) -> Score:
    """Score documents in `lanes` lanes, update the weights after every segment; return the Score.

    A segment is scored; then `optimizer` takes a step with its gradient, clipped to the norm `clip`
    unless 0. Dropout is off.
    """
    model.zero_grad()  # old gradients belong to another text
    device = model.embedding.device
    score = Score()
    for segment, _, state, predictions in scoring.carried_through(model, documents, lanes):
        score = scoring.add_segment(score, predictions, segment, tokenizer)
        if segment.scored.any():
            through_time(model, [segment.to(device)], state)
            average_and_clip(model, 1, clip)
            optimizer.step()
            model.zero_grad()
    return score


def report(run: TrainedRun, options: argparse.Namespace) -> Answer:
    """The score with weights that keep training on what was scored."""
    rate = options.learning_rate
    optimizer = make_optimizer(run.model, run.settings.training)
    try:
        optimizer.load_state_dict(run.checkpoint["optimizer"])
    except (KeyError, ValueError):
        raise InputError(
            "dynamic continues with a run's optimiser; give a run of train.py, and leave sizes out"
        ) from None
    set_learning_rate(optimizer, rate)

    clip = run.settings.training.clip
    score = evaluate_dynamically(
        run.model, run.documents, run.tokenizer, run.lane_count, optimizer, clip
    )
    if math.isnan(score.nats):
        raise InputError(
            f"--learning-rate {rate:g}: the predictions become NaN while training continues; "
            "give a smaller one"
        )

    words = run.words()
    lines = [f"with dynamic evaluation at {rate:g}:"]
    lines += score_lines(score, words, run.count_predictions())
    return {"dynamic": score_record(score, words)}, lines
