"""Scoring documents: sums of log-probabilities and counts, never means of means."""

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


def count_bytes(segments, token_bytes):
    """Bytes of text that the scored tokens of segments spell; token_bytes (V,) are each token's."""
    return sum(int(token_bytes[segment.targets[segment.scored]].sum()) for segment in segments)


@torch.no_grad()
def evaluate(model, documents, tokenizer, lanes, clear_memory=False, segments=None):
    """Read documents in `lanes` lanes, state carried through each document, and return their Score.

    clear_memory puts the initial state in place of the carried one before every segment. segments, if given, stops after that
    many segments of every lane; what was read until then counts.
    """
    device, training = next(model.parameters()).device, model.training
    model.eval()
    token_bytes = torch.as_tensor(tokenizer.token_bytes, device=device)
    state, nats, scored, right, text_bytes = model.initial_state(lanes), 0.0, 0, 0, 0
    for segment in itertools.islice(Lanes(documents, lanes, model.config.segment), segments):
        segment = segment.to(device)
        starts = torch.ones_like(segment.starts) if clear_memory else segment.starts
        logits, state, _ = model(segment.tokens, replace_lanes(starts, model.initial_state(lanes), state))
        logits, targets = logits[segment.scored].double(), segment.targets[segment.scored]
        nats += functional.cross_entropy(logits, targets, reduction="sum").item()
        right += int((logits.argmax(-1) == targets).sum())
        text_bytes += count_bytes([segment], token_bytes)
        scored += len(targets)
    model.train(training)
    return Score(nats, scored, right, text_bytes)
