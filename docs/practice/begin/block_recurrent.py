"""Block-Recurrent Transformer in eight tasks (docs/block_recurrent.md): mask, bucket, gate, block.

B lanes, S states, D width, W window, K blocks.
Write each function, then ask what is right:

    python -m docs.practice --in FOLDER block_recurrent

FOLDER is the one that this file is in; the command runs in the clone. Functions return NumPy
arrays, a tuple of them where several are named, and leave their arguments as they are.
"""

import numpy as np  # noqa: F401


def tile_mask(window):
    """1. Sliding attention as a picture. Returns (W, 2W) of bool, true where a query sees a key.

    A block's W queries meet the W keys of the block before it, then the W of its own (Figure 2).
    A token sees the W tokens before it, and not itself: 1 <= i - j <= W (section 3.1).

    >>> tile_mask(2).astype(int).tolist()
    [[1, 1, 0, 0], [0, 1, 1, 0]]
    """
    raise NotImplementedError


def position_bucket(distance, buckets, max_distance):
    """2. T5's buckets of distances. Returns integers of the shape of distance.

    Half of the buckets, e = buckets / 2, are for the distances 0 to e - 1, one each. A larger n has
    e + floor(log(n / e) / log(max_distance / e) (buckets - e)), at most buckets - 1.
    A negative distance is taken for 0.

    >>> position_bucket(np.array([-1, 0, 1, 2, 4, 99]), 4, 8).tolist()
    [0, 0, 1, 2, 3, 3]
    """
    raise NotImplementedError


def gate_backward(dout, carry, hidden, weight, bias_z, bias_g):
    """3. Back through the fixed gate. Returns (dcarry, dhidden, dweight, dbias_z, dbias_g).

    dout, carry (B, S, D); hidden (B, S, F); weight (D, F); biases (D,).
    z = hidden weight^T + bias_z (Eq. 1), g = sigmoid(bias_g) (Eq. 2),
    c' = c g + z (1 - g) (Eq. 3).

    >>> one = np.ones((1, 1, 1))
    >>> results = gate_backward(one, 3 * one, one, one[0], 0 * one[0, 0], 0 * one[0, 0])
    >>> [float(each.ravel()[0]) for each in results]
    [0.5, 0.5, 0.5, 0.5, 0.5]
    """
    raise NotImplementedError


def lstm_gate(carry, hidden, weights, biases):
    """4. The LSTM gate. Returns the next states (B, S, D).

    carry (B, S, D); hidden (B, S, F); weights (3, D, F) and biases (3, D) of z, i and f, in order.
    z = tanh(W_z h + b_z) (Eq. 4), i = sigmoid(W_i h + b_i - 1) (Eq. 5),
    f = sigmoid(W_f h + b_f + 1) (Eq. 6), c' = c f + z i (Eq. 7).

    >>> one = np.ones((1, 1, 1))
    >>> lstm_gate(one, one, np.zeros((3, 1, 1)), np.zeros((3, 1))).round(3).ravel().tolist()
    [0.731]
    """
    raise NotImplementedError


def recurrence(x, states, window, read, update):
    """5. The states through the blocks of a segment. Returns (out, states after the last block).

    x (B, N, D), N a multiple of window; states (B, S, D). In each block the tokens read the states
    before they are updated: read(block of x, states) gives (B, W, D), update(states, block of x)
    the next states.

    >>> x = np.array([[[1.0], [2.0], [3.0], [4.0]]])
    >>> read, update = lambda x, c: x * c, lambda c, x: c + x.sum()
    >>> given = (x, np.ones((1, 1, 1)), 2, read, update)
    >>> [each.ravel().tolist() for each in recurrence(*given)]
    [[1.0, 2.0, 12.0, 16.0], [11.0]]
    """
    raise NotImplementedError


def lstm_gate_backward(dout, carry, hidden, weights, biases):
    """6. A derivation: back through task 4. Returns (dcarry, dhidden, dweights, dbiases).

    dout, carry (B, S, D); hidden (B, S, F); weights (3, D, F) and biases (3, D) of z, i and f.
    The results have the shapes of carry, hidden, weights and biases.

    >>> one = np.ones((1, 1, 1))
    >>> given = (one, 2 * one, one, np.zeros((3, 1, 1)), np.array([[0.0], [1.0], [-1.0]]))
    >>> [each.ravel().tolist() for each in lstm_gate_backward(*given)]
    [[0.5], [0.0], [0.5, 0.0, 0.5], [0.5, 0.0, 0.5]]
    """
    raise NotImplementedError


def moving_average_backward(dlast, first, written, bias_g):
    """7. A derivation: back through K blocks of a fixed gate. Returns (dfirst, dwritten, dbias_g).

    c_{t+1} = g c_t + (1 - g) written_t,  g = sigmoid(bias_g), bias_g (D,).
    first (B, S, D) is c_0, written (K, B, S, D), and dlast (B, S, D) the gradient of c_K.
    K may be 0.

    >>> one = np.ones((1, 1, 1))
    >>> results = moving_average_backward(one, 8 * one, np.array([4 * one, 0 * one]), np.zeros(1))
    >>> [each.ravel().tolist() for each in results]
    [[0.25], [0.25, 0.5], [2.0]]
    """
    raise NotImplementedError


def two_routes_backward(dlast, first, x, weight, bias_g):
    """8. A derivation: the same, but a block reads the states before it writes.

    Returns (dfirst, dx, dweight, dbias_g). c_{t+1} = g c_t + (1 - g) tanh(c_t weight^T + x_t),
    g = sigmoid(bias_g); x (K, B, S, D); weight (D, D); the others are those of task 7.
    K may be 0.

    >>> one = np.ones((1, 1, 1))
    >>> results = two_routes_backward(one, 2 * one, 0 * one[None], 0 * one[0], np.zeros(1))
    >>> [each.ravel().tolist() for each in results]
    [[0.5], [0.5], [1.0], [0.5]]
    """
    raise NotImplementedError
