"""RoBERTa with recurrence in NumPy: its gradients, and what passes from window to window."""

import dataclasses

import numpy as np
import pytest

from reference import roberta as ref
from tests.helpers.comparison import check_directions
from tests.helpers.roberta import ROBERTA, roberta_example, roberta_params

CHANGES = [
    {},
    {"recurrent": False},
    {"insertion_layer": 1},
    {"insertion_layer": 3},
    {"module_layers": 0},
    {"layers": 1, "insertion_layer": 1},
]


def check_gradients(of_loss, params, used, unused, rng):
    """Compare gradients with finite differences of a loss; of_loss(params) returns both.

    The parameters of the unused head get none, nor a bias of keys, because softmax cancels it.
    """
    _, grads = of_loss(params)
    moving = {}
    for name, value in params.items():
        if name.startswith(unused) or name.endswith("key_bias"):
            assert not grads.get(name, np.zeros(1)).any(), f"{name} gets a gradient"
        else:
            moving[name] = value

    def objective(moved):
        loss, _ = of_loss(params | moved)
        return loss

    check_directions(objective, moving, grads, rng, used)


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_gradients_of_answering(change):
    """Along random directions, with dropout."""
    config = dataclasses.replace(ROBERTA, dropout=0.3, **change)
    rng = np.random.default_rng(3)
    params = roberta_params(config, rng)
    windows, answer = roberta_example(config, rng)

    def of_loss(p):
        return ref.loss_and_gradients(p, config, windows, answer, np.random.default_rng(4))

    check_gradients(of_loss, params, "answer.", "masked.", rng)


def outputs_of(params, config, windows):
    """The outputs of all windows, and the last state."""
    state = ref.initial_state(params, config, len(windows[0][0]))
    found = []
    for tokens, readable, _ in windows:
        x, state, _ = ref.forward(params, config, tokens, readable, state)
        found.append(x)
    return found, state


@pytest.mark.parametrize("recurrent", [True, False])
def test_a_window_knows_of_earlier_ones_through_the_vector_alone(recurrent):
    """A lane's first window changes its second one's outputs if the model is recurrent.

    And no other lane's at all.
    """
    config = dataclasses.replace(ROBERTA, recurrent=recurrent)
    rng = np.random.default_rng(5)
    params = roberta_params(config, rng)
    windows, _ = roberta_example(config, rng)
    tokens, readable, text = windows[0]
    changed = (tokens + np.array([[1], [0], [0]])) % config.vocabulary
    (_, second, *_), _ = outputs_of(params, config, windows)
    (_, other, *_), _ = outputs_of(params, config, [(changed, readable, text), *windows[1:]])
    difference = np.abs(second - other).max((1, 2))
    assert (difference[0] > 1e-6) == recurrent
    assert not difference[1:].any(), "another lane's window is read"


def test_the_state_is_the_mean_and_the_maximum_over_windows():
    rng = np.random.default_rng(6)
    params = roberta_params(ROBERTA, rng)
    windows, _ = roberta_example(ROBERTA, rng)
    outputs, state = outputs_of(params, ROBERTA, windows)
    for lane in range(3):
        read = [k for k, (_, readable, _) in enumerate(windows) if readable[lane, 0]]
        last = read[-1]
        readable = windows[last][1][lane]
        np.testing.assert_allclose(state.pooled[lane], outputs[last][lane][readable].mean(0))
        firsts = [outputs[k][lane, 0] for k in read]
        np.testing.assert_array_equal(state.first[lane], np.max(firsts, axis=0))
    assert state.present.all()
    assert len(read) < len(windows), "the last lane's example ends before the others"


def log_softmax(scores):
    return scores - np.logaddexp.reduce(scores, axis=-1, keepdims=True)


def test_an_answer_is_looked_for_in_all_of_the_text_and_nowhere_else():
    rng = np.random.default_rng(8)
    params = roberta_params(ROBERTA, rng)
    windows, answer = roberta_example(ROBERTA, rng)
    outputs, state = outputs_of(params, ROBERTA, windows)
    texts = [text for _, _, text in windows]
    head = ref.subtree(params, "answer.")
    spans, kinds, _ = ref.answer_forward(head, outputs, texts, state.first)
    assert spans.shape == (3, 2, 3 * ROBERTA.segment)
    assert kinds.shape == (3, 3)
    np.testing.assert_array_equal(np.isfinite(spans[:, 0]), np.concatenate(texts, 1))

    assert {0} < set(answer.kind), "spans and others"
    of_places = log_softmax(spans)
    expected = -log_softmax(kinds)[range(3), answer.kind].sum()
    for lane in np.flatnonzero(answer.kind == 0):
        start = of_places[lane, 0, answer.start[lane]]
        end = of_places[lane, 1, answer.end[lane]]
        expected -= 0.5 * (start + end)
    loss, _ = ref.answer_loss_forward(spans, kinds, answer)
    assert loss == pytest.approx(expected, rel=1e-12)


REFUSED = [
    ({"insertion_layer": 4}, r"insertion_layer is 4; it must lie in 1\.\.3"),
    ({"insertion_layer": 0}, "insertion_layer is 0"),
    ({"heads": 4}, "width 6 is not a multiple of heads 4; the nearest is 8"),
    ({"module_layers": -1}, "module_layers is -1"),
    ({"dropout": 1.0}, "dropout is 1.0"),
]


@pytest.mark.parametrize("change,words", REFUSED, ids=str)
def test_impossible_configs_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(ROBERTA, **change)


@pytest.mark.parametrize("length", [0, ROBERTA.segment + 1])
def test_windows_of_other_lengths_are_refused(length):
    params = roberta_params(ROBERTA, np.random.default_rng(0))
    tokens = np.zeros((1, length), int)
    state = ref.initial_state(params, ROBERTA, 1)
    with pytest.raises(ValueError, match=f"a window of {length} tokens; it must have 1 to 8"):
        ref.forward(params, ROBERTA, tokens, tokens == 0, state)
