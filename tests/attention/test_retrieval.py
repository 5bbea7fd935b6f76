"""The Memorizing Transformer's lookup on both sides: definition, gradients, by dtype."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelerated.attention.retrieval import retrieval_attention, searchable
from accelerated.fast.retrieval import largest_by_columns
from reference import memorizing
from tests.helpers.comparison import SEEDS, SIZES, assert_agree, beside_one, mixture


def found_by_sorting(query, keys, values, scale, retrieved):
    """What one query (E,) finds among keys and values (M, E), with one head's scale."""
    similarity = keys @ query
    order = sorted(range(len(keys)), key=lambda j: (not keys[j].any(), -similarity[j]))
    best = order[:retrieved]  # empty rows come last
    return mixture(scale * similarity[best], values[best])


counts = st.integers(1, 3)


@given(
    batch=counts,
    heads=counts,
    n=st.integers(1, 5),
    m=st.integers(1, 12),
    share=st.floats(0, 1),
    size=SIZES,
    seed=SEEDS,
)
def test_a_query_attends_to_its_nearest_keys_alone(batch, heads, n, m, share, size, seed):
    """By definition, with the reference's gradients.

    The memory needs no order and gets no gradient; some rows are empty.
    """
    rng = np.random.default_rng(seed)
    retrieved = max(1, round(share * m))
    query = rng.standard_normal((batch, heads, n, 4))
    keys, values = rng.standard_normal((2, batch, heads, m, 4))
    for lane, young in enumerate(rng.integers(m + 1, size=batch)):
        keys[lane, :, :young] = 0
        values[lane, :, :young] = 0
    scale = size * rng.random(heads)
    by_hand = np.zeros(query.shape)
    for b, h, i in np.ndindex(batch, heads, n):
        one = query[b, h, i], keys[b, h], values[b, h], scale[h]
        by_hand[b, h, i] = found_by_sorting(*one, retrieved)
    out, cache = memorizing.retrieval_forward(query, keys, values, scale, retrieved)
    assert_agree(beside_one({"out": by_hand}), beside_one({"out": out}), 1e-11, "NumPy")

    dout = rng.standard_normal(query.shape)
    dquery, dscale = memorizing.retrieval_backward(dout, cache)
    expected = {"out": out, "query": dquery, "scale": dscale}
    leaves = [torch.tensor(x, requires_grad=True) for x in (query, keys, values, scale)]
    leaf, *memory, leaf_scale = leaves
    found = retrieval_attention(leaf, searchable(*memory), leaf_scale, retrieved)
    found.backward(torch.tensor(dout))
    assert [x.grad for x in memory] == [None, None]
    by_torch = {"out": found, "query": leaf.grad, "scale": leaf_scale.grad}
    assert_agree(beside_one(expected), beside_one(by_torch), 1e-11, "PyTorch")


@given(
    rows=st.integers(1, 5),
    length=st.integers(1, 400),
    share=st.floats(0, 0.5),
    seed=SEEDS,
)
def test_a_search_by_columns_finds_the_largest(rows, length, share, seed):
    """As a GPU takes it; some numbers are equal, and empty rows are found last."""
    rng = np.random.default_rng(seed)
    numbers = rng.integers(-30, 30, size=(rows, length)).astype(float)
    offset = np.where(rng.random((1, length)) < 0.2, -np.inf, 0.0)
    count = max(1, round(share * length))
    total = numbers + offset
    for pair in ((numbers, offset), (total, None)):  # added on the way, or before
        x, added = (None if part is None else torch.tensor(part) for part in pair)
        place = largest_by_columns(x, added, count).numpy()
        assert all(len(set(row)) == count for row in place), f"rows twice, or not {count}: {place}"
        found = np.sort(np.take_along_axis(total, place, -1), -1)
        assert np.array_equal(found, np.sort(total, -1)[:, length - count :]), "not the largest"
