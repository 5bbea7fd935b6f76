"""Recurrence in a pretrained model in seven tasks (docs/pretrained_recurrence.md).

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

    >>> pool(np.zeros(2), np.array([[[[1.0], [3.0]]], [[[5.0], [7.0]]]])).ravel().tolist()
    [4.0]
    """
    raise NotImplementedError


def pool_backward(dpooled, layer_scores, outputs):
    """2. And back. Returns (dlayer_scores, doutputs): (L,) and (L, B, N, D).

    dpooled (B, D) is the gradient of z, Eq. 1 of task 1.

    >>> given = (np.ones((1, 1)), np.zeros(2), np.array([[[[1.0]]], [[[5.0]]]]))
    >>> [each.ravel().tolist() for each in pool_backward(*given)]
    [[-1.0, 1.0], [0.5, 0.5]]
    """
    raise NotImplementedError


def insertion_mask(length, vectors, present):
    """3. Who sees the vector. Returns (B, N, S + N) of bool, true where a token sees a key.

    The keys are S inserted vectors, then the N = length tokens of the window. A token sees the
    vectors if a window came before, present (B,), and of the tokens those up to itself.
    vectors may be 0.

    >>> insertion_mask(2, 1, np.array([False]))[0].astype(int).tolist()
    [[0, 1, 0], [0, 1, 1]]
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
    length and overlap may be 0.

    >>> windows(8, 4, 1).tolist()
    [[0, 4, 1], [3, 7, 5]]
    """
    raise NotImplementedError


def attention_pool_backward(dpooled, mixed, fixed_key):
    """5. A derivation: back through pooling by attention. Returns (dmixed, dfixed_key).

    dpooled (B, D); mixed (B, N, D); fixed_key (D,). The forward is
    z = sum_i w_i m_i,  w = softmax over i of m_i·fixed_key / sqrt(D).

    >>> given = (np.ones((1, 1)), np.array([[[1.0], [3.0]]]), np.zeros(1))
    >>> [each.ravel().tolist() for each in attention_pool_backward(*given)]
    [[0.5, 0.5], [1.0]]
    """
    raise NotImplementedError


def fading_pool_backward(dpooled, mixed, rate):
    """6. A derivation: back through a pooling that fades. Returns (dmixed, drate).

    dpooled (B, D); mixed (B, N, D); rate (D,), of each feature. A row's age is N - 1 - i, and
    z_d = sum_i w_id m_id,  w_id = softmax over i of -rate_d times the age. No size is 0.

    >>> given = (np.ones((1, 1)), np.array([[[1.0], [3.0]]]), np.zeros(1))
    >>> [each.ravel().tolist() for each in fading_pool_backward(*given)]
    [[0.5, 0.5], [0.5]]
    """
    raise NotImplementedError


def document_backward(dpooled, x, weight):
    """7. A derivation: a document of K windows in small. Returns (dx, dweight).

    x (K, B, N, D); weight (D, D). A window sees its N rows and, but for the first, weight z of the
    window before. z is the mean of what it sees: z_0 = mean of x_0's rows, and
    z_t = (weight z_{t-1} + sum of x_t's rows) / (1 + N). dpooled (K, B, D) is what each z has of
    losses without the windows that follow. No size is 0.

    >>> given = (np.array([[[0.0]], [[1.0]]]), np.array([[[[2.0]]], [[[4.0]]]]), np.ones((1, 1)))
    >>> [each.ravel().tolist() for each in document_backward(*given)]
    [[0.5, 0.5], [1.0]]
    """
    raise NotImplementedError
