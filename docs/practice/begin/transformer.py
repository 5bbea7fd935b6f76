"""What every Transformer has, in five tasks: a mask, attention, the loss, a norm, backwards.

Write each function, then ask what is right:

    python -m docs.practice --in FOLDER transformer

FOLDER is the one that this file is in; the command runs in the clone. Functions return NumPy
arrays, a tuple of them where several are named, and leave their arguments as they are.
"""

import numpy as np  # noqa: F401


def causal_mask(n, k):
    """1. Who sees whom, as a picture. Returns (n, k) of bool, true where query i sees key j.

    The keys are a memory of k - n rows, then the n tokens of the segment, whose queries are asked.
    A query sees all of the memory, and the segment up to itself.
    k - n may be 0.

    >>> causal_mask(2, 3).astype(int).tolist()
    [[1, 1, 0], [1, 1, 1]]
    """
    raise NotImplementedError


def attention(query, key, value, mask):
    """2. Attention. Returns (out, weights): (B, H, N, E) and (B, H, N, K).

    query (B, H, N, E); key, value (B, H, K, E); mask (N, K), true where a key is seen.
    z_ij = q_i·k_j / sqrt(E), -inf where hidden;  a = softmax over j;  y_i = sum_j a_ij v_j.

    >>> query, key = np.zeros((1, 1, 1, 1)), np.zeros((1, 1, 2, 1))
    >>> value = np.array([[[[2.0], [4.0]]]])
    >>> out, weights = attention(query, key, value, np.array([[True, True]]))
    >>> out.ravel().tolist(), weights.ravel().tolist()
    ([3.0], [0.5, 0.5])
    """
    raise NotImplementedError


def attention_backward(dout, query, key, value, weights):
    """3. Back through attention. Returns (dquery, dkey, dvalue).

    The forward is y = a v, a = softmax(z), z = q k^T / sqrt(E).

    >>> one = np.ones((1, 1, 1, 1))
    >>> two = np.array([[[[0.0], [2.0]]]])
    >>> given = (one, one, two, two, np.array([[[[0.5, 0.5]]]]))
    >>> [each.ravel().tolist() for each in attention_backward(*given)]
    [[1.0], [-0.5, 0.5], [0.5, 0.5]]
    """
    raise NotImplementedError


def cross_entropy(logits, targets, scored):
    """4. The loss and its gradient. Returns (loss, dlogits).

    logits (B, N, V); targets (B, N) of token ids; scored (B, N), false where nothing counts.
    loss = sum of -log p of the targets at scored places, p = softmax(logits);
    dlogits is the loss's gradient; what is not scored gets none.

    >>> given = (np.zeros((1, 1, 2)), np.array([[0]]), np.array([[True]]))
    >>> [each.round(4).ravel().tolist() for each in map(np.array, cross_entropy(*given))]
    [[0.6931], [-0.5, 0.5]]
    """
    raise NotImplementedError


def norm_backward(dy, x, scale):
    """5. Back through a norm. Returns (dx, dscale, dbias).

    dy, x (B, N, D); y = n scale + bias, n = (x - mean x) / s, s = sqrt(variance of x + 1e-6).

    >>> given = (np.array([[[0.0, 0.0, 1.0]]]), np.array([[[1.0, 2.0, 6.0]]]), np.ones(3))
    >>> [each.round(3).ravel().tolist() for each in norm_backward(*given)]
    [[0.044, -0.055, 0.011], [0.0, 0.0, 1.389], [0.0, 0.0, 1.0]]
    """
    raise NotImplementedError
