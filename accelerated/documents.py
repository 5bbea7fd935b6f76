"""What every corpus is made of."""

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
