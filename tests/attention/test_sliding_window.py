"""The fast paths of sliding-window attention and head projections equal their plain paths, by dtype and device."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelerated.attention import sliding_window as attention
from accelerated.attention.heads import NORM_EPSILON, merge_heads, project_heads_plain
from accelerated.attention.on_a_cpu import ProjectHeads, SlidingAttention
from tests.helpers.comparison import TOLERANCE, assert_agree
from tests.helpers.definitions import SIZES, beside_one


def outputs_and_gradients(function, inputs):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outs = function(*leaves)
    outs = outs if isinstance(outs, tuple) else (outs,)
    weights = [torch.linspace(-1, 2, out.numel(), dtype=out.dtype, device=out.device).view(out.shape) for out in outs]
    sum((out * weight).sum() for out, weight in zip(outs, weights, strict=True)).backward()
    rows = {f"out {k}": out for k, out in enumerate(outs)}
    return rows | {f"grad {k}": leaf.grad for k, leaf in enumerate(leaves)}


def tile_inputs(batch, heads, blocks, window, width, dtype=torch.float64, size=1.0):
    """size: of the queries and of the offset."""
    torch.manual_seed(0)
    shapes = [(heads, window, 2 * window), *((batch, heads, count * window, width) for count in (blocks, blocks + 1, blocks + 1))]
    offset, query, keys, values = (torch.randn(shape, dtype=dtype) for shape in shapes)
    mask = attention.window_mask(attention.tile_distance(window), window)
    return [size * query, keys, values, (size * offset).masked_fill(~mask, -torch.inf)]


@given(
    batch=st.integers(1, 3),
    heads=st.integers(1, 3),
    blocks=st.integers(1, 4),
    window=st.integers(1, 9),
    width=st.integers(1, 6),
    size=SIZES,
)
def test_tiled_sliding_attention_equals_plain(batch, heads, blocks, window, width, size):
    """In float64, and of usual scores in float32 too."""
    inputs = tile_inputs(batch, heads, blocks, window, width, size=size)
    expected = outputs_and_gradients(attention.sliding_attention_plain, inputs)
    for dtype in (torch.float64, torch.float32) if size == 1 else (torch.float64,):
        actual = outputs_and_gradients(SlidingAttention.apply, [x.to(dtype) for x in inputs])
        assert {x.dtype for x in actual.values()} == {dtype}
        assert_agree(beside_one(expected), beside_one(actual), 10 * TOLERANCE["cpu", dtype])  # sizes are up to 30


@pytest.mark.parametrize("sizes", [(2, 3, 4, 16, 32), (1, 2, 3, 9, 8)])
def test_tiled_sliding_attention_in_bfloat16(sizes):
    """Against the plain path in float64; every result is in bfloat16, and merging heads copies nothing."""
    inputs = tile_inputs(*sizes, torch.bfloat16)
    expected = outputs_and_gradients(attention.sliding_attention_plain, [x.double() for x in inputs])
    actual = outputs_and_gradients(SlidingAttention.apply, inputs)
    assert {x.dtype for x in actual.values()} == {torch.bfloat16}
    assert_agree(expected, actual, TOLERANCE["cpu", torch.bfloat16])
    assert merge_heads(actual["out 0"]).data_ptr() == actual["out 0"].data_ptr()


def test_an_offsets_gradient_is_summed_in_float32():
    """A sum of bfloat16 stops growing when an addend is below 1/256 of it; here each of 600 equal blocks adds to it."""
    window, blocks = 4, 600
    query, _, _, offset = tile_inputs(1, 2, 1, window, 8, torch.bfloat16)
    rows = query.repeat(1, 1, blocks + 1, 1)
    inputs = [rows[:, :, window:], rows, rows, offset]
    gradients = []
    for attend, dtype in ((attention.sliding_attention_plain, torch.float64), (SlidingAttention.apply, torch.bfloat16)):
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        attend(*leaves)[..., 0].sum().backward()
        gradients.append({"doffset": leaves[3].grad})
    assert_agree(*gradients, TOLERANCE["cpu", torch.bfloat16])


@given(
    batch=st.integers(1, 3), length=st.integers(1, 5), heads=st.integers(1, 3), width=st.integers(2, 6), parts=st.integers(2, 4)
)
def test_fast_head_projection_equals_plain(batch, length, heads, width, parts):
    """In every type, against the plain path in float64; of unit length are all parts except the last."""
    torch.manual_seed(0)
    inputs = torch.randn(batch, length, 7), torch.randn(parts * heads * width, 7)
    plain = lambda x, w: project_heads_plain(x, w, heads, parts)  # noqa: E731
    fast = lambda x, w: ProjectHeads.apply(x, w, heads, parts, NORM_EPSILON)  # noqa: E731
    for dtype in (torch.float64, torch.float32):
        rounded = [x.to(dtype) for x in inputs]
        actual = outputs_and_gradients(fast, rounded)
        assert {x.dtype for x in actual.values()} == {dtype}
        assert_agree(outputs_and_gradients(plain, [x.double() for x in rounded]), actual, TOLERANCE["cpu", dtype])


@pytest.mark.parametrize("parts", [2, 4])
def test_fast_head_projection_in_bfloat16(parts):
    torch.manual_seed(0)
    inputs = torch.randn(3, 70, 48).bfloat16(), torch.randn(parts * 5 * 32, 48).bfloat16()
    expected = outputs_and_gradients(lambda x, w: project_heads_plain(x, w, 5, parts), [x.double() for x in inputs])
    actual = outputs_and_gradients(lambda x, w: ProjectHeads.apply(x, w, 5, parts, NORM_EPSILON), inputs)
    assert {x.dtype for x in actual.values()} == {torch.bfloat16}
    assert_agree(expected, actual, TOLERANCE["cpu", torch.bfloat16])


def test_the_fast_path_is_taken_if_possible(monkeypatch):
    """On a CPU without dropout the tiled function runs, in bfloat16 too, otherwise the plain one."""
    taken, plain, tiled = [], attention.sliding_attention_plain, SlidingAttention.apply
    monkeypatch.setattr(attention, "sliding_attention_plain", lambda *a: taken.append("plain") or plain(*a))
    monkeypatch.setattr(SlidingAttention, "apply", lambda *a: taken.append("tiled") or tiled(*a))
    inputs = tile_inputs(1, 2, 2, 3, 4, torch.float32)
    attention.sliding_attention(*inputs)
    attention.sliding_attention(*(x.bfloat16() for x in inputs))
    attention.sliding_attention(*inputs, 0.5)
    assert taken == ["tiled", "tiled", "plain"]
