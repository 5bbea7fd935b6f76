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
    Hint: query i is at key i + k - n.
    Hint: one comparison of np.arange with np.arange[:, None] does it.
    """
    raise NotImplementedError


def attention(query, key, value, mask):
    """2. Attention. Returns (out, weights): (B, H, N, E) and (B, H, N, K).

    query (B, H, N, E); key, value (B, H, K, E); mask (N, K), true where a key is seen.
    z_ij = q_i·k_j / sqrt(E), -inf where hidden;  a = softmax over j;  y_i = sum_j a_ij v_j.
    Hint: key.swapaxes(-1, -2) makes it a matrix product.
    Hint: subtract the largest score before exp; scores may be a thousand.
    """
    raise NotImplementedError


def attention_backward(dout, query, key, value, weights):
    """3. Back through attention. Returns (dquery, dkey, dvalue).

    da_ij = dy_i·v_j, dv_j = sum_i a_ij dy_i;  dz_ij = a_ij (da_ij - sum_l a_il da_il);
    dq_i = sum_j dz_ij k_j / sqrt(E);  dk_j = sum_i dz_ij q_i / sqrt(E).
    Hint: a sum over i is a product with the transposed matrix.
    Hint: check each result's shape against its variable's.
    """
    raise NotImplementedError


def cross_entropy(logits, targets, scored):
    """4. The loss and its gradient. Returns (loss, dlogits).

    logits (B, N, V); targets (B, N) of token ids; scored (B, N), false where nothing counts.
    loss = sum of -log p of the targets at scored places, p = softmax(logits);
    dlogits = p - onehot(target) there, and 0 elsewhere.
    Hint: log p = z - max z - log(sum of exp(z - max z)).
    Hint: np.take_along_axis picks the targets.
    """
    raise NotImplementedError


def norm_backward(dy, x, scale):
    """5. Back through a norm. Returns (dx, dscale, dbias).

    dy, x (B, N, D); y = n scale + bias, n = (x - mean x) / s, s = sqrt(variance of x + 1e-6).
    dn = dy scale;  dx = (dn - mean(dn) - n mean(n dn)) / s, means over D.
    Hint: the mean and the variance depend on x too; that is where two of the three terms come from.
    Hint: scale and bias are shared by all B N rows.
    """
    raise NotImplementedError
