"""Attention by content: its definition, by torch's SDPA and by the plain path."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelerated.attention.content import content_attention, content_attention_plain
from tests.helpers.comparison import SIZES, assert_agree, mixture


@given(
    n=st.integers(1, 5),
    k=st.integers(1, 5),
    masked=st.booleans(),
    size=SIZES,
    seed=st.integers(0, 2**31),
)
def test_attention_is_a_weighted_mean_of_values(n, k, masked, size, seed):
    """One query at a time, by both paths; a masked key has no weight."""
    rng = np.random.default_rng(seed)
    query = size * rng.standard_normal((2, 3, n, 4))
    key, value = rng.standard_normal((2, 2, 3, k, 4))
    hidden = rng.random((2, 1, n, k)) < (0.4 if masked else 0)
    hidden[..., 0] = False
    expected = np.zeros(query.shape)
    for b, h, i in np.ndindex(2, 3, n):
        seen = np.flatnonzero(~hidden[b, 0, i])
        scores = [key[b, h, j] @ query[b, h, i] / 2 for j in seen]
        expected[b, h, i] = mixture(scores, value[b, h, seen])
    mask = torch.tensor(hidden) if masked else None
    given = (*map(torch.tensor, (query, key, value)), mask)
    actual = {"plain": content_attention_plain(*given), "fast": content_attention(*given)}
    assert_agree(dict.fromkeys(actual, expected), actual, 1e-12)


def test_a_causal_query_sees_no_later_key():
    """By both paths: it is attention with a mask of all later keys."""
    query, key, value = torch.randn(3, 2, 3, 5, 4)
    later = torch.ones(5, 5, dtype=torch.bool).triu(1)
    for path in (content_attention_plain, content_attention):
        masked = path(query, key, value, later)
        torch.testing.assert_close(path(query, key, value, causal=True), masked)
        assert not torch.allclose(path(query, key, value), masked)
