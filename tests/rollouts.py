"""A rollout of several segments, by a reference and by its accelerated model: everything that the two must agree on, by name.

Segments are (tokens, targets, scored) arrays of two lanes; lane 1 starts a document at segment `start`. The objective is the
summed cross-entropy plus the auxiliary losses of every segment.
"""

import numpy as np
import torch
from agreement import assert_agree, named

from accelerated.protocol import replace_lanes, require_gradient


def random_segments(config, rng, count=3):
    cut = []
    for _ in range(count):
        tokens, targets = rng.integers(config.vocabulary, size=(2, 2, config.segment))
        cut.append((tokens, targets, rng.random(tokens.shape) < 0.7))
    return cut


def by_lane(first, second):
    """Lane 0 of one state, lane 1 of another."""
    return type(first)(*(np.concatenate([a[:1], b[1:]]) for a, b in zip(first, second, strict=True)))


def reference_rollout(ref, params, config, segments, start, state):
    """{name: array} of losses, logits, states and gradients in float64."""
    caches, rows, total = [], {}, 0.0
    for index, (tokens, targets, scored) in enumerate(segments):
        if index == start:
            state = by_lane(state, ref.initial_state(params, config, len(tokens)))
        logits, state, cache = ref.forward(params, config, tokens, state)
        loss, loss_cache = ref.cross_entropy_forward(logits, targets, scored)
        losses, auxiliary_cache = (
            ref.auxiliary_forward(params, config, cache) if hasattr(ref, "auxiliary_forward") else ({}, None)
        )
        rows |= {f"logits {index}": logits} | named(f"state {index}", state)
        rows |= {f"auxiliary {index} {name}": np.array([loss]) for name, loss in losses.items()}
        total += loss
        caches.append((cache, loss_cache, auxiliary_cache))
    grads, dstate = {}, None
    for index in reversed(range(len(segments))):
        cache, loss_cache, auxiliary_cache = caches[index]
        dparams, dstate = ref.backward(params, config, cache, ref.cross_entropy_backward(1.0, loss_cache), dstate)
        ref.add_into(grads, dparams)
        if auxiliary_cache is not None:
            ref.add_into(grads, ref.auxiliary_backward(config, 1.0, auxiliary_cache))
        if index == start:
            zero = type(dstate)(*(np.zeros_like(field) for field in dstate))
            if hasattr(ref, "initial_state_backward"):
                ref.add_into(grads, ref.initial_state_backward(config, by_lane(zero, dstate)))
            dstate = by_lane(dstate, zero)
    rows |= {f"grad {name}": value for name, value in grads.items()} | named("grad state", dstate)
    return rows | {"loss": np.array([total])}


def accelerated_rollout(model, segments, start, state):
    """The same of a model; leaves the gradients in .grad."""
    leaf = require_gradient(state)
    state, total, rows = leaf, 0.0, {}
    objective = 0.0
    for index, (tokens, targets, scored) in enumerate(segments):
        state = replace_lanes(torch.tensor([False, index == start]), model.initial_state(2), state)
        logits, state, auxiliary = model(torch.tensor(tokens), state)
        picked = logits.log_softmax(-1).gather(-1, torch.tensor(targets)[..., None])[..., 0]
        loss = -picked[torch.tensor(scored)].sum()
        total, objective = total + loss, objective + loss + sum(auxiliary.values())
        rows |= {f"logits {index}": logits} | named(f"state {index}", state)
        rows |= {f"auxiliary {index} {name}": loss[None] for name, loss in auxiliary.items()}
    objective.backward()
    rows |= {f"grad {n}": torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    dstate = type(leaf)(*(torch.zeros_like(f) if f.grad is None else f.grad for f in leaf))
    return rows | named("grad state", dstate) | {"loss": total[None]}


def filled(rows):
    """The rows that hold numbers: a state without rows of some kind has fields of size zero."""
    return {name: row for name, row in rows.items() if 0 not in row.shape}


def check_rollout(ref, params, model, config, state, to_torch, tolerance, title):
    """Everything over three segments with a document start in the second, then the weights after five steps of descent."""
    segments = random_segments(config, np.random.default_rng(5))
    expected = filled(reference_rollout(ref, params, config, segments, 1, state))
    assert_agree(expected, filled(accelerated_rollout(model, segments, 1, to_torch(state))), tolerance, title)
    five_steps(ref, params, model, config, segments, state, to_torch, tolerance)


def five_steps(ref, params, model, config, segments, state, to_torch, tolerance):
    """Momentum descent on both sides; the weights must still agree."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    momentum = {name: np.zeros_like(value) for name, value in params.items()}
    for _ in range(5):
        optimizer.zero_grad()
        rows = reference_rollout(ref, params, config, segments, 1, state)
        accelerated_rollout(model, segments, 1, to_torch(state))
        optimizer.step()
        momentum = {name: 0.9 * momentum[name] + rows[f"grad {name}"] for name in params}
        params = {name: value - 1e-3 * momentum[name] for name, value in params.items()}
    assert_agree(params, dict(model.state_dict()), tolerance, "weights after five steps")
