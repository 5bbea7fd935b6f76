"""The tiled path of relative attention equals its plain path, by dtype, tile and device."""

import pytest
import torch
from comparison import assert_agree
from hypothesis import given
from hypothesis import strategies as st
from tolerances import TOLERANCE

from accelerated.attention import relative_shift as module
from reference import compressive as ref

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def attention_inputs(batch, heads, length, before, width, dtype, device="cpu"):
    torch.manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, dtype=dtype, device=device)  # noqa: E731
    total = before + length
    keys = (draw(batch, heads, total, width), draw(batch, heads, total, width), draw(heads, total, width))
    return draw(batch, heads, length, width), *keys, draw(heads, width), draw(heads, width)


def outputs_and_gradients(function, inputs):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out, usage = function(*leaves, measure=True)
    assert not usage.requires_grad
    (out * torch.linspace(-1, 2, out.numel(), dtype=out.dtype, device=out.device).view(out.shape)).sum().backward()
    names = ("query", "key", "value", "distance_key", "content_bias", "distance_bias")
    return {"out": out, "usage": usage} | {f"d{name}": leaf.grad for name, leaf in zip(names, leaves, strict=True)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(
    batch=st.integers(1, 3), heads=st.integers(1, 3), length=st.integers(1, 9), before=st.integers(0, 7), width=st.integers(1, 6),
    tile=st.integers(1, 10),
)  # fmt: skip
def test_tiled_attention_equals_plain(dtype, batch, heads, length, before, width, tile):
    inputs = attention_inputs(batch, heads, length, before, width, dtype)
    expected = outputs_and_gradients(module.relative_attention_plain, inputs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "TILE", tile)
        patch.setattr(module, "relative_attention_plain", None)  # the fast path must not fall back
        assert_agree(expected, outputs_and_gradients(module.relative_attention, inputs), TOLERANCE["cpu", dtype])


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
    with torch.autocast(device, dtype=torch.bfloat16):
        rough = module.relative_attention(*inputs)[0]
    assert_agree({"out": expected}, {"out": rough.float()}, TOLERANCE["cuda", torch.bfloat16])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_what_the_cpu_gives():
    inputs = attention_inputs(2, 3, 64, 70, 16, torch.float32)
    expected = outputs_and_gradients(module.relative_attention_plain, inputs)
    actual = outputs_and_gradients(module.relative_attention, [x.cuda() for x in inputs])
    assert_agree(expected, actual, TOLERANCE["cuda", torch.float32])
