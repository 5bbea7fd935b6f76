"""Memory replay of any step gives the gradients of back-propagation through time."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from accelerated.memory_replay import drawn_seeds, replay, seeded
from tests.conftest import examples

CPU = torch.device("cpu")


class Nested(nn.Module):
    """A step with a nested state: two tensors, a count, and what the first step alone has not."""

    def __init__(self, dropout):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(6, 3)
        self.start = nn.Parameter(torch.randn(3))
        self.dropout = dropout

    def forward(self, x, state):
        after = self.advance(x, state)
        mixed = torch.cat([x, after["pair"][0]], -1)
        return functional.dropout(self.second(mixed), self.dropout).square().sum(), after

    def advance(self, x, state):
        """The memory path; it draws the same numbers, because it draws first."""
        slow, fast = state["pair"]
        if fast is None:
            fast = self.start.expand_as(x)
        fast = functional.dropout(torch.tanh(self.first(x + fast)), self.dropout)
        return {"count": state["count"] + 1, "pair": (slow.lerp(fast, 0.3), fast)}


def gradients_of(model):
    return [parameter.grad for parameter in model.parameters()]


@examples(20)
@given(
    steps=st.integers(1, 5),
    lanes=st.integers(1, 3),
    dropout=st.sampled_from([0.0, 0.5]),
    apart=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_gradients_are_those_of_back_propagation_through_time(steps, lanes, dropout, apart, seed):
    """For any number of steps, with dropout and with a memory path of its own or without."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(seed)
    model = Nested(dropout)
    inputs = torch.randn(steps, lanes, 3)
    first = {"count": torch.tensor(0), "pair": (torch.randn(lanes, 3, requires_grad=True), None)}

    torch.manual_seed(seed)
    loss = 0
    state = first
    for x, drawn in zip(inputs, drawn_seeds(steps), strict=True):
        with seeded(drawn, CPU):
            part, state = model(x, state)
        loss = loss + part
    after_seeds = torch.get_rng_state()
    loss.backward()
    expected = gradients_of(model)
    first["pair"][0].grad = None

    model.zero_grad()
    torch.manual_seed(seed)
    total, last = replay(model, inputs, first, model.advance if apart else None)
    assert torch.equal(torch.get_rng_state(), after_seeds)
    torch.testing.assert_close(total, loss.detach())
    torch.testing.assert_close(gradients_of(model), expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(tree_leaves(last), [leaf.detach() for leaf in tree_leaves(state)])
    assert not any(leaf.requires_grad for leaf in tree_leaves(last))
    assert first["pair"][0].grad is None, "no gradient flows into the given state"
