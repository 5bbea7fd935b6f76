"""Documents, and how they are cut into windows. Everything that reads documents uses this file.

A window is the tokens read at once; a token is scored if its prediction counts. Every token after
the first is scored exactly once, in order.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

SPLITS = ("train", "valid", "test")
NOTHING = np.zeros(0, np.int64)


class Document(NamedTuple):
    """A tokenised text: a model reads inputs[i] and predicts targets[i].

    The prediction counts if scored[i].
    """

    name: str
    inputs: np.ndarray  # (n - 1,)
    targets: np.ndarray  # (n - 1,)
    scored: np.ndarray  # (n - 1,) bool


class Documents(Sequence[Document]):
    """Documents with lengths that are known before they are read. A list works as well."""

    lengths: np.ndarray  # (documents,) predictions in each
    words: np.ndarray = NOTHING  # (documents,) words of each document's text; empty without texts
    line_ends: np.ndarray = NOTHING  # (documents,) line ends of each; empty without texts
    whole: bool = True  # whether they are all documents of their split, and all of each

    def __len__(self) -> int:
        return len(self.lengths)


def lengths_of(documents: Sequence[Document]) -> np.ndarray:
    """Number of predictions in each document, (documents,)."""
    if isinstance(documents, Documents):
        return documents.lengths
    return np.array([len(document.inputs) for document in documents], np.int64)


class Window(NamedTuple):
    """Tokens that are read at once. Positions count from 0; token i is read to predict i + 1."""

    start: int  # it reads tokens start .. stop - 1 of its document
    stop: int
    first: int  # it scores its predictions of tokens first .. stop


def count_windows(length: int, window: int, overlap: int = 0) -> int:
    """Number of windows in a document of n = `length` tokens, 0 if n < 2.

    Otherwise 1 + max(0, ceil((n - 1 - T) / (T - o))), with T = `window` and o = `overlap`.
    """
    if length < 2:
        return 0
    after_first = max(0, length - 1 - window)
    return 1 + math.ceil(after_first / (window - overlap))


def window_at(index: int, length: int, window: int, overlap: int) -> Window:
    """Window number `index` of a document of `length` tokens.

    Windows begin T - o tokens apart; the last may be short.
    """
    start = index * (window - overlap)
    stop = min(start + window, length - 1)
    repeated = overlap if index else 0  # predictions that the previous window scores
    return Window(start, stop, start + 1 + repeated)


def cut(length: int, window: int, overlap: int = 0) -> list[Window]:
    """The windows of a document of `length` tokens.

    Each has T = `window` tokens, of which the previous window has o = `overlap` < T too. Overlap 0
    gives the ordinary segments.
    """
    count = count_windows(length, window, overlap)
    return [window_at(index, length, window, overlap) for index in range(count)]
