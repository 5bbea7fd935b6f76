"""eval.py range: the loss by how many segments the memory has carried."""

import argparse

from torch.nn import Module

from accelerated.data.lanes import longest_document
from accelerated.data.windows import overlap_of
from accelerated.errors import InputError
from accelerated.evaluation.score import EMPTY, Report, Run, Score, add_segment, at_least, carries_nothing, read, score_record


def temporal_range(model: Module, documents, tokenizer, lanes: int, reach: int) -> list[Score]:
    """A Score for each number of segments, 0 .. reach - 1, that the state has carried since it was the initial one.

    The state, all of it, is cleared before every reach-th segment of a document. A document's first `reach` segments are read and
    not scored, so that all numbers are of text from the middle of documents; each is of other segments than the others.
    """
    scores = [EMPTY] * reach
    for segment, number, _, logits in read(model, documents, lanes, clear_every=reach):
        for carried in (number % reach)[number >= reach].unique().tolist():
            own = ((number >= reach) & (number % reach == carried))[:, None]
            scores[carried] = add_segment(scores[carried], logits, segment._replace(scored=segment.scored & own), tokenizer)
    return scores


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--segments", type=at_least(2), metavar="K", required=True, help="clear the memory every K segments")


def report(run: Run, options: argparse.Namespace) -> tuple[dict, list[str]]:
    """The loss by how many segments the memory has carried."""
    model, reach = run.model, options.segments
    if carries_nothing(model):
        raise InputError("range: this model carries no memory that could be cleared; evaluate another run")
    longest = longest_document(run.documents, model.config.segment, overlap_of(model.config))
    scores = temporal_range(model, run.documents, run.tokenizer, run.lanes, reach) if longest >= 2 * reach else []
    if not scores or not all(score.tokens for score in scores):
        raise InputError(
            f"--segments {reach}: no document scores anything in its segments {reach + 1} to {2 * reach}; "
            f"give longer documents (--data) or a smaller number"
        )
    lines = ["segments carried   bits per byte   right predictions   tokens scored"]
    for carried, score in enumerate(scores):
        lines.append(f"{carried:16d}   {score.bits_per_byte:13.4f}   {score.accuracy:17.1%}   {score.tokens:13d}")
    return {"temporal_range": [{"segments": n} | score_record(score) for n, score in enumerate(scores)]}, lines


REPORT = Report("the loss by how many segments the memory has carried", "RUN --segments 8", report, add_options)
