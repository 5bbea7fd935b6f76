"""Numbers at the edge: equal tokens, extreme logits and scores, nothing scored."""

import numpy as np
import torch

from accelerated import replay
from reference.rollout import Segment
from tests.helpers.comparison import LADDER, as_array, assert_agree
from tests.helpers.rollouts import back_propagated, both_sides, random_rows, torch_segments
from tests.helpers.variants import ONE_OF_EACH, PAPERS, over, pairs
from tests.start_here.strategies import Setting, by_numpy
from tests.start_here.test_mrbp import in_pytorch, rows_of_training


def agreed(paper, config, params, segments, *methods):
    """The reference's rows from a document's start, after checking the methods against them.

    NumPy may not overflow or divide by 0. All gradients are one row: some are zero and have only
    rounding.
    """
    own = PAPERS[paper]
    state = own.reference.initial_state(params, config, 2)
    setting = Setting(own.reference, config, params, state, own.model_with(params, config), None)
    with np.errstate(all="raise", under="ignore"):
        expected = rows_of_training(by_numpy(setting, segments), len(segments))

    def rows_to_compare(rows):
        rows = {name: row for name, row in rows.items() if "auxiliary" not in name}
        flat = [as_array(rows.pop(f"gradient of {name}")).ravel() for name in params]
        return rows | {"gradients": np.concatenate(flat)}

    for method in methods:
        found = in_pytorch(method, setting, segments)
        assert_agree(rows_to_compare(expected), rows_to_compare(found), LADDER, method.__name__)
    return expected


def scaled(params, factor, *parts):
    """The params, multiplied by the factor if their names end with one of the parts."""
    return {
        name: value * factor if name.rpartition(".")[2] in parts else value
        for name, value in params.items()
    }


MORE_CHOICES = pairs(  # between rows that are equal
    block_recurrent="lstm-dual-feedback",
    compressive="max_pooling-none most_used-none",
    memorizing="all-of-memory",
    pretrained_recurrence="max",
)


@over(ONE_OF_EACH + MORE_CHOICES)
def test_a_document_of_one_repeated_token_is_finite_and_equal_on_both_sides(paper, name):
    """Over segments; lane 1 starts anew in the second.

    Gradients that equal keys make zero are rounding on both sides.
    """
    config, _, params, *_ = both_sides(paper, name)
    tokens = np.full((2, config.segment), config.vocabulary - 1)
    scored = np.ones(tokens.shape, bool)
    starts = [np.array([False, number == 1]) for number in range(3)]
    segments = [Segment(tokens, tokens, scored, begins) for begins in starts]
    agreed(paper, config, params, segments, replay.through_time)


@over(ONE_OF_EACH)
def test_extreme_scores_are_equal_on_both_sides_and_overflow_nowhere(paper, name, monkeypatch):
    """Logits of 10,000; then scores of as much: all weight is on one key, in float32 too."""
    config, _, params, *_ = both_sides(paper, name)
    ref = PAPERS[paper].reference
    rows = random_rows(config, np.random.default_rng(0), begins=[0, 2])
    larger = scaled(params, 1e5, "embedding")
    expected = agreed(paper, config, larger, rows, replay.through_time)
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
    agreed(paper, config, params, rows, replay.through_time)
    assert max(largest) > 1e4
    model = PAPERS[paper].model_with(params, config).float()
    segments = torch_segments(paper, rows)
    found = back_propagated("through_time", model, segments, model.initial_state(2), torch.float32)
    for key, row in found.items():
        assert row.isfinite().all(), f"{key} is not finite in float32"


AUXILIARY = pairs(compressive="conv-attention_reconstruction dilated_conv-auto_encoding")


@over(ONE_OF_EACH + AUXILIARY)
def test_a_rollout_with_nothing_scored_has_no_loss_and_gives_no_gradient(paper, name, monkeypatch):
    """Exactly zero, by all methods, whether rows are left out or masked, as a GPU does.

    An auxiliary loss trains its own alone.
    """
    config, rng, params, _, model, _ = both_sides(paper, name)
    rows = random_rows(config, rng, begins=[0, 2])
    for row in rows:
        row.scored[:] = False
    auxiliary = {id(parameter) for parameter in model.auxiliary_parameters()}
    own = {name for name, parameter in model.named_parameters() if id(parameter) in auxiliary}

    def masked(*given):
        with monkeypatch.context() as patch:
            patch.setattr(replay, "on_host", lambda tensor: False)
            return replay.through_time(*given)

    found = agreed(paper, config, params, rows, *replay.BACKPROP.values(), masked)
    assert found["loss"] == 0
    assert {name for name in params if found[f"gradient of {name}"].any()} == own
