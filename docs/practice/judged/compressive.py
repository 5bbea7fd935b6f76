"""The judge's side of begin/compressive.py: right answers from the reference, inputs.

Nothing here is shown to the reader; compressive.txt has the mistakes.
"""

import numpy as np

from docs.practice.tasks import Task, backward_task, normal, normals, ranges
from reference import compressive as reference

HEADS = ranges(B=3, H=3, N=5, m=(0, 5), E=7)
SCORED = {
    "query": "B, H, N, E",
    "key": "B, H, N + m, E",
    "distance_key": "H, N + m, E",
    "content_bias": "H, E",
    "distance_bias": "H, E",
}


class OneHead:
    """A config of one head."""

    heads = 1

    @property
    def operations(self):
        """The method's own."""
        return reference.operations_with()


def seen(array):
    """An array (B, H, N, K) with zeros where the causal mask hides."""
    mask = reference.causal_mask(*array.shape[-2:])
    return np.where(mask, array, 0.0)


def relative_shift(by_distance):
    out, _ = reference.relative_shift_forward(by_distance)
    return out


def call_and_mask(answer, given):
    """What an answer returns, where the mask does not hide."""
    out = answer(**given)
    has_shape = isinstance(out, np.ndarray) and out.shape == given["by_distance"].shape
    return seen(out) if has_shape else out


def relative_shift_backward(dout):
    return reference.relative_shift_backward(dout, None)


def shift_backward_inputs(rng, B, H, N, m, E):
    return {"dout": seen(normal(rng, B, H, N, N + m))}


def relative_scores(query, key, distance_key, content_bias, distance_bias):
    content_query = query + content_bias[:, None]
    distance_query = query + distance_bias[:, None]
    by_content = content_query @ key.swapaxes(-1, -2)
    by_distance = distance_query @ distance_key.swapaxes(-1, -2)
    scores = by_content + relative_shift(by_distance)
    scaled = scores * query.shape[-1] ** -0.5
    mask = reference.causal_mask(*scores.shape[-2:])
    return np.where(mask, scaled, -np.inf)


def relative_scores_backward(dscores, query, key, distance_key, content_bias, distance_bias):
    scaled = dscores * query.shape[-1] ** -0.5
    by_distance = relative_shift_backward(scaled)
    dcontent_query = scaled @ key
    ddistance_query = by_distance @ distance_key
    dkey = scaled.swapaxes(-1, -2) @ (query + content_bias[:, None])
    ddistance_key = (by_distance.swapaxes(-1, -2) @ (query + distance_bias[:, None])).sum(0)
    dbiases = (dcontent_query.sum((0, 2)), ddistance_query.sum((0, 2)))
    return dcontent_query + ddistance_query, dkey, ddistance_key, *dbiases


def scores_backward_inputs(rng, **sizes):
    """Inputs of task 3, and gradients of its scores."""
    given = normals(rng, sizes, {"dscores": "B, H, N, N + m"} | SCORED)
    return given | {"dscores": seen(given["dscores"])}


def remember(h, memory, compressed, weight):
    n = h.shape[1]
    queue = np.concatenate([memory, h], axis=1)
    evicted = queue[:, :n]
    next_memory = queue[:, n:]
    flat = evicted.reshape(len(h), -1, weight.shape[1])
    new = flat @ weight.T
    compressed_queue = np.concatenate([compressed, new], axis=1)
    next_compressed = compressed_queue[:, new.shape[1] :]
    return next_memory, next_compressed


def reconstruction_loss(h, evicted, new, query, key, value):
    p = {"query": query, "key": key, "value": value}
    loss, cache = reference.attention_reconstruction_forward(p, OneHead(), h, evicted, new)
    dnew, _ = reference.attention_reconstruction_backward(1.0, cache)
    return loss, dnew, np.zeros_like(h), np.zeros_like(evicted), np.zeros_like(key)


def tied_auto_encoding(rows, weight):
    new = rows @ weight.T
    difference = new @ weight - rows
    derror = 2 * difference / difference.size
    by_decoder = np.tensordot(new, derror, ((0, 1), (0, 1)))
    by_encoder = np.tensordot(derror @ weight.T, rows, ((0, 1), (0, 1)))
    return (difference**2).mean(), by_decoder + by_encoder


TASKS = (
    Task(
        relative_shift,
        {"out": "B, H, N, K"},
        HEADS,
        {"by_distance": "B, H, N, N + m"},
        call=call_and_mask,
    ),
    Task(relative_shift_backward, {"dby_distance": "B, H, N, K"}, HEADS, shift_backward_inputs),
    Task(relative_scores, {"scores": "B, H, N, K"}, HEADS, SCORED),
    Task(
        remember,
        {"next memory": "B, M, D", "next compressed": "B, C, D"},
        ranges(B=3, new=3, c=4, M=(0, 9), C=(0, 7), D=5),
        {
            "h": "B, new * c, D",
            "memory": "B, M, D",
            "compressed": "B, C, D",
            "weight": "D, c * D",
        },
    ),
    Task(
        reconstruction_loss,
        {"loss": "", "dnew": "B, N/c, D", "dh": "B, N, D", "devicted": "B, N, D", "dkey": "D, D"},
        ranges(B=3, new=3, c=4, D=6),
        {
            "h": "B, new * c, D",
            "evicted": "B, new * c, D",
            "new": "B, new, D",
            "query": "D, D",
            "key": "D, D",
            "value": "D, D",
        },
    ),
    backward_task(relative_scores_backward, HEADS, "", SCORED, scores_backward_inputs),
    Task(
        tied_auto_encoding,
        {"loss": "", "dweight": "D, c * D"},
        ranges(B=3, n=4, c=3, D=5),
        {"rows": "B, n, c * D", "weight": "D, c * D"},
    ),
)
