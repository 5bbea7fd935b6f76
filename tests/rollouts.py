"""A rollout (consecutive segments) by a reference and by its accelerated model: everything that must agree, by name.

Segments are (tokens, targets, scored) arrays of two lanes (rows of the batch), with a reference's Task if the segment has one;
lane 1 starts a document at segment `start`. The objective is the sum over segments of cross-entropy and auxiliary losses.
"""

import numpy as np
import torch
from comparison import assert_agree, named
from tolerances import LADDER
from variants import PAPERS, random_task

from accelerated import replay
from accelerated.data.lanes import Segment
from accelerated.protocol import replace_lanes, require_gradient

RATE, MOMENTUM = 1e-3, 0.9  # of gradient descent on both sides


def random_segments(paper, name, rng):
    """Three segments, the last one short if the model reads short ones; if it reads tasks, one more and all pairs of tasks."""
    config, segments = PAPERS[paper].variant(name), []
    lengths = [config.segment, config.segment, max(1, config.segment - PAPERS[paper].shorter)]
    tasks = [(), (), ()]
    if name in PAPERS[paper].tasks:
        lengths.append(config.segment)
        tasks = [(), *((random_task(config, rng, kinds),) for kinds in ([0, 1], [1, 2], [2, 0]))]
    for length, task in zip(lengths, tasks, strict=True):
        tokens, targets = rng.integers(config.vocabulary, size=(2, 2, length))
        segments.append((tokens, targets, rng.random(tokens.shape) < 0.7, *task))
    return segments


def torch_segments(paper, segments, starts):
    """[Segment] of segments in arrays; starts (2,) of each are true in lanes where a document starts."""
    found = []
    for (tokens, targets, scored, *task), begins in zip(segments, starts, strict=True):
        rows = (torch.tensor(array) for array in (tokens, targets, scored, begins))
        found.append(Segment(*rows, *(PAPERS[paper].to_torch(each) for each in task)))
    return found


def check_back_propagation(model, segments, state):
    """The three methods agree on loss, gradients and next state, whatever dropout drops."""
    found = {}
    for method, propagate in replay.BACKPROP.items():
        model.train().zero_grad()
        torch.manual_seed(11)
        loss, after = propagate(model, segments, state)
        grads = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        found[method] = {"loss": loss[None]} | grads | rows_of_state(after)
    assert_agree(found["through_time"], found["checkpointed"], 1e-11)
    assert_agree(found["through_time"], found["memory_replay"], 1e-11)


def by_lane(first, second):
    """A state with lane 0 of the first and lane 1 of the second."""
    return type(first)(*(np.concatenate([a[:1], b[1:]]) for a, b in zip(first, second, strict=True)))


def reference_rollout(ref, params, config, segments, start, state):
    """{name: array} of losses, logits, states and gradients in float64."""
    caches, rows, total = [], {}, 0.0
    for index, (tokens, targets, scored, *task) in enumerate(segments):
        if index == start:
            state = by_lane(state, ref.initial_state(params, config, len(tokens)))
        logits, state, cache = ref.forward(params, config, tokens, state, None, *task)
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


def accelerated_rollout(paper, model, segments, start, state):
    """The same as reference_rollout for a model; leaves the gradients in .grad."""
    leaf = require_gradient(state)
    state, total, rows = leaf, 0.0, {}
    objective = 0.0
    for index, (tokens, targets, scored, *task) in enumerate(segments):
        state = replace_lanes(torch.tensor([False, index == start]), model.initial_state(2), state)
        logits, state, auxiliary = model(torch.tensor(tokens), state, *(PAPERS[paper].to_torch(each) for each in task))
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
    """The rows that are not empty: a state's field may have size zero."""
    return {name: row for name, row in rows.items() if 0 not in row.shape}


def rows_of_state(state):
    """A state's fields and their shapes as rows, so that empty fields are compared too."""
    return filled(named("state", state)) | {f"shape of {k}": np.array(field.shape) for k, field in state._asdict().items()}


def check_rollout(paper, config, params, segments, state, title):
    """Compare everything over the segments, with a document start in the second, then the weights after five steps."""
    ref, model = PAPERS[paper].reference, PAPERS[paper].model_with(params, config)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    velocity = {name: np.zeros_like(value) for name, value in params.items()}
    for step in range(5):
        optimizer.zero_grad()
        read = segments if step == 0 else segments[:2]  # enough to train on
        expected = reference_rollout(ref, params, config, read, 1, state)
        actual = accelerated_rollout(paper, model, read, 1, PAPERS[paper].to_torch(state))
        if step == 0:
            assert_agree(filled(expected), filled(actual), LADDER, title)
        optimizer.step()
        velocity = {name: MOMENTUM * velocity[name] + expected[f"grad {name}"] for name in params}
        params = {name: value - RATE * velocity[name] for name, value in params.items()}
    assert_agree(params, dict(model.state_dict()), LADDER, f"{title}: weights after five steps")


def dropout_from(rng):
    """A replacement for torch's dropout with the reference's random numbers, so that both sides drop the same entries."""

    def dropout(x, rate, training=True):
        if not training or rate == 0:
            return x
        tiles = x.unbind(2) if x.dim() == 5 else [x]  # a reference draws the matrix of sliding attention tile by tile
        kept = [torch.tensor((rng.random(tuple(tile.shape)) >= rate) / (1 - rate)) for tile in tiles]
        return x * (torch.stack(kept, 2) if x.dim() == 5 else kept[0])

    return dropout


def memformer_segments(config, rng, horizon, lanes=3):
    """A rollout for Memformer's reference, with document starts inside and, if the model reads tasks, some tasks."""
    segments = []
    for _ in range(horizon):
        tokens, targets = rng.integers(config.vocabulary, size=(2, lanes, config.segment))
        scored, starts = rng.random((lanes, config.segment)) < 0.7, rng.random(lanes) < 0.3
        task = random_task(config, rng, rng.integers(3, size=lanes)) if config.encoder_layers and rng.random() < 0.6 else None
        segments.append(PAPERS["memformer"].reference.Segment(tokens, targets, scored, starts, task))
    return segments
