"""Attention by content: its definition, by torch's SDPA and by the plain path."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelerated.attention.content import content_attention, content_attention_plain
from tests.helpers.comparison import SEEDS, SIZES, assert_agree, mixture


@given(
    n=st.integers(1, 5),
    k=st.integers(1, 5),
    hides=st.sampled_from(["", "some keys", "later keys"]),
    size=SIZES,
    seed=SEEDS,
)
def test_attention_is_a_weighted_mean_of_values(n, k, hides, size, seed):
    """One query at a time, by both paths; a hidden key has no weight, nor has a later one."""
    rng = np.random.default_rng(seed)
    query = size * rng.standard_normal((2, 3, n, 4))
    keys = n if hides == "later keys" else k
    key, value = rng.standard_normal((2, 2, 3, keys, 4))
    hidden = np.zeros((2, 1, n, keys), bool)
    options = {}
    if hides == "some keys":
        hidden = rng.random(hidden.shape) < 0.4
        hidden[..., 0] = False
        options["hidden_keys"] = torch.tensor(hidden)
    if hides == "later keys":
        hidden[:] = ~np.tri(n, dtype=bool)
        options["causal"] = True
    expected = np.zeros(query.shape)
    for b, h, i in np.ndindex(2, 3, n):
        seen = np.flatnonzero(~hidden[b, 0, i])
        scores = [key[b, h, j] @ query[b, h, i] / 2 for j in seen]
        expected[b, h, i] = mixture(scores, value[b, h, seen])
    given = [torch.tensor(array) for array in (query, key, value)]
    plain = content_attention_plain(*given, **options)
    fast = content_attention(*given, **options)
    assert_agree({"plain": expected, "fast": expected}, {"plain": plain, "fast": fast}, 1e-12)
