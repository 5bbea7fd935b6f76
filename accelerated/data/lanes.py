"""Dealing documents to lanes that each read one document at a time, segment by segment. For training and evaluation."""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from accelerated.data.windows import Document, Documents, Window, check_overlap, count_windows, cut, lengths_of, window_at
from accelerated.errors import InputError


def longest_document(documents: Sequence, segment: int, overlap: int = 0) -> int:
    """Segments in the longest of the documents."""
    return count_windows(int(lengths_of(documents).max()) + 1, segment, overlap)


class Parts(Documents):
    """Documents, the longest of them cut into equal parts until there are `count`; each part is read as a document of its own.

    So no two lanes read the same text if there are fewer documents than lanes, as with a single book.
    """

    def __init__(self, documents: Sequence, count: int):
        self.documents, lengths = documents, lengths_of(documents)
        parts_of = np.minimum(lengths, 1)  # parts of each document; an empty one has none
        while 0 < parts_of.sum() < count and (parts_of < lengths).any():
            parts_of[np.argmax(np.where(parts_of, lengths / np.maximum(parts_of, 1), 0))] += 1
        self.spans = [
            (number, length * part // parts, length * (part + 1) // parts)
            for number, (length, parts) in enumerate(zip(lengths.tolist(), parts_of.tolist(), strict=True))
            for part in range(parts)
        ]
        self.lengths = np.array([stop - start for _, start, stop in self.spans])

    def __getitem__(self, index):
        number, start, stop = self.spans[index]
        document = self.documents[number]
        fields = (field[start:stop] for field in (document.inputs, document.targets, document.scored))
        return Document(f"{document.name}:{start}", *fields)


def cut_for_lanes(lanes: int, documents: Sequence) -> Sequence:
    """The documents; cut into parts if there are fewer of them than lanes."""
    return documents if np.count_nonzero(lengths_of(documents)) >= lanes else Parts(documents, lanes)


class Segment(NamedTuple):
    """One step of every lane: B lanes of N tokens."""

    tokens: torch.Tensor  # (B, N) int64, padded with 0
    targets: torch.Tensor  # (B, N) int64
    scored: torch.Tensor  # (B, N) bool, false on padding
    starts: torch.Tensor  # (B,) bool, true if a document begins
    task: tuple | None = None  # a tasks.Task, unless every lane continues its text
    place: torch.Tensor | None = None  # (B, 2) int64, number of the document and of its first token here; -1, 0 on padding

    def to(self, device: torch.device) -> "Segment":
        return Segment(*(None if field is None else field.to(device) for field in self))

    def keep_lanes(self, rows: slice | list[int]) -> "Segment":
        """The Segment of some lanes, given as a slice or by their numbers."""
        task = self.task and type(self.task)(*(field[rows] for field in self.task))
        fields = (self.tokens, self.targets, self.scored, self.starts)
        return Segment(*(field[rows] for field in fields), task, None if self.place is None else self.place[rows])


def stack_windows(work: list[tuple[int, Document, Window, bool] | None], length: int, lanes: int) -> Segment:
    """A Segment of `lanes` rows of `length` tokens from [(number, document, window, is_start) or None]; the rest is padding."""
    tokens, targets = np.zeros((lanes, length), np.int64), np.zeros((lanes, length), np.int64)
    scored, starts, place = np.zeros((lanes, length), bool), np.zeros(lanes, bool), np.full((lanes, 2), (-1, 0))
    for row, part in enumerate(work):
        if part is None:
            continue
        number, document, window, is_start = part
        starts[row], place[row] = is_start, (number, window.start)
        size, already_scored = window.stop - window.start, window.first - 1 - window.start
        tokens[row, :size] = document.inputs[window.start : window.stop]
        targets[row, :size] = document.targets[window.start : window.stop]
        scored[row, already_scored:size] = document.scored[window.first - 1 : window.stop]
    tokens, targets, scored, starts, place = map(torch.from_numpy, (tokens, targets, scored, starts, place))
    return Segment(tokens, targets, scored, starts, place=place)


def independent_windows(documents: Sequence, lanes: int, length: int, overlap: int = 0) -> Iterator[Segment]:
    """Segments of all windows, `lanes` of any documents at a time, each read as if a document began with it."""
    windows = (
        (number, document, window, True)
        for number, document in enumerate(documents)
        for window in cut(len(document.inputs) + 1, length, overlap)
    )
    while work := list(itertools.islice(windows, lanes)):
        yield stack_windows(work, length, lanes)


class Lanes:
    """Deals documents to lanes; iterating gives Segments, each lane reading one document contiguously to its end.

    With an overlap, a segment begins with that many tokens of the previous one, whose predictions are not scored again.
    With a seed, the documents are shuffled anew on every pass, without end. Without one there is a single pass, longest first so
    that lanes end together; a lane with nothing left holds padding that is not scored.
    """

    def __init__(self, documents: Sequence, lanes: int, length: int, seed: int | None = None, overlap: int = 0):
        check_overlap(length, overlap)
        self.lengths = lengths_of(documents)
        if not self.lengths.any():
            raise InputError("no document has two tokens or more, so there is nothing to predict")
        self.documents, self.length, self.overlap, self.seed = documents, length, overlap, seed
        self.passes, self.dealt, self.order = 0, 0, self._shuffle(0)
        self.reading = [None] * lanes  # per lane (document index, segments read) or None
        self.busy = list(range(lanes))  # lanes that are not padding in the last segment
        self.document = functools.lru_cache(lanes)(documents.__getitem__)  # cached: recall documents are generated when read

    def _shuffle(self, passes):
        if self.seed is None:
            return np.argsort(-self.lengths, kind="stable")
        return np.random.default_rng([self.seed, passes]).permutation(len(self.documents))

    def _next_document(self):
        """Index of the next document that has something to predict; None if a single pass is over."""
        while self.dealt < len(self.order) or self.seed is not None:
            if self.dealt == len(self.order):
                self.passes, self.dealt = self.passes + 1, 0
                self.order = self._shuffle(self.passes)
            self.dealt += 1
            index = int(self.order[self.dealt - 1])
            if self.lengths[index]:
                return index
        return None

    def _advance(self, lane):
        """Move a lane to its next segment; returns (number, document, window, is_start), or None if nothing is left."""
        if self.reading[lane] is None:
            index = self._next_document()
            if index is None:
                return None
            self.reading[lane] = (index, 0)
        index, segment = self.reading[lane]
        tokens = int(self.lengths[index]) + 1
        is_last = segment + 1 == count_windows(tokens, self.length, self.overlap)
        self.reading[lane] = None if is_last else (index, segment + 1)
        return index, self.document(index), window_at(segment, tokens, self.length, self.overlap), segment == 0

    def __iter__(self):
        return self

    def __next__(self):
        work = [self._advance(lane) for lane in range(len(self.reading))]
        self.busy = [lane for lane, part in enumerate(work) if part is not None]
        if not self.busy:
            raise StopIteration
        return stack_windows(work, self.length, len(work))

    def position(self) -> dict:
        """The place of every lane, for a checkpoint."""
        return {"passes": self.passes, "dealt": self.dealt, "reading": list(self.reading)}

    def seek(self, position: dict) -> None:
        """Continue from the position() of other lanes over the same documents."""
        self.passes, self.dealt = position["passes"], position["dealt"]
        self.order = self._shuffle(self.passes)
        self.reading = [None if place is None else tuple(place) for place in position["reading"]]


def one_pass(documents: Sequence, lanes: int, length: int, overlap: int = 0) -> Iterator[tuple[Segment, list[int]]]:
    """Read every document once; yields (segment, kept). Lanes with nothing left are not in the segment.

    kept are the rows of the previous segment that continue, in order: index the carried state with them.
    """
    reader, rows = Lanes(documents, lanes, length, overlap=overlap), list(range(lanes))
    for segment in reader:
        kept = [row for row, lane in enumerate(rows) if lane in reader.busy]
        rows = reader.busy
        yield segment.keep_lanes(rows), kept
