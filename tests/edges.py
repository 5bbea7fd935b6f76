"""A rollout by a reference and by `replay`, with any number of lanes and starts: test_edges.py and test_edge_documents.py."""

import numpy as np
import torch
from comparison import as_array, assert_agree
from rollouts import filled, torch_segments
from tolerances import LADDER
from variants import PAPERS

from accelerated.protocol import computing_in
from accelerated.replay import BACKPROP


def random_rows(config, rng, lanes=2, count=3):
    """`count` segments (tokens, targets, scored) with every prediction scored."""
    return [
        (*rng.integers(config.vocabulary, size=(2, lanes, config.segment)), np.ones((lanes, config.segment), bool))
        for _ in range(count)
    ]


def starting(*numbers, count=3, lanes=2):
    """For each of `count` segments, whether a document starts in each lane (lanes,): in all lanes of the numbered segments."""
    return [np.full(lanes, number in numbers) for number in range(count)]


def choose_lanes(starts, first, second):
    """The state `first` in the lanes where starts (B,) is true, `second` elsewhere."""
    pairs = zip(first, second, strict=True)
    return type(first)(*(np.where(starts.reshape(-1, *[1] * (a.ndim - 1)), a, b) for a, b in pairs))


def reference_rollout(paper, params, config, segments, starts):
    """(Mean loss, {name: gradient}, next state) by the reference, from a document's start; the objective is that of `replay`."""
    ref, state, caches, loss = PAPERS[paper].reference, None, [], 0.0
    scored_tokens = max(1, sum(int(segment[2].sum()) for segment in segments))
    for (tokens, targets, scored, *task), begins in zip(segments, starts, strict=True):
        initial = ref.initial_state(params, config, len(tokens))
        state = initial if state is None else choose_lanes(begins, initial, state)
        logits, state, cache = ref.forward(params, config, tokens, state, None, *task)
        nats, loss_cache = ref.cross_entropy_forward(logits, targets, scored)
        extra = ref.auxiliary_forward(params, config, cache)[1] if hasattr(ref, "auxiliary_forward") else None
        loss += nats / scored_tokens
        caches.append((cache, loss_cache, extra))
    grads, dstate = {}, None
    for (cache, loss_cache, extra), begins in zip(reversed(caches), reversed(starts), strict=True):
        dlogits = ref.cross_entropy_backward(1 / scored_tokens, loss_cache)
        dparams, dstate = ref.backward(params, config, cache, dlogits, dstate)
        ref.add_into(grads, dparams)
        if extra is not None:
            ref.add_into(grads, ref.auxiliary_backward(config, 1 / len(segments), extra))
        zero = type(dstate)(*(np.zeros_like(field) for field in dstate))
        if hasattr(ref, "initial_state_backward"):
            ref.add_into(grads, ref.initial_state_backward(config, choose_lanes(begins, dstate, zero)))
        dstate = choose_lanes(begins, zero, dstate)
    return loss, grads, state


def accelerated_rollout(paper, model, segments, starts, method="through_time", dtype=torch.float64):
    """The same by one of the ways of back-propagation, computed in dtype."""
    model.zero_grad()
    with computing_in(model, dtype):
        state = model.initial_state(len(starts[0]))
        loss, after = BACKPROP[method](model, torch_segments(paper, segments, starts), state)
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
