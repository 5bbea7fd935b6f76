"""Attention by content: torch's SDPA equals the plain path, and the cases that take the plain path."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelerated.attention import content
from accelerated.attention.content import content_attention, content_attention_plain
from tests.helpers.comparison import TOLERANCE, assert_agree


@given(n=st.integers(1, 5), k=st.integers(1, 5), padded=st.booleans(), seed=st.integers(0, 99))
def test_content_attention_equals_its_plain_path(n, k, padded, seed):
    """Outputs and gradients, with some keys masked or none, but never all except one: then gradients of scores are rounding."""
    rng = np.random.default_rng(seed)
    arrays = [rng.standard_normal((2, 3, rows, 4)) for rows in (n, k, k)]
    hidden = torch.tensor(rng.random((2, 1, 1, k)) < 0.4) if padded else None
    if padded:
        hidden[..., :2] = False
    rows = []
    for attend in (content_attention_plain, content_attention):
        leaves = [torch.tensor(array, requires_grad=True) for array in arrays]
        out = attend(*leaves, hidden)
        (out**3).sum().backward()
        rows.append({"out": out} | {f"gradient {i}": leaf.grad for i, leaf in enumerate(leaves)})
    assert_agree(*rows, 1e-12)


def test_the_plain_path_is_a_weighted_mean_of_values():
    """One query at a time; the weights are exponentials of scores, without masked keys."""
    rng = np.random.default_rng(0)
    query, key, value = (rng.standard_normal((2, 3, rows, 4)) for rows in (2, 5, 5))
    hidden = rng.random((2, 1, 2, 5)) < 0.4
    hidden[..., 0] = False
    expected = np.zeros(query.shape)
    for b, h, i in np.ndindex(2, 3, 2):
        weights = np.exp(key[b, h] @ query[b, h, i] / 2) * ~hidden[b, 0, i]
        expected[b, h, i] = weights / weights.sum() @ value[b, h]
    actual = content_attention_plain(*map(torch.tensor, (query, key, value, hidden)))
    assert_agree({"out": expected}, {"out": actual}, 1e-13)


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


@pytest.mark.parametrize(
    "dtype, needed, fused",
    [
        (torch.float32, ("query", "key", "value"), True),
        (torch.float32, ("query",), True),
        (torch.float32, ("key", "value"), False),
        (torch.bfloat16, ("query", "key", "value"), False),
        (torch.bfloat16, ("key", "value"), False),
    ],
)
def test_a_cpu_takes_sdpa_where_it_is_faster(dtype, needed, fused, monkeypatch):
    """Not in bfloat16, nor if only keys and values need gradients; the numbers are those of float64 either way."""
    torch.manual_seed(0)
    inputs = {name: torch.randn(2, 3, rows, 16).to(dtype) for name, rows in (("query", 40), ("key", 24), ("value", 24))}
    expected = results(content_attention_plain, {name: x.double() for name, x in inputs.items()}, needed)
    taken, attend = [], torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda *a, **k: taken.append(a) or attend(*a, **k))
    assert_agree(expected, results(content_attention, inputs, needed), TOLERANCE["cpu", dtype])
    assert bool(taken) == fused


@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_dropout_is_drawn_by_torchs_dropout(monkeypatch, rate):
    """So that a test can replace its random numbers."""
    rates = []
    monkeypatch.setattr(torch.nn.functional, "dropout", lambda x, rate: rates.append(rate) or x)
    content_attention(*(torch.randn(1, 2, rows, 4) for rows in (3, 5, 5)), dropout=rate)
    assert rates == ([rate] if rate else [])


@pytest.mark.parametrize("device, keys, fused", [("meta", 2, True), ("meta", 1, False), ("cpu", 2, False)])
def test_off_the_cpu_sdpa_is_taken_for_more_than_one_key(device, keys, fused):
    query, key = (torch.empty(1, 1, rows, 4, device=device) for rows in (3, keys))
    assert content.takes_sdpa(query, key) == fused
    assert content.sdpa_is_faster_on_a_cpu(query, key) == (keys > 1)


def test_where_sdpa_is_taken_it_is_taken_with_dropout_too(monkeypatch):
    monkeypatch.setattr(content, "takes_sdpa", lambda query, key: True)
    monkeypatch.setattr(content, "sdpa", lambda query, key, value, offset, dropout, causal: (dropout, causal))
    rows = torch.randn(1, 2, 5, 4)
    assert content_attention(rows, rows, rows, dropout=0.4, causal=True) == (0.4, True)
