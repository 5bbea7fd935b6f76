"""The fast paths of a CPU equal the plain ones, in each type; test_sdpa.py has those of a GPU."""

import math
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelerated.attention import relative_shift, sliding_window
from accelerated.fast import attention_cpu
from accelerated.fast.attention_cpu import SlidingAttention
from tests.helpers.comparison import SIZES, TOLERANCE, assert_agree, beside_one

BFLOAT16 = TOLERANCE["cpu", torch.bfloat16]


def drawn(**shapes):
    """{name: normal random numbers}."""
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def sliding_inputs(batch, heads, blocks, window, width, size=1.0):
    """What sliding attention takes; `size` is that of the queries and of the offset.

    The first block's keys are zeros, as a document's are.
    """
    rows = (batch, heads, (blocks + 1) * window, width)
    inputs = drawn(
        query=(batch, heads, blocks * window, width),
        keys=rows,
        values=rows,
        offset=(heads, window, 2 * window),
    )
    for name in ("keys", "values"):
        inputs[name][:, :, :window] = 0
    _, seen = sliding_window.tables_by_distance(window, 4, 8)
    seen = sliding_window.by_query_and_key(seen, window)
    inputs["query"] = size * inputs["query"]
    inputs["offset"] = (size * inputs["offset"]).masked_fill(~seen, -math.inf)
    return inputs


def by_distance(inputs):
    """The same with an offset by distance, as sliding_attention takes it."""
    offset = inputs.pop("offset")
    heads, window, _ = offset.shape
    return inputs | {"by_distance": torch.randn(heads, 3 * window - 1)}


def relative_inputs(batch, heads, length, before, width, size=1.0):
    """What relative attention takes; `size` is that of the queries and the biases."""
    keys = before + length
    inputs = drawn(
        query=(batch, heads, length, width),
        key=(batch, heads, keys, width),
        value=(batch, heads, keys, width),
        distance_key=(heads, keys, width),
        content_bias=(heads, width),
        distance_bias=(heads, width),
    )
    for name in ("query", "content_bias", "distance_bias"):
        inputs[name] = size * inputs[name]
    return inputs


def gradients(function, inputs, *rest, **options):
    """The outputs of a function and the gradients of its inputs, by name."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    returned = function(*leaves.values(), *rest, **options)
    if not isinstance(returned, tuple):
        returned = (returned,)
    outs = {f"out {k}": out for k, out in enumerate(returned) if out is not None}
    total = 0.0
    for out in outs.values():
        if out.requires_grad:
            weights = torch.linspace(-1, 2, out.numel(), dtype=out.dtype)
            total = total + (out * weights.view(out.shape)).sum()
    total.backward()
    return outs | {f"d{name}": leaf.grad for name, leaf in leaves.items()}


def in_type(inputs, dtype):
    return {name: x.to(dtype) for name, x in inputs.items()}


def types_for(size):
    """Usual scores are compared in float32 too; large ones would need other tolerances."""
    return (torch.float64, torch.float32) if size == 1 else (torch.float64,)


sizes = st.integers(1, 3)


@given(
    batch=sizes,
    heads=sizes,
    blocks=st.integers(1, 4),
    window=st.integers(1, 9),
    width=st.integers(1, 6),
    size=SIZES,
)
def test_tiled_sliding_attention_equals_plain(batch, heads, blocks, window, width, size):
    inputs = sliding_inputs(batch, heads, blocks, window, width, size)
    expected = gradients(sliding_window.sliding_attention_plain, inputs)
    for dtype in types_for(size):
        actual = gradients(SlidingAttention.apply, in_type(inputs, dtype))
        assert {x.dtype for x in actual.values()} == {dtype}
        tolerance = 10 * TOLERANCE["cpu", dtype]  # sizes are up to 30
        assert_agree(beside_one(expected), beside_one(actual), tolerance)


@given(
    batch=sizes,
    heads=sizes,
    length=st.integers(1, 9),
    before=st.integers(0, 7),
    width=st.integers(1, 6),
    tile=st.integers(1, 10),
    size=SIZES,
)
def test_tiled_relative_attention_equals_plain(batch, heads, length, before, width, tile, size):
    inputs = relative_inputs(batch, heads, length, before, width, size)
    expected = gradients(relative_shift.relative_attention_plain, inputs, measure=True)
    for dtype in types_for(size):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attention_cpu, "TILE", tile)
            # The fast path must not fall back
            patch.setattr(relative_shift, "relative_attention_plain", None)
            typed = in_type(inputs, dtype)
            actual = gradients(relative_shift.relative_attention, typed, measure=True)
        assert actual["out 0"].dtype == dtype
        assert not actual["out 1"].requires_grad, "usage has no gradient"
        assert_agree(beside_one(expected), beside_one(actual), 10 * TOLERANCE["cpu", dtype])


def test_tiled_relative_attention_in_bfloat16(monkeypatch):
    """Against the plain path in float64; usage, out 1, is a mean over many queries in float32.

    A sum in bfloat16 stops growing as soon as an addend is below 1/256 of it. Here each of 400
    tiles adds to the gradient of a value.
    """
    monkeypatch.setattr(attention_cpu, "TILE", 1)
    inputs = in_type(relative_inputs(1, 2, 400, 3, 8), torch.bfloat16)
    inputs["query"].zero_()
    plain = relative_shift.relative_attention_plain
    expected = gradients(plain, in_type(inputs, torch.float64), measure=True)
    monkeypatch.setattr(relative_shift, "relative_attention_plain", None)  # no falling back
    found = gradients(relative_shift.relative_attention, inputs, measure=True)
    assert {name: x.dtype for name, x in found.items() if x.dtype != torch.bfloat16} == {
        "out 1": torch.float32
    }
    assert_agree(expected, found, BFLOAT16)


def test_tiled_sliding_attention_in_bfloat16():
    """The same; each of 600 tiles adds to the gradient of the offset."""
    inputs = sliding_inputs(1, 2, 1, 4, 8)
    rows = inputs["query"].repeat(1, 1, 601, 1)
    inputs |= {"query": rows[:, :, 4:], "keys": rows, "values": rows}
    inputs = in_type(inputs, torch.bfloat16)
    expected = gradients(sliding_window.sliding_attention_plain, in_type(inputs, torch.float64))
    found = gradients(SlidingAttention.apply, inputs)
    assert {x.dtype for x in found.values()} == {torch.bfloat16}
    assert_agree(expected, found, BFLOAT16)


def test_sliding_attention_is_tiled_unless_it_drops(monkeypatch):
    """Dropout, which the tiles do not have, is the plain path's."""
    plain = Mock(wraps=sliding_window.sliding_attention_plain)
    tiled = Mock(wraps=SlidingAttention.apply)
    monkeypatch.setattr(sliding_window, "sliding_attention_plain", plain)
    monkeypatch.setattr(SlidingAttention, "apply", tiled)
    inputs = by_distance(sliding_inputs(1, 2, 2, 3, 4))
    sliding_window.sliding_attention(*in_type(inputs, torch.bfloat16).values())
    assert (tiled.call_count, plain.call_count) == (1, 0)
    sliding_window.sliding_attention(*inputs.values(), 0.5)
    assert (tiled.call_count, plain.call_count) == (1, 1)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_usage_is_measured_only_if_it_is_asked_for(dropout):
    """Before weights are dropped."""
    inputs = relative_inputs(2, 3, 4, 5, 6).values()
    _, usage = relative_shift.relative_attention(*inputs, dropout)
    assert usage is None
    _, usage = relative_shift.relative_attention(*inputs, dropout, measure=True)
    _, expected = relative_shift.relative_attention_plain(*inputs, measure=True)
    assert usage.shape == (2, 9)
    torch.testing.assert_close(usage, expected)
