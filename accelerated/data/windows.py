"""Documents, and how they are cut into windows: every token after the first is scored exactly once, in order.

A window is the tokens read at once; a token is scored if its prediction counts. Everything that reads documents uses this file.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

SPLITS = ("train", "valid", "test")


class Document(NamedTuple):
    """A tokenised text: a model reads inputs[i] and predicts targets[i]; the prediction counts if scored[i]."""

    name: str
    inputs: np.ndarray  # (n - 1,)
    targets: np.ndarray  # (n - 1,)
    scored: np.ndarray  # (n - 1,) bool


class Documents(Sequence[Document]):
    """Documents with lengths that are known before they are read. A list of Document works as well."""

    lengths: np.ndarray  # (documents,) predictions in each
    words: np.ndarray | int = 0  # (documents,) words of each document's text; 0 if there is no text
    line_ends: np.ndarray | int = 0  # (documents,) line ends of each document's text
    whole: bool = True  # whether they are all documents of their split, and all of each

    def __len__(self):
        return len(self.lengths)


def lengths_of(documents: Sequence[Document]) -> np.ndarray:
    """Number of predictions in each document, (documents,)."""
    if isinstance(documents, Documents):
        return documents.lengths
    return np.array([len(document.inputs) for document in documents], np.int64)


class Window(NamedTuple):
    """A window reads tokens start..stop - 1 of its document and scores its predictions of tokens first..stop.

    Token positions count from 0; the model reads token i to predict token i + 1.
    """

    start: int
    stop: int
    first: int


def count_windows(length: int, window: int, overlap: int = 0) -> int:
    """Number of windows in a document of n tokens: 1 + max(0, ceil((n - 1 - T) / (T - o))), or 0 if n < 2."""
    if length < 2:
        return 0
    return 1 + max(0, -(-(length - 1 - window) // (window - overlap)))


def window_at(index: int, length: int, window: int, overlap: int) -> Window:
    """Window number `index` of a document of `length` tokens. Windows begin T - o tokens apart; the last may be short."""
    start = index * (window - overlap)
    return Window(start, min(start + window, length - 1), start + 1 + (overlap if index else 0))


def cut(length: int, window: int, overlap: int = 0) -> list[Window]:
    """The windows of a document of `length` tokens: T = `window` tokens each, o = `overlap` shared with the previous window.

    Overlap 0 gives the ordinary segments. Raises ValueError unless 0 <= overlap < window.
    """
    if not 0 <= overlap < window:
        raise ValueError(
            f"overlap is {overlap}; it must lie in 0..{window - 1} for window {window}"
        )
    return [
        window_at(index, length, window, overlap)
        for index in range(count_windows(length, window, overlap))
    ]
