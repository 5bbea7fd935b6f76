"""A rollout (consecutive segments) by a reference and by its accelerated model: everything that must agree, by name.

Segments are (tokens, targets, scored) arrays (lanes, n), with a reference's Task if the segment has one. The objective is that
of reference/rollout.py.
"""

import numpy as np
import torch

from accelerated import replay
from accelerated.data.lanes import Segment
from accelerated.protocol import computing_in, replace_lanes, require_gradient
from reference import rollout
from tests.helpers.comparison import LADDER, as_array, assert_agree, named
from tests.helpers.variants import PAPERS, random_task

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
        loss, auxiliary, after = propagate(model, segments, state)
        grads = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        losses = {f"auxiliary.{name}": value[None] for name, value in auxiliary.items()}
        found[method] = {"loss": loss[None]} | losses | grads | rows_of_state(after)
    assert_agree(found["through_time"], found["checkpointed"], 1e-11)
    assert_agree(found["through_time"], found["memory_replay"], 1e-11)


def check_key_biases(paper, config):
    """Key biases add the same to all scores of a query, and softmax cancels it: exactly no gradient, on both sides."""
    ref, rng = PAPERS[paper].reference, np.random.default_rng(5)
    params, state = PAPERS[paper].random_params(config, rng), PAPERS[paper].random_state(config, rng, 2)
    tokens = rng.integers(config.vocabulary, size=(2, config.segment))
    logits, _, cache = ref.forward(params, config, tokens, state)
    grads, _ = ref.backward(params, config, cache, rng.standard_normal(logits.shape))
    biases = [name for name in params if name.endswith("key_bias")]
    assert len(biases) == 3 and not any(grads[name].any() for name in biases)
    shifted, _, _ = ref.forward(params | {name: params[name] + 1.0 for name in biases}, config, tokens, state)
    assert np.allclose(shifted, logits, rtol=0, atol=1e-11)
    model = PAPERS[paper].model_with(params, config)
    output = model(torch.tensor(tokens), PAPERS[paper].to_torch(state))
    (output.logits.square().sum() + sum(output.auxiliary.values())).backward()
    assert all(p.grad is None for name, p in model.named_parameters() if name in biases)


def with_starts(segments, start):
    """The segments as the reference's rollout reads them; lane 1 starts a document at segment `start`."""
    return [rollout.Segment(*rows[:3], np.array([False, k == start]), *rows[3:]) for k, rows in enumerate(segments)]


def reference_rollout(ref, params, config, segments, state):
    """{name: array} of losses, logits, states and gradients in float64, by the names of the conformance vectors."""
    rows, caches, _ = rollout.rollout_forward(ref, params, config, segments, state)
    grads, dstate = rollout.rollout_backward(ref, params, config, caches)
    return rows | {f"grad/{name}": value for name, value in grads.items()} | named("grad_state", dstate, "/")


def accelerated_rollout(paper, model, segments, state):
    """The same for a model; leaves the gradients in .grad."""
    leaf = require_gradient(state)
    state, nats, extra, rows = leaf, 0.0, 0.0, {}
    for k, (tokens, targets, scored, starts, *task) in enumerate(segments):
        state = replace_lanes(torch.tensor(starts), model.initial_state(len(starts)), state)
        tasks = [PAPERS[paper].to_torch(each) for each in task if each is not None]
        logits, state, auxiliary = model(torch.tensor(tokens), state, *tasks)
        picked = logits.log_softmax(-1).gather(-1, torch.tensor(targets)[..., None])[..., 0]
        loss = -picked[torch.tensor(scored)].sum()
        nats, extra = nats + loss, extra + sum(auxiliary.values())
        rows |= {f"{k}/logits": logits, f"{k}/loss": loss} | named(f"{k}/next", state)
        rows |= {f"{k}/auxiliary.{name}": loss for name, loss in auxiliary.items()}
    objective = nats / rollout.count_scored(segments) + extra / len(segments)
    objective.backward()
    rows |= {f"grad/{n}": torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    dstate = type(leaf)(*(torch.zeros_like(f) if f.grad is None else f.grad for f in leaf))
    return rows | named("grad_state", dstate, "/") | {"objective": objective}


def filled(rows):
    """The rows that are not empty: a state's field may have size zero."""
    return {name: row for name, row in rows.items() if 0 not in row.shape}


def rows_of_state(state):
    """A state's fields and their shapes as rows, so that empty fields are compared too."""
    return filled(named("state", state)) | {f"shape of {k}": np.array(field.shape) for k, field in state._asdict().items()}


def check_rollout(paper, config, params, segments, state, title):
    """Compare everything over the segments, with a document start in the second, then the weights after five steps."""
    ref, model, segments = PAPERS[paper].reference, PAPERS[paper].model_with(params, config), with_starts(segments, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    velocity = {name: np.zeros_like(value) for name, value in params.items()}
    for step in range(5):
        optimizer.zero_grad()
        read = segments if step == 0 else segments[:2]  # enough to train on
        expected = reference_rollout(ref, params, config, read, state)
        actual = accelerated_rollout(paper, model, read, PAPERS[paper].to_torch(state))
        if step == 0:
            assert_agree(filled(expected), filled(actual), LADDER, title)
        optimizer.step()
        velocity = {name: MOMENTUM * velocity[name] + expected[f"grad/{name}"] for name in params}
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


def random_rows(config, rng, lanes=2, count=3):
    """`count` segments (tokens, targets, scored) with every prediction scored."""
    return [
        (*rng.integers(config.vocabulary, size=(2, lanes, config.segment)), np.ones((lanes, config.segment), bool))
        for _ in range(count)
    ]


def starting(*numbers, count=3, lanes=2):
    """For each of `count` segments, whether a document starts in each lane (lanes,): in all lanes of the numbered segments."""
    return [np.full(lanes, number in numbers) for number in range(count)]


def reference_gradients(paper, params, config, segments, starts):
    """(Mean loss, {name: gradient}, next state) by the reference, from a document's start."""
    ref = PAPERS[paper].reference
    segments = [rollout.Segment(*rows[:3], begins, *rows[3:]) for rows, begins in zip(segments, starts, strict=True)]
    state = ref.initial_state(params, config, len(starts[0]))
    rows, caches, after = rollout.rollout_forward(ref, params, config, segments, state)
    grads, _ = rollout.rollout_backward(ref, params, config, caches)
    return sum(rows[f"{k}/loss"] for k in range(len(segments))) / rollout.count_scored(segments), grads, after


def accelerated_gradients(paper, model, segments, starts, method="through_time", dtype=torch.float64):
    """The same by one of the ways of back-propagation, computed in dtype."""
    model.zero_grad()
    with computing_in(model, dtype):
        state = model.initial_state(len(starts[0]))
        loss, _, after = replay.BACKPROP[method](model, torch_segments(paper, segments, starts), state)
    return loss, {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}, after


def rows_of(loss, grads, state, together):
    """One {name: array} of a rollout's results. If together, all gradients are one row: some are zero and have only rounding."""
    if together:
        grads = {"gradients": np.concatenate([as_array(grads[name]).ravel() for name in sorted(grads)])}
    return filled({"loss": np.asarray(loss)[None]} | grads | {f"state.{n}": field for n, field in state._asdict().items()})


def agreed(paper, config, segments, starts, params=None, methods=tuple(replay.BACKPROP), together=False):
    """The reference's (loss, gradients, state), after checking it against the methods; NumPy may not overflow or divide by 0."""
    params = PAPERS[paper].random_params(config, np.random.default_rng(5)) if params is None else params
    with np.errstate(all="raise", under="ignore"):
        expected = reference_gradients(paper, params, config, segments, starts)
    model = PAPERS[paper].model_with(params, config)
    for method in methods:
        found = accelerated_gradients(paper, model, segments, starts, method)
        assert_agree(rows_of(*expected, together), rows_of(*found, together), LADDER, method)
    return expected
