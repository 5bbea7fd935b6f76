"""RoBERTa with recurrence in NumPy: gradients by finite differences, and what passes from window to window."""

import dataclasses

import numpy as np
import pytest

from reference import roberta as ref
from tests.helpers.finite_differences import check_directions, check_operation, draw
from tests.helpers.roberta import CONFIG, example, shaken

COUNTED = np.array([[1, 1, 0, 1], [0, 0, 0, 0]], bool)
OPERATIONS = {  # forward, backward, inputs
    "exact_gelu": (ref.exact_gelu_forward, ref.exact_gelu_backward, {"x": draw(3, 5)}),
    "mean_of_rows": (lambda x: ref.mean_of_rows_forward(x, COUNTED), ref.mean_of_rows_backward, {"x": draw(2, 4, 3)}),
    "larger": (ref.larger_forward, ref.larger_backward, {"a": draw(3, 5), "b": draw(3, 5)}),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_gradient(name):
    check_operation(*OPERATIONS[name], name)


def test_of_two_equal_ones_one_has_the_gradient_and_no_rows_have_mean_zero():
    da, db = ref.larger_backward(np.ones(1), ref.larger_forward(np.ones(1), np.ones(1))[1])
    assert da == 1 and db == 0
    means, _ = ref.mean_of_rows_forward(np.arange(24.0).reshape(2, 4, 3), COUNTED)
    np.testing.assert_allclose(means, [[4, 5, 6], [0, 0, 0]])


def test_initial_weights_are_as_large_as_their_layers_ask_for():
    config = dataclasses.replace(CONFIG, width=48, module_width=80)
    params = ref.init_params(config, np.random.default_rng(0))
    for name, fan_in in (("module.hidden_1", 48), ("module.hidden_2", 80), ("module.inserted", 80)):
        assert params[name].std() == pytest.approx(fan_in**-0.5, rel=0.1) and abs(params[name]).max() < 2.3 * fan_in**-0.5
    for name in ("embedding", "positions", "layers.0.query", "layers.2.mlp_hidden", "masked.hidden", "answer.span"):
        assert params[name].std() == pytest.approx(0.02, rel=0.2), name
    scales = {name for name in params if name.endswith("scale")}
    biases = {name for name in params if name.endswith("bias")}
    assert all((params[name] == 1).all() for name in scales) and not any(params[name].any() for name in biases)
    assert len(scales) == 2 * 3 + 2 and len(biases) > 20


CHANGES = [
    {},
    {"recurrent": False},
    {"insertion_layer": 1},
    {"insertion_layer": 3},
    {"module_layers": 0},
    {"layers": 1, "insertion_layer": 1},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_gradients_of_answering_and_of_the_pretraining(change):
    """Along random directions, with dropout; a bias of keys gets exactly none, because softmax cancels it."""
    config, rng = dataclasses.replace(CONFIG, dropout=0.3, **change), np.random.default_rng(3)
    params, (windows, answer) = shaken(config, rng), example(config, rng)
    targets, scored = rng.integers(config.vocabulary, size=(3, config.segment)), rng.random((3, config.segment)) < 0.5

    for function, own, other in (
        (lambda p: ref.loss_and_gradients(p, config, windows, answer, np.random.default_rng(4)), "answer.", "masked."),
        (
            lambda p: ref.masked_loss_and_gradients(p, config, windows[0][0], targets, scored, np.random.default_rng(4)),
            "masked.",
            "answer.",
        ),
    ):
        _, grads = function(params)
        assert not any(grad.any() for name, grad in grads.items() if name.startswith(other) or name.endswith("key_bias"))
        moving = {n: v for n, v in params.items() if not n.startswith(other) and not n.endswith("key_bias")}
        check_directions(lambda shifted, f=function: f(params | shifted)[0], moving, grads, rng, own)


def outputs_of(params, config, windows):
    """The outputs of all windows, and the last state."""
    state, found = ref.initial_state(params, config, len(windows[0][0])), []
    for tokens, readable, _ in windows:
        x, state, _ = ref.forward(params, config, tokens, readable, state)
        found.append(x)
    return found, state


@pytest.mark.parametrize("recurrent", [True, False])
def test_a_window_knows_of_earlier_ones_through_the_vector_alone(recurrent):
    """A lane's first window changes its second one's outputs if the model is recurrent, and no other lane's at all."""
    config, rng = dataclasses.replace(CONFIG, recurrent=recurrent), np.random.default_rng(5)
    params, (windows, _) = shaken(config, rng), example(config, rng)
    tokens, readable, text = windows[0]
    other = [((tokens + np.array([[1], [0], [0]])) % config.vocabulary, readable, text), *windows[1:]]
    (_, second, *_), _ = outputs_of(params, config, windows)
    (_, changed, *_), _ = outputs_of(params, config, other)
    difference = np.abs(second - changed).max((1, 2))
    assert (difference[0] > 1e-6) == recurrent and not difference[1:].any()


def test_the_state_is_the_mean_and_the_maximum_over_windows():
    config, rng = CONFIG, np.random.default_rng(6)
    params, (windows, _) = shaken(config, rng), example(config, rng)
    outputs, state = outputs_of(params, config, windows)
    for lane in range(3):
        read = [k for k, (_, readable, _) in enumerate(windows) if readable[lane, 0]]
        last = read[-1]
        np.testing.assert_allclose(state.pooled[lane], outputs[last][lane][windows[last][1][lane]].mean(0))
        np.testing.assert_array_equal(state.first[lane], np.max([outputs[k][lane, 0] for k in read], axis=0))
    assert state.present.all() and len(read) < 3, "the last lane's example ends before the others"


def test_padding_changes_nothing():
    """Neither what stands in it nor how much there is of it."""
    config, rng = CONFIG, np.random.default_rng(7)
    params, (windows, _) = shaken(config, rng), example(config, rng)
    tokens, readable, _ = windows[0]
    n = int(readable[0].sum())
    assert n < config.segment
    alone, _, _ = ref.forward(params, config, tokens[:1, :n], readable[:1, :n], ref.initial_state(params, config, 1))
    padded, _, _ = ref.forward(params, config, np.where(readable, tokens, 0), readable, ref.initial_state(params, config, 3))
    np.testing.assert_allclose(padded[:1, :n], alone, rtol=1e-12)


def test_an_answer_is_looked_for_in_all_of_the_text_and_nowhere_else():
    config, rng = CONFIG, np.random.default_rng(8)
    params, (windows, answer) = shaken(config, rng), example(config, rng)
    outputs, state = outputs_of(params, config, windows)
    texts = [text for _, _, text in windows]
    spans, kinds, _ = ref.answer_forward(ref.subtree(params, "answer."), outputs, texts, state.first)
    assert spans.shape == (3, 2, 3 * config.segment) and kinds.shape == (3, 3)
    np.testing.assert_array_equal(np.isfinite(spans[:, 0]), np.concatenate(texts, 1))
    shares = np.exp(spans - np.logaddexp.reduce(spans, axis=-1, keepdims=True))
    kind = np.exp(kinds - np.logaddexp.reduce(kinds, axis=-1, keepdims=True))
    expected = -np.log(kind[range(3), answer.kind]).sum()
    for lane in np.flatnonzero(answer.kind == 0):
        expected -= 0.5 * np.log(shares[lane, 0, answer.start[lane]] * shares[lane, 1, answer.end[lane]])
    assert ref.answer_loss_forward(spans, kinds, answer)[0] == pytest.approx(expected, rel=1e-12)
    assert {0} < set(answer.kind), "spans and others"


@pytest.mark.parametrize(
    "change,words",
    [
        ({"heads": 4}, "width 6 is not a multiple of heads 4; the nearest is 8"),
        ({"layers": 0}, "layers is 0"),
        ({"insertion_layer": 4}, "insertion_layer is 4; it must lie in 1..3"),
        ({"module_layers": -1}, "module_layers is -1"),
        ({"dropout": 1.0}, "dropout is 1.0"),
    ],
)
def test_what_cannot_work_is_refused(change, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(CONFIG, **change)
    with pytest.raises(ValueError, match="a window of 9 tokens; it must have 1 to 8"):
        ref.forward({}, CONFIG, np.zeros((1, 9), int), np.ones((1, 9), bool), None)
