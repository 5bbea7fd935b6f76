"""The protocol's own helpers: states put together from lanes, and where a model's copies in another type are kept."""

from typing import NamedTuple

import pytest
import torch

from accelerated.protocol import computing_in, detach, memory_of_copies, put_lanes, require_gradient


class State(NamedTuple):
    rows: torch.Tensor
    counts: torch.Tensor


def test_some_lanes_are_replaced_in_place():
    state = State(torch.arange(8.0).view(4, 2), torch.arange(4))
    put = put_lanes(state, slice(1, 3), State(torch.full((2, 2), -1.0), torch.tensor([-1, -1])))
    assert put is state
    assert put.rows.tolist() == [[0, 1], [-1, -1], [-1, -1], [6, 7]] and put.counts.tolist() == [0, -1, -1, 3]


def test_all_lanes_replace_the_state_and_leave_the_old_one_as_it_was():
    state, new = (State(torch.full((2, 3), value), torch.full((2,), value)) for value in (0.0, 1.0))
    assert put_lanes(state, slice(0, 2), new) is new and not state.rows.any()


def test_a_state_that_requires_gradient_is_a_leaf_and_a_detached_one_has_no_graph():
    state = State(2 * torch.ones(3, 1, requires_grad=True), torch.arange(3))
    leaf = require_gradient(state)
    assert leaf.rows.is_leaf and leaf.rows.requires_grad and not leaf.counts.requires_grad
    assert not detach(state).rows.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_keep_their_memory_until_the_model_moves_or_has_another_type(dtype):
    model, originals = torch.nn.Linear(2, 3), [torch.zeros(3, 2), torch.zeros(3)]
    kept = memory_of_copies(model, dtype, originals)
    assert [(x.dtype, x.shape) for x in kept] == [(dtype, x.shape) for x in originals]
    memory_of_copies(model, torch.float16, originals)
    assert memory_of_copies(model, dtype, originals) is kept
    moved = memory_of_copies(model, dtype, [x.to("meta") for x in originals])
    assert [x.device.type for x in moved] == ["meta", "meta"]


def test_kept_copies_belong_to_no_graph():
    """Or the graph of one iteration would live until the next."""
    model = torch.nn.Linear(2, 3)
    with computing_in(model, torch.bfloat16):
        model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    kept = memory_of_copies(model, torch.bfloat16, [*model.parameters()])
    assert kept[0].tolist() == model.weight.bfloat16().tolist() and not any(copy.requires_grad for copy in kept)
