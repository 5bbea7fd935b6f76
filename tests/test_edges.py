"""Numbers at the edge: equal tokens, extreme logits and scores, nothing scored."""

import numpy as np
import torch

from accelerated import replay
from tests.helpers.comparison import LADDER, as_array, assert_agree
from tests.helpers.rollouts import (
    back_propagated,
    both_sides,
    in_lane_1,
    random_rows,
    reference_gradients,
    starting,
    torch_segments,
)
from tests.helpers.variants import ONE_OF_EACH, PAPERS, over


def agreed(paper, config, params, segments, starts, methods):
    """The reference's rows, after checking the methods against them.

    NumPy may not overflow or divide by 0. All gradients are one row: some are zero and have only
    rounding.
    """
    with np.errstate(all="raise", under="ignore"):
        expected = reference_gradients(paper, params, config, segments, starts)

    def rows_to_compare(rows):
        rows = {name: row for name, row in rows.items() if "auxiliary" not in name}
        flat = [as_array(rows.pop(name)).ravel() for name in params]
        return rows | {"gradients": np.concatenate(flat)}

    model = PAPERS[paper].model_with(params, config)
    state = model.initial_state(len(starts[0]))
    read = torch_segments(paper, segments, starts)
    for method in methods:
        found = back_propagated(method, model, read, state)
        assert_agree(rows_to_compare(expected), rows_to_compare(found), LADDER, f"{method}")
    return expected


def scaled(params, factor, *parts):
    """The params, multiplied by the factor if their names end with one of the parts."""
    return {
        name: value * factor if name.rpartition(".")[2] in parts else value
        for name, value in params.items()
    }


@over(
    [
        *ONE_OF_EACH,
        ("block_recurrent", "lstm-dual-feedback"),
        ("compressive", "max_pooling-none"),
        ("compressive", "most_used-none"),
        ("memorizing", "all-of-memory"),
        ("pretrained_recurrence", "max"),
    ]
)
def test_a_document_of_one_repeated_token_is_finite_and_equal_on_both_sides(paper, name):
    """Over segments; lane 1 starts anew in the second.

    Gradients that equal keys make zero are rounding on both sides.
    """
    config, _, params, *_ = both_sides(paper, name)
    tokens = np.full((2, config.segment), config.vocabulary - 1)
    rows = [(tokens, tokens, np.ones(tokens.shape, bool))] * 3
    agreed(paper, config, params, rows, in_lane_1(rows), ["through_time"])


@over(ONE_OF_EACH)
def test_extreme_scores_are_equal_on_both_sides_and_overflow_nowhere(paper, name, monkeypatch):
    """Logits of 10,000; then scores of as much: all weight is on one key, in float32 too."""
    config, _, params, *_ = both_sides(paper, name)
    ref = PAPERS[paper].reference
    rows = random_rows(config, np.random.default_rng(0))
    starts = starting(0, 2)
    larger = scaled(params, 1e5, "embedding")
    expected = agreed(paper, config, larger, rows, starts, ["through_time"])
    assert expected["loss"] > 1e4

    if not PAPERS[paper].has_softmax:
        return
    params = scaled(params, 300.0, "query", "key")
    for key in params:
        if key.endswith("scale") and "norm" not in key:  # of unit keys
            params[key] = params[key] * 1e4
    softmax = ref.softmax_forward
    largest = []

    def noted(scores):
        largest.append(np.abs(scores[np.isfinite(scores)]).max())
        return softmax(scores)

    monkeypatch.setattr(ref, "softmax_forward", noted)
    agreed(paper, config, params, rows, starts, ["through_time"])
    assert max(largest) > 1e4
    model = PAPERS[paper].model_with(params, config).float()
    segments = torch_segments(paper, rows, starts)
    found = back_propagated("through_time", model, segments, model.initial_state(2), torch.float32)
    for key, row in found.items():
        assert row.isfinite().all(), f"{key} is not finite in float32"


WITH_AUXILIARY_LOSS = [
    ("compressive", "conv-attention_reconstruction"),
    ("compressive", "dilated_conv-auto_encoding"),
]


@over([*ONE_OF_EACH, *WITH_AUXILIARY_LOSS])
def test_a_rollout_with_nothing_scored_has_no_loss_and_gives_no_gradient(paper, name, monkeypatch):
    """Exactly zero, by all methods, whether rows are left out or masked, as a GPU does.

    An auxiliary loss trains its own alone.
    """
    config, rng, params, _, model, _ = both_sides(paper, name)
    rows = []
    for tokens, targets, scored in random_rows(config, rng):
        rows.append((tokens, targets, scored & False))
    auxiliary = {id(parameter) for parameter in model.auxiliary_parameters()}
    own = {name for name, parameter in model.named_parameters() if id(parameter) in auxiliary}

    def masked(*given):
        with monkeypatch.context() as patch:
            patch.setattr(replay, "on_host", lambda tensor: False)
            return replay.through_time(*given)

    methods = [*replay.BACKPROP, masked]
    found = agreed(paper, config, params, rows, starting(0, 2), methods)
    assert found["loss"] == 0
    assert {name for name in params if found[name].any()} == own
