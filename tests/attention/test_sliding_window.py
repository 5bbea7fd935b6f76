"""The fast paths of sliding-window attention and head projections equal their plain paths, by dtype and device."""

import pytest
import torch
from comparison import assert_agree
from hypothesis import given
from hypothesis import strategies as st
from tolerances import TOLERANCE

from accelerated.attention import sliding_window as attention
from accelerated.attention.heads import ProjectHeads, project_heads_plain

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def outputs_and_gradients(function, inputs):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outs = function(*leaves)
    outs = outs if isinstance(outs, tuple) else (outs,)
    weights = [torch.linspace(-1, 2, out.numel(), dtype=out.dtype, device=out.device).view(out.shape) for out in outs]
    sum((out * weight).sum() for out, weight in zip(outs, weights, strict=True)).backward()
    rows = {f"out {k}": out for k, out in enumerate(outs)}
    return rows | {f"grad {k}": leaf.grad for k, leaf in enumerate(leaves)}


def tile_inputs(batch, heads, blocks, window, width, dtype, device):
    torch.manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, dtype=dtype, device=device)  # noqa: E731
    mask = attention.window_mask(attention.tile_distance(window), window).to(device)
    offset = draw(heads, window, 2 * window).masked_fill(~mask, -torch.inf)
    length = blocks * window
    query, keys = draw(batch, heads, length, width), draw(batch, heads, window + length, width)
    return query, keys, draw(batch, heads, window + length, width), offset


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(
    batch=st.integers(1, 3), heads=st.integers(1, 3), blocks=st.integers(1, 4), window=st.integers(1, 9), width=st.integers(1, 6)
)
def test_tiled_sliding_attention_equals_plain(dtype, batch, heads, blocks, window, width):
    inputs = tile_inputs(batch, heads, blocks, window, width, dtype, "cpu")
    expected = outputs_and_gradients(attention.sliding_attention_plain, inputs)
    actual = outputs_and_gradients(attention.SlidingAttention.apply, inputs)
    assert_agree(expected, actual, TOLERANCE["cpu", dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(
    batch=st.integers(1, 3), length=st.integers(1, 5), heads=st.integers(1, 3), width=st.integers(2, 6), parts=st.integers(2, 4)
)
def test_fast_head_projection_equals_plain(dtype, batch, length, heads, width, parts):
    torch.manual_seed(0)
    x, weight = torch.randn(batch, length, 7, dtype=dtype), torch.randn(parts * heads * width, 7, dtype=dtype)
    expected = outputs_and_gradients(lambda x, w: project_heads_plain(x, w, heads, parts), (x, weight))
    actual = outputs_and_gradients(lambda x, w: ProjectHeads.apply(x, w, heads, parts), (x, weight))
    assert_agree(expected, actual, TOLERANCE["cpu", dtype])


@pytest.mark.parametrize("device", DEVICES)
def test_the_fast_path_is_taken_if_possible(device, monkeypatch):
    """On a CPU without dropout and autocast the tiled function runs, otherwise the plain one; on a GPU SDPA."""
    taken = []
    plain, tiled, fused = attention.sliding_attention_plain, attention.SlidingAttention.apply, attention.sliding_attention_sdpa
    monkeypatch.setattr(attention, "sliding_attention_sdpa", lambda *a: taken.append("sdpa") or fused(*a))
    monkeypatch.setattr(attention, "sliding_attention_plain", lambda *a: taken.append("plain") or plain(*a))
    monkeypatch.setattr(attention.SlidingAttention, "apply", lambda *a: taken.append("tiled") or tiled(*a))
    inputs = tile_inputs(1, 2, 2, 3, 4, torch.float32, device)
    attention.sliding_attention(*inputs)
    attention.sliding_attention(*inputs, 0.5)
    with torch.autocast(device, dtype=torch.bfloat16):
        attention.sliding_attention(*inputs)
    assert taken == (["tiled", "plain", "plain"] if device == "cpu" else ["sdpa"] * 3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sliding_attention_on_a_gpu_equals_the_cpu(dtype):
    inputs = tile_inputs(2, 3, 4, 16, 32, torch.float32, "cpu")
    expected = outputs_and_gradients(attention.sliding_attention_plain, inputs)
    actual = outputs_and_gradients(attention.sliding_attention, [x.to("cuda", dtype) for x in inputs])
    assert_agree(expected, actual, TOLERANCE["cuda", dtype])
