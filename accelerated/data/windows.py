"""Documents, and cutting them into windows so that every token after the first is scored exactly once, in order."""

from typing import NamedTuple

import numpy as np

SPLITS = ("train", "valid", "test")
WHITE_SPACE = b" \t\n\r\x0b\x0c"  # what words stand between: where bytes.split() splits


class Document(NamedTuple):
    """A text as a model meets it: reading inputs[i] it predicts targets[i], which counts where scored[i]."""

    name: str
    inputs: np.ndarray  # (n - 1,)
    targets: np.ndarray  # (n - 1,)
    scored: np.ndarray  # (n - 1,) bool
    words: int = 0  # of the text that the tokens were made from, between white space


def lengths_of(documents):
    """Predictions in each document, (documents,), without reading them where the sequence knows."""
    known = getattr(documents, "lengths", None)
    return np.array([len(document.inputs) for document in documents], np.int64) if known is None else known


def count_words(documents):
    """Words of the documents' original text, 0 where there is none."""
    known = getattr(documents, "words", None)
    return sum(document.words for document in documents) if known is None else int(known.sum())


class Window(NamedTuple):
    """A window reads tokens start..stop - 1 of its document and scores its predictions of tokens first..stop.

    Token positions count from 0; the model reads token i to predict token i + 1.
    """

    start: int
    stop: int
    first: int

    @property
    def scored(self):
        """How many tokens this window scores."""
        return self.stop + 1 - self.first


def check_overlap(window, overlap):
    """Raise ValueError unless window >= 1 and 0 <= overlap < window."""
    if window < 1:
        raise ValueError(f"window is {window}; it must be at least 1")
    if not 0 <= overlap < window:
        raise ValueError(f"overlap is {overlap}; it must lie in 0..{window - 1} for window {window}")


def count_windows(length, window, overlap=0):
    """1 + max(0, ceil((n - 1 - T) / (T - o))) windows for a document of n tokens, none below two tokens."""
    if length < 2:
        return 0
    return 1 + max(0, -(-(length - 1 - window) // (window - overlap)))


def window_at(index, length, window, overlap):
    """Window number `index` of a document of `length` tokens; it stands on the grid of T - o tokens, the last is short."""
    start = index * (window - overlap)
    return Window(start, min(start + window, length - 1), start + 1 + (overlap if index else 0))


def cut(length, window, overlap=0):
    """The windows of a document of `length` tokens: window T tokens each, `overlap` o of them read before.

    Overlap 0 gives the ordinary segments. Raises ValueError unless window >= 1 and 0 <= overlap < window.
    """
    cutter = Cutter(window, overlap)
    return cutter.push(length) + cutter.close()


class Cutter:
    """`cut` for a document that arrives in pieces: `push` gives the windows that a piece completes, `close` the short last one.

    Raises ValueError unless window >= 1 and 0 <= overlap < window.
    """

    def __init__(self, window, overlap=0):
        check_overlap(window, overlap)
        self.window, self.overlap, self.length, self.given = window, overlap, 0, 0

    def push(self, tokens):
        """The windows that are full, with all their targets, once `tokens` more tokens have come."""
        self.length += tokens
        full = max(0, (self.length - 1 - self.overlap) // (self.window - self.overlap))
        return self._give(full)

    def close(self):
        """What is left when the document has ended: one short window or none."""
        return self._give(count_windows(self.length, self.window, self.overlap))

    def _give(self, until):
        windows = [window_at(index, self.length, self.window, self.overlap) for index in range(self.given, until)]
        self.given = until
        return windows


def overlap_of(config):
    """Tokens that a model's segments share with the ones before: 0 but for pretrained_recurrence."""
    return getattr(config, "overlap", 0)
