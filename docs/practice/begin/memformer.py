"""Memformer in seven tasks (docs/memformer.md): its slots, a step, a document, gradients.

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
    Hint: z_* needs the product of each slot with itself alone, not a matrix product.
    Hint: the score of padding is -inf.
    """
    raise NotImplementedError


def slot_attention(scores, slots, value):
    """2. How a slot is written: a mean of itself and of the values. Returns (B, H, S, D/H).

    scores (B, H, S, 1 + N) from the first task; slots (B, H, S, D/H); value (B, H, N, D/H).
    Figure 2c:  a = softmax(z_*, z_0, ...);  m' = a_* m + sum_j a_j v_j.
    Hint: a slot's own value is the slot itself. Scores may be -inf or a thousand.
    Hint: subtract the largest score before exp.
    """
    raise NotImplementedError


def slot_attention_backward(dnew, query, self_key, key, slots, value, weights):
    """3. Back through tasks 2 and 1. Returns (dquery, dself_key, dkey, dslots, dvalue).

    dnew (B, H, S, D/H) is the gradient of m'; weights (B, H, S, 1 + N) are a of task 2.
    da_* = m·dm', da_j = v_j·dm';  dz = a (da - sum of a da);  dm = a_* dm', dv_j = sum_S a_j dm';
    dq = (dz_* k_* + sum_j dz_j k_j) / sqrt(E);  dk_* = dz_* q / sqrt(E).
    Hint: join da_* and da_j in one array of 1 + N before softmax's backward.
    Hint: each gradient has the shape of its variable: sum over what the variable was shared by.
    """
    raise NotImplementedError


def simplified_attention(query, key, value, positions):
    """4. Attention with relative positions, Eqs. 3 and 4. Returns (B, H, N, E).

    query, key, value (B, H, N, E); positions (2m + 1, E) has R of the distances i - j = -m, ..., m;
    distances further than m use the rows at the ends. No mask: it is the encoder's.
    z_ij = q_i·(k_j + R_{i-j}) / sqrt(E),  a = softmax over j;  y_i = sum_j a_ij (v_j + R_{i-j}).
    Hint: make the index (N, N) of rows with np.clip first.
    Hint: positions[index] is (N, N, E); np.einsum takes it apart.
    """
    raise NotImplementedError


def step(tokens, memory, previous, encode, write, decode):
    """5. One step, Eqs. 5 and 6. Returns (logits, next memory, next previous).

    tokens (B, N) is s_t, previous (B, N) is s_{t-1}, memory (B, S, D) is M_t.
    encode(tokens, memory) gives encodings (B, N, D), write(memory, encodings) the next memory,
    decode(tokens, encodings) the logits (B, N, V).
    Hint: the encoder reads the previous segment, the decoder the present one.
    Hint: what will the next step call previous?
    """
    raise NotImplementedError


def document_start_backward(starts, dread):
    """6. Where a document begins, the learned slots are read. Returns (dinitial, dcarried).

    The state that was read is initial (S, D) in lanes where starts (B,) is true, and what the
    segment before has left, carried (B, S, D), in the others. dread (B, S, D) is its gradient.
    Hint: initial was read by every lane that starts: its gradient is a sum.
    Hint: nothing flows from one document into the one before it.
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
    Hint: first a loop with advance that fills a list of the memories before each segment.
    Hint: then a loop from the last segment to the first, with forward and backward in it.
    """
    raise NotImplementedError
