"""eval.py range: the loss by how many segments the memory has carried (Block-Recurrent Transformers, section 4)."""

import argparse
from collections.abc import Sequence

import numpy as np
from torch.nn import Module

from accelerated.data.tokenizers import Tokenizer
from accelerated.data.windows import Document, count_windows, lengths_of
from accelerated.evaluation.score import (
    Score,
    TrainedRun,
    add_segment,
    carried_through,
    carries_nothing,
    score_record,
)
from accelerated.program.errors import InputError
from accelerated.protocol import overlap_of


def temporal_range(
    model: Module, documents: Sequence[Document], tokenizer: Tokenizer, lanes: int, clear_every: int
) -> list[Score]:
    """A Score for each number of segments, 0 .. clear_every - 1, that the state has carried since it was cleared.

    A document's first clear_every segments are read but not scored. Each later segment counts in one Score.
    """
    scores = [Score()] * clear_every
    for segment, number, _, made in carried_through(
        model, documents, lanes, clear_every=clear_every
    ):
        for carried in np.unique((number % clear_every)[number >= clear_every]).tolist():
            rows = (number >= clear_every) & (number % clear_every == carried)
            scores[carried] = add_segment(scores[carried], made, segment, tokenizer, rows)
    return scores


def report(run: TrainedRun, options: argparse.Namespace) -> tuple[dict, list[str]]:
    """The loss by how many segments the memory has carried."""
    model, every = run.model, options.segments
    if carries_nothing(model):
        raise InputError(
            "range: this model carries no memory that could be cleared; evaluate another run"
        )
    longest = count_windows(
        int(lengths_of(run.documents).max()) + 1, model.config.segment, overlap_of(model.config)
    )
    scores = (
        temporal_range(model, run.documents, run.tokenizer, run.lane_count, every)
        if longest >= 2 * every
        else []
    )
    if not scores or not all(score.tokens for score in scores):
        lack = f"no document has scored tokens in its segments {every + 1:,} to {2 * every:,}"
        raise InputError(
            f"--segments {every}: {lack}; give longer documents (--data) or a smaller number"
        )
    lines = ["segments carried   bits per byte   right predictions   tokens scored"]
    for carried, score in enumerate(scores):
        lines.append(
            f"{carried:16d}   {score.bits_per_byte:13.4f}   {score.accuracy:17.1%}   {score.tokens:13,d}"
        )
    return {
        "temporal_range": [{"segments": n} | score_record(score) for n, score in enumerate(scores)]
    }, lines
