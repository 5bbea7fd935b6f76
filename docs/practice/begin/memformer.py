"""Memformer in nine tasks (docs/memformer.md): its slots, a step, a document, gradients.

B lanes, H heads, S slots, N tokens, E head width, D/H width of a value.
Write each function, then ask what is right:

    python -m docs.practice --in FOLDER memformer

FOLDER is the one that this file is in; the command runs in the clone. Functions return NumPy
arrays, a tuple of them where several are named, and leave their arguments as they are.
"""

import numpy as np  # noqa: F401


def slot_scores(query, self_key, key, readable):
    """1. What a slot sees: itself and N encodings, no other slot. Returns (B, H, S, 1 + N).

    query, self_key (B, H, S, E); key (B, H, N, E); readable (B, N), false on padding.
    Figure 2c:  z_* = q·k_* / sqrt(E), first of the row;  z_j = q·k_j / sqrt(E).

    >>> two = np.array([[[[2.0]]]])
    >>> slot_scores(two, two, 3 * two, np.array([[True]])).ravel().tolist()
    [4.0, 12.0]
    """
    raise NotImplementedError


def slot_attention(scores, slots, value):
    """2. How a slot is written: a mean of itself and of the values. Returns (B, H, S, D/H).

    scores (B, H, S, 1 + N) from the first task; slots (B, H, S, D/H); value (B, H, N, D/H).
    Figure 2c:  a = softmax(z_*, z_0, ...);  m' = a_* m + sum_j a_j v_j.

    >>> slots, value = np.array([[[[2.0]]]]), np.array([[[[4.0]]]])
    >>> slot_attention(np.zeros((1, 1, 1, 2)), slots, value).ravel().tolist()
    [3.0]
    """
    raise NotImplementedError


def slot_attention_backward(dnew, query, self_key, key, slots, value, weights):
    """3. Back through tasks 2 and 1. Returns (dquery, dself_key, dkey, dslots, dvalue).

    dnew (B, H, S, D/H) is the gradient of m'; weights (B, H, S, 1 + N) are a of task 2.
    value, slots (B, H, S, D/H) and the others are those of the forward.

    >>> one = np.ones((1, 1, 1, 1))
    >>> given = (one, one, 2 * one, one, 4 * one, 3 * one, np.array([[[[0.5, 0.5]]]]))
    >>> [float(each.ravel()[0]) for each in slot_attention_backward(*given)]
    [0.25, 0.25, -0.25, 0.5, 0.5]
    """
    raise NotImplementedError


def simplified_attention(query, key, value, positions):
    """4. Attention with relative positions, Eqs. 3 and 4. Returns (B, H, N, E).

    query, key, value (B, H, N, E); positions (2m + 1, E) has R of the distances i - j = -m, ..., m;
    distances further than m use the rows at the ends. No mask: it is the encoder's.
    z_ij = q_i·(k_j + R_{i-j}) / sqrt(E),  a = softmax over j;  y_i = sum_j a_ij (v_j + R_{i-j}).

    >>> one = np.ones((1, 1, 2, 1))
    >>> simplified_attention(0 * one, one, one, np.array([[0.0], [1.0], [2.0]])).ravel().tolist()
    [1.5, 2.5]
    """
    raise NotImplementedError


def step(tokens, memory, previous, encode, write, decode):
    """5. One step, Eqs. 5 and 6. Returns (logits, next memory, next previous).

    tokens (B, N) is s_t, previous (B, N) is s_{t-1}, memory (B, S, D) is M_t.
    encode(tokens, memory) gives encodings (B, N, D), write(memory, encodings) the next memory,
    decode(tokens, encodings) the logits (B, N, V).

    >>> functions = (lambda t, m: t + m, lambda m, e: m + e, lambda t, e: t * e)
    >>> [int(each[0]) for each in step(np.array([2]), np.array([10]), np.array([1]), *functions)]
    [22, 21, 2]
    """
    raise NotImplementedError


def document_start_backward(starts, dread, keep):
    """6. A derivation: documents start, within K segments. Returns (dinitial, dcarried).

    Segment t reads initial (S, D) in lanes where starts[t] (B,) is true, and what was carried to it
    in the others. To the next one it carries keep (D,) times what it has read, plus something made
    of its tokens. dread (K, B, S, D) is the gradient of what each segment read, by its own loss.
    Results are the gradients of initial, and of what was carried to segment 0, (B, S, D).

    >>> starts, dread = np.array([[False, True], [True, False]]), np.array([[[[1.0]]] * 2] * 2)
    >>> [each.ravel().tolist() for each in document_start_backward(starts, dread, np.array([3.0]))]
    [[5.0], [1.0, 0.0]]
    """
    raise NotImplementedError


def memory_replay(segments, memory, advance, forward, backward):
    """7. Memory Replay Back-Propagation, Algorithm 1. Returns (loss, dweight, dmemory).

    segments is a list; memory (B, S, D) is the first.
    advance(segment, memory) gives the next memory;
    forward(segment, memory) gives (loss, next memory, cache);
    backward(cache, dnext_memory) gives (dweight, dmemory), the weights' gradient and the memory's.
    The last segment's dnext_memory is zeros. Return the sum of losses, the sum of the weights'
    gradients, and the gradient of the first memory.
    Store memories, never two caches: `cache = None` before the next forward.
    """
    raise NotImplementedError


def retention_backward(dkept, scores):
    """8. A derivation: what K writes leave of a slot. Returns dscores, (K, S, 1 + N).

    scores (K, S, 1 + N) are those of task 1 in K segments, of itself first. A write leaves the
    share a_* of the slot (task 2), so kept (S,) is the product of K shares. dkept is its gradient.
    K may be 0.

    >>> retention_backward(np.array([4.0]), np.zeros((2, 1, 2))).ravel().tolist()
    [0.5, -0.5, 0.5, -0.5]
    """
    raise NotImplementedError


def plain_write_backward(dnew, slots, encoded):
    """9. A derivation: writing without matrices. Returns (dslots, dencoded).

    dnew, slots (B, S, D); encoded (B, N, D). A slot m is its own query, key and value, and an
    encoding e_j is key and value: a = softmax of (m·m, m·e_0, ..., m·e_{N-1}) / sqrt(D), and
    m' = a_* m + sum_j a_j e_j. N may be 0.

    >>> one = np.ones((1, 1, 1))
    >>> [each.ravel().tolist() for each in plain_write_backward(one, 0 * one, 2 * one)]
    [[1.5], [0.5]]
    """
    raise NotImplementedError
