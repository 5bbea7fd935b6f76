"""The judge's side of begin/block_recurrent.py: right answers from the reference, inputs.

Nothing here is shown to the reader; block_recurrent.txt has the mistakes.
"""

import numpy as np

from docs.practice.tasks import Task, backward_task, normal, ranges
from reference import block_recurrent as reference
from reference.variants import block_recurrent as variants


def tile_mask(window):
    return reference.tile_mask(window)


def position_bucket(distance, buckets, max_distance):
    return reference.position_bucket(distance, buckets, max_distance)


def bucket_inputs(rng, N, e, m):
    """Distances below 0, below e, and beyond the largest."""
    distance = np.arange(-N, 4 * N)
    return {"distance": distance, "buckets": 2 * e, "max_distance": 2 * e + 2 * m - 1}


def gate_backward(dout, carry, hidden, weight, bias_z, bias_g):
    p = {"weight_z": weight, "bias_z": bias_z, "bias_g": bias_g}
    _, cache = reference.fixed_gate_forward(p, carry, hidden)
    dcarry, dhidden, grads = reference.fixed_gate_backward(dout, cache)
    return dcarry, dhidden, grads["weight_z"], grads["bias_z"], grads["bias_g"]


def lstm_parameters(weights, biases):
    p = {}
    for number, name in enumerate("zif"):
        p |= {f"weight_{name}": weights[number], f"bias_{name}": biases[number]}
    return p


def lstm_gate(carry, hidden, weights, biases):
    out, _ = variants.lstm_gate_forward(lstm_parameters(weights, biases), carry, hidden)
    return out


def lstm_gate_backward(dout, carry, hidden, weights, biases):
    _, cache = variants.lstm_gate_forward(lstm_parameters(weights, biases), carry, hidden)
    dcarry, dhidden, grads = variants.lstm_gate_backward(dout, cache)
    dweights = np.stack([grads[f"weight_{name}"] for name in "zif"])
    dbiases = np.stack([grads[f"bias_{name}"] for name in "zif"])
    return dcarry, dhidden, dweights, dbiases


def recurrence(x, states, window, read, update):
    outs = []
    for at in range(0, x.shape[1], window):
        block = x[:, at : at + window]
        outs.append(read(block, states))
        states = update(states, block)
    return np.concatenate(outs, axis=1), states


def recurrence_inputs(rng, B, blocks, W, S, D):
    """Small functions in the places of attention and the gate."""
    matrix = normal(rng, D, D)

    def read(block, states):
        return np.tanh(block + states.mean(1, keepdims=True) @ matrix)

    def update(states, block):
        return np.tanh(0.5 * states + block.mean(1, keepdims=True))

    x = normal(rng, B, blocks * W, D)
    return {"x": x, "states": normal(rng, B, S, D), "window": W, "read": read, "update": update}


def moving_average_backward(dlast, first, written, bias_g):
    states = [first]
    g = reference.sigmoid(bias_g)
    for z in written:
        states.append(states[-1] * g + z * (1 - g))
    dg = 0 * g
    dstates = dlast
    dwritten = np.zeros_like(written)
    for t in reversed(range(len(written))):
        dg = dg + (dstates * (states[t] - written[t])).sum((0, 1))
        dwritten[t] = dstates * (1 - g)
        dstates = dstates * g
    return dstates, dwritten, dg * g * (1 - g)


def two_routes_backward(dlast, first, x, weight, bias_g):
    states = [first]
    g = reference.sigmoid(bias_g)
    candidates = []
    for row in x:
        candidates.append(np.tanh(states[-1] @ weight.T + row))
        states.append(states[-1] * g + candidates[-1] * (1 - g))
    dg = 0 * g
    dweight = 0 * weight
    dstates = dlast
    dx = np.zeros_like(x)
    for t in reversed(range(len(x))):
        z = candidates[t]
        dg = dg + (dstates * (states[t] - z)).sum((0, 1))
        dx[t] = dstates * (1 - g) * (1 - z**2)
        dweight = dweight + np.tensordot(dx[t], states[t], ((0, 1), (0, 1)))
        dstates = dstates * g + dx[t] @ weight
    return dstates, dx, dweight, dg * g * (1 - g)


GATE = ranges(B=4, S=5, D=6, F=7)
GATED = {"carry": "B, S, D", "hidden": "B, S, F"}
FIXED = {"weight": "D, F", "bias_z": "D", "bias_g": "D"}
LSTM = {"weights": "3, D, F", "biases": "3, D"}
BLOCKS = ranges(B=3, blocks=4, W=4, S=5, D=6)
ROLLOUT = ranges(K=(0, 4), B=3, S=5, D=6)
STATES = "B, S, D"
TASKS = (
    Task(tile_mask, {"mask": "W, 2W"}, ranges(W=6), lambda rng, W: {"window": W}),
    Task(
        position_bucket,
        {"bucket": "distances"},
        ranges(N=12, e=6, m=6),
        bucket_inputs,
    ),
    backward_task(gate_backward, GATE, STATES, GATED | FIXED),
    Task(lstm_gate, {"next states": STATES}, GATE, GATED | LSTM),
    Task(recurrence, {"out": "B, N, D", "states": STATES}, BLOCKS, recurrence_inputs),
    backward_task(lstm_gate_backward, GATE, STATES, GATED | LSTM),
    backward_task(
        moving_average_backward,
        ROLLOUT,
        STATES,
        {"first": STATES, "written": "K, B, S, D", "bias_g": "D"},
    ),
    backward_task(
        two_routes_backward,
        ROLLOUT,
        STATES,
        {"first": STATES, "x": "K, B, S, D", "weight": "D, D", "bias_g": "D"},
    ),
)
