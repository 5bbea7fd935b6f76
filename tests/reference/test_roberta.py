"""RoBERTa with recurrence in NumPy: gradients by finite differences, and what passes from window to
window.
"""

import dataclasses

import numpy as np
import pytest

from reference import roberta as ref
from tests.helpers.comparison import check_directions
from tests.helpers.roberta import ROBERTA, roberta_example, roberta_params

ONE_LAYER = {"layers": 1, "insertion_layer": 1}
CHANGES = [
    {},
    {"recurrent": False},
    {"insertion_layer": 1},
    {"insertion_layer": 3},
    {"module_layers": 0},
    ONE_LAYER,
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_gradients_of_answering_and_of_the_pretraining(change):
    """Along random directions, with dropout; a bias of keys gets exactly none, because softmax
    cancels it.
    """
    config, rng = dataclasses.replace(ROBERTA, dropout=0.3, **change), np.random.default_rng(3)
    params, (windows, answer) = roberta_params(config, rng), roberta_example(config, rng)
    targets, scored = (
        rng.integers(config.vocabulary, size=(3, config.segment)),
        rng.random((3, config.segment)) < 0.5,
    )

    for function, own, other in (
        (
            lambda p: ref.loss_and_gradients(p, config, windows, answer, np.random.default_rng(4)),
            "answer.",
            "masked.",
        ),
        (
            lambda p: ref.masked_loss_and_gradients(
                p, config, windows[0][0], targets, scored, np.random.default_rng(4)
            ),
            "masked.",
            "answer.",
        ),
    ):
        _, grads = function(params)
        assert not any(
            grad.any()
            for name, grad in grads.items()
            if name.startswith(other) or name.endswith("key_bias")
        )
        moving = {
            n: v
            for n, v in params.items()
            if not n.startswith(other) and not n.endswith("key_bias")
        }
        check_directions(
            lambda shifted, f=function: f(params | shifted)[0], moving, grads, rng, own
        )


def outputs_of(params, config, windows):
    """The outputs of all windows, and the last state."""
    state, found = ref.initial_state(params, config, len(windows[0][0])), []
    for tokens, readable, _ in windows:
        x, state, _ = ref.forward(params, config, tokens, readable, state)
        found.append(x)
    return found, state


@pytest.mark.parametrize("recurrent", [True, False])
def test_a_window_knows_of_earlier_ones_through_the_vector_alone(recurrent):
    """A lane's first window changes its second one's outputs if the model is recurrent, and no
    other lane's at all.
    """
    config, rng = dataclasses.replace(ROBERTA, recurrent=recurrent), np.random.default_rng(5)
    params, (windows, _) = roberta_params(config, rng), roberta_example(config, rng)
    tokens, readable, text = windows[0]
    other = [
        ((tokens + np.array([[1], [0], [0]])) % config.vocabulary, readable, text),
        *windows[1:],
    ]
    (_, second, *_), _ = outputs_of(params, config, windows)
    (_, changed, *_), _ = outputs_of(params, config, other)
    difference = np.abs(second - changed).max((1, 2))
    assert (difference[0] > 1e-6) == recurrent and not difference[1:].any()


def test_the_state_is_the_mean_and_the_maximum_over_windows():
    config, rng = ROBERTA, np.random.default_rng(6)
    params, (windows, _) = roberta_params(config, rng), roberta_example(config, rng)
    outputs, state = outputs_of(params, config, windows)
    for lane in range(3):
        read = [k for k, (_, readable, _) in enumerate(windows) if readable[lane, 0]]
        last = read[-1]
        np.testing.assert_allclose(
            state.pooled[lane], outputs[last][lane][windows[last][1][lane]].mean(0)
        )
        np.testing.assert_array_equal(
            state.first[lane], np.max([outputs[k][lane, 0] for k in read], axis=0)
        )
    assert state.present.all() and len(read) < 3, "the last lane's example ends before the others"


def test_an_answer_is_looked_for_in_all_of_the_text_and_nowhere_else():
    config, rng = ROBERTA, np.random.default_rng(8)
    params, (windows, answer) = roberta_params(config, rng), roberta_example(config, rng)
    outputs, state = outputs_of(params, config, windows)
    texts = [text for _, _, text in windows]
    spans, kinds, _ = ref.answer_forward(
        ref.subtree(params, "answer."), outputs, texts, state.first
    )
    assert spans.shape == (3, 2, 3 * config.segment) and kinds.shape == (3, 3)
    np.testing.assert_array_equal(np.isfinite(spans[:, 0]), np.concatenate(texts, 1))
    shares = np.exp(spans - np.logaddexp.reduce(spans, axis=-1, keepdims=True))
    kind = np.exp(kinds - np.logaddexp.reduce(kinds, axis=-1, keepdims=True))
    expected = -np.log(kind[range(3), answer.kind]).sum()
    for lane in np.flatnonzero(answer.kind == 0):
        expected -= 0.5 * np.log(
            shares[lane, 0, answer.start[lane]] * shares[lane, 1, answer.end[lane]]
        )
    assert ref.answer_loss_forward(spans, kinds, answer)[0] == pytest.approx(expected, rel=1e-12)
    assert {0} < set(answer.kind), "spans and others"
