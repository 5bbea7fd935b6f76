"""The tiled path of relative attention equals its plain path, by dtype, tile and device."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelerated.attention import on_a_cpu, signed_distance
from accelerated.attention import relative_shift as module
from accelerated.attention.heads import merge_heads
from reference import compressive as ref
from tests.helpers.comparison import TOLERANCE, assert_agree

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def attention_inputs(batch, heads, length, before, width, dtype, device="cpu", clipped=None):
    """clipped: the number of rows of the distance keys, at most that of the keys."""
    torch.manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, dtype=dtype, device=device)  # noqa: E731
    total = before + length
    rows = min(total, clipped or total)
    keys = (draw(batch, heads, total, width), draw(batch, heads, total, width), draw(heads, rows, width))
    return draw(batch, heads, length, width), *keys, draw(heads, width), draw(heads, width)


def outputs_and_gradients(function, inputs, in_values=False):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out, usage = function(*leaves, measure=True, in_values=in_values)
    assert not usage.requires_grad
    (out * torch.linspace(-1, 2, out.numel(), dtype=out.dtype, device=out.device).view(out.shape)).sum().backward()
    names = ("query", "key", "value", "distance_key", "content_bias", "distance_bias")
    return {"out": out, "usage": usage} | {f"d{name}": leaf.grad for name, leaf in zip(names, leaves, strict=True)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(
    batch=st.integers(1, 3),
    heads=st.integers(1, 3),
    length=st.integers(1, 9),
    before=st.integers(0, 7),
    width=st.integers(1, 6),
    tile=st.integers(1, 10),
    clipped=st.integers(1, 16),
    in_values=st.booleans(),
)
def test_tiled_attention_equals_plain(dtype, batch, heads, length, before, width, tile, clipped, in_values):
    inputs = attention_inputs(batch, heads, length, before, width, dtype, clipped=clipped)
    expected = outputs_and_gradients(module.relative_attention_plain, inputs, in_values)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(on_a_cpu, "TILE", tile)
        patch.setattr(module, "relative_attention_plain", None)  # the fast path must not fall back
        actual = outputs_and_gradients(module.relative_attention, inputs, in_values)
    if inputs[3].shape[1] == 1:  # one distance: it adds the same to all scores, softmax cancels it, and rounding is left
        names = ("ddistance_bias",) if in_values else ("ddistance_bias", "ddistance_key")
        cancelled = [rows.pop(name) for rows in (expected, actual) for name in names]
        assert all(gradient.abs().max() < 1000 * torch.finfo(dtype).eps for gradient in cancelled)
    assert_agree(expected, actual, TOLERANCE["cpu", dtype])


@given(
    batch=st.integers(1, 3),
    heads=st.integers(1, 3),
    length=st.integers(1, 7),
    before=st.integers(0, 5),
    reach=st.integers(1, 12),
)
def test_clipped_positions_in_values_are_memformers(batch, heads, length, before, reach):
    """The plain path equals simplified attention, which looks up the row of every pair; a memory's keys have positions here."""
    query, key, value, _, bias, _ = attention_inputs(batch, heads, length, before, 4, torch.float64)
    table = torch.randn(reach + 1, 4, dtype=torch.float64)
    total = before + length
    index = (torch.arange(before, total)[:, None] - torch.arange(total)).clamp(0, reach)
    inputs = {"query": query, "key": key, "value": value, "table": table, "bias": bias}
    results = []
    for memformers in (True, False):
        leaves = [x.clone().requires_grad_() for x in inputs.values()]
        q, k, v, t, u = leaves
        if memformers:
            out = signed_distance.simplified_attention(q + u[:, None], k, v, t, index, module.causal_mask(length, total))
        else:
            rows = t[:total].flip(0).expand(heads, -1, -1)
            out, _ = module.relative_attention_plain(q, k, v, rows, u, u, in_values=True)
        out.cos().sum().backward()
        results.append({"out": out} | {f"d{name}": leaf.grad for name, leaf in zip(inputs, leaves, strict=True)})
    assert_agree(*results, 1e-12)


@pytest.mark.parametrize("in_values", [False, True])
@pytest.mark.parametrize("sizes", [(2, 3, 130, 70, 32), (1, 2, 9, 0, 8), (3, 1, 256, 320, 64)])
def test_tiled_attention_in_bfloat16(sizes, in_values, monkeypatch):
    """Against the plain path in float64; every result is in bfloat16, except usage, which is a mean over many queries."""
    inputs = attention_inputs(*sizes, torch.bfloat16, clipped=65 if in_values else None)
    expected = outputs_and_gradients(module.relative_attention_plain, [x.double() for x in inputs], in_values)
    assert module.relative_attention_plain(*inputs, measure=True)[1].dtype == torch.float32
    monkeypatch.setattr(module, "relative_attention_plain", None)  # the fast path must not fall back
    actual = outputs_and_gradients(module.relative_attention, inputs, in_values)
    assert actual["usage"].dtype == torch.float32
    assert {x.dtype for name, x in actual.items() if name != "usage"} == {torch.bfloat16}
    assert_agree(expected, actual, TOLERANCE["cpu", torch.bfloat16])


def test_sums_over_tiles_are_in_float32(monkeypatch):
    """A sum of bfloat16 stops growing when an addend is below 1/256 of it; here each of 700 tiles adds to it."""
    monkeypatch.setattr(on_a_cpu, "TILE", 1)
    inputs = attention_inputs(1, 2, 700, 3, 8, torch.bfloat16)
    inputs[0].zero_()
    results = []
    for attend, dtype in ((module.relative_attention_plain, torch.float64), (module.relative_attention, torch.bfloat16)):
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        out, usage = attend(*leaves, measure=True)
        out[..., 0].sum().backward()
        results.append({"usage": usage, "dvalue": leaves[2].grad})
    assert_agree(*results, TOLERANCE["cpu", torch.bfloat16])


def test_merging_heads_after_the_tiled_path_copies_nothing():
    out = module.relative_attention(*attention_inputs(2, 3, 4, 5, 6, torch.float32))[0]
    assert merge_heads(out).data_ptr() == out.data_ptr()


def test_usage_is_measured_only_when_asked():
    inputs = attention_inputs(1, 2, 3, 4, 5, torch.float64)
    for function in (module.relative_attention, module.relative_attention_plain):
        assert function(*inputs)[1] is None and function(*inputs, measure=True)[1].shape == (1, 7)


def test_dropout_takes_the_plain_path_and_leaves_usage_alone():
    inputs = attention_inputs(2, 2, 4, 3, 5, torch.float64)
    out, usage = module.relative_attention(*inputs, dropout=0.5, measure=True)
    exact, exact_usage = module.relative_attention(*inputs, measure=True)
    assert not torch.allclose(out, exact) and torch.allclose(usage, exact_usage)


@given(n=st.integers(1, 6), before=st.integers(0, 6))
def test_shift_mask_and_sinusoids_are_the_references(n, before):
    torch.manual_seed(0)
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


@pytest.mark.parametrize("device", DEVICES)
def test_bfloat16_is_close_to_float32(device):
    inputs = attention_inputs(2, 3, 64, 70, 16, torch.float32, device)
    expected = module.relative_attention_plain(*inputs)[0]
    rough = module.relative_attention(*(x.bfloat16() for x in inputs))[0]
    assert_agree({"out": expected}, {"out": rough.float()}, TOLERANCE[device, torch.bfloat16])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_what_the_cpu_gives():
    inputs = attention_inputs(2, 3, 64, 70, 16, torch.float32)
    expected = outputs_and_gradients(module.relative_attention_plain, inputs)
    actual = outputs_and_gradients(module.relative_attention, [x.cuda() for x in inputs])
    assert_agree(expected, actual, TOLERANCE["cuda", torch.float32])
