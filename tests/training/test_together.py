"""Processes that train together: what each one reads, sums, and gathers of the others.

Two of them, of which this is the second; the other's numbers stand here. tests/process has real
ones.
"""

import contextlib
from types import SimpleNamespace

import pytest
import torch

import train
from accelerated.data.lanes import Lanes
from accelerated.training import process
from accelerated.training.options import parse
from tests.helpers.programs import COMPRESSIVE, words
from tests.helpers.rollouts import setting
from tests.helpers.texts import BYTES, documents_of
from tests.helpers.variants import PAPERS

CPU = torch.device("cpu")


@pytest.fixture
def other(monkeypatch):
    """A list of what the first process gives to each sum or gathering, in order."""
    given = []

    def all_reduce(tensor):
        tensor += torch.as_tensor(given.pop(0), dtype=tensor.dtype)

    def all_gather(parts, own):
        parts[0].copy_(given.pop(0))
        parts[1].copy_(own)

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    monkeypatch.setattr(torch.distributed, "all_gather", all_gather)
    return given


def test_a_process_reads_its_own_lanes_and_counts_what_all_read(other):
    """Tokens for the log's speed; tokens that are scored, and their bytes."""
    settings, _ = parse(words(*COMPRESSIVE, "--batch 2"))
    reader = Lanes(documents_of([30, 30]), 2, 8, 0)
    expected = Lanes(documents_of([30, 30]), 2, 8, 0).rollout(1)
    run = SimpleNamespace(settings=settings, reader=reader, tokenizer=BYTES, tokens=0)
    [segment], *counts = train.next_segments(run)
    assert torch.equal(segment.tokens, expected[0].tokens[1:]), "it reads the first one's lane"
    assert [run.tokens, *counts] == 3 * [2 * 8], "of this process alone: look at next_segments"


def test_losses_are_summed_and_all_else_is_averaged(other):
    other.append([5.0 + 2**-30, 7.0])  # in float32 it would be 5
    found = process.read_numbers({"loss": torch.tensor(1.0), "norm": torch.tensor(3.0)})
    right = {"loss": 6.0 + 2**-30, "norm": 5.0}
    assert found == right, "look at read_numbers in training/process.py"


def test_a_gradient_is_the_mean_of_both_and_none_if_both_have_none(other):
    """One that is None in this process alone counts as zero."""
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(2)) for _ in range(3)])
    model[0].grad = torch.tensor([2.0, 6.0])
    other += [[1.0, 1.0, 0.0], [4.0, 0.0], [8.0, 2.0]]
    process.average_gradients(model.parameters(), CPU)
    assert model[0].grad.tolist() == [3.0, 3.0], "of gradients that both have"
    assert model[1].grad.tolist() == [4.0, 1.0], "of one that the other alone has"
    assert model[2].grad is None, "of one that nobody has"


def test_the_states_of_all_lanes_are_saved_in_their_order(other):
    own = PAPERS["compressive"].model(PAPERS["compressive"].small).initial_state(2)
    own = own._make(torch.full_like(field, 2.0) for field in own)
    other += [torch.full_like(field, 1.0) for field in own]
    for field, value in process.gather_lanes(own)._asdict().items():
        lanes = value.flatten(1)[:, 0].tolist()
        assert lanes == [1.0, 1.0, 2.0, 2.0], f"the lanes of {field} are those of processes {lanes}"


def test_a_process_divides_by_its_half_of_all_scored_tokens(other):
    """Gradients are averaged, not summed; dropout is drawn from the process's own number."""
    model, segments, state = setting("compressive", "conv-bptt")
    asked = []

    def backprop(model, segments, state, **how):
        asked.append(how)
        return torch.tensor(0.5), {}, state

    run = SimpleNamespace(model=model, state=state, device=CPU, backprop=backprop, since_update=0)
    run.settings = SimpleNamespace(training=SimpleNamespace(accumulate=2))
    run.lanes_at_once = 1
    run.computing = contextlib.nullcontext
    nats, _ = train.forward_and_backward(run, segments, scored=30)
    assert asked == 2 * [{"divisor": 15.0, "share": 0.5, "rank": 1}], "of two groups of a lane"
    assert nats.item() == 15.0, "both groups' losses, times what they were divided by"
