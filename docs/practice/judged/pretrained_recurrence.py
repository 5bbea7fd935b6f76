"""The judge's side of begin/pretrained_recurrence.py: right answers from the reference, inputs.

Nothing here is shown to the reader; pretrained_recurrence.txt has the mistakes.
"""

import numpy as np

from docs.practice.tasks import Task, backward_task, normal, ranges
from reference import pretrained_recurrence as reference


def pool(layer_scores, outputs):
    mixed, _ = reference.mix_forward(layer_scores, outputs)
    pooled, _ = reference.mean_over_positions_forward({}, mixed)
    return pooled


def pool_inputs(rng, L, B, N, D):
    """Scores, now and then large."""
    large = 1000 * rng.integers(0, 2)
    return {"layer_scores": normal(rng, L) + large, "outputs": normal(rng, L, B, N, D)}


def pool_backward(dpooled, layer_scores, outputs):
    _, cache = reference.mix_forward(layer_scores, outputs)
    dmixed, _ = reference.mean_over_positions_backward(dpooled, outputs.shape[1:])
    return reference.mix_backward(dmixed, cache)


def attention_pool_backward(dpooled, mixed, fixed_key):
    scale = mixed.shape[-1] ** -0.5
    weights, _ = reference.softmax_forward(mixed @ fixed_key * scale)  # (B, N)
    dweights = (mixed @ dpooled[:, :, None])[:, :, 0]
    dscores = reference.softmax_backward(dweights, weights) * scale
    dmixed = weights[:, :, None] * dpooled[:, None] + dscores[:, :, None] * fixed_key
    return dmixed, np.tensordot(dscores, mixed, 2)


def fading_pool_backward(dpooled, mixed, rate):
    n = mixed.shape[1]
    age = np.arange(n - 1, -1, -1.0)[:, None]  # (N, 1)
    weights, _ = reference.softmax_forward((-rate * age).T)
    weights = weights.T  # (N, D)
    pooled = (weights * mixed).sum(1, keepdims=True)
    dmixed = weights * dpooled[:, None]
    drate = -(dmixed * age * (mixed - pooled)).sum((0, 1))
    return dmixed, drate


def document_backward(dpooled, x, weight):
    n = x.shape[2]
    rows = 1 + n
    pooled = [x[0].mean(1)]
    for window in x[1:]:
        pooled.append((pooled[-1] @ weight.T + window.sum(1)) / rows)
    dx = np.zeros_like(x)
    dweight = 0 * weight
    later = 0.0
    for t in reversed(range(1, len(x))):
        drow = (dpooled[t] + later) / rows
        dx[t] = drow[:, None]
        dweight = dweight + drow.T @ pooled[t - 1]
        later = drow @ weight
    dx[0] = (dpooled[0] + later)[:, None] / n
    return dx, dweight


def insertion_mask(length, vectors, present):
    return reference.window_mask(length, vectors, present)[:, 0]


def mask_inputs(rng, B, N, S):
    return {"length": N, "vectors": S, "present": rng.random(B) < 0.5}


def windows(length, size, overlap):
    config = reference.Config(segment=size, overlap=overlap)
    rows = []
    for window in reference.windows_of(config, np.arange(length)[None]):
        start = window.tokens[0, 0]
        first = window.targets[window.scored].min()
        rows.append((start, start + window.tokens.shape[1], first))
    return np.array(rows, int).reshape(-1, 3)


def window_inputs(rng, n, T, o):
    return {"length": n, "size": T, "overlap": min(o, T - 1)}


POOL = ranges(L=4, B=3, N=5, D=6)
TASKS = (
    Task(pool, {"pooled": "B, D"}, POOL, pool_inputs),
    backward_task(pool_backward, POOL, "B, D", {"layer_scores": "L", "outputs": "L, B, N, D"}),
    Task(
        insertion_mask,
        {"mask": "B, N, S + N"},
        ranges(B=4, N=6, S=(0, 3)),
        mask_inputs,
    ),
    Task(
        windows,
        {"windows": "windows, 3"},
        ranges(n=(0, 30), T=9, o=(0, 8)),
        window_inputs,
    ),
    backward_task(attention_pool_backward, POOL, "B, D", {"mixed": "B, N, D", "fixed_key": "D"}),
    backward_task(fading_pool_backward, POOL, "B, D", {"mixed": "B, N, D", "rate": "D"}),
    backward_task(
        document_backward,
        ranges(K=4, B=3, N=5, D=6),
        "K, B, D",
        {"x": "K, B, N, D", "weight": "D, D"},
    ),
)
