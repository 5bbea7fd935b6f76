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
    block_recurrent="lstm-dual-feedback",
    compressive="simplified-conv-bptt",
    memformer="encoder-decoder-xl",
    pretrained_recurrence="advance-fixed-key",
)


@over(EVERY_VARIANT)
def test_model_gradient(paper, name):
    """Three segments with a document start in the second, all tasks, all losses: every parameter
    and the first state.

    What a paper stops is held at its value while the objective is differentiated.
    """
    config, rng, own = variant(paper, name), np.random.default_rng(6), PAPERS[paper]
    params, state = own.random_params(config, rng), own.random_state(config, rng, 2)
    segments = random_segments(paper, name, rng)[:3]
    segments = reference_segments(segments, in_lane_1(segments))
    case = gradients.Case(own.reference, config, params, state, segments)
    caches = rollout_forward(own.reference, params, config, segments, state)[1]
    grads, dstate = rollout_backward(own.reference, params, config, caches)
    assert grads.keys() == params.keys()
    inputs = gradients.inputs_of(params, state)
    with gradients.holding_what_is_stopped(case) as objective:
        objective(inputs)
        check_directions(
            objective, inputs, gradients.inputs_of(grads, dstate), rng, f"{paper} {name}"
        )


@over(WITH_DROPOUT)
def test_model_gradient_with_dropout(paper, name):
    """Of one segment's logits and next state; both passes drop the same."""
    config, rng, own = (
        dataclasses.replace(variant(paper, name), dropout=0.3),
        np.random.default_rng(6),
        PAPERS[paper],
    )
    params, state = own.random_params(config, rng), own.random_state(config, rng, 3)
    tokens = rng.integers(config.vocabulary, size=(3, config.segment))
    task = [own.random_task(config, rng, [0, 1, 2])] if name in own.tasks else []

    def run(inputs):
        moved = state._replace(**{field: inputs[f"state.{field}"] for field in own.carried})
        return own.reference.forward(inputs, config, tokens, moved, np.random.default_rng(8), *task)

    inputs = params | {f"state.{field}": getattr(state, field) for field in own.carried}
    logits, after, cache = run(inputs)
    dlogits = rng.standard_normal(logits.shape)
    dnext = after._replace(
        **{field: rng.standard_normal(getattr(after, field).shape) for field in own.carried}
    )
    arriving = dnext if own.carried else None
    grads, dstate = own.reference.backward(params, config, cache, dlogits, arriving)

    def objective(moved):
        logits, after, _ = run(moved)
        return (logits * dlogits).sum() + sum(
            (getattr(after, f) * getattr(dnext, f)).sum() for f in own.carried
        )

    found = grads | named("state", dstate)
    check_directions(objective, inputs, {key: found[key] for key in inputs}, rng, f"{paper} {name}")


def test_a_wrong_gradient_leads_to_the_function_that_knows_most_of_its_name():
    """`scale` is in the results of many functions, `norm.scale` of few; then to the function inside
    that made it.
    """
    inside = gradients.Call("norm_backward", 3, {"scale"}, [])
    calls = [
        gradients.Call("other_backward", 1, {"scale"}, []),
        gradients.Call("layer_backward", 2, {"norm.scale"}, [inside]),
    ]
    for made in (calls, calls[::-1]):
        assert [call.function for call in gradients.path_to(made, "layers.0.norm.scale")] == [
            "layer_backward",
            "norm_backward",
        ]
    assert gradients.path_to(calls, "embedding") == []
