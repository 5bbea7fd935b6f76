"""The tiled path of relative attention equals its plain path, by dtype, tile and device."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelerated.attention import on_a_cpu
from accelerated.attention import relative_shift as module
from accelerated.attention.heads import merge_heads
from reference import compressive as ref
from tests.helpers.comparison import TOLERANCE, assert_agree
from tests.helpers.definitions import SIZES, beside_one

NAMES = ("query", "key", "value", "distance_key", "content_bias", "distance_bias")


def attention_inputs(batch, heads, length, before, width, dtype, clipped=None, size=1.0):
    """clipped: the number of rows of the distance keys, at most that of the keys; size: of the queries and the biases."""
    torch.manual_seed(0)
    total = before + length
    rows = min(total, clipped or total)
    query, biases = size * torch.randn(batch, heads, length, width), size * torch.randn(2, heads, width)
    keys = (torch.randn(batch, heads, total, width), torch.randn(batch, heads, total, width), torch.randn(heads, rows, width))
    return [x.to(dtype) for x in (query, *keys, *biases)]


def outputs_and_gradients(function, inputs, in_values=False):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out, usage = function(*leaves, measure=True, in_values=in_values)
    assert not usage.requires_grad
    (out * torch.linspace(-1, 2, out.numel(), dtype=out.dtype, device=out.device).view(out.shape)).sum().backward()
    return {"out": out, "usage": usage} | {f"d{name}": leaf.grad for name, leaf in zip(NAMES, leaves, strict=True)}


@given(
    batch=st.integers(1, 3),
    heads=st.integers(1, 3),
    length=st.integers(1, 9),
    before=st.integers(0, 7),
    width=st.integers(1, 6),
    tile=st.integers(1, 10),
    clipped=st.integers(1, 16),
    in_values=st.booleans(),
    size=SIZES,
)
def test_tiled_attention_equals_plain(batch, heads, length, before, width, tile, clipped, in_values, size):
    """In float64, and of usual scores in float32 too."""
    inputs = attention_inputs(batch, heads, length, before, width, torch.float64, clipped, size)
    expected = outputs_and_gradients(module.relative_attention_plain, inputs, in_values)
    for dtype in (torch.float64, torch.float32) if size == 1 else (torch.float64,):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(on_a_cpu, "TILE", tile)
            patch.setattr(module, "relative_attention_plain", None)  # the fast path must not fall back
            actual = outputs_and_gradients(module.relative_attention, [x.to(dtype) for x in inputs], in_values)
        assert actual["out"].dtype == dtype
        assert_agree(beside_one(expected), beside_one(actual), 10 * TOLERANCE["cpu", dtype])  # sizes are up to 30


@pytest.mark.parametrize("in_values", [False, True])
def test_tiled_attention_in_bfloat16(in_values, monkeypatch):
    """Against the plain path in float64; every result is in bfloat16, except usage, which is a mean over many queries."""
    inputs = attention_inputs(2, 3, 130, 170, 32, torch.bfloat16, clipped=65 if in_values else None)
    expected = outputs_and_gradients(module.relative_attention_plain, [x.double() for x in inputs], in_values)
    assert module.relative_attention_plain(*inputs, measure=True)[1].dtype == torch.float32
    monkeypatch.setattr(module, "relative_attention_plain", None)  # the fast path must not fall back
    actual = outputs_and_gradients(module.relative_attention, inputs, in_values)
    assert actual["usage"].dtype == torch.float32
    assert {x.dtype for name, x in actual.items() if name != "usage"} == {torch.bfloat16}
    assert_agree(expected, actual, TOLERANCE["cpu", torch.bfloat16])


def test_sums_over_tiles_are_in_float32(monkeypatch):
    """A sum of bfloat16 stops growing when an addend is below 1/256 of it; here each of 400 tiles adds to it."""
    monkeypatch.setattr(on_a_cpu, "TILE", 1)
    inputs = attention_inputs(1, 2, 400, 3, 8, torch.bfloat16)
    inputs[0].zero_()
    results = []
    for attend, dtype in ((module.relative_attention_plain, torch.float64), (module.relative_attention, torch.bfloat16)):
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        out, usage = attend(*leaves, measure=True)
        out[..., 0].sum().backward()
        results.append({"usage": usage, "dvalue": leaves[2].grad})
    assert_agree(*results, TOLERANCE["cpu", torch.bfloat16])


def test_the_tiled_path_copies_nothing_measures_when_asked_and_leaves_dropout_to_the_plain_one():
    inputs = attention_inputs(2, 3, 4, 5, 6, torch.float64)
    out, usage = module.relative_attention(*inputs, measure=True)
    assert merge_heads(out).data_ptr() == out.data_ptr()
    for function in (module.relative_attention, module.relative_attention_plain):
        assert function(*inputs)[1] is None and usage.shape == (2, 9)
    dropped, same = module.relative_attention(*inputs, dropout=0.5, measure=True)
    assert not torch.allclose(dropped, out) and torch.allclose(same, usage)


@given(n=st.integers(1, 6), before=st.integers(0, 6))
def test_shift_mask_and_sinusoids_are_the_references(n, before):
    x = torch.randn(2, 1, n, before + n)
    assert (module.relative_shift(x).numpy() == ref.relative_shift_forward(x.numpy())[0]).all()
    assert (module.relative_unshift(x).numpy() == ref.relative_shift_backward(x.numpy(), None)).all()
    assert (~module.causal_mask(n, before + n).numpy() == ref.causal_mask(n, before + n)).all()
    sinusoids = {"sinusoids": ref.distance_sinusoids(before + n, 4)}
    assert_agree(sinusoids, {"sinusoids": module.distance_sinusoids(before + n, 4)}, 1e-14)


def test_sinusoids_of_far_distances_are_rounded_once():
    """In float32 the angle itself would be off by 2e-4 at a distance of 4,000."""
    torch.set_default_dtype(torch.float32)
    far = module.distance_sinusoids(4001, 8)
    assert far.dtype == torch.float32
    assert_agree({"sinusoids": ref.distance_sinusoids(4001, 8)}, {"sinusoids": far}, 1e-7)
