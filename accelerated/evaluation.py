"""Scoring documents: sums of log-probabilities and counts, never means of means."""

import contextlib
import itertools
import math
from typing import NamedTuple

import torch
from torch.nn import functional

from accelerated.corpus import Lanes
from accelerated.protocol import replace_lanes


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


EMPTY = Score(0.0, 0, 0, 0)


def count_bytes(segments, token_bytes):
    """Bytes of text that the scored tokens of segments spell; token_bytes (V,) are each token's."""
    return sum(int(token_bytes[segment.targets[segment.scored]].sum()) for segment in segments)


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
    with torch.no_grad():
        yield device, torch.as_tensor(tokenizer.token_bytes, device=device)
    model.train(training)


def evaluate(model, documents, tokenizer, lanes, clear_memory=False, segments=None):
    """Read documents in `lanes` lanes, state carried through each document, and return their Score.

    clear_memory puts the initial state in place of the carried one before every segment. segments, if given, stops after that
    many segments of every lane; what was read until then counts.
    """
    with evaluating(model, tokenizer) as (device, token_bytes):
        state, score = model.initial_state(lanes), EMPTY
        for segment in itertools.islice(Lanes(documents, lanes, model.config.segment), segments):
            segment = segment.to(device)
            starts = torch.ones_like(segment.starts) if clear_memory else segment.starts
            logits, state, _ = model(segment.tokens, replace_lanes(starts, model.initial_state(lanes), state))
            score = add_scores(score, score_segment(logits, segment, token_bytes))
    return score


def temporal_range(model, documents, tokenizer, lanes, reach):
    """A Score for each number of segments, 0 .. reach - 1, that the state has carried since it was the initial one.

    The state, all of it, is cleared before every reach-th segment of a document. A document's first `reach` segments are read and
    not scored, so that all numbers are of text from the middle of documents; each is of other segments than the others.
    """
    with evaluating(model, tokenizer) as (device, token_bytes):
        state, scores = model.initial_state(lanes), [EMPTY] * reach
        place = torch.zeros(lanes, dtype=torch.long, device=device)  # of the segment in its document
        for segment in Lanes(documents, lanes, model.config.segment):
            segment = segment.to(device)
            place = torch.where(segment.starts, 0, place + 1)
            logits, state, _ = model(segment.tokens, replace_lanes(place % reach == 0, model.initial_state(lanes), state))
            for carried in (place % reach)[place >= reach].unique().tolist():
                own = ((place >= reach) & (place % reach == carried))[:, None]
                part = score_segment(logits, segment._replace(scored=segment.scored & own), token_bytes)
                scores[carried] = add_scores(scores[carried], part)
    return scores
