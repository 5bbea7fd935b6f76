"""Dealing documents to lanes that each read one document at a time, segment by segment. Training and evaluation read them so."""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from accelerated.data.windows import Document, Documents, Window, check_overlap, count_windows, lengths_of, window_at
from accelerated.errors import InputError

HELD = 16 << 20  # tokens that lanes read before they give back the memory that the documents were mapped to


def longest_document(documents: Sequence, segment: int, overlap: int = 0) -> int:
    """Segments in the longest of the documents."""
    return count_windows(int(lengths_of(documents).max()) + 1, segment, overlap)


class Parts(Documents):
    """Documents of which the longest are cut into equal parts, each read as a document of its own, until there are `count`.

    So no lane reads what another does if there are fewer documents than lanes: a long text is the usual case.
    """

    def __init__(self, documents: Sequence, count: int):
        self.documents, lengths = documents, lengths_of(documents)
        cuts = np.minimum(lengths, 1)  # parts of each document; an empty one has none
        while 0 < cuts.sum() < count and (cuts < lengths).any():
            cuts[np.argmax(np.where(cuts, lengths / np.maximum(cuts, 1), 0))] += 1
        self.spans = [
            (number, length * part // parts, length * (part + 1) // parts)
            for number, (length, parts) in enumerate(zip(lengths.tolist(), cuts.tolist(), strict=True))
            for part in range(parts)
        ]
        self.lengths = np.array([stop - start for _, start, stop in self.spans])

    def release(self) -> None:
        release(self.documents)

    def __len__(self):
        return len(self.spans)

    def __getitem__(self, index):
        number, start, stop = self.spans[index]
        document = self.documents[number]
        fields = (field[start:stop] for field in (document.inputs, document.targets, document.scored))
        return Document(f"{document.name}:{start}", *fields)


def release(documents: Sequence) -> None:
    """Give back the memory that documents on the disk were mapped to; a plain list stays as it is."""
    if isinstance(documents, Documents):
        documents.release()


def cut_for_lanes(lanes: int, documents: Sequence) -> Sequence:
    """The documents, in parts if there are fewer of them than lanes."""
    return documents if np.count_nonzero(lengths_of(documents)) >= lanes else Parts(documents, lanes)


class Segment(NamedTuple):
    """One step of every lane: B lanes of N tokens."""

    tokens: torch.Tensor  # (B, N) int64, padded with 0
    targets: torch.Tensor  # (B, N) int64
    scored: torch.Tensor  # (B, N) bool, false on padding
    starts: torch.Tensor  # (B,) bool, where a new document begins
    task: tuple | None = None  # a tasks.Task, if something else than continuing the text is asked for
    place: torch.Tensor | None = None  # (B, 2) int64, number of the document and of its first token here; -1, 0 on padding

    def to(self, device: torch.device) -> "Segment":
        return Segment(*(None if field is None else field.to(device) for field in self))

    def keep_lanes(self, rows: slice | list[int]) -> "Segment":
        """The lanes in rows, a slice or numbers."""
        task = self.task and type(self.task)(*(field[rows] for field in self.task))
        fields = (self.tokens, self.targets, self.scored, self.starts)
        return Segment(*(field[rows] for field in fields), task, None if self.place is None else self.place[rows])


def stack_windows(work: list[tuple[int, Document, Window, bool] | None], length: int, lanes: int) -> Segment:
    """A Segment of `lanes` rows of `length` tokens from [(number, document, window, starts) or None]; the rest is padding."""
    tokens, targets = np.zeros((lanes, length), np.int64), np.zeros((lanes, length), np.int64)
    scored, starts, place = np.zeros((lanes, length), bool), np.zeros(lanes, bool), np.full((lanes, 2), (-1, 0))
    for row, part in enumerate(work):
        if part is None:
            continue
        number, document, window, starts[row] = part
        place[row] = number, window.start
        span, size, read = slice(window.start, window.stop), window.stop - window.start, window.first - 1 - window.start
        tokens[row, :size] = document.inputs[span]
        targets[row, :size] = document.targets[span]
        scored[row, read:size] = document.scored[window.first - 1 : window.stop]  # the window before has scored the others
    tokens, targets, scored, starts, place = map(torch.from_numpy, (tokens, targets, scored, starts, place))
    return Segment(tokens, targets, scored, starts, place=place)


def independent_windows(documents: Sequence, lanes: int, length: int, overlap: int = 0) -> Iterator[Segment]:
    """Segments of windows that need nothing of each other, `lanes` of any documents at a time; each is a start."""
    check_overlap(length, overlap)
    windows = (
        (number, document, window_at(index, len(document.inputs) + 1, length, overlap), True)
        for number, document in enumerate(documents)
        for index in range(count_windows(len(document.inputs) + 1, length, overlap))
    )
    while work := list(itertools.islice(windows, lanes)):
        yield stack_windows(work, length, lanes)


class Lanes:
    """Deals documents to lanes; iterating gives Segments, each lane reading one document contiguously to its end.

    With an overlap, a segment begins with that many tokens of the one before, whose predictions are not scored again.

    With a seed the documents come in a new shuffled order on every pass, without end. With seed None they come once,
    longest first so that lanes end together; a lane with nothing left is padding that nothing scores.
    """

    def __init__(self, documents: Sequence, lanes: int, length: int, seed: int | None = None, overlap: int = 0):
        check_overlap(length, overlap)
        self.lengths = lengths_of(documents)
        if not self.lengths.any():
            raise InputError("no document has two tokens or more, so there is nothing to predict")
        self.documents, self.length, self.overlap, self.seed = documents, length, overlap, seed
        self.passes, self.dealt, self.order = 0, 0, self._shuffle(0)
        self.reading = [None] * lanes  # per lane (document index, segments read) or None
        self.busy = list(range(lanes))  # the lanes that the last segment gave something to read
        self.document = functools.lru_cache(lanes)(documents.__getitem__)  # reading one may mean making it
        self.held = 0  # tokens read since memory was given back

    def _shuffle(self, passes):
        if self.seed is None:
            return np.argsort(-self.lengths, kind="stable")
        return np.random.default_rng([self.seed, passes]).permutation(len(self.documents))

    def _next_document(self):
        """Index of the next document that has something to predict; None when a single pass is over."""
        while True:
            if self.dealt == len(self.order):
                if self.seed is None:
                    return None
                self.passes, self.dealt = self.passes + 1, 0
                self.order = self._shuffle(self.passes)
            self.dealt += 1
            index = int(self.order[self.dealt - 1])
            if self.lengths[index]:
                return index

    def _advance(self, lane):
        """Move a lane on by one segment; returns (number, document, window, starts) or None for an idle lane."""
        if self.reading[lane] is None:
            index = self._next_document()
            if index is None:
                return None
            self.reading[lane] = (index, 0)
        index, segment = self.reading[lane]
        size = (int(self.lengths[index]) + 1, self.length, self.overlap)
        self.reading[lane] = (index, segment + 1) if segment + 1 < count_windows(*size) else None
        return index, self.document(index), window_at(segment, *size), segment == 0

    def __iter__(self):
        return self

    def __next__(self):
        dealt = [self._advance(lane) for lane in range(len(self.reading))]
        if not any(dealt):
            raise StopIteration
        self.busy = [lane for lane, work in enumerate(dealt) if work is not None]
        self.held += len(dealt) * self.length
        if self.held >= HELD:
            self.held = 0
            release(self.documents)
        return stack_windows(dealt, self.length, len(dealt))

    def position(self) -> dict:
        """Where every lane stands, for a checkpoint."""
        return {"passes": self.passes, "dealt": self.dealt, "reading": list(self.reading)}

    def seek(self, position: dict) -> None:
        """Continue from a position() of lanes over the same documents."""
        self.passes, self.dealt = position["passes"], position["dealt"]
        self.order = self._shuffle(self.passes)
        self.reading = [None if place is None else tuple(place) for place in position["reading"]]


def one_pass(documents: Sequence, lanes: int, length: int, overlap: int = 0) -> Iterator[tuple[Segment, list[int]]]:
    """Read every document once; yields (segment, kept), where lanes with nothing left are no longer in the segment.

    kept are the rows of the previous segment that continue, in order: those of the state that its model carries.
    """
    reader, rows = Lanes(documents, lanes, length, overlap=overlap), list(range(lanes))
    for segment in reader:
        kept = [row for row, lane in enumerate(rows) if lane in reader.busy]
        rows = reader.busy
        yield segment.keep_lanes(rows), kept
