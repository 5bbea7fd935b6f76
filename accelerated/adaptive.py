"""Adaptive inputs and adaptive softmax, for the Compressive Transformer's closed vocabularies.

Baevski and Auli (2019): words are sorted by frequency and cut into bands. The first band has an
embedding of the model's width; each other band, a tail, has a narrow one and a projection.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from accelerated.attention.heads import (
    ParameterModule,
    at_least_float32,
    embed,
    logits_from,
    parameter,
)
from accelerated.data.lanes import move


class Tail(ParameterModule):
    """One band of rarer words: a narrow embedding, and its projection to the model's width."""

    def __init__(self, words: int, narrow: int, width: int):
        super().__init__()
        self.embedding = parameter(words, narrow)  # (V', D')
        self.projection = parameter(width, narrow)  # (D, D')


class AdaptiveSoftmax(NamedTuple):
    """The output layer of a model with cutoffs: adaptive softmax, tied to the adaptive inputs."""

    embedding: Tensor  # (first cutoff, D)
    clusters: Tensor  # (tails, D), one vector for each tail
    tails: Sequence[Tail]

    @property
    def vocabulary(self) -> int:
        """V, how many words all bands have."""
        return len(self.embedding) + sum(len(tail.embedding) for tail in self.tails)

    def bands(self) -> list[tuple[Tail, int, int]]:
        """Each tail with its words' numbers, start to stop - 1."""
        bands = []
        start = len(self.embedding)
        for tail in self.tails:
            stop = start + len(tail.embedding)
            bands.append((tail, start, stop))
            start = stop
        return bands

    def embed(self, tokens: Tensor) -> Tensor:
        """Rows (B, N, D) of tokens (B, N).

        Each token is looked up in every band, so that the host never waits for the GPU.
        """
        hidden = embed(tokens.clamp(max=len(self.embedding) - 1), self.embedding)
        for tail, start, stop in self.bands():
            in_band = (tokens - start).clamp(0, stop - start - 1)
            rows = functional.linear(embed(in_band, tail.embedding), tail.projection)
            hidden = torch.where((tokens >= start)[..., None], rows, hidden)
        return hidden

    def head_matrix(self) -> Tensor:
        """The first band's words, then a row for each cluster: (first cutoff + tails, D)."""
        return torch.cat([self.embedding, self.clusters])

    def log_probabilities(self, hidden: Tensor) -> Tensor:
        """Log-probabilities (..., V), in float32 or better, of hidden rows (..., D).

        They can be used as logits: log_softmax leaves them unchanged.
        """
        one_each = [1] * len(self.tails)
        head = log_softmax(logits_from(hidden, self.head_matrix()))
        words, *clusters = head.split([len(self.embedding), *one_each], -1)
        bands = [words]
        for tail, cluster in zip(self.tails, clusters, strict=True):
            narrow = functional.linear(hidden, tail.projection.T)  # (..., D')
            # given its cluster, (..., V')
            within = log_softmax(logits_from(narrow, tail.embedding))
            bands.append(cluster + within)
        return torch.cat(bands, -1)

    def cross_entropy_sum(
        self,
        hidden: Tensor,
        targets: Tensor,
        host_targets: np.ndarray,
        cross_entropy: Callable[[Tensor, Tensor, Tensor], Tensor],
    ) -> Tensor:
        """Summed -log p of targets (R,) from hidden (R, D).

        A tail is computed only for the rows whose target is in it. host_targets (R,) are the same
        targets as a NumPy array, so that no GPU is waited for. cross_entropy(hidden, matrix,
        targets) must return the summed -log p of one softmax.
        """
        first = len(self.embedding)
        in_head = targets  # the target's column of the head: a word of the first band, or a cluster
        nats = 0.0
        for number, (tail, start, stop) in enumerate(self.bands()):
            in_tail = np.flatnonzero((host_targets >= start) & (host_targets < stop))
            rows = move(torch.from_numpy(in_tail), hidden.device)
            in_head = in_head.index_fill(0, rows, first + number)
            # not hidden[rows], whose gradient would sort rows on a GPU
            narrow = functional.linear(hidden.index_select(0, rows), tail.projection.T)
            nats = nats + cross_entropy(narrow, tail.embedding, targets[rows] - start)
        return nats + cross_entropy(hidden, self.head_matrix(), in_head)


def log_softmax(logits: Tensor) -> Tensor:
    """Log-probabilities over the last axis, in float32 or better.

    bfloat16 would round them to an eighth of a bit.
    """
    return at_least_float32(logits).log_softmax(-1)
