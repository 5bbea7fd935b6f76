"""A rollout by a reference and by its accelerated model: everything that must agree, by name.

A rollout is consecutive segments, and the objective is that of reference/rollout.py.
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import torch

from accelerated import replay
from accelerated.protocol import computing_in, state_from
from reference.rollout import Segment
from tests.helpers.comparison import LADDER, assert_agree, named
from tests.helpers.culprit import blaming
from tests.helpers.variants import PAPERS
from tests.start_here.strategies import Setting, by_numpy, in_torch, plain_bptt

# What is read


class Sides(NamedTuple):
    """A model and its reference, with random weights in mid-document."""

    config: Any
    rng: np.random.Generator
    params: dict
    state: tuple  # of arrays
    model: torch.nn.Module
    torch_state: tuple  # the same of tensors


def both_sides(paper, name, lanes=2, seed=5, **changes):
    """The Sides of a variant whose fields are changed; without dropout, unless they say so."""
    own = PAPERS[paper]
    config = dataclasses.replace(own.variant(name), **{"dropout": 0.0} | changes)
    rng = np.random.default_rng(seed)
    params = own.random_params(config, rng)
    state = own.random_state(config, rng, lanes)
    return Sides(config, rng, params, state, own.model_with(params, config), own.to_torch(state))


def random_segments(paper, name, rng):
    """Three segments, the last one short if the model reads short ones.

    A document starts in lane 1 of the second. If it reads tasks, one more, so that every pair of
    tasks stands side by side.
    """
    own = PAPERS[paper]
    config = own.variant(name)
    lengths = [config.segment, config.segment, max(1, config.segment - own.shorter)]
    tasks = [(), (), ()]
    if name in own.tasks:
        lengths.append(config.segment)
        pairs = ([0, 1], [1, 2], [2, 0])
        tasks = [(), *((own.random_task(config, rng, kinds),) for kinds in pairs)]

    segments = []
    for length, task in zip(lengths, tasks, strict=True):
        tokens, targets = rng.integers(config.vocabulary, size=(2, 2, length))
        scored = rng.random(tokens.shape) < 0.7
        starts = np.array([False, len(segments) == 1])
        segments.append(Segment(tokens, targets, scored, starts, *task))
    return segments


def random_rows(config, rng, lanes=2, count=3, begins=()):
    """`count` segments with every prediction scored and no task.

    In those whose numbers `begins` has, a document starts in every lane.
    """
    segments = []
    for number in range(count):
        tokens, targets = rng.integers(config.vocabulary, size=(2, lanes, config.segment))
        starts = np.full(lanes, number in begins)
        segments.append(Segment(tokens, targets, np.ones(tokens.shape, bool), starts))
    return segments


def torch_segments(paper, segments):
    """The segments in tensors."""
    return [in_torch(segment, PAPERS[paper].module.State) for segment in segments]


def setting(paper, name, dropout=0.3, **changes):
    """(model in training mode, segments, a state) of two lanes, all random.

    A document starts in the second segment; there are tasks if the model reads them.
    """
    sides = both_sides(paper, name, dropout=dropout, **changes)
    segments = random_segments(paper, name, sides.rng)
    return sides.model.train(), torch_segments(paper, segments), sides.torch_state


# Rows that are compared


def gradients(model):
    """{name: gradient} of all parameters, zero if there is none."""
    found = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        found[name] = torch.zeros_like(parameter) if grad is None else grad.clone()
    return found


def back_propagated(method, model, segments, state, dtype=torch.float64):
    """{name: tensor} of a method's loss, auxiliary losses, gradients and next state, in dtype.

    The method is one of replay's, by its name, or a function like them.
    """
    backprop = replay.BACKPROP.get(method, method)
    model.zero_grad()
    torch.manual_seed(11)
    with computing_in(model, dtype):
        given = state_from(model.initial_state(len(state[0])), state)  # in its fields' own types
        loss, auxiliary, after = backprop(model, segments, given)
    for value in (loss, *after):
        assert not value.requires_grad, f"{method} returns a graph, which would be kept for nothing"
    losses = {f"auxiliary.{name}": value for name, value in auxiliary.items()}
    return {"loss": loss} | losses | gradients(model) | named("state", after)


# Both sides compared


def check_rollout(paper, sides, segments, title):
    """Compare everything over the segments. Returns the reference's rows."""
    setting = Setting(
        PAPERS[paper].reference, sides.config, sides.params, sides.state, sides.model, rng=None
    )
    rows = by_numpy(setting, segments)
    found = plain_bptt(setting, segments)
    with blaming(setting, segments, plain_bptt):
        assert_agree(rows, found, LADDER, title)
    return rows


def check_back_propagation(model, segments, state, *methods):
    """The methods, or all of them, agree on loss, gradients and next state with any dropout.

    Returns the rows of through_time.
    """
    expected = back_propagated("through_time", model, segments, state)
    for method in methods or ("checkpointed", "memory_replay"):
        assert_agree(expected, back_propagated(method, model, segments, state), 1e-11, method)
    return expected


def dropout_from(rng):
    """A replacement for torch's dropout that draws as the reference does, and so drops the same."""

    def factors(shape, rate):
        return torch.tensor((rng.random(tuple(shape)) >= rate) / (1 - rate))

    def dropout(x, rate, training=True):
        if not training or rate == 0:
            return x
        if x.dim() == 5:  # a reference draws the matrix of sliding attention tile by tile
            return x * torch.stack([factors(tile.shape, rate) for tile in x.unbind(2)], 2)
        return x * factors(x.shape, rate)

    return dropout
