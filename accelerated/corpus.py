"""Documents, their splits, and how they are dealt to lanes that each read one document at a time."""

import difflib
import hashlib
import itertools
import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from accelerated.documents import SPLITS, Document
from accelerated.errors import InputError
from accelerated.recall import RecallDocuments, recall_splits
from accelerated.windows import check_overlap, count_windows, window_at

CORPORA = ("stdlib", "recall")
TEXT_SUFFIXES = (".txt", ".text", ".md", ".py", ".tex", ".c", ".h", ".rst", ".json", ".html", ".xml", ".csv", "")


def text_document(name, text, tokenizer):
    """A document that predicts each of its own tokens after the first."""
    tokens = tokenizer.encode(text)
    return Document(name, tokens[:-1], tokens[1:], np.ones(max(len(tokens) - 1, 0), bool), len(text.split()))


def split_of(name):
    """The split of a document, by a hash of its name: 5% valid, 5% test, the rest train."""
    bucket = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 20
    return {0: "test", 1: "valid"}.get(bucket, "train")


def split_by_name(documents):
    splits = {split: [] for split in SPLITS}
    for document in documents:
        splits[split_of(document.name)].append(document)
    return splits


def split_by_position(texts, tokenizer):
    """Cut every text 90/5/5 into a train, a valid and a test document: for corpora of too few documents to deal out."""
    splits = {split: [] for split in SPLITS}
    for name, text in texts:
        ends = [0, len(text) * 90 // 100, len(text) * 95 // 100, len(text)]
        for split, start, stop in zip(SPLITS, ends, ends[1:], strict=False):
            splits[split].append(text_document(f"{name}:{split}", text[start:stop], tokenizer))
    return splits


def standard_library_texts(root=None):
    """(name, bytes) of each top-level package or module of the running Python's standard library, files in sorted order.

    Left out: site-packages, which is not part of it, `test`, which not every installation has and which would be most of the
    text, and the build's own _sysconfigdata. root is the library's folder, for tests.
    """
    root = Path(root or sysconfig.get_paths()["stdlib"])
    files = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        name = parts[0].removesuffix(".py")
        if name in ("site-packages", "dist-packages", "test") or name.startswith("_sysconfigdata"):
            continue
        files.setdefault(name, []).append(path)
    return [(name, b"".join(path.read_bytes() for path in paths)) for name, paths in files.items()]


def read_text(path):
    """The bytes of a UTF-8 text file; raises InputError where it is none."""
    try:
        text = path.read_bytes()
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text (byte {error.start}); convert it, or leave it out of the folder") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    return text


def text_splits(path, tokenizer):
    """The splits of a text file (90/5/5 by position) or a folder of text files (a document each, by a hash of its name)."""
    path = Path(path)
    if not path.exists():
        near = difflib.get_close_matches(str(path), CORPORA, n=1)
        hint = f"did you mean {near[0]}?" if near else "give a text file, a folder of text files, stdlib or recall"
        raise InputError(f"--data {path}: no such file or folder; {hint}")
    if path.is_file():
        return split_by_position([(path.name, read_text(path))], tokenizer)
    paths = sorted(p for p in path.rglob("*") if p.is_file() and p.suffix in TEXT_SUFFIXES)
    if not paths:
        raise InputError(f"--data {path}: no text files in this folder; names should end in one of {' '.join(TEXT_SUFFIXES)}")
    texts = [(str(p.relative_to(path)), read_text(p)) for p in paths]
    splits = split_by_name(text_document(name, text, tokenizer) for name, text in texts)
    return splits if all(splits.values()) else split_by_position(texts, tokenizer)


def longest_document(documents, segment, overlap=0):
    """Segments in the longest of documents."""
    if isinstance(documents, RecallDocuments):  # made when they are read, and all of one length
        return count_windows(documents.config.length + 1, segment, overlap)
    return count_windows(max(len(document.inputs) for document in documents) + 1, segment, overlap)


def load_splits(data, tokenizer, recall, segment, needed=("train", "valid")):
    """{split: documents} of --data: stdlib, recall (of a RecallConfig), or the path of a text file or folder.

    Raises InputError where a needed split could not fill one segment.
    """
    if data == "recall":
        return recall_splits(recall)
    if data == "stdlib":
        splits = split_by_name(text_document(name, text, tokenizer) for name, text in standard_library_texts())
    else:
        splits = text_splits(data, tokenizer)
    for split in needed:
        tokens = sum(len(document.inputs) for document in splits[split])
        if tokens < segment:
            raise InputError(
                f"--data {data}: the {split} split has {tokens} tokens to predict, fewer than a segment of {segment}; "
                f"give more text or a smaller --segment"
            )
    return splits


class Segment(NamedTuple):
    """One step of every lane: B lanes of N tokens."""

    tokens: torch.Tensor  # (B, N) int64, padded with 0
    targets: torch.Tensor  # (B, N) int64
    scored: torch.Tensor  # (B, N) bool, false on padding
    starts: torch.Tensor  # (B,) bool, where a new document begins
    task: tuple | None = None  # a tasks.Task, where something else than continuing the text is asked for
    place: torch.Tensor | None = None  # (B, 2) int64, number of the document and of its first token here; -1, 0 on padding

    def to(self, device):
        return Segment(*(None if field is None else field.to(device) for field in self))


def stack_windows(work, length, lanes):
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


def independent_windows(documents, lanes, length, overlap=0):
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

    def __init__(self, documents, lanes, length, seed=None, overlap=0):
        check_overlap(length, overlap)
        if not any(len(document.inputs) for document in documents):
            raise InputError("no document has two tokens or more, so there is nothing to predict")
        self.documents, self.length, self.overlap, self.seed = documents, length, overlap, seed
        self.passes, self.dealt, self.order = 0, 0, self._shuffle(0)
        self.reading = [None] * lanes  # per lane (document index, segments read) or None
        self.busy = list(range(lanes))  # the lanes that the last segment gave something to read
        self.open = [None] * lanes  # per lane (document, how many windows it has), of the document being read

    def _shuffle(self, passes):
        if self.seed is None:
            return np.argsort([-len(document.inputs) for document in self.documents], kind="stable")
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
            if len(self.documents[index].inputs):
                return index

    def _open(self, lane, index):
        document = self.documents[index]
        self.open[lane] = (document, count_windows(len(document.inputs) + 1, self.length, self.overlap))

    def _advance(self, lane):
        """Move a lane on by one segment; returns (number, document, window, starts) or None for an idle lane."""
        if self.reading[lane] is None:
            index = self._next_document()
            if index is None:
                return None
            self.reading[lane] = (index, 0)
            self._open(lane, index)
        index, segment = self.reading[lane]
        document, count = self.open[lane]
        self.reading[lane] = (index, segment + 1) if segment + 1 < count else None
        return index, document, window_at(segment, len(document.inputs) + 1, self.length, self.overlap), segment == 0

    def __iter__(self):
        return self

    def __next__(self):
        dealt = [self._advance(lane) for lane in range(len(self.reading))]
        if not any(dealt):
            raise StopIteration
        self.busy = [lane for lane, work in enumerate(dealt) if work is not None]
        return stack_windows(dealt, self.length, len(dealt))

    def position(self):
        """Where every lane stands, for a checkpoint."""
        return {"passes": self.passes, "dealt": self.dealt, "reading": list(self.reading)}

    def seek(self, position):
        """Go on from a position() of lanes over the same documents."""
        self.passes, self.dealt = position["passes"], position["dealt"]
        self.order = self._shuffle(self.passes)
        self.reading = [None if place is None else tuple(place) for place in position["reading"]]
        for lane, place in enumerate(self.reading):
            if place is not None:
                self._open(lane, place[0])


def one_pass(documents, lanes, length, overlap=0):
    """Read every document once; yields (segment, kept), where lanes with nothing left are no longer in the segment.

    kept are the rows of the segment before that go on, in order: those of the state that its model carries.
    """
    reader, rows = Lanes(documents, lanes, length, overlap=overlap), list(range(lanes))
    for segment in reader:
        kept = [row for row, lane in enumerate(rows) if lane in reader.busy]
        rows = reader.busy
        yield Segment(*(None if field is None else field[rows] for field in segment)), kept
