"""What every corpus is made of."""

from typing import NamedTuple

import numpy as np

SPLITS = ("train", "valid", "test")


class Document(NamedTuple):
    """A text as a model meets it: reading inputs[i] it predicts targets[i], which counts where scored[i]."""

    name: str
    inputs: np.ndarray  # (n - 1,)
    targets: np.ndarray  # (n - 1,)
    scored: np.ndarray  # (n - 1,) bool
    words: int = 0  # of the text that the tokens were made from, between white space
