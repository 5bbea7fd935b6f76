"""Attention by content: torch's SDPA equals the plain path, and the cases that take the plain path."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelerated.attention.content import content_attention, content_attention_plain
from tests.helpers.comparison import SIZES, TOLERANCE, assert_agree, brute_force_softmax


@given(n=st.integers(1, 5), k=st.integers(1, 5), masked=st.booleans(), size=SIZES, seed=st.integers(0, 2**31))
def test_attention_is_a_weighted_mean_of_values(n, k, masked, size, seed):
    """One query at a time, by both paths; a masked key has no weight."""
    rng = np.random.default_rng(seed)
    query, key, value = (rng.standard_normal((2, 3, rows, 4)) for rows in (n, k, k))
    query, hidden = size * query, rng.random((2, 1, n, k)) < (0.4 if masked else 0)
    hidden[..., 0] = False
    expected = np.zeros(query.shape)
    for b, h, i in np.ndindex(2, 3, n):
        seen = np.flatnonzero(~hidden[b, 0, i])
        shares = brute_force_softmax([key[b, h, j] @ query[b, h, i] / 2 for j in seen])
        expected[b, h, i] = sum(share * value[b, h, j] for share, j in zip(shares, seen, strict=True))
    arrays = [torch.tensor(x) for x in (query, key, value)] + [torch.tensor(hidden) if masked else None]
    actual = {"plain": content_attention_plain(*arrays), "fast": content_attention(*arrays)}
    assert_agree(dict.fromkeys(actual, expected), actual, 1e-12)


def test_a_query_with_one_key_has_exactly_no_gradient():
    query, key, value = (torch.randn(2, 3, rows, 17, requires_grad=True) for rows in (5, 1, 1))  # wide enough to round
    content_attention(query, key, value).square().sum().backward()
    assert not query.grad.any() and not key.grad.any() and value.grad.any()


def results(attend, inputs, needed):
    """Output and the gradients of the inputs in `needed`."""
    leaves = [x.clone().requires_grad_(name in needed) for name, x in inputs.items()]
    out = attend(*leaves)
    (out * torch.linspace(-1, 2, out.numel()).view(out.shape)).sum().backward()
    return {"out": out} | {name: leaf.grad for name, leaf in zip(inputs, leaves, strict=True) if name in needed}


@pytest.mark.parametrize("needed", ["query key value", "query", "key value"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cpu_takes_sdpa_where_it_is_faster(dtype, needed, monkeypatch):
    """Not in bfloat16, nor if only keys and values need gradients; the numbers are those of float64 either way."""
    torch.manual_seed(0)
    inputs = {name: torch.randn(2, 3, rows, 16).to(dtype) for name, rows in (("query", 40), ("key", 24), ("value", 24))}
    expected = results(content_attention_plain, {name: x.double() for name, x in inputs.items()}, needed.split())
    taken, attend = [], torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda *a, **k: taken.append(a) or attend(*a, **k))
    assert_agree(expected, results(content_attention, inputs, needed.split()), TOLERANCE["cpu", dtype])
    assert bool(taken) == (dtype == torch.float32 and "query" in needed)
