"""A rollout (consecutive segments) by a reference and by its accelerated model: everything that must agree, by name.

Segments are (tokens, targets, scored) arrays (lanes, n), with a reference's Task if the segment has one. `starts` says for each
segment in which lanes (lanes,) a document starts. The objective is that of reference/rollout.py.
"""

import dataclasses

import numpy as np
import torch

from accelerated import replay
from accelerated.data.lanes import Segment
from accelerated.protocol import computing_in, replace_lanes, require_gradient, state_from
from reference import rollout
from tests.helpers.comparison import LADDER, as_array, assert_agree, named
from tests.helpers.variants import PAPERS

RATE, MOMENTUM = 1e-3, 0.9  # of gradient descent on both sides

# What is read


def both_sides(paper, name, lanes=2, seed=5, **changes):
    """(config, rng, params, state of arrays, the model, its state) of a changed variant, with random weights in mid-document."""
    config, rng = (
        dataclasses.replace(PAPERS[paper].variant(name), **{"dropout": 0.0} | changes),
        np.random.default_rng(seed),
    )
    params, state = (
        PAPERS[paper].random_params(config, rng),
        PAPERS[paper].random_state(config, rng, lanes),
    )
    return (
        config,
        rng,
        params,
        state,
        PAPERS[paper].model_with(params, config),
        PAPERS[paper].to_torch(state),
    )


def random_segments(paper, name, rng):
    """Three segments, the last one short if the model reads short ones; if it reads tasks, one more and all pairs of tasks."""
    config, segments = PAPERS[paper].variant(name), []
    lengths = [config.segment, config.segment, max(1, config.segment - PAPERS[paper].shorter)]
    tasks = [(), (), ()]
    if name in PAPERS[paper].tasks:
        lengths.append(config.segment)
        tasks = [
            (),
            *(
                (PAPERS[paper].random_task(config, rng, kinds),)
                for kinds in ([0, 1], [1, 2], [2, 0])
            ),
        ]
    for length, task in zip(lengths, tasks, strict=True):
        tokens, targets = rng.integers(config.vocabulary, size=(2, 2, length))
        segments.append((tokens, targets, rng.random(tokens.shape) < 0.7, *task))
    return segments


def random_rows(config, rng, lanes=2, count=3):
    """`count` segments with every prediction scored and no task."""
    return [
        (
            *rng.integers(config.vocabulary, size=(2, lanes, config.segment)),
            np.ones((lanes, config.segment), bool),
        )
        for _ in range(count)
    ]


def starting(*numbers, count=3, lanes=2):
    """The starts of `count` segments: in all lanes of the numbered ones."""
    return [np.full(lanes, number in numbers) for number in range(count)]


def in_lane_1(segments, start=1):
    """The starts of segments of two lanes: lane 1 starts a document at one of them."""
    return [np.array([False, number == start]) for number in range(len(segments))]


def torch_segments(paper, segments, starts):
    """[Segment] of segments in arrays."""
    found = []
    for (tokens, targets, scored, *task), begins in zip(segments, starts, strict=True):
        rows = (torch.tensor(array) for array in (tokens, targets, scored, begins))
        found.append(Segment(*rows, *(PAPERS[paper].to_torch(each) for each in task)))
    return found


def reference_segments(segments, starts):
    """The segments as the reference's rollout reads them."""
    return [
        rollout.Segment(*rows[:3], begins, *rows[3:])
        for rows, begins in zip(segments, starts, strict=True)
    ]


def setting(paper, name, dropout=0.3, **changes):
    """(model in training mode, segments with a document start in the second and tasks, a state) of two lanes, all random."""
    _, rng, _, _, model, state = both_sides(paper, name, dropout=dropout, **changes)
    segments = random_segments(paper, name, rng)
    return model.train(), torch_segments(paper, segments, in_lane_1(segments)), state


# Rows that are compared


def filled(rows):
    """The rows that are not empty: a state's field may have size zero."""
    return {name: row for name, row in rows.items() if 0 not in row.shape}


def rows_of_state(state):
    """A state's fields and their shapes as rows, so that empty fields are compared too."""
    return filled(named("state", state)) | {
        f"shape of {k}": np.array(field.shape) for k, field in state._asdict().items()
    }


def gradients(model):
    """{name: gradient} of all parameters, zero if there is none."""
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
    }


def reference_rollout(ref, params, config, segments, state):
    """{name: array} of losses, logits, states and gradients in float64, by the names of the conformance vectors."""
    rows, caches, _ = rollout.rollout_forward(ref, params, config, segments, state)
    grads, dstate = rollout.rollout_backward(ref, params, config, caches)
    return (
        rows
        | {f"grad/{name}": value for name, value in grads.items()}
        | named("grad_state", dstate, "/")
    )


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
    rows |= {f"grad/{name}": gradient for name, gradient in gradients(model).items()}
    dstate = type(leaf)(*(torch.zeros_like(f) if f.grad is None else f.grad for f in leaf))
    return rows | named("grad_state", dstate, "/") | {"objective": objective}


def back_propagated(method, model, segments, state, dtype=torch.float64, trained=None):
    """{name: tensor} of a method's loss, auxiliary losses, gradients by parameter, and next state; it computes in dtype."""
    model.zero_grad()
    torch.manual_seed(11)
    with computing_in(model, dtype):
        given = state_from(model.initial_state(len(state[0])), state)  # in its fields' own types
        loss, auxiliary, after = replay.BACKPROP[method](trained or model, segments, given)
    assert not loss.requires_grad and not any(field.requires_grad for field in after)
    losses = {f"auxiliary.{name}": value[None] for name, value in auxiliary.items()}
    return filled({"loss": loss[None]} | losses | gradients(model) | named("state", after))


def reference_gradients(paper, params, config, segments, starts, state=None):
    """The same rows by the reference; from a document's start unless a state is given."""
    ref, segments, count = (
        PAPERS[paper].reference,
        reference_segments(segments, starts),
        len(segments),
    )
    state = ref.initial_state(params, config, len(starts[0])) if state is None else state
    rows, caches, after = rollout.rollout_forward(ref, params, config, segments, state)
    grads, _ = rollout.rollout_backward(ref, params, config, caches)
    loss = sum(rows[f"{k}/loss"] for k in range(count)) / rollout.count_scored(segments)
    names = [key.removeprefix("0/") for key in rows if key.startswith("0/auxiliary")]
    losses = {
        name: np.array([sum(rows[f"{k}/{name}"] for k in range(count)) / count]) for name in names
    }
    return filled({"loss": np.array([loss])} | losses | grads | named("state", after))


# Both sides compared


def check_rollout(paper, config, params, segments, state, title):
    """Compare everything over the segments, with a document start in the second, then the weights after five steps.

    Returns the reference's rows of the first step.
    """
    ref, model = PAPERS[paper].reference, PAPERS[paper].model_with(params, config)
    segments, found = reference_segments(segments, in_lane_1(segments)), {}
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    velocity = {name: np.zeros_like(value) for name, value in params.items()}
    for step in range(5):
        optimizer.zero_grad()
        read = segments if step == 0 else segments[:2]  # enough to train on
        expected = reference_rollout(ref, params, config, read, state)
        actual = accelerated_rollout(paper, model, read, PAPERS[paper].to_torch(state))
        if step == 0:
            assert_agree(filled(expected), filled(actual), LADDER, title)
            found = expected
        optimizer.step()
        velocity = {name: MOMENTUM * velocity[name] + expected[f"grad/{name}"] for name in params}
        params = {name: value - RATE * velocity[name] for name, value in params.items()}
    assert_agree(params, dict(model.state_dict()), LADDER, f"{title}: weights after five steps")
    return found


def check_back_propagation(model, segments, state, *methods):
    """The methods, or all three, agree on loss, gradients and next state with any dropout; returns the rows of through_time."""
    expected = back_propagated("through_time", model, segments, state)
    for method in methods or ("checkpointed", "memory_replay"):
        assert_agree(expected, back_propagated(method, model, segments, state), 1e-11, method)
    return expected


def agreed(
    paper, config, segments, starts, params=None, methods=tuple(replay.BACKPROP), together=False
):
    """The reference's rows, after checking them against the methods; NumPy may not overflow or divide by 0.

    If together, all gradients are one row: some are zero and have only rounding.
    """
    params = (
        PAPERS[paper].random_params(config, np.random.default_rng(5)) if params is None else params
    )
    with np.errstate(all="raise", under="ignore"):
        expected = reference_gradients(paper, params, config, segments, starts)
    model = PAPERS[paper].model_with(params, config)
    state, own = model.initial_state(len(starts[0])), torch_segments(paper, segments, starts)
    for method in methods:
        found = back_propagated(method, model, own, state)
        pair = [
            {name: rows[name] for name in rows if "auxiliary" not in name}
            for rows in (expected, found)
        ]
        if together:
            pair = [
                rows
                | {"gradients": np.concatenate([as_array(rows.pop(n)).ravel() for n in params])}
                for rows in pair
            ]
        assert_agree(*pair, LADDER, method)
    return expected


def dropout_from(rng):
    """A replacement for torch's dropout with the reference's random numbers, so that both sides drop the same entries."""

    def dropout(x, rate, training=True):
        if not training or rate == 0:
            return x
        tiles = (
            x.unbind(2) if x.dim() == 5 else [x]
        )  # a reference draws the matrix of sliding attention tile by tile
        kept = [
            torch.tensor((rng.random(tuple(tile.shape)) >= rate) / (1 - rate)) for tile in tiles
        ]
        return x * (torch.stack(kept, 2) if x.dim() == 5 else kept[0])

    return dropout
