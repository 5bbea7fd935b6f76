"""Cutting a document into windows so that every token after the first is scored exactly once, in order."""

from typing import NamedTuple


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


def count_windows(length, window, overlap=0):
    """1 + max(0, ceil((n - 1 - T) / (T - o))) windows for a document of n tokens, none below two tokens."""
    if length < 2:
        return 0
    return 1 + max(0, -(-(length - 1 - window) // (window - overlap)))


def cut(length, window, overlap=0):
    """The windows of a document of `length` tokens: window T tokens each, `overlap` o of them read before.

    Window k reads from token k (T - o) on; the last one stays on that grid and is short. Overlap 0 gives the ordinary
    segments. Raises ValueError unless window >= 1 and 0 <= overlap < window.
    """
    if window < 1:
        raise ValueError(f"window is {window}; it must be at least 1")
    if not 0 <= overlap < window:
        raise ValueError(f"overlap is {overlap}; it must lie in 0..{window - 1} for window {window}")
    stride = window - overlap
    windows = []
    for index in range(count_windows(length, window, overlap)):
        start = index * stride
        windows.append(Window(start, min(start + window, length - 1), start + 1 + (overlap if index else 0)))
    return windows
