"""A rollout by a reference and by `replay`, with any number of lanes and starts: test_edges.py and test_edge_documents.py."""

import numpy as np
import torch

from accelerated.protocol import computing_in
from accelerated.replay import BACKPROP
from reference.rollout import Segment, count_scored, rollout_backward, rollout_forward
from tests.helpers.comparison import as_array, assert_agree
from tests.helpers.rollouts import filled, torch_segments
from tests.helpers.tolerances import LADDER
from tests.helpers.variants import PAPERS


def random_rows(config, rng, lanes=2, count=3):
    """`count` segments (tokens, targets, scored) with every prediction scored."""
    return [
        (*rng.integers(config.vocabulary, size=(2, lanes, config.segment)), np.ones((lanes, config.segment), bool))
        for _ in range(count)
    ]


def starting(*numbers, count=3, lanes=2):
    """For each of `count` segments, whether a document starts in each lane (lanes,): in all lanes of the numbered segments."""
    return [np.full(lanes, number in numbers) for number in range(count)]


def reference_rollout(paper, params, config, segments, starts):
    """(Mean loss, {name: gradient}, next state) by the reference, from a document's start."""
    ref = PAPERS[paper].reference
    segments = [Segment(*rows[:3], begins, *rows[3:]) for rows, begins in zip(segments, starts, strict=True)]
    state = ref.initial_state(params, config, len(starts[0]))
    rows, caches, after = rollout_forward(ref, params, config, segments, state)
    grads, _ = rollout_backward(ref, params, config, caches)
    return sum(rows[f"{k}/loss"] for k in range(len(segments))) / count_scored(segments), grads, after


def accelerated_rollout(paper, model, segments, starts, method="through_time", dtype=torch.float64):
    """The same by one of the ways of back-propagation, computed in dtype."""
    model.zero_grad()
    with computing_in(model, dtype):
        state = model.initial_state(len(starts[0]))
        loss, _, after = BACKPROP[method](model, torch_segments(paper, segments, starts), state)
    return loss, {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}, after


def rows_of(loss, grads, state, together):
    """One {name: array} of a rollout's results. If together, all gradients are one row: some are zero and have only rounding."""
    if together:
        grads = {"gradients": np.concatenate([as_array(grads[name]).ravel() for name in sorted(grads)])}
    return filled({"loss": np.asarray(loss)[None]} | grads | {f"state.{n}": field for n, field in state._asdict().items()})


def agreed(paper, config, segments, starts, params=None, methods=tuple(BACKPROP), together=False):
    """The reference's (loss, gradients, state), after checking it against the methods; NumPy may not overflow or divide by 0."""
    params = PAPERS[paper].random_params(config, np.random.default_rng(5)) if params is None else params
    with np.errstate(all="raise", under="ignore"):
        expected = reference_rollout(paper, params, config, segments, starts)
    model = PAPERS[paper].model_with(params, config)
    for method in methods:
        found = accelerated_rollout(paper, model, segments, starts, method)
        assert_agree(rows_of(*expected, together), rows_of(*found, together), LADDER, method)
    return expected
