"""Whole references against finite differences: every variant over segments, and with dropout."""

import dataclasses

import numpy as np

from reference import gradients
from reference.rollout import rollout_backward, rollout_forward
from tests.helpers.comparison import check_directions, named
from tests.helpers.rollouts import in_lane_1, random_segments, reference_segments
from tests.helpers.variants import (
    EVERY_VARIANT,
    ONE_OF_EACH,
    PAPERS,
    over,
    pairs,
    variant,
)

WITH_DROPOUT = ONE_OF_EACH + pairs(
    block_recurrent="lstm-dual-feedback output-dropout",
    compressive="simplified-conv-bptt authors-attention",
    memformer="encoder-decoder-xl",
    pretrained_recurrence="advance-fixed-key",
)


@over(EVERY_VARIANT)
def test_model_gradient(paper, name):
    """Of all losses, by every parameter and the first state, over three segments with all tasks.

    A document starts in the second. What a paper stops is held at its value while the objective is
    differentiated.
    """
    own = PAPERS[paper]
    config = variant(paper, name)
    rng = np.random.default_rng(6)
    params = own.random_params(config, rng)
    state = own.random_state(config, rng, 2)
    segments = random_segments(paper, name, rng)[:3]
    segments = reference_segments(segments, in_lane_1(segments))
    _, caches, _ = rollout_forward(own.reference, params, config, segments, state)
    grads, dstate = rollout_backward(own.reference, params, config, caches)
    assert grads.keys() == params.keys()
    inputs = gradients.inputs_of(params, state)
    by_hand = gradients.inputs_of(grads, dstate)
    case = gradients.Case(own.reference, config, params, state, segments)
    with gradients.holding_what_is_stopped(case) as objective:
        objective(inputs)
        check_directions(objective, inputs, by_hand, rng, f"{paper} {name}")


@over(WITH_DROPOUT)
def test_model_gradient_with_dropout(paper, name):
    """Of one segment's logits and next state; both passes drop the same."""
    own = PAPERS[paper]
    config = dataclasses.replace(variant(paper, name), dropout=0.3)
    rng = np.random.default_rng(6)
    params = own.random_params(config, rng)
    state = own.random_state(config, rng, 3)
    tokens = rng.integers(config.vocabulary, size=(3, config.segment))
    task = [own.random_task(config, rng, [0, 1, 2])] if name in own.tasks else []

    def run(inputs):
        """{name: what a gradient arrives at}, and the cache of the segment."""
        moved = state._replace(**{field: inputs[f"state.{field}"] for field in own.carried})
        draws = np.random.default_rng(8)
        logits, after, cache = own.reference.forward(inputs, config, tokens, moved, draws, *task)
        return {"logits": logits} | {name: getattr(after, name) for name in own.carried}, cache

    inputs = params | {f"state.{field}": getattr(state, field) for field in own.carried}
    outputs, cache = run(inputs)
    arriving = {name: rng.standard_normal(value.shape) for name, value in outputs.items()}

    def objective(moved):
        found, _ = run(moved)
        return sum((found[name] * arriving[name]).sum() for name in found)

    dlogits, *of_state = arriving.values()
    dnext = state._replace(**dict(zip(own.carried, of_state, strict=True))) if of_state else None
    grads, dstate = own.reference.backward(params, config, cache, dlogits, dnext)
    found = grads | named("state", dstate)
    check_directions(objective, inputs, {key: found[key] for key in inputs}, rng, f"{paper} {name}")
