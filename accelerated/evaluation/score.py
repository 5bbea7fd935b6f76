"""Scoring documents: sums of log-probabilities and counts, never means of means."""

import contextlib
import itertools
import math
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional
from tqdm import tqdm

from accelerated.data.lanes import independent_windows, one_pass
from accelerated.data.windows import lengths_of, overlap_of
from accelerated.protocol import keep_lanes, replace_lanes
from accelerated.replay import begin


class Score(NamedTuple):
    """What reading a split adds up to."""

    nats: float  # summed -log p of the scored tokens
    tokens: int  # scored tokens
    right: int  # of them, those whose most probable prediction is right
    text_bytes: int  # bytes of text that the scored tokens spell

    @property
    def bits_per_token(self):
        return self.nats / math.log(2) / self.tokens

    @property
    def bits_per_byte(self):
        return self.nats / math.log(2) / self.text_bytes

    @property
    def accuracy(self):
        return self.right / self.tokens

    def perplexity(self, units):
        """exp(-sum of log p / units), infinite where that is beyond a double: per token, or per word of the original text."""
        return math.inf if self.nats / units > 700 else math.exp(self.nats / units)


EMPTY = Score(0.0, 0, 0, 0)


def count_bytes(segments, token_bytes):
    """Bytes of text that the scored tokens of segments spell; token_bytes (V,) are each token's."""
    return sum(int(token_bytes[segment.targets[segment.scored]].sum()) for segment in segments)


def finite(value):
    """The number, None where it is infinite or none: JSON has no such."""
    return value if math.isfinite(value) else None


def add_scores(first, second):
    return Score(*(a + b for a, b in zip(first, second, strict=True)))


def score_segment(logits, segment, token_bytes):
    """The Score of a segment's scored tokens under logits (B, N, V)."""
    logits, targets = logits[segment.scored].double(), segment.targets[segment.scored]
    nats = functional.cross_entropy(logits, targets, reduction="sum").item()
    return Score(nats, len(targets), int((logits.argmax(-1) == targets).sum()), count_bytes([segment], token_bytes))


@contextlib.contextmanager
def evaluating(model, tokenizer):
    """The device of a model that is in evaluation mode inside, and its tokens' bytes."""
    device, training = next(model.parameters()).device, model.training
    model.eval()
    try:
        with torch.no_grad():
            yield device, torch.as_tensor(tokenizer.token_bytes, device=device)
    finally:
        model.train(training)


def carries_nothing(model):
    """Whether the model's state holds no numbers: its segments know nothing of each other, as in plain GPT-2."""
    return not any(field.numel() for field in model.initial_state(1))


def segments_to_score(model, documents, lanes, clear_memory, limit):
    """(segment, rows of the state that it goes on from), which score every token after a document's first once.

    Where nothing is carried from one to the next, segments of any documents stand beside each other, so that no lane is idle;
    but not under a limit, which is to end at the same place with the memory and without.
    """
    size, overlap = model.config.segment, overlap_of(model.config)
    if limit is None and (clear_memory or carries_nothing(model)):
        parts = ((segment, slice(None)) for segment in independent_windows(documents, lanes, size, overlap))
    else:
        parts = itertools.islice(one_pass(documents, lanes, size, overlap), limit)
    whole = limit is None and documents[0].scored.all()  # otherwise it is not known beforehand how many are scored
    return with_progress(parts, int(lengths_of(documents).sum()) if whole else None)


def with_progress(parts, total=None):
    """The same (segment, kept), with a bar of the tokens scored where there is a terminal to show it."""
    with tqdm(desc="evaluating", total=total, unit="token", unit_scale=True, leave=False, disable=None) as bar:
        for segment, kept in parts:
            yield segment, kept
            bar.update(int(segment.scored.sum()))


def evaluate(model, documents, tokenizer, lanes, clear_memory=False, segments=None):
    """Read documents in `lanes` lanes, state carried through each document, and return their Score.

    clear_memory puts the initial state in place of the carried one before every segment. segments, if given, stops after that
    many segments of every lane; what was read until then counts.
    """
    with evaluating(model, tokenizer) as (device, token_bytes):
        state, score = model.initial_state(lanes), EMPTY
        for segment, kept in segments_to_score(model, documents, lanes, clear_memory, segments):
            segment, state = segment.to(device), keep_lanes(state, kept)
            starts = torch.ones_like(segment.starts) if clear_memory else segment.starts
            logits, state, _ = model(segment.tokens, replace_lanes(starts, model.initial_state(len(starts)), state))
            score = add_scores(score, score_segment(logits, segment, token_bytes))
    return score


def ratio(total, count):
    return total / count if count else math.nan


def as_record(row):
    """A row as a plain dict for JSON, which has no number for NaN and infinity: they become None."""
    record = row._asdict() | {rate: getattr(row, rate) for rate in row.RATES}
    return {name: value if isinstance(value, str) else finite(value) for name, value in record.items()}


def token_nats(model, documents, tokenizer, lanes, clear_memory=False):
    """-log p (nats) of every target: an array (n - 1,) float64 for each document, NaN where nothing is scored.

    Read in `lanes` lanes as evaluate does, whose Score the sums are of. clear_memory puts the initial state in place of the
    carried one before every segment.
    """
    nats = [np.full(len(document.inputs), np.nan) for document in documents]
    with evaluating(model, tokenizer) as (device, _):
        state = model.initial_state(lanes)
        for segment, kept in segments_to_score(model, documents, lanes, clear_memory, None):
            segment, state = segment.to(device), keep_lanes(state, kept)
            logits, state, _ = model(segment.tokens, begin(model, segment, state))  # all are starts where memory is cleared
            keep_nats(nats, logits, segment)
    return nats


def keep_nats(nats, logits, segment):
    """Put -log p of a segment's scored tokens under logits (B, N, V) where their documents have their place."""
    losses = torch.zeros(segment.scored.shape, dtype=torch.float64, device=logits.device)
    targets = segment.targets[segment.scored]
    losses[segment.scored] = functional.cross_entropy(logits[segment.scored].double(), targets, reduction="none")
    rows = zip(segment.place.tolist(), losses.cpu().numpy(), segment.scored.cpu().numpy(), strict=True)
    for (number, first), own, scored in rows:
        if number >= 0:
            nats[number][first + np.flatnonzero(scored)] = own[scored]


def as_cell(value, form):
    """A number as text, a dash where there is none."""
    return "-" if math.isnan(value) else f"{value:{form}}"
