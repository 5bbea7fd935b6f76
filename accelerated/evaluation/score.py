"""Scoring documents by sums of log-probabilities and counts, for train.py, the bench and every report of eval.py.

`Run` is what eval.py gives a report, and `Report` is what a report is.
"""

import argparse
import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import Module, functional
from tqdm import tqdm

from accelerated.data.lanes import Segment, independent_windows, one_pass
from accelerated.data.named_sets import words_of_split
from accelerated.data.recall import CHANCE
from accelerated.data.windows import lengths_of, overlap_of
from accelerated.protocol import keep_lanes, replace_lanes
from accelerated.training.options import changed
from accelerated.training.settings import Settings


class Score(NamedTuple):
    """What reading documents adds up to."""

    nats: float  # summed -log p of the scored tokens
    tokens: int  # scored tokens
    right: int  # of them, those whose most probable prediction is right
    text_bytes: int  # bytes of text that the scored tokens spell

    @property
    def bits_per_token(self) -> float:
        return self.nats / math.log(2) / self.tokens

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.text_bytes

    @property
    def accuracy(self) -> float:
        return self.right / self.tokens

    def perplexity(self, units: int) -> float:
        """exp(-sum of log p / units): per token, or per word of the original text."""
        return exponential(self.nats / units)


EMPTY = Score(0.0, 0, 0, 0)


class Run(NamedTuple):
    """A trained run that eval.py has opened, and what it reads."""

    path: str
    model: Module  # in evaluation mode
    settings: Settings
    contents: dict  # of its checkpoint
    tokenizer: object
    lanes: int  # that documents are read in
    data: str = ""  # --data, or what the run was trained on
    splits: dict = {}  # noqa: RUF012  {split: documents}; most reports read one, and sample none

    @property
    def documents(self):
        """The documents of the only split."""
        [documents] = self.splits.values()
        return documents

    def words(self, split: str | None = None) -> tuple[int, str]:
        """(words in the original text of a split, or of the only one; how they were counted)."""
        [split] = self.splits if split is None else [split]
        return words_of_split(self.data, split, self.splits[split])


class Report(NamedTuple):
    """A subcommand of eval.py."""

    help: str  # one line
    example: str  # what follows its name on a command line
    run: Callable  # (*runs, options) -> (record, lines): plain values for --json, and the text to print
    add_options: Callable = lambda parser: None
    config: Callable = lambda config, sizes, options: changed(config, sizes)  # what models are read with, or InputError
    model: str | None = None  # the only model that it is for
    splits: tuple[str, ...] = ("valid",)  # that it reads unless --split names one
    plots: bool = False  # whether it takes --plot
    exact: bool = False  # whether it reads without bfloat16: small differences need all their digits


def number(kind: type, fits: Callable, expected: str) -> Callable:
    """A type for argparse: a number for which fits(number) is true."""

    def parse(text: str):
        if not fits(value := kind(text)):
            raise argparse.ArgumentTypeError(f"{text} was given; it must be {expected}")
        return value

    parse.__name__ = kind.__name__
    return parse


def at_least(least: int) -> Callable:
    """A type for argparse: a whole number that is not smaller."""
    return number(int, lambda value: value >= least, f"at least {least}")


def ratio(total: float, count: int) -> float:
    return total / count if count else math.nan


def exponential(value: float) -> float:
    """exp(value), infinite if that is too large for a double."""
    return math.inf if value > 700 else math.exp(value)


def as_cell(value: float, form: str) -> str:
    """A number as text, a dash if it is NaN."""
    return "-" if math.isnan(value) else f"{value:{form}}"


def count_bytes(segments: Iterable[Segment], token_bytes: torch.Tensor) -> int:
    """Bytes of text that the scored tokens of segments spell; token_bytes (V,) are each token's."""
    return sum(int(token_bytes[segment.targets[segment.scored]].sum()) for segment in segments)


def carries_nothing(model: Module) -> bool:
    """Whether the model's state holds no numbers: its segments know nothing of each other, as in plain GPT-2."""
    return not any(field.numel() for field in model.initial_state(1))


@contextlib.contextmanager
def evaluating(model: Module) -> Iterator[None]:
    """Evaluation mode inside; afterwards the mode that was before."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def segments_to_score(model: Module, documents, lanes: int, clear_memory: bool, limit: int | None = None) -> Iterator[tuple]:
    """(segment, rows of the state that it continues from), with a bar of the tokens scored on a terminal.

    If nothing is carried from one segment to the next, segments of any documents stand side by side, so that no lane is idle;
    but not under a limit of segments, which must end at the same place with the memory and without.
    """
    size, overlap = model.config.segment, overlap_of(model.config)
    if limit is None and (clear_memory or carries_nothing(model)):
        parts = ((segment, slice(None)) for segment in independent_windows(documents, lanes, size, overlap))
    else:
        parts = itertools.islice(one_pass(documents, lanes, size, overlap), limit)
    known = limit is None and documents[0].scored.all()  # otherwise nobody knows beforehand how many tokens are scored
    total = int(lengths_of(documents).sum()) if known else None
    with tqdm(desc="evaluating", total=total, unit="token", unit_scale=True, leave=False, disable=None) as bar:
        for segment, kept in parts:
            yield segment, kept
            bar.update(int(segment.scored.sum()))


@torch.no_grad()
def read(model: Module, documents, lanes: int, clear_every: int = 0, parts=None, forward=None) -> Iterator[tuple]:
    """Read documents in evaluation mode; yields (segment, its number in its document (B,), the state it read, its logits).

    A document starts from the initial state, and so does every clear_every-th segment of it unless that is 0. parts, if given,
    are what to read instead of all in lanes: (segment, rows of the state that it continues from). forward, if given, reads in
    place of the model.
    """
    parts = parts or one_pass(documents, lanes, model.config.segment, overlap_of(model.config))
    device, forward = next(model.parameters()).device, forward or model
    state, number = model.initial_state(lanes), torch.zeros(lanes, dtype=torch.long, device=device)
    with evaluating(model):
        for segment, kept in parts:
            segment = segment.to(device)
            number = torch.where(segment.starts, 0, number[kept] + 1)
            starts = number % clear_every == 0 if clear_every else segment.starts
            state = replace_lanes(starts, model.initial_state(len(starts)), keep_lanes(state, kept))
            logits, after, _ = forward(segment.tokens, state)
            yield segment, number, state, logits
            state = after


def add_segment(score: Score, logits: torch.Tensor, segment: Segment, tokenizer) -> Score:
    """score and that of a segment's scored tokens under logits (B, N, V)."""
    logits, targets = logits[segment.scored].double(), segment.targets[segment.scored]
    nats = functional.cross_entropy(logits, targets, reduction="sum").item()
    text_bytes = int(tokenizer.token_bytes[targets.cpu().numpy()].sum())
    own = (nats, len(targets), int((logits.argmax(-1) == targets).sum()), text_bytes)
    return Score(*(a + b for a, b in zip(score, own, strict=True)))


def evaluate(model: Module, documents, tokenizer, lanes: int, clear_memory: bool = False, segments: int | None = None) -> Score:
    """Read documents in `lanes` lanes, state carried through each document, and return their Score.

    clear_memory puts the initial state in place of the carried one before every segment. segments, if given, stops after that
    many segments of every lane; what was read until then counts.
    """
    score = EMPTY
    parts = segments_to_score(model, documents, lanes, clear_memory, segments)
    for segment, _, _, logits in read(model, documents, lanes, int(clear_memory), parts):
        score = add_segment(score, logits, segment, tokenizer)
    return score


def token_nats(model: Module, documents, lanes: int, clear_memory: bool = False) -> list[np.ndarray]:
    """-log p (nats) of every target: an array (n - 1,) float64 for each document, NaN where nothing is scored.

    The documents are read as by evaluate, whose Score the sums are of.
    """
    nats = [np.full(len(document.inputs), np.nan) for document in documents]
    parts = segments_to_score(model, documents, lanes, clear_memory)
    for segment, _, _, logits in read(model, documents, lanes, int(clear_memory), parts):
        losses = torch.zeros(segment.scored.shape, dtype=torch.float64, device=logits.device)
        targets = segment.targets[segment.scored]
        losses[segment.scored] = functional.cross_entropy(logits[segment.scored].double(), targets, reduction="none")
        rows = zip(segment.place.tolist(), losses.cpu().numpy(), segment.scored.cpu().numpy(), strict=True)
        for (document, first), own, scored in rows:
            if document >= 0:  # not a lane of padding
                nats[document][first + np.flatnonzero(scored)] = own[scored]
    return nats


def score_record(score: Score, words: tuple[int, str] = (0, "")) -> dict:
    """A Score as plain values; words are those of the original text and how they were counted."""
    per_word = {"word_perplexity": score.perplexity(words[0]), "words": words[0], "words_are": words[1]} if words[0] else {}
    rates = {"bits_per_byte": score.bits_per_byte, "bits_per_token": score.bits_per_token}
    rates |= {"perplexity": score.perplexity(score.tokens)} | per_word
    return rates | {"nats": score.nats, "tokens": score.tokens, "text_bytes": score.text_bytes, "accuracy": score.accuracy}


def score_lines(score: Score, words: tuple[int, str]) -> list[str]:
    """The lines that show a Score."""
    lines = [f"bits per byte       {score.bits_per_byte:.4f}", f"bits per token      {score.bits_per_token:.4f}"]
    lines.append(f"perplexity          {score.perplexity(score.tokens):.3f}")
    if words[0]:
        lines.append(f"per word            {score.perplexity(words[0]):.5g} ({words[0]} words of the original text, {words[1]})")
    return [*lines, f"log-probability     {-score.nats:.2f} nats", f"tokens scored       {score.tokens}"]


def add_clear_memory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--clear-memory", action="store_true", help="start every segment from the initial state instead of the carried one"
    )


def report(run: Run, options: argparse.Namespace) -> tuple[dict, list[str]]:
    """The Score of a split."""
    score, words = evaluate(run.model, run.documents, run.tokenizer, run.lanes, options.clear_memory), run.words()
    chance = [f"right answers       {score.accuracy:.1%} (chance {CHANCE:.0%})"] if run.data == "recall" else []
    return score_record(score, words), score_lines(score, words) + chance


REPORT = Report("bits per byte, perplexity and log-probability of a split", "RUN --split test", report, add_clear_memory)
