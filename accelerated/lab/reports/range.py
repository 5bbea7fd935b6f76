"""eval.py range: the loss by how many segments the memory has carried.

Block-Recurrent Transformers asks for it in section 4.
"""

import argparse
from collections.abc import Sequence

import numpy as np

from accelerated.data.tokenizers import Tokenizer
from accelerated.data.windows import Document, count_windows, lengths_of
from accelerated.evaluation.score import (
    Answer,
    Score,
    TrainedRun,
    add_segment,
    carried_through,
    is_stateless,
    score_record,
)
from accelerated.program.errors import InputError
from accelerated.protocol import Model, overlap_of


def temporal_range(
    model: Model, documents: Sequence[Document], tokenizer: Tokenizer, lanes: int, clear_every: int
) -> list[Score]:
    """A Score for each number of segments that the state has carried since it was cleared.

    That number is 0 .. clear_every - 1. A document's first clear_every segments are read but not
    scored. Each later segment counts in one Score.
    """
    scores = [Score()] * clear_every
    reading = carried_through(model, documents, lanes, clear_every=clear_every)
    for segment, number, _, predictions in reading:
        carried = np.where(number >= clear_every, number % clear_every, -1)
        for count in np.unique(carried[carried >= 0]).tolist():
            rows = carried == count
            scores[count] = add_segment(scores[count], predictions, segment, tokenizer, rows)
    return scores


def report(run: TrainedRun, options: argparse.Namespace) -> Answer:
    """The loss by how many segments the memory has carried."""
    model = run.model
    every = options.segments
    if is_stateless(model):
        raise InputError(
            "range: this model carries no memory that could be cleared; evaluate another run"
        )
    tokens = int(lengths_of(run.documents).max()) + 1
    longest = count_windows(tokens, model.config.segment, overlap_of(model.config))
    scores = []
    if longest >= 2 * every:
        scores = temporal_range(model, run.documents, run.tokenizer, run.lane_count, every)
    if not scores or min(score.tokens for score in scores) == 0:
        raise InputError(
            f"--segments {every}: "
            f"no document has scored tokens in its segments {every + 1:,} to {2 * every:,}; "
            "give longer documents (--data) or a smaller number"
        )

    lines = ["segments carried   bits per byte   right predictions   tokens scored"]
    rows = []
    for carried, score in enumerate(scores):
        rows.append({"segments": carried} | score_record(score))
        rates = f"{score.bits_per_byte:13.4f}   {score.accuracy:17.1%}"
        lines.append(f"{carried:16d}   {rates}   {score.tokens:13,d}")
    return {"temporal_range": rows}, lines
