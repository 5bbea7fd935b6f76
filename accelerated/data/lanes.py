"""Deal documents to lanes, which are read side by side, in segments of N tokens.

Each lane reads one document at a time. Training and evaluation use this file. The documents may be
joined into one text first; then memory is carried from each to the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from accelerated.data.tokenizers import Tokenizer
from accelerated.data.windows import (
    Document,
    Documents,
    Window,
    count_windows,
    lengths_of,
    window_at,
)
from accelerated.program.errors import InputError

# A part of a document, (its number, start, stop): its predictions start .. stop - 1
Span = tuple[int, int, int]


class Parts(Documents):
    """Parts of documents, each read as a document."""

    def __init__(self, documents: Sequence[Document], spans: list[Span]):
        self.documents = documents
        self.spans = spans
        self.lengths = np.array([stop - start for _, start, stop in spans], np.int64)

    def __getitem__(self, index: int) -> Document:
        number, start, stop = self.spans[index]
        name, *arrays = self.documents[number]
        return Document(f"{name}:{start}", *(array[start:stop] for array in arrays))


def equal_spans(lengths: list[int], parts_of: list[int]) -> list[Span]:
    """Spans, in order, that cut document i, of lengths[i] tokens, into parts_of[i] equal parts."""
    spans = []
    for number, (length, parts) in enumerate(zip(lengths, parts_of, strict=True)):
        for part in range(parts):
            start = length * part // parts
            stop = length * (part + 1) // parts
            spans.append((number, start, stop))
    return spans


def cut_for_lanes(lanes: int, documents: Sequence[Document]) -> Sequence[Document]:
    """The documents; fewer than lanes are cut into parts until every lane has one of its own.

    Otherwise several lanes would read the same text, such as a single book. The longest documents
    are cut, each into equal parts. A part has at least one prediction.
    """
    lengths = lengths_of(documents).tolist()
    parts_of = [min(length, 1) for length in lengths]  # an empty document has none
    missing = min(lanes, sum(lengths)) - sum(parts_of)
    if missing <= 0:
        return documents

    def length_of_parts(number: int) -> float:
        return lengths[number] / max(parts_of[number], 1)

    for _ in range(missing):
        longest = max(range(len(lengths)), key=length_of_parts)
        parts_of[longest] += 1
    return Parts(documents, equal_spans(lengths, parts_of))


def evenly_spread(documents: Sequence[Document], tokens: int, longest: int) -> Sequence[Document]:
    """About `tokens` tokens from all over the documents, or the documents if they have no more.

    Documents of more than `longest` predictions are cut into equal pieces of at most that; shorter
    ones stay whole. The pieces are taken at even distances, always the same ones.
    """
    lengths = lengths_of(documents)
    total = lengths.sum()
    if total <= tokens:
        return documents

    share = tokens / total
    pieces_of = np.ceil(lengths / longest).astype(int)
    owed = 0.0  # predictions that the share of the text so far has, less those taken
    taken = []
    for number, start, stop in equal_spans(lengths.tolist(), pieces_of.tolist()):
        size = stop - start
        owed += share * size
        if owed >= size / 2:
            taken.append((number, start, stop))
            owed -= size
    return Parts(documents, taken)


def truncated(documents: Sequence[Document], tokens: int) -> Sequence[Document]:
    """The first `tokens` tokens of each document."""
    lengths = lengths_of(documents).tolist()
    spans = [(number, 0, min(length, tokens - 1)) for number, length in enumerate(lengths)]
    return Parts(documents, spans)


def joined_for_lanes(
    lanes: int, documents: Sequence[Document], seed: int | None = None, least: int = 1
) -> Sequence[Document]:
    """The documents as one text, with nothing between them, cut into one equal part per lane.

    They are shuffled if there is a seed. At a document's last token the model predicts the next
    document's first token; that prediction is not scored. So the same tokens are scored as if each
    document were read alone. Documents of fewer than two tokens are left out. There are fewer parts
    if they would have less than `least` tokens to predict.
    """
    lengths = lengths_of(documents)
    order = np.flatnonzero(lengths)
    if seed is not None:
        order = np.random.default_rng(seed).permutation(order)

    tokens = [np.empty(0, np.uint8)]
    scored = [np.empty(0, bool)]
    for number in order.tolist():
        document = documents[number]
        tokens += [document.inputs, document.targets[-1:]]
        scored += [document.scored, np.array([False])]
    text = np.concatenate(tokens)
    joined = Document("joined", text[:-1], text[1:], np.concatenate(scored)[:-1])

    parts = min(lanes, max(1, int(lengths.sum()) // least))
    return cut_for_lanes(parts, [joined])


def move(field: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The field on the device; a copy to a GPU is asynchronous, from pinned memory."""
    if device.type == "cuda" and field.device.type == "cpu":
        return field.pin_memory().to(device, non_blocking=True)
    return field.to(device)


class Task(NamedTuple):
    """The task of every lane in one segment; axis 0 of every field is the lane."""

    kind: torch.Tensor  # (B,) number in TASKS of data/config.py; Memformer's, section 2.3
    reading: torch.Tensor  # (B, N) token ids that the encoder reads
    readable: torch.Tensor  # (B, N) bool, false on padding: masked spans shorten a text
    prompt: torch.Tensor  # (B, N) token ids that the decoder reads after the task's token


class Segment(NamedTuple):
    """One step of all lanes: N tokens of each of B lanes."""

    tokens: torch.Tensor  # (B, N) int64, padded with 0
    targets: torch.Tensor  # (B, N) int64
    scored: torch.Tensor  # (B, N) bool, false on padding
    starts: torch.Tensor  # (B,) bool, true if a document or a part of one begins
    task: Task | None = None  # None if every lane continues its text
    # (B, 2) int64: the document's number, and where in it this begins; -1, 0 on padding
    place: np.ndarray | None = None
    # any_starts and scored_targets of a segment that `to` has moved: its device need not be asked
    host_starts: bool | None = None
    host_targets: np.ndarray | None = None

    def to(self, device: torch.device) -> Segment:
        """The Segment with every tensor on the device, those of its task too."""
        moved = tree_map_only(torch.Tensor, lambda field: move(field, device), self)
        return moved._replace(host_starts=self.any_starts, host_targets=self.scored_targets)

    def keep_lanes(self, rows: slice | list[int]) -> Segment:
        """The Segment of some lanes, given as a slice or by their numbers."""
        of_lanes = (torch.Tensor, np.ndarray)
        kept = tree_map_only(of_lanes, lambda field: field[rows], self)
        return kept._replace(host_starts=None)

    def with_all_starts(self) -> Segment:
        """The Segment, as if a document started in every lane."""
        return self._replace(starts=torch.ones_like(self.starts), host_starts=True)

    @property
    def any_starts(self) -> bool:
        """Whether a document or a part of one begins in any lane."""
        if self.host_starts is not None:
            return self.host_starts
        return bool(self.starts.cpu().numpy().any())

    @property
    def scored_targets(self) -> np.ndarray:
        """The targets (B, N) on the host, -1 if they are not scored."""
        if self.host_targets is not None:
            return self.host_targets
        return np.where(self.scored.cpu().numpy(), self.targets.cpu().numpy(), -1)


def count_bytes(segments: Iterable[Segment], tokenizer: Tokenizer) -> int:
    """Bytes of text that the scored tokens of segments spell; the segments are on the host."""
    count = 0
    for segment in segments:
        targets = segment.scored_targets
        count += int(tokenizer.token_bytes[targets[targets >= 0]].sum())
    return count


class LaneWindow(NamedTuple):
    """What a lane reads in a segment: a window of a document."""

    number: int  # of the document
    document: Document
    window: Window
    is_start: bool  # whether it is the document's first window


def stack_windows(work: list[LaneWindow | None], length: int) -> Segment:
    """A Segment with a row of `length` tokens for each lane's window; the rest is padding."""
    lanes = len(work)
    tokens = np.zeros((lanes, length), np.int64)
    targets = np.zeros((lanes, length), np.int64)
    scored = np.zeros((lanes, length), bool)
    starts = np.zeros(lanes, bool)
    place = np.full((lanes, 2), (-1, 0))
    for row, lane_window in enumerate(work):
        if lane_window is None:
            continue
        number, document, window, is_start = lane_window
        starts[row] = is_start
        place[row] = (number, window.start)
        size = window.stop - window.start
        already_scored = window.first - 1 - window.start
        tokens[row, :size] = document.inputs[window.start : window.stop]
        targets[row, :size] = document.targets[window.start : window.stop]
        scored[row, already_scored:size] = document.scored[window.first - 1 : window.stop]
    return Segment(
        torch.from_numpy(tokens),
        torch.from_numpy(targets),
        torch.from_numpy(scored),
        torch.from_numpy(starts),
        place=place,
    )


class Lanes(Iterator[Segment]):
    """Deals documents to lanes; iterating yields Segments.

    Each lane reads one document to its end, then another. With an overlap, a segment begins with
    that many tokens of the previous one and does not score their predictions again.

    With a seed, passes never end, and each shuffles the documents anew. Without one there is a
    single pass, longest documents first so that lanes end together; a lane with no document left
    holds padding, which is not scored.
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
        self.documents = documents
        self.length = length
        self.overlap = overlap
        self.seed = seed
        self.passes = 0
        self.dealt = 0  # documents of this pass
        self.order = self._shuffle(0)
        # Per lane (document's number, segments of it that are read), None between documents
        self.reading: list[tuple[int, int] | None] = [None] * lanes
        # Cached, because documents of the recall task are generated when they are read
        self.document = lru_cache(int(lanes))(documents.__getitem__)

    def _shuffle(self, passes):
        """The order of the documents in a pass."""
        if self.seed is None:
            return np.argsort(-self.lengths, kind="stable")
        return np.random.default_rng([self.seed, passes]).permutation(len(self.documents))

    def _next_document(self):
        """The next document that has something to predict; None at the end of a single pass."""
        while True:
            if self.dealt == len(self.order):
                if self.seed is None:
                    return None
                self.passes += 1
                self.dealt = 0
                self.order = self._shuffle(self.passes)
            number = int(self.order[self.dealt])
            self.dealt += 1
            if self.lengths[number]:
                return number

    def _advance(self, lane):
        """Move a lane to its next segment; returns what it reads there, None if nothing is left."""
        place = self.reading[lane]
        if place is None:
            next_number = self._next_document()
            if next_number is None:
                return None
            place = (next_number, 0)
        number, segment = place

        tokens = int(self.lengths[number]) + 1
        is_last = segment + 1 == count_windows(tokens, self.length, self.overlap)
        self.reading[lane] = None if is_last else (number, segment + 1)
        window = window_at(segment, tokens, self.length, self.overlap)
        return LaneWindow(number, self.document(number), window, segment == 0)

    def __next__(self) -> Segment:
        work = [self._advance(lane) for lane in range(len(self.reading))]
        if not any(work):
            raise StopIteration
        return stack_windows(work, self.length)

    def rollout(self, horizon: int) -> list[Segment]:
        """The next `horizon` segments of every lane."""
        return [next(self) for _ in range(horizon)]

    def state_dict(self) -> dict:
        """The place of every lane, for a checkpoint."""
        return {"passes": self.passes, "dealt": self.dealt, "reading": list(self.reading)}

    def load_state_dict(self, state: dict) -> None:
        """Continue from a state_dict of the same documents.

        Raises ValueError if it has another number of lanes.
        """
        if len(state["reading"]) != len(self.reading):
            raise ValueError("it has another number of lanes")
        self.passes = state["passes"]
        self.dealt = state["dealt"]
        self.order = self._shuffle(self.passes)
        self.reading = list(state["reading"])


def one_pass(
    documents: Sequence[Document], lanes: int, length: int, overlap: int = 0
) -> Iterator[tuple[Segment, list[int]]]:
    """Read every document once; yields (segment, kept).

    A segment drops lanes whose documents have ended. `kept` lists the rows of the previous segment
    that continue, in order: index the carried state with it.
    """
    rows = list(range(lanes))
    for segment in Lanes(documents, lanes, length, overlap=overlap):
        assert segment.place is not None
        busy = np.flatnonzero(segment.place[:, 0] >= 0).tolist()  # the others are padding
        kept = [row for row, lane in enumerate(rows) if lane in busy]
        yield segment.keep_lanes(busy), kept
        rows = busy
