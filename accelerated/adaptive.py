"""Adaptive inputs and adaptive softmax (Baevski and Auli, 2019) for large closed vocabularies; the Compressive Transformer's."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from accelerated.attention.heads import Declared, at_least_float32, look_up, parameter


class Tail(Declared):
    """One band of rarer words: a narrow embedding, and its projection to the model's width."""

    def __init__(self, words: int, narrow: int, width: int):
        super().__init__()
        self.embedding = parameter(words, narrow)  # (V', D')
        self.projection = parameter(width, narrow)  # (D, D')


class AdaptiveSoftmax(NamedTuple):
    """What a model with cutoffs has for its output matrix: the tables of its adaptive inputs."""

    embedding: Tensor  # (first cutoff, D)
    clusters: Tensor  # (tails, D), one vector for each tail
    tails: tuple[Tail, ...]

    @property
    def vocabulary(self) -> int:
        """V, how many words all bands have."""
        return len(self.embedding) + sum(len(tail.embedding) for tail in self.tails)

    def look_up(self, tokens: Tensor) -> Tensor:
        """Rows (B, N, D) of tokens (B, N). Each token is looked up in every band, so that the host never waits for the GPU."""
        start = len(self.embedding)
        h = look_up(tokens.clamp(max=start - 1), self.embedding)
        for tail in self.tails:
            stop = start + len(tail.embedding)
            rows = functional.linear(
                look_up((tokens - start).clamp(0, stop - start - 1), tail.embedding),
                tail.projection,
            )
            h = torch.where((tokens >= start)[..., None], rows, h)
            start = stop
        return h

    def head(self, hidden: Tensor) -> Tensor:
        """Log-probabilities (..., first cutoff + tails) of the first band's words and of each tail's cluster."""
        return log_softmax(functional.linear(hidden, torch.cat([self.embedding, self.clusters])))

    def within(self, tail: Tail, hidden: Tensor) -> Tensor:
        """Log-probabilities (..., V') of a tail's words, given its cluster."""
        return log_softmax(
            functional.linear(functional.linear(hidden, tail.projection.T), tail.embedding)
        )

    def log_probabilities(self, hidden: Tensor) -> Tensor:
        """Log-probabilities (..., V), in float32 or better, of hidden rows (..., D). They are their own logits."""
        words, *clusters = self.head(hidden).split(
            [len(self.embedding), *[1] * len(self.tails)], -1
        )
        tails = (
            cluster + self.within(tail, hidden)
            for cluster, tail in zip(clusters, self.tails, strict=True)
        )
        return torch.cat([words, *tails], -1)

    def summed_nats(self, hidden: Tensor, targets: Tensor, ignored: int) -> Tensor:
        """Summed -log p of targets (R,) from hidden (R, D); a tail is computed only for the rows whose target is in it.

        The host asks the device which rows these are, and waits for it, as torch's AdaptiveLogSoftmaxWithLoss does.
        """
        start, heads, nats = len(self.embedding), targets, 0.0
        for number, tail in enumerate(self.tails):
            stop = start + len(tail.embedding)
            rows = rows_of((targets >= start) & (targets < stop))
            heads = heads.index_fill(0, rows, len(self.embedding) + number)
            within = self.within(
                tail, hidden.index_select(0, rows)
            )  # the gradient of hidden[rows] would sort rows on a GPU
            nats = nats + functional.nll_loss(within, targets[rows] - start, reduction="sum")
            start = stop
        return nats + functional.nll_loss(
            self.head(hidden), heads, reduction="sum", ignore_index=ignored
        )


def rows_of(inside: Tensor) -> Tensor:
    """The numbers of the rows (R,) that are true. The meta device has no values, so a tenth of the rows is assumed."""
    return (
        inside.new_empty(-(-len(inside) // 10), dtype=torch.long)
        if inside.is_meta
        else inside.nonzero()[:, 0]
    )


def log_softmax(logits: Tensor) -> Tensor:
    """Log-probabilities over the last axis, in float32 or better: bfloat16 would round them to an eighth of a bit."""
    return at_least_float32(logits).log_softmax(-1)
