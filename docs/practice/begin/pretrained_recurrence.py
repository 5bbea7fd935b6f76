"""Recurrence in a pretrained model in four tasks (docs/pretrained_recurrence.md).

A window is pooled to one vector, which the next window sees. L layers, B lanes, N tokens, D width.
Write each function, then ask what is right:

    python -m docs.practice --in FOLDER pretrained_recurrence

FOLDER is the one that this file is in; the command runs in the clone. Functions return NumPy
arrays, a tuple of them where several are named, and leave their arguments as they are.
"""

import numpy as np  # noqa: F401


def pool(layer_scores, outputs):
    """1. A window as one vector, Eq. 1. Returns (B, D).

    layer_scores (L,); outputs (L, B, N, D) of all layers.
    w = softmax(layer_scores);  z = sum over layers and positions of w_l h_li, divided by N.
    Hint: np.tensordot sums over the layers.
    """
    raise NotImplementedError


def pool_backward(dpooled, layer_scores, outputs):
    """2. And back. Returns (dlayer_scores, doutputs): (L,) and (L, B, N, D).

    dm_i = dz / N at every position;  dh_l = w_l dm;  dw_l = sum of h_l dm;
    d layer_scores = w (dw - sum over l of w_l dw_l).
    Hint: the gradients of softmax's scores add up to zero; check that.
    """
    raise NotImplementedError


def insertion_mask(length, vectors, present):
    """3. Who sees the vector. Returns (B, N, S + N) of bool, true where a token sees a key.

    The keys are S inserted vectors, then the N = length tokens of the window. A token sees the
    vectors if a window came before, present (B,), and of the tokens those up to itself.
    Hint: np.broadcast_to makes both parts (B, N, .); np.concatenate joins them.
    """
    raise NotImplementedError


def windows(length, size, overlap):
    """4. Windows that count each token once (4.2). Returns integers (windows, 3).

    A document has length tokens. A window reads at most size of them, from start to stop - 1; the
    next one begins size - overlap later. The last token is predicted and never read, so stop is at
    most length - 1. A row is (start, stop, first): token first is the first that the window scores,
    token stop the last. Every token from 1 to length - 1 is scored once, in order; the last window
    is the first one that scores token length - 1. A document of less than 2 tokens has no windows:
    shape (0, 3).
    Hint: a token that a window before has scored is context.
    """
    raise NotImplementedError
