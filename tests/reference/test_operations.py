"""Operations that several references share: each once, because a test says that their sources are equal."""

import numpy as np

from reference import block_recurrent as ref
from tests.helpers.gradients import check_operation, draw, flat


def test_linear_gradient():
    check_operation(
        lambda x, weight: ref.linear_forward(x, weight),
        lambda dout, cache: dict(zip(("x", "weight"), ref.linear_backward(dout, cache), strict=True)),
        {"x": draw(2, 3, 4), "weight": draw(5, 4)},
        "linear",
    )


def test_layer_norm_gradient():
    check_operation(
        lambda x, **p: ref.layer_norm_forward(p, "own", x),
        lambda dout, cache: flat(ref.layer_norm_backward(dout, cache), ["x"]),
        {"x": draw(2, 3, 5), "own.scale": draw(5), "own.bias": draw(5)},
        "layer_norm",
    )


def test_unit_norm_gradient():
    check_operation(
        ref.unit_norm_forward,
        lambda dout, cache: {"x": ref.unit_norm_backward(dout, cache)},
        {"x": draw(2, 3, 5)},
        "unit_norm",
    )


def test_softmax_gradient():
    check_operation(
        ref.softmax_forward,
        lambda dout, cache: {"scores": ref.softmax_backward(dout, cache)},
        {"scores": draw(3, 5)},
        "softmax",
    )


def test_dropout_gradient():
    check_operation(
        lambda x: ref.dropout_forward(x, 0.4, np.random.default_rng(8)),
        lambda dout, keep: {"x": ref.dropout_backward(dout, keep)},
        {"x": draw(3, 5)},
        "dropout",
    )


def test_cross_entropy_gradient():
    targets, scored = np.array([[1, 3, 0], [2, 2, 1]]), np.array([[1, 0, 1], [1, 1, 0]], bool)
    check_operation(
        lambda logits: ref.cross_entropy_forward(logits, targets, scored),
        lambda dout, cache: {"logits": ref.cross_entropy_backward(dout, cache)},
        {"logits": draw(2, 3, 5)},
        "cross_entropy",
    )


def test_dropout_rate_and_scale():
    x = np.ones(200_000)
    dropped, _ = ref.dropout_forward(x, 0.25, np.random.default_rng(0))
    assert set(np.unique(dropped)) == {0.0, 1 / 0.75}
    assert abs((dropped == 0).mean() - 0.25) < 0.005
    assert ref.dropout_forward(x, 0.25, None)[0] is x
