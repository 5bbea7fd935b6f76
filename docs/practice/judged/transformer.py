"""The judge's side of begin/transformer.py: right answers from the reference, inputs.

Nothing here is shown to the reader; transformer.txt has the mistakes.
"""

import numpy as np

from docs.practice.tasks import Task, backward_task, normal, normals, ranges
from reference import memformer as reference

ROWS = ranges(B=3, H=4, N=6, K=7, E=8)
ATTENDED = {"query": "B, H, N, E", "key": "B, H, K, E", "value": "B, H, K, E"}


def causal_mask(n, k):
    query = np.arange(n)[:, None]
    key = np.arange(k)[None, :]
    return key <= query + k - n


def mask_inputs(rng, n, m):
    return {"n": n, "k": n + m}


def attention(query, key, value, mask):
    out, cache = reference.masked_attention_forward(query, key, value, mask, 0.0, None)
    return out, cache[3]


def attention_inputs(rng, **sizes):
    """Now and then large scores; every query sees the first key."""
    large = 1 + 9999 * rng.integers(0, 2)
    given = normals(rng, sizes, ATTENDED)
    given["query"] *= large
    mask = rng.random((sizes["N"], sizes["K"])) < 0.6
    mask[:, 0] = True
    return given | {"mask": mask}


def attention_backward(dout, query, key, value, weights):
    cache = (query, key, value, weights, weights, 1.0)
    return reference.masked_attention_backward(dout, cache)


def backward_inputs(rng, **sizes):
    shapes = {"weights": "B, H, N, K", "dout": "B, H, N, E"}
    given = normals(rng, sizes, shapes | ATTENDED)
    weights, _ = reference.softmax_forward(given["weights"])
    return given | {"weights": weights}


def cross_entropy(logits, targets, scored):
    loss, cache = reference.cross_entropy_forward(logits, targets, scored)
    return loss, reference.cross_entropy_backward(1.0, cache)


def loss_inputs(rng, B, N, V):
    """Logits, now and then large; some places do not count."""
    return {
        "logits": normal(rng, B, N, V) + 1000 * rng.integers(0, 2),
        "targets": rng.integers(V, size=(B, N)),
        "scored": rng.random((B, N)) < 0.7,
    }


def norm_backward(dy, x, scale):
    p = {"norm.scale": scale, "norm.bias": np.zeros_like(scale)}
    _, cache = reference.layer_norm_forward(p, "norm", x)
    dx, grads = reference.layer_norm_backward(dy, cache)
    return dx, grads["norm.scale"], grads["norm.bias"]


def norm_inputs(rng, B, N, D):
    """Inputs, some of them so small that epsilon counts."""
    size = 1e-2 ** rng.integers(0, 2)
    return {"dy": normal(rng, B, N, D), "x": normal(rng, B, N, D) * size, "scale": normal(rng, D)}


TASKS = (
    Task(causal_mask, {"mask": "n, k"}, ranges(n=5, m=(0, 4)), mask_inputs),
    Task(attention, {"out": "B, H, N, E", "weights": "B, H, N, K"}, ROWS, attention_inputs),
    backward_task(attention_backward, ROWS, "", ATTENDED, backward_inputs),
    Task(
        cross_entropy,
        {"loss": "", "dlogits": "B, N, V"},
        ranges(B=4, N=6, V=(2, 9)),
        loss_inputs,
    ),
    Task(
        norm_backward,
        {"dx": "B, N, D", "dscale": "D", "dbias": "D"},
        ranges(B=4, N=6, D=(3, 9)),
        norm_inputs,
    ),
)
