"""Sliding-window attention by SDPA compiles to one graph."""

import torch

from accelerated.attention import sliding_window
from accelerated.attention.relative_shift import by_query_and_key


def sliding_inputs(device):
    """Queries, keys, values and an offset of two lanes, three heads, two blocks of four and width five."""
    seen = by_query_and_key(sliding_window.tables_by_distance(4, 4, 8)[1], 4)
    offset = torch.randn(3, 4, 8).masked_fill(~seen, -torch.inf)
    rows = [torch.randn(2, 3, length, 5) for length in (8, 12, 12)]
    return [x.to(device).requires_grad_() for x in (*rows, offset)]


def test_compiled_it_is_one_graph():
    """With the kernels pinned and with dropout: the meta device takes a GPU's branch."""
    for device in ("cpu", "meta"):
        compiled = torch.compile(sliding_window.sliding_attention_sdpa, backend="eager", fullgraph=True)
        inputs = sliding_inputs(device)
        out = compiled(*inputs, 0.1)
        out.sum().backward()
        assert out.shape == inputs[0].shape and all(x.grad.shape == x.shape for x in inputs)
