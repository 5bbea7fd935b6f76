"""The fast paths of a CPU equal the plain ones, in each type; test_sdpa.py has those of a GPU."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelerated.attention import on_a_cpu, relative_shift, sliding_window
from accelerated.attention.heads import NORM_EPSILON, project_heads_plain
from accelerated.attention.on_a_cpu import ProjectHeads, SlidingAttention
from tests.helpers.comparison import SIZES, TOLERANCE, assert_agree, beside_one

BFLOAT16 = TOLERANCE["cpu", torch.bfloat16]


def drawn(**shapes):
    """{name: normal random numbers}."""
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def sliding_inputs(batch, heads, blocks, window, width, size=1.0):
    """size: of the queries and of the offset.

    The first block's keys are zeros, as a document's are.
    """
    rows = (batch, heads, (blocks + 1) * window, width)
    inputs = drawn(
        query=(batch, heads, blocks * window, width),
        keys=rows,
        values=rows,
        offset=(heads, window, 2 * window),
    )
    mask = sliding_window.by_query_and_key(
        sliding_window.tables_by_distance(window, 4, 8)[1], window
    )
    for name in ("keys", "values"):
        inputs[name][:, :, :window] = 0
    return inputs | {
        "query": size * inputs["query"],
        "offset": (size * inputs["offset"]).masked_fill(~mask, -math.inf),
    }


def relative_inputs(batch, heads, length, before, width, rows=None, size=1.0):
    """rows: of the distance keys, at most as many as there are keys; size: of the queries and the
    biases.
    """
    keys, biases = (
        (batch, heads, before + length, width),
        dict.fromkeys(("content_bias", "distance_bias"), (heads, width)),
    )
    distances = (heads, min(before + length, rows or before + length), width)
    inputs = drawn(
        query=(batch, heads, length, width), key=keys, value=keys, distance_key=distances, **biases
    )
    return inputs | {name: size * inputs[name] for name in ("query", *biases)}


def gradients(function, inputs, *rest, **options):
    """The outputs of function and the gradients of its inputs, by name."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    outs = function(*leaves.values(), *rest, **options)
    outs = {
        f"out {k}": out
        for k, out in enumerate(outs if isinstance(outs, tuple) else (outs,))
        if out is not None
    }
    moving = [out for out in outs.values() if out.requires_grad]
    sum(
        (out * torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view(out.shape)).sum()
        for out in moving
    ).backward()
    return outs | {f"d{name}": leaf.grad for name, leaf in leaves.items()}


def in_type(inputs, dtype):
    return {name: x.to(dtype) for name, x in inputs.items()}


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
    """In float64, and of usual scores in float32 too."""
    inputs = sliding_inputs(batch, heads, blocks, window, width, size)
    expected = gradients(sliding_window.sliding_attention_plain, inputs)
    for dtype in (torch.float64, torch.float32) if size == 1 else (torch.float64,):
        actual = gradients(SlidingAttention.apply, in_type(inputs, dtype))
        assert {x.dtype for x in actual.values()} == {dtype}
        assert_agree(
            beside_one(expected), beside_one(actual), 10 * TOLERANCE["cpu", dtype]
        )  # sizes are up to 30


@given(
    batch=sizes,
    heads=sizes,
    length=st.integers(1, 9),
    before=st.integers(0, 7),
    width=st.integers(1, 6),
    tile=st.integers(1, 10),
    rows=st.integers(1, 16),
    in_values=st.booleans(),
    size=SIZES,
)
def test_tiled_relative_attention_equals_plain(
    batch, heads, length, before, width, tile, rows, in_values, size
):
    """In float64, and of usual scores in float32 too."""
    inputs, options = (
        relative_inputs(batch, heads, length, before, width, rows, size),
        {"measure": True, "in_values": in_values},
    )
    expected = gradients(relative_shift.relative_attention_plain, inputs, **options)
    for dtype in (torch.float64, torch.float32) if size == 1 else (torch.float64,):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(on_a_cpu, "TILE", tile)
            patch.setattr(
                relative_shift, "relative_attention_plain", None
            )  # the fast path must not fall back
            actual = gradients(relative_shift.relative_attention, in_type(inputs, dtype), **options)
        assert actual["out 0"].dtype == dtype and not actual["out 1"].requires_grad
        assert_agree(beside_one(expected), beside_one(actual), 10 * TOLERANCE["cpu", dtype])


@given(
    batch=sizes,
    length=st.integers(1, 5),
    heads=sizes,
    width=st.integers(2, 6),
    parts=st.integers(2, 4),
)
def test_fast_head_projection_equals_plain(batch, length, heads, width, parts):
    """In every type, against the plain path in float64; of unit length are all parts except the
    last.
    """
    inputs = drawn(x=(batch, length, 7), weight=(parts * heads * width, 7))
    for dtype in (torch.float64, torch.float32):
        rounded = in_type(inputs, dtype)
        actual = gradients(
            lambda x, w: ProjectHeads.apply(x, w, heads, parts, NORM_EPSILON), rounded
        )
        assert {x.dtype for x in actual.values()} == {dtype}
        expected = gradients(
            lambda x, w: project_heads_plain(x, w, heads, parts), in_type(rounded, torch.float64)
        )
        assert_agree(expected, actual, TOLERANCE["cpu", dtype])


RELATIVE = relative_shift.relative_attention_plain, relative_shift.relative_attention
SLIDING = sliding_window.sliding_attention_plain, SlidingAttention.apply
PROJECT = (
    lambda x, w, parts: project_heads_plain(x, w, 5, parts),
    lambda x, w, parts: ProjectHeads.apply(x, w, 5, parts, NORM_EPSILON),
)
IN_BFLOAT16 = {  # {case: (plain, fast, inputs, what else both are given)}
    "relative": (*RELATIVE, relative_inputs(2, 3, 130, 170, 32), (0.0, True)),
    "relative in values": (
        *RELATIVE,
        relative_inputs(2, 3, 130, 170, 32, rows=65),
        (0.0, True, True),
    ),
    "sliding": (*SLIDING, sliding_inputs(2, 3, 4, 16, 32), ()),
    "projection": (*PROJECT, drawn(x=(3, 70, 48), weight=(2 * 5 * 32, 48)), (2,)),
}


@pytest.mark.parametrize("case", IN_BFLOAT16)
def test_fast_paths_in_bfloat16(case, monkeypatch):
    """Against the plain path in float64; every result is in bfloat16, except usage, which is a mean
    over many queries.
    """
    plain, fast, inputs, rest = IN_BFLOAT16[case]
    inputs = in_type(inputs, torch.bfloat16)
    expected = gradients(plain, in_type(inputs, torch.float64), *rest)
    monkeypatch.setattr(
        relative_shift, "relative_attention_plain", None
    )  # the fast path must not fall back
    actual = gradients(fast, inputs, *rest)
    types = {
        name: torch.float32 if "relative" in case and name == "out 1" else torch.bfloat16
        for name in actual
    }
    assert {name: x.dtype for name, x in actual.items()} == types
    assert_agree(expected, actual, BFLOAT16)


def test_sums_over_tiles_are_in_float32(monkeypatch):
    """A sum of bfloat16 stops growing when an addend is below 1/256 of it; here each of 400 and of
    600 tiles adds to it.
    """
    monkeypatch.setattr(on_a_cpu, "TILE", 1)
    relative = in_type(relative_inputs(1, 2, 400, 3, 8), torch.bfloat16)
    relative["query"].zero_()
    sliding = in_type(sliding_inputs(1, 2, 1, 4, 8), torch.bfloat16)
    rows = sliding["query"].repeat(1, 1, 601, 1)
    sliding |= {"query": rows[:, :, 4:], "keys": rows, "values": rows}
    cases = ((RELATIVE, relative, (0.0, True), "value"), (SLIDING, sliding, (), "offset"))
    for (plain, fast), inputs, rest, summed in cases:
        found = []
        for attend, dtype in ((plain, torch.float64), (fast, torch.bfloat16)):
            leaves = {name: x.to(dtype).requires_grad_() for name, x in inputs.items()}
            outs = attend(*leaves.values(), *rest)
            out, *usage = outs if isinstance(outs, tuple) else (outs,)
            out[..., 0].sum().backward()
            found.append({summed: leaves[summed].grad} | dict(zip(["usage"], usage, strict=False)))
        assert_agree(*found, BFLOAT16)


def test_the_tiled_paths_are_taken_if_possible_and_measure_when_asked(monkeypatch):
    """Dropout, which they do not have, is the plain path's."""
    taken, plain, tiled = [], sliding_window.sliding_attention_plain, SlidingAttention.apply
    monkeypatch.setattr(
        sliding_window, "sliding_attention_plain", lambda *a: taken.append("plain") or plain(*a)
    )
    monkeypatch.setattr(SlidingAttention, "apply", lambda *a: taken.append("tiled") or tiled(*a))
    inputs = in_type(sliding_inputs(1, 2, 2, 3, 4), torch.float32)
    sliding_window.sliding_attention(*in_type(inputs, torch.bfloat16).values())
    sliding_window.sliding_attention(*inputs.values(), 0.5)
    assert taken == ["tiled", "plain"]
    inputs = relative_inputs(2, 3, 4, 5, 6).values()
    out, usage = relative_shift.relative_attention(*inputs, measure=True)
    dropped, same = relative_shift.relative_attention(*inputs, dropout=0.5, measure=True)
    assert (
        not torch.allclose(dropped, out) and torch.allclose(same, usage) and usage.shape == (2, 9)
    )
    assert all(attend(*inputs)[1] is None for attend in RELATIVE)
