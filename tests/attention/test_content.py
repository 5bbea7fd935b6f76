"""Attention by content: torch's SDPA equals the plain path, and the cases that take the plain path."""

import numpy as np
import pytest
import torch
from comparison import assert_agree
from hypothesis import given
from hypothesis import strategies as st

from accelerated.attention.content import content_attention, content_attention_plain


@given(n=st.integers(1, 5), k=st.integers(1, 5), padded=st.booleans(), seed=st.integers(0, 99))
def test_content_attention_equals_its_plain_path(n, k, padded, seed):
    """Outputs and gradients, with some keys masked or none."""
    rng = np.random.default_rng(seed)
    arrays = [rng.standard_normal((2, 3, rows, 4)) for rows in (n, k, k)]
    hidden = torch.tensor(rng.random((2, 1, 1, k)) < 0.4) if padded else None
    if padded:
        hidden[..., 0] = False
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


@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_dropout_is_drawn_by_torchs_dropout(monkeypatch, rate):
    """So that a test can replace its random numbers."""
    rates = []
    monkeypatch.setattr(torch.nn.functional, "dropout", lambda x, rate: rates.append(rate) or x)
    content_attention(*(torch.randn(1, 2, rows, 4) for rows in (3, 5, 5)), dropout=rate)
    assert rates == ([rate] if rate else [])
