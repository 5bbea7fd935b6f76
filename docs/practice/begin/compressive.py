"""Compressive Transformer in seven tasks (docs/compressive.md): distances, a queue, losses.

B lanes, H heads, N queries of a segment, K keys, E head width, D width.
Write each function, then ask what is right:

    python -m docs.practice --in FOLDER compressive

FOLDER is the one that this file is in; the command runs in the clone. Functions return NumPy
arrays, a tuple of them where several are named, and leave their arguments as they are.
"""

import numpy as np  # noqa: F401


def relative_shift(by_distance):
    """1. Transformer-XL's shift: scores by distance become scores by key. Returns (B, H, N, K).

    by_distance (B, H, N, K) has the distances K - 1, ..., 1, 0 of every query. Query i stands at
    key K - N + i, so its row moves left by N - 1 - i. What the mask will hide may be anything:
    the judge looks at keys j <= K - N + i alone, and sets the others to zero.
    K may be N: there is no memory then.

    >>> relative_shift(np.array([[[[4, 5, 6], [7, 8, 9]]]]))[0, 0, 1].tolist()
    [7, 8, 9]
    """
    raise NotImplementedError


def relative_shift_backward(dout):
    """2. A derivation: back through task 1. Returns (B, H, N, K), the gradient of by_distance.

    dout (B, H, N, K) is zero where the mask hides. K may be N.

    >>> relative_shift_backward(np.array([[[[5, 6, 0], [7, 8, 9]]]]))[0, 0].tolist()
    [[0, 5, 6], [7, 8, 9]]
    """
    raise NotImplementedError


def relative_scores(query, key, distance_key, content_bias, distance_bias):
    """3. Transformer-XL's scores, masked. Returns (B, H, N, K), -inf where a key is hidden.

    query (B, H, N, E); key (B, H, K, E); distance_key (H, K, E), of the distances K - 1, ..., 0;
    u = content_bias, v = distance_bias (H, E).
    z_ij = ((q_i + u)·k_j + (q_i + v)·r_{i-j}) / sqrt(E), hidden if j > K - N + i. K may be N.

    >>> one = np.ones((1, 1, 1, 4))
    >>> relative_scores(one, one, one[0], 0 * one[0, :, 0], one[0, :, 0]).ravel().tolist()
    [6.0]
    """
    raise NotImplementedError


def remember(h, memory, compressed, weight):
    """4. A queue that compresses what leaves it (Algorithm 1, l. 8-11).

    Returns (next memory, next compressed): (B, M, D) and (B, C, D). h (B, N, D) enters;
    memory (B, M, D) and compressed (B, C, D) have the oldest row first; weight (D, c D). The N
    oldest rows of [memory; h] leave, c rows end to end through weight make one, and these N / c
    rows enter the compressed memory, whose oldest leave. M and C may be smaller or larger than N.
    M and C may be 0.

    >>> h, memory = np.array([[[3.0], [4.0]]]), np.array([[[1.0], [2.0]]])
    >>> after = remember(h, memory, np.zeros((1, 1, 1)), np.ones((1, 2)))
    >>> [each.ravel().tolist() for each in after]
    [[3.0, 4.0], [3.0]]
    """
    raise NotImplementedError


def reconstruction_loss(h, evicted, new, query, key, value):
    """5. Attention reconstruction (Algorithm 2), and what it may train.

    Returns (loss, dnew, dh, devicted, dkey). h (B, N, D), evicted (B, N, D), new (B, N / c, D);
    query, key, value (D, D) are matrices of one head. attention(x) = softmax over rows of x of
    (h query^T)·(x key^T) / sqrt(D), times x value^T;  loss = mean of
    (attention(new) - attention(evicted))^2. Only new gets a gradient: h, evicted and the
    matrices are data to this loss (l. 3-5).

    >>> one = np.ones((1, 1, 1))
    >>> loss, dnew, *_ = reconstruction_loss(one, one, 3 * one, *[one[0]] * 3)
    >>> float(loss), dnew.ravel().tolist()
    (4.0, [4.0])
    """
    raise NotImplementedError


def relative_scores_backward(dscores, query, key, distance_key, content_bias, distance_bias):
    """6. A derivation: back through task 3.

    Returns (dquery, dkey, ddistance_key, dcontent_bias, ddistance_bias), each in the shape of what
    it is of. dscores (B, H, N, K) is zero where the mask hides; the others are those of task 3.
    K may be N.

    >>> one = np.ones((1, 1, 1, 4))
    >>> given = (2 * one[..., :1], one, one, 3 * one[0], 0 * one[0, :, 0], one[0, :, 0])
    >>> [float(each.ravel()[0]) for each in relative_scores_backward(*given)]
    [4.0, 1.0, 2.0, 1.0, 3.0]
    """
    raise NotImplementedError


def tied_auto_encoding(rows, weight):
    """7. A derivation: auto-encoding with one matrix. Returns (loss, dweight).

    rows (B, n, c D) are the evicted rows, c of them end to end, and data. weight (D, c D) makes
    new = rows weight^T of them, and decodes it too: loss = mean of (new weight - rows)^2, over all
    numbers. No size is 0.

    >>> loss, dweight = tied_auto_encoding(np.array([[[1.0, 0.0]]]), np.array([[1.0, 1.0]]))
    >>> float(loss), dweight.ravel().tolist()
    (0.5, [1.0, 1.0])
    """
    raise NotImplementedError
