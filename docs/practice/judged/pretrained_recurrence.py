"""The judge's side of begin/pretrained_recurrence.py: right answers from the reference, inputs.

Nothing here is shown to the reader; pretrained_recurrence.txt has the mistakes.
"""

import numpy as np

from docs.practice.tasks import Task, normal, ranges
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
    Task(
        pool_backward,
        {"dlayer_scores": "L", "doutputs": "L, B, N, D"},
        POOL,
        {"dpooled": "B, D", "layer_scores": "L", "outputs": "L, B, N, D"},
    ),
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
    Task(
        attention_pool_backward,
        {"dmixed": "B, N, D", "dfixed_key": "D"},
        POOL,
        {"dpooled": "B, D", "mixed": "B, N, D", "fixed_key": "D"},
    ),
)
