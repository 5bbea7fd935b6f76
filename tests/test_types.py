"""The type that a model computes in, by copies of its parameters, and where float32 is needed.

See accelerated/protocol.py.
"""

import dataclasses

import numpy as np
import pytest
import torch

from accelerated.attention.heads import (
    embed,
    unit_norm,
)
from accelerated.attention.signed_distance import simplified_attention
from accelerated.attention.sliding_window import (
    by_query_and_key,
    score_offset,
    tables_by_distance,
)
from accelerated.block_recurrent import GATES
from accelerated.protocol import computing_in
from accelerated.training import opening
from accelerated.training.options import parse
from tests.helpers.comparison import assert_agree
from tests.helpers.programs import TINY, words
from tests.helpers.variants import PAPERS, variant


@pytest.fixture(autouse=True)
def float32():
    torch.set_default_dtype(torch.float32)


# Copies of parameters


@pytest.fixture
def model():
    """A norm with weights, a bias, running means and a counter; beside it a layer without use."""
    norm = torch.nn.BatchNorm1d(2)
    norm.weight.data.copy_(torch.tensor([1.001, 3.3]))
    return torch.nn.ModuleDict({"norm": norm, "unused": torch.nn.Linear(1, 1)})


def test_inside_all_are_rounded_copies_and_afterwards_all_are_as_before(model):
    """Buffers of a package's module keep their type."""
    before = model.state_dict(keep_vars=True)
    values = {name: tensor.clone() for name, tensor in before.items()}
    parameters = {name for name, _ in model.named_parameters()}
    with pytest.raises(ZeroDivisionError), computing_in(model, torch.bfloat16):
        for name, tensor in model.state_dict(keep_vars=True).items():
            kind = torch.bfloat16 if name in parameters else values[name].dtype
            assert tensor.dtype == kind, f"{name} is {tensor.dtype} inside"
            assert torch.equal(tensor, values[name].to(kind)), f"{name} is another inside"
        raise ZeroDivisionError
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert tensor is before[name], f"{name} is still a copy afterwards"
        assert torch.equal(tensor, values[name]), f"{name} has changed"


def test_gradients_reach_the_parameters_in_their_own_type_and_add_up(model):
    """Each backward call adds to .grad in float32: memory replay and groups of lanes need it."""
    x = torch.tensor([2.0, 3.0], dtype=torch.bfloat16)
    with computing_in(model, torch.bfloat16):
        for scale in (1.0, 2**-10):
            y = model["norm"].weight * x
            assert y.dtype == torch.bfloat16
            torch.autograd.backward([y], [scale * torch.ones_like(y)])
    gradient = model["norm"].weight.grad
    assert gradient.dtype == torch.float32
    assert gradient.tolist() == [2 * (1 + 2**-10), 3 * (1 + 2**-10)], "rounded to bfloat16: Copies"
    assert model["unused"].weight.grad is None


# Where float32 is needed


def test_a_frequent_tokens_gradient_is_added_up_in_float32():
    """4,000 gradients of 1 in bfloat16 would stop at 256."""
    embedding = torch.zeros(3, 2, dtype=torch.bfloat16, requires_grad=True)
    rows = embed(torch.ones(4, 1000, dtype=torch.long), embedding)
    assert rows.dtype == torch.bfloat16
    rows.backward(torch.ones_like(rows))
    assert embedding.grad.tolist() == [[0, 0], [4000, 4000], [0, 0]], "summed in bfloat16: embed"


def test_a_position_biass_gradient_is_added_up_in_float32():
    """Of W W = 4,096 pairs that are not masked, whose gradients are 1."""
    in_bucket, seen = tables_by_distance(64, 4, 64)
    bias = torch.zeros(1, 4, dtype=torch.bfloat16, requires_grad=True)
    scale = torch.ones(1, dtype=torch.bfloat16)
    by_distance = score_offset(bias, scale, in_bucket, seen)
    offset = by_query_and_key(by_distance, 64).bfloat16()
    offset.backward(by_query_and_key(seen[None], 64).bfloat16())
    pairs = by_query_and_key((in_bucket & seen[:, None]).T, 64).sum((1, 2))
    assert pairs.max() > 1000
    assert torch.equal(bias.grad[0], pairs.bfloat16())


def test_a_gradient_of_simplified_positions_is_added_up_in_float32():
    """Of up to 512 pairs at a distance, each of which gives 1."""
    n = 512
    rows = torch.zeros(2 * n - 1, 1, dtype=torch.bfloat16, requires_grad=True)
    zeros = torch.zeros(1, 1, n, 1, dtype=torch.bfloat16)
    out = simplified_attention(zeros, zeros, zeros, rows)
    out.backward(n * torch.ones_like(out))
    pairs = n - torch.arange(1 - n, n).abs()
    assert torch.equal(rows.grad[:, 0], pairs.bfloat16()), "it stops at 256"


def test_a_unit_norm_is_computed_in_float32():
    """A sum of squares that bfloat16 adds up term by term would be off by much."""
    x = torch.randn(5, 512).bfloat16()
    found = unit_norm(x)
    assert found.dtype == torch.bfloat16
    expected = x.double() / x.double().norm(dim=-1, keepdim=True)
    assert_agree(expected, found.double(), 2**-7)


@pytest.mark.parametrize("kind", GATES)
@torch.no_grad()
def test_a_gate_keeps_its_share_in_float32(kind):
    """A sigmoid of 8 is 0.99966, which bfloat16 rounds to 1: nothing would ever be forgotten."""
    gate = GATES[kind](4, 8).bfloat16()
    for name, parameter in gate.named_parameters():
        parameter.fill_({"bias_g": 8.0, "bias_f": 7.0}.get(name, 0.0))  # the LSTM gate adds 1
    carry = torch.full((2, 3, 4), 0.7)
    kept = gate(carry, torch.ones(2, 3, 8, dtype=torch.bfloat16))
    assert kept.dtype == torch.float32
    expected = carry.double() * torch.tensor(8.0, dtype=torch.float64).sigmoid()
    assert_agree(expected, kept.double(), 1e-6, "states")


def test_slots_are_normalised_in_float32():
    """Rounded to bfloat16, a slot would lose what a segment has changed in it."""
    model = PAPERS["memformer"].model(variant("memformer", "encoder-decoder-biased"))
    with computing_in(model, torch.bfloat16):
        assert model.slots(model.initial_state(2)).dtype == torch.float32


def test_a_run_begins_with_a_state_of_the_types_that_it_goes_on_with(text, tmp_path):
    """A new run and a resumed one.

    Rows of float32 would make the first segment compute in float32. A run is in no update's graph.
    """
    new = words(*TINY, f"--data {text} --dtype bfloat16 --out {tmp_path}/run")
    for options in (new, words(f"--resume {tmp_path}/run")):
        with opening.open_run(*parse(options)) as run:
            kinds = {name: field.dtype for name, field in run.state._asdict().items()}
            assert kinds == {
                "states": torch.float32,
                "keys": torch.bfloat16,
                "values": torch.bfloat16,
            }
            assert not any(field.requires_grad for field in run.state), "a graph is kept for good"


def hold_states(model):
    """Let Block-Recurrent's fixed gates keep nearly all of a state."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias_g"):
            parameter.fill_(8.0)


def hold_slots(model):
    """Let each slot of Memformer find itself: its query is its key."""
    model.writer.key.copy_(model.writer.query)
    model.writer.memory_norm.scale.fill_(3.0)


@pytest.mark.parametrize(
    "paper,field,hold",
    [("block_recurrent", "states", hold_states), ("memformer", "memory", hold_slots)],
)
@torch.no_grad()
def test_over_100_segments_the_state_stays_near_that_of_float32(paper, field, hold):
    """Of gates that keep nearly all of a state or slot. In bfloat16 it would not move at all."""
    config = dataclasses.replace(PAPERS[paper].small, segment=4)
    model = PAPERS[paper].model(config).eval()
    rng = np.random.default_rng(0)
    text = torch.tensor(rng.integers(config.vocabulary, size=(100, 2, config.segment)))
    hold(model)
    moved = []
    for dtype in (torch.float32, torch.bfloat16):
        with computing_in(model, dtype):
            first = model.initial_state(2)
            state = first
            for tokens in text:
                state = model.advance(tokens, state)
        moved.append(getattr(state, field).double() - getattr(first, field).double())
    exact, rough = moved
    assert (rough - exact).norm() <= 0.02 * exact.norm()  # the most measured is 0.004
