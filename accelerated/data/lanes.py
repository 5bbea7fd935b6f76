"""Deal documents to lanes, which are read side by side: each lane reads one document at a time, in segments of N tokens.

Training and evaluation use it. The documents may be joined into one text first; then memory is carried from each to the next.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from accelerated.data.windows import (
    Document,
    Documents,
    Window,
    count_windows,
    lengths_of,
    window_at,
)
from accelerated.program.errors import InputError


class Parts(Documents):
    """Parts of documents, each read as a document: predictions start .. stop - 1 of document `number` for each of the spans."""

    def __init__(self, documents: Sequence[Document], spans: list[tuple[int, int, int]]):
        self.documents, self.spans = documents, spans
        self.lengths = np.array([stop - start for _, start, stop in spans], np.int64)

    def __getitem__(self, index):
        number, start, stop = self.spans[index]
        document = self.documents[number]
        fields = (
            field[start:stop] for field in (document.inputs, document.targets, document.scored)
        )
        return Document(f"{document.name}:{start}", *fields)


def equal_spans(lengths: list[int], parts_of: list[int]) -> list[tuple[int, int, int]]:
    """The spans (number, start, stop) that cut documents of these lengths into so many equal parts each, in order."""
    return [
        (number, length * part // parts, length * (part + 1) // parts)
        for number, (length, parts) in enumerate(zip(lengths, parts_of, strict=True))
        for part in range(parts)
    ]


def cut_for_lanes(lanes: int, documents: Sequence[Document]) -> Sequence[Document]:
    """The documents; if there are fewer than lanes, the longest are cut into equal parts until every lane has one of its own.

    Otherwise several lanes would read the same text, such as a single book. A part has at least one prediction.
    """
    lengths = lengths_of(documents).tolist()
    parts_of = [min(length, 1) for length in lengths]  # an empty document has none
    for _ in range(min(lanes, sum(lengths)) - sum(parts_of)):
        longest = max(
            range(len(lengths)), key=lambda number: lengths[number] / max(parts_of[number], 1)
        )
        parts_of[longest] += 1
    return (
        Parts(documents, equal_spans(lengths, parts_of))
        if max(parts_of, default=0) > 1
        else documents
    )


def spread(documents: Sequence[Document], tokens: int, longest: int) -> Sequence[Document]:
    """The documents, or if they have more predictions than `tokens`, about so many of them from all over the documents.

    Documents of more than `longest` predictions are cut into equal pieces of at most that; shorter ones stay whole. The pieces
    are taken at even distances, always the same ones.
    """
    lengths = lengths_of(documents)
    if lengths.sum() <= tokens:
        return documents
    share, owed, taken = tokens / lengths.sum(), 0.0, []
    for span in equal_spans(lengths.tolist(), (-(-lengths // longest)).tolist()):
        size = span[2] - span[1]
        owed += share * size
        if owed >= size / 2:
            taken.append(span)
            owed -= size
    return Parts(documents, taken)


def joined_for_lanes(
    lanes: int, documents: Sequence[Document], seed: int | None = None, least: int = 1
) -> Sequence[Document]:
    """The documents as one text, with nothing between them, shuffled if there is a seed, and cut into one equal part per lane.

    At a document's last token the model predicts the next document's first token; that prediction is not scored. So the same
    tokens are scored as if each document were read alone. Documents of fewer than two tokens are left out. There are fewer parts
    if they would have less than `least` tokens to predict.
    """
    order = np.flatnonzero(lengths := lengths_of(documents))
    order = order if seed is None else np.random.default_rng(seed).permutation(order)
    tokens, scored = [np.empty(0, np.uint8)], [np.empty(0, bool)]
    for document in (documents[number] for number in order.tolist()):
        tokens += [document.inputs, document.targets[-1:]]
        scored += [document.scored, [False]]
    tokens, scored = np.concatenate(tokens), np.concatenate(scored)
    return cut_for_lanes(
        min(lanes, max(1, lengths.sum() // least)),
        [Document("joined", tokens[:-1], tokens[1:], scored[:-1])],
    )


def move(field: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The field on the device. A copy to a GPU is made from pinned memory, so that it waits for no work before it."""
    if device.type == "cuda" and field.device.type == "cpu":
        return field.pin_memory().to(device, non_blocking=True)
    return field.to(device)


class Segment(NamedTuple):
    """One step of all lanes: N tokens of each of B lanes."""

    tokens: torch.Tensor  # (B, N) int64, padded with 0
    targets: torch.Tensor  # (B, N) int64
    scored: torch.Tensor  # (B, N) bool, false on padding
    starts: torch.Tensor  # (B,) bool, true if a document or a part of one begins
    task: tuple | None = None  # a tasks.Task, unless every lane continues its text
    place: np.ndarray | None = (
        None  # (B, 2) int64: the document's number, and where in it this begins; -1, 0 on padding
    )
    begins: bool | None = (
        None  # any_starts of a segment that `to` has moved, so that its device need not be asked
    )

    def to(self, device: torch.device) -> "Segment":
        moved = (move(field, device) for field in self[:4])
        return Segment(*moved, self.task and self.task.to(device), self.place, self.any_starts)

    def keep_lanes(self, rows: slice | list[int]) -> "Segment":
        """The Segment of some lanes, given as a slice or by their numbers."""
        task = self.task and type(self.task)(*(field[rows] for field in self.task))
        return Segment(
            *(field[rows] for field in self[:4]),
            task,
            None if self.place is None else self.place[rows],
        )

    @property
    def any_starts(self) -> bool:
        """Whether a document or a part of one begins in any lane."""
        return bool(self.starts.cpu().numpy().any()) if self.begins is None else self.begins

    @property
    def count_scored(self) -> int:
        """The number of scored tokens."""
        return int(self.scored.sum())


def stack_windows(work: list[tuple[int, Document, Window, bool] | None], length: int) -> Segment:
    """A Segment of rows of `length` tokens from [(number, document, window, is_start) or None]; the rest is padding."""
    lanes, (tokens, targets) = len(work), np.zeros((2, len(work), length), np.int64)
    scored, starts, place = (
        np.zeros((lanes, length), bool),
        np.zeros(lanes, bool),
        np.full((lanes, 2), (-1, 0)),
    )
    for row, part in enumerate(work):
        if part is None:
            continue
        number, document, window, is_start = part
        starts[row], place[row] = is_start, (number, window.start)
        size, already_scored = window.stop - window.start, window.first - 1 - window.start
        tokens[row, :size] = document.inputs[window.start : window.stop]
        targets[row, :size] = document.targets[window.start : window.stop]
        scored[row, already_scored:size] = document.scored[window.first - 1 : window.stop]
    return Segment(*map(torch.from_numpy, (tokens, targets, scored, starts)), place=place)


class Lanes(Iterator):
    """Deals documents to lanes; iterating yields Segments. Each lane reads one document to its end, then another.

    With an overlap, a segment begins with that many tokens of the previous one and does not score their predictions again.
    With a seed, passes never end, and each shuffles the documents anew. Without one there is a single pass, longest documents
    first so that lanes end together; a lane with no document left holds padding, which is not scored.
    """

    def __init__(
        self,
        documents: Sequence[Document],
        lanes: int,
        length: int,
        seed: int | None = None,
        overlap: int = 0,
    ):
        self.lengths = lengths_of(documents)
        if not self.lengths.any():
            raise InputError(
                "no document has two tokens or more, so there is nothing to predict; give more text"
            )
        self.documents, self.length, self.overlap, self.seed = documents, length, overlap, seed
        self.passes, self.dealt, self.order = 0, 0, self._shuffle(0)
        self.reading = [None] * lanes  # per lane (document index, segments read) or None
        self.document = lru_cache(int(lanes))(
            documents.__getitem__
        )  # cached: recall documents are generated when read

    def _shuffle(self, passes):
        if self.seed is None:
            return np.argsort(-self.lengths, kind="stable")
        return np.random.default_rng([self.seed, passes]).permutation(len(self.documents))

    def _next_document(self):
        """Index of the next document that has something to predict; None at the end of a single pass."""
        while True:
            if self.dealt == len(self.order):
                if self.seed is None:
                    return None
                self.passes, self.dealt = self.passes + 1, 0
                self.order = self._shuffle(self.passes)
            self.dealt += 1
            if self.lengths[index := int(self.order[self.dealt - 1])]:
                return index

    def _advance(self, lane):
        """Move a lane to its next segment; returns (number, document, window, is_start), or None if nothing is left."""
        if self.reading[lane] is None:
            index = self._next_document()
            if index is None:
                return None
            self.reading[lane] = (index, 0)
        index, segment = self.reading[lane]
        self.reading[lane] = None if segment + 1 == self._segments(index) else (index, segment + 1)
        window = window_at(segment, int(self.lengths[index]) + 1, self.length, self.overlap)
        return index, self.document(index), window, segment == 0

    def _segments(self, index):
        """How many segments a document has."""
        return count_windows(int(self.lengths[index]) + 1, self.length, self.overlap)

    def __next__(self):
        work = [self._advance(lane) for lane in range(len(self.reading))]
        if not any(work):
            raise StopIteration
        return stack_windows(work, self.length)

    def position(self) -> dict:
        """The place of every lane, for a checkpoint."""
        return {"passes": self.passes, "dealt": self.dealt, "reading": list(self.reading)}

    def seek(self, position: dict) -> None:
        """Continue from a position() over the same documents."""
        self.passes, self.dealt, reading = (
            position[name] for name in ("passes", "dealt", "reading")
        )
        self.order = self._shuffle(self.passes)
        lost = any(
            segment not in range(self._segments(index)) for index, segment in filter(None, reading)
        )
        if (
            lost
            or self.dealt not in range(len(self.order) + 1)
            or len(reading) != len(self.reading)
        ):
            raise ValueError("its lanes are at no place of the documents")
        self.reading = [place and tuple(place) for place in reading]


def one_pass(
    documents: Sequence[Document], lanes: int, length: int, overlap: int = 0
) -> Iterator[tuple[Segment, list[int]]]:
    """Read every document once; yields (segment, kept). A segment drops lanes whose documents have ended.

    kept lists the rows of the previous segment that continue, in order: index the carried state with it.
    """
    rows = list(range(lanes))
    for segment in Lanes(documents, lanes, length, overlap=overlap):
        busy = np.flatnonzero(segment.place[:, 0] >= 0).tolist()  # the others are padding
        yield segment.keep_lanes(busy), [row for row, lane in enumerate(rows) if lane in busy]
        rows = busy
