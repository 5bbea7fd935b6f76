"""Full BPTT, gradient checkpointing and memory replay give the same loss, gradients and next state."""

import contextlib
import dataclasses
import math
import shutil
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelerated import replay
from accelerated.block_recurrent import BlockRecurrent
from accelerated.data.lanes import Segment
from accelerated.data.tasks import Task
from accelerated.lab.speed.timing import peak_memory
from accelerated.protocol import Model, Reading, computing_in, detach, replace_lanes, require_gradient, state_from
from accelerated.training.optimization import TrainedModel
from accelerated.training.settings import TrainingConfig
from tests.conftest import examples
from tests.helpers.comparison import assert_agree, named
from tests.helpers.variants import EVERY_VARIANT, PAPERS, variant
from tests.helpers.variants import ONE_OF_EACH as ONE_OF_EACH_PAPER

TOLERANCE = 1e-11  # float64, relative
EVERY_MODEL = {f"{paper} {name}": (PAPERS[paper].model, variant(paper, name)) for paper, name in EVERY_VARIANT}
ONE_OF_EACH = [f"{paper} {name}" for paper, name in ONE_OF_EACH_PAPER]
SMALL = PAPERS["block_recurrent"].small


def random_rollout(config, horizon, lanes=3, scored=0.7):
    torch.manual_seed(4)
    segments = []
    for _ in range(horizon):
        tokens, targets = torch.randint(config.vocabulary, (2, lanes, config.segment)).unbind(0)
        segments.append(Segment(tokens, targets, torch.rand(lanes, config.segment) < scored, torch.rand(lanes) < 0.3))
    return segments


def random_task(config, lanes):
    """A random task per lane (row of the batch): infilling, recall or continuation, with padding."""
    kind = torch.randint(3, (lanes,))
    reading, prompt = torch.randint(config.vocabulary, (2, lanes, config.segment)).unbind(0)
    return Task(kind, reading, torch.arange(config.segment) < torch.randint(1, config.segment + 1, (lanes, 1)), prompt)


def rollout_for(name, config, horizon):
    """A random rollout (consecutive segments); if the model reads tasks, every other segment has one."""
    segments = random_rollout(config, horizon)
    if name.startswith("memformer") and name.partition(" ")[2] in PAPERS["memformer"].tasks:
        segments[::2] = [segment._replace(task=random_task(config, 3)) for segment in segments[::2]]
    return segments


def rows_of(method, model, segments, state, dtype=torch.float64, trained=None):
    """The loss, auxiliary losses, every parameter's gradient and the next state of a method that computes in dtype."""
    model.zero_grad()
    torch.manual_seed(11)
    with computing_in(model, dtype):
        given = state_from(model.initial_state(len(state[0])), state)
        loss, auxiliary, after = method(trained or model, segments, given)
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    rows = {"loss": loss[None]} | grads | named("state", after)
    rows |= {f"auxiliary.{name}": value[None] for name, value in auxiliary.items()}
    assert not any(field.requires_grad for field in after) and not loss.requires_grad
    return {name: row for name, row in rows.items() if row.numel()}


def carried_state(model, lanes=3):
    """A state in mid-document."""
    tokens = torch.randint(model.config.vocabulary, (lanes, model.config.segment))
    return detach(model(tokens, model.initial_state(lanes)).state)


@examples(45)
@given(name=st.sampled_from(sorted(EVERY_MODEL)), horizon=st.integers(1, 6), dropout=st.sampled_from([0.0, 0.3]))
def test_the_three_methods_agree(name, horizon, dropout):
    model_class, config = EVERY_MODEL[name]
    config = dataclasses.replace(config, dropout=dropout)
    model = model_class(config).train()
    segments, state = rollout_for(name, config, horizon), carried_state(model)
    expected = rows_of(replay.through_time, model, segments, state)
    for method in ("checkpointed", "memory_replay"):
        assert_agree(expected, rows_of(replay.BACKPROP[method], model, segments, state), TOLERANCE, method)


def dropping_in_the_first_pass_alone(model):
    advance = model.advance

    def advance_by_other_numbers(*read):
        torch.rand(1)
        return advance(*read)

    model.advance = advance_by_other_numbers


def losing_the_memorys_gradient(model):
    read = model.read
    model.read = lambda tokens, state, *task: read(tokens, detach(state), *task)


def losing_a_task(model):
    advance = model.advance
    model.advance = lambda tokens, state, *task: advance(tokens, state)


WITH_REPLAY = ("memformer encoder-decoder", "memformer decoder-only", "pretrained_recurrence several-vectors")
FAULTS = [(fault, name) for fault in (dropping_in_the_first_pass_alone, losing_the_memorys_gradient) for name in WITH_REPLAY]


@pytest.mark.parametrize("fault,name", [*FAULTS, (losing_a_task, "memformer encoder-decoder")])
def test_a_broken_replay_is_noticed(name, fault):
    """Other dropout in the first pass, no gradient into memory, or a first pass without the task."""
    model_class, config = EVERY_MODEL[name]
    model = model_class(dataclasses.replace(config, dropout=0.3)).train()
    segments, state = rollout_for(name, config, 4), carried_state(model)
    expected = rows_of(replay.through_time, model, segments, state)
    assert_agree(expected, rows_of(replay.memory_replay, model, segments, state), TOLERANCE)
    fault(model)
    with pytest.raises(AssertionError):
        assert_agree(expected, rows_of(replay.memory_replay, model, segments, state), TOLERANCE)


@pytest.mark.parametrize("fault", ["doubled loss", "same seed for all", "another seed going back", "state that is not the next"])
def test_a_broken_replay_function_is_noticed(fault, monkeypatch):
    """Faults planted in the parts of memory_replay itself."""
    name = "memformer encoder-decoder"
    model_class, config = EVERY_MODEL[name]
    model = model_class(dataclasses.replace(config, dropout=0.3)).train()
    segments, state = rollout_for(name, config, 4), carried_state(model)
    expected = rows_of(replay.through_time, model, segments, state)
    run = replay.run_segment
    if fault == "doubled loss":
        monkeypatch.setattr(replay, "run_segment", lambda *a: (lambda part, extra, after: (2 * part, extra, after))(*run(*a)))
    elif fault == "same seed for all":
        monkeypatch.setattr(replay, "segment_seeds", lambda segments, rank: [5] * len(segments))
    elif fault == "another seed going back":
        monkeypatch.setattr(replay, "run_segment", lambda m, g, s, seed, n: run(m, g, s, seed + torch.is_grad_enabled(), n))
    else:
        monkeypatch.setattr(replay, "begin", lambda model, segment, state: state)
    with pytest.raises(AssertionError):
        assert_agree(expected, rows_of(replay.memory_replay, model, segments, state), TOLERANCE)


def peak_bytes(method, model, segments, state):
    """The most bytes that torch's CPU allocator held at once, beyond those before."""
    model.zero_grad()
    method(model, segments, state)  # allocates the gradients
    return peak_memory(lambda: method(model, segments, state), torch.device("cpu"))


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_memory_replay_takes_the_memory_of_one_segment(name):
    """From 4 to 16 segments its peak grows by the stored states; that of BPTT by the graphs of 12 segments."""
    model_class, config = EVERY_MODEL[name]
    model = model_class(config)
    state, lanes = carried_state(model, lanes=3), 3
    peaks = {
        (method, horizon): peak_bytes(replay.BACKPROP[method], model, random_rollout(config, horizon, lanes), state)
        for method in replay.BACKPROP
        for horizon in (4, 16)
    }
    stored = 12 * sum(field.numel() * field.element_size() for field in state)
    generator = torch.get_rng_state().numel()  # bytes, not small at these sizes
    assert peaks["memory_replay", 16] <= 1.01 * peaks["memory_replay", 4] + stored + generator
    assert peaks["through_time", 16] > 3.5 * peaks["through_time", 4]
    assert peaks["memory_replay", 4] < 0.45 * peaks["through_time", 4]
    assert peaks["memory_replay", 16] < peaks["checkpointed", 16] < peaks["through_time", 16]


@pytest.mark.parametrize("name", ["block_recurrent fixed-skip", "compressive conv-bptt", "compressive conv-auto_encoding"])
def test_through_time_is_autograd_on_the_whole_rollout(name):
    """Compared with one autograd graph written by hand, without seeds or replay."""
    model_class, config = EVERY_MODEL[name]
    model = model_class(config)
    segments, state = random_rollout(config, 3), carried_state(model)
    actual = rows_of(replay.through_time, model, segments, state)
    model.zero_grad()
    nats, count, auxiliary, carried = 0.0, 0, {}, state
    for segment in segments:
        fresh = model.initial_state(3)
        carried = type(carried)(
            *(
                torch.stack([(new if segment.starts[lane] else old)[lane] for lane in range(3)])
                for new, old in zip(fresh, carried, strict=True)
            )
        )
        output = model(segment.tokens, carried)
        carried = output.state
        auxiliary |= {loss: auxiliary.get(loss, 0.0) + value / 3 for loss, value in output.auxiliary.items()}
        for lane, place in segment.scored.nonzero().tolist():
            nats = nats - output.logits[lane, place].log_softmax(-1)[segment.targets[lane, place]]
            count += 1
    (nats / count + sum(auxiliary.values())).backward()
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    losses = {"loss": (nats / count)[None]} | {f"auxiliary.{loss}": value[None] for loss, value in auxiliary.items()}
    assert_agree(losses | grads | named("state", carried), actual, TOLERANCE)


@pytest.mark.parametrize("method", replay.BACKPROP)
def test_no_gradient_leaves_the_rollout_through_its_first_state(method):
    """A learned initial state gets gradient only from lanes that start inside the rollout."""
    model = BlockRecurrent(SMALL)
    name = "layers.1.state.initial"
    segments = [s._replace(starts=torch.zeros(3, dtype=torch.bool)) for s in random_rollout(SMALL, 2)]
    assert not rows_of(replay.BACKPROP[method], model, segments, model.initial_state(3))[name].any()
    segments[1].starts[2] = True
    assert rows_of(replay.BACKPROP[method], model, segments, model.initial_state(3))[name].any()


@pytest.mark.parametrize("method", replay.BACKPROP)
def test_a_rollout_without_scored_tokens_has_zero_loss(method):
    model = BlockRecurrent(SMALL)
    rows = rows_of(replay.BACKPROP[method], model, random_rollout(SMALL, 2, scored=0.0), model.initial_state(3))
    assert all(not row.any() for name, row in rows.items() if not name.startswith("state"))


def test_every_segment_draws_from_its_own_seed():
    draws = []
    for seed in (5, 6, 5):
        with replay.seeded(seed, torch.device("cpu")):
            draws.append(torch.rand(3))
    assert torch.equal(draws[0], draws[2]) and not torch.equal(draws[0], draws[1])
    first, second = replay.segment_seeds([None] * 50), replay.segment_seeds([None] * 50)
    assert len(set(first + second)) == 100


def test_the_generators_of_a_segments_device_are_restored(monkeypatch):
    """A CPU's always; of other devices the GPU's own."""
    asked = []
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: asked.append(devices) or contextlib.nullcontext())
    for device in map(torch.device, ("cpu", "cuda", "meta")):
        with replay.seeded(0, device):
            assert asked[-1] == ([device] if device.type == "cuda" else [])


@pytest.mark.parametrize("method", replay.BACKPROP)
def test_processes_draw_different_dropout_from_the_same_generator(method):
    """One saved generator state then restores all processes."""
    model, rows, generators = BlockRecurrent(dataclasses.replace(SMALL, dropout=0.3)).train(), [], []
    segments = random_rollout(SMALL, 2)
    for rank in (0, 1, 1):
        torch.manual_seed(5)
        rows.append(replay.BACKPROP[method](model, segments, model.initial_state(3), rank=rank)[0])
        generators.append(torch.get_rng_state())
    assert rows[0] != rows[1] == rows[2] and all(torch.equal(state, generators[0]) for state in generators)


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.parametrize("name", ["pretrained_recurrence one-layer-one-head"])
def test_both_compiled_passes_drop_out_what_uncompiled_ones_do(name):
    """Otherwise memory replay would not recompute the states that it stored, and its gradients would be wrong."""
    model_class, config = EVERY_MODEL[name]
    model = model_class(dataclasses.replace(config, dropout=0.3)).train()
    segments, state = random_rollout(config, 3), detach(model.initial_state(3))
    expected = rows_of(replay.memory_replay, model, segments, state)
    trained = TrainedModel(model, TrainingConfig(compile="inductor", backprop="memory_replay"))
    assert_agree(expected, rows_of(replay.memory_replay, model, segments, state, trained=trained), TOLERANCE)


@pytest.mark.parametrize("method", replay.BACKPROP)
def test_global_random_numbers_continue_as_if_nothing_was_drawn_inside(method):
    """All methods take only the segments' seeds from the global generator."""
    model = BlockRecurrent(dataclasses.replace(SMALL, dropout=0.3)).train()
    torch.manual_seed(5)
    replay.BACKPROP[method](model, random_rollout(SMALL, 3), model.initial_state(3))
    torch.manual_seed(5)
    replay.segment_seeds([None] * 3)
    torch.manual_seed(4)
    random_rollout(SMALL, 3)
    after = torch.rand(2)
    torch.manual_seed(5)
    segments = random_rollout(SMALL, 3)
    replay.BACKPROP[method](model, segments, model.initial_state(3))
    torch.manual_seed(4)
    random_rollout(SMALL, 3)
    assert torch.equal(after, torch.rand(2))


class CounterState(NamedTuple):
    total: torch.Tensor  # (B, 1)
    last: torch.Tensor  # (B,) token ids: a field without gradient


class Counter(Model):
    """A two-parameter model of the protocol with an auxiliary loss and an integer state field."""

    def __init__(self):
        super().__init__()
        self.rate, self.start = torch.nn.Parameter(torch.tensor(0.5)), torch.nn.Parameter(torch.tensor(0.2))

    def initial_state(self, batch):
        return CounterState(self.start.expand(batch, 1), torch.zeros(batch, dtype=torch.long))

    def output_matrix(self):
        return torch.linspace(-0.1, 0.1, 4)[:, None]

    def read(self, tokens, state):
        total = state.total * self.rate + tokens.sum(1, keepdim=True) * self.rate + state.last[:, None]
        hidden = total[:, :, None].expand(-1, tokens.shape[1], -1)  # (B, N, 1)
        return Reading(hidden, CounterState(total, tokens[:, -1]), {"size": (total**2).mean(), "rate": self.rate**2})

    def advance(self, tokens, state):
        return self.read(tokens, state).state


class Forgetful(Counter):
    """It writes a state that it does not read."""

    def read(self, tokens, state):
        return super().read(tokens, CounterState(*(torch.zeros_like(field) for field in state)))


def test_a_state_that_nothing_reads_passes_no_gradient_on():
    model, segments = Forgetful(), random_rollout(dataclasses.replace(SMALL, vocabulary=4), 3)
    segments = [segment._replace(starts=torch.zeros(3, dtype=torch.bool)) for segment in segments]
    rows = [rows_of(method, model, segments, model.initial_state(3)) for method in (replay.through_time, replay.memory_replay)]
    assert_agree(*rows, TOLERANCE)


def test_auxiliary_losses_are_averaged_over_segments_beside_the_loss():
    model, counter = Counter(), dataclasses.replace(SMALL, vocabulary=4)
    segments, state = random_rollout(counter, 3), detach(Counter().initial_state(3))
    rows = {name: rows_of(method, model, segments, state) for name, method in replay.BACKPROP.items()}
    assert_agree(rows["through_time"], rows["checkpointed"], TOLERANCE)
    assert_agree(rows["through_time"], rows["memory_replay"], TOLERANCE)
    model.zero_grad()
    loss, auxiliary, carried, scored = 0.0, 0.0, state, sum(int(s.scored.sum()) for s in segments)
    for segment in segments:
        carried = replace_lanes(segment.starts, model.initial_state(3), carried)
        logits, carried, extra = model(segment.tokens, carried)
        loss = loss - logits.log_softmax(-1).gather(-1, segment.targets[..., None])[segment.scored].sum() / scored
        auxiliary = auxiliary + extra["size"] / 3 + extra["rate"] / 3
    (loss + auxiliary).backward()
    assert_agree(
        {"loss": loss[None], "rate": model.rate.grad, "start": model.start.grad},
        {name: rows["through_time"][name] for name in ("loss", "rate", "start")},
        TOLERANCE,
    )


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_memory_replay_keeps_one_segments_graph(name, monkeypatch):
    """First only `advance` without gradient, then one forward with gradient and one backward at a time."""
    model_class, config = EVERY_MODEL[name]
    model, calls = model_class(config), []
    read, advance, backward = model.read, model.advance, torch.autograd.backward
    monkeypatch.setattr(model, "read", lambda *a: calls.append("read") or read(*a))
    monkeypatch.setattr(model, "advance", lambda *a: calls.append(f"advance {torch.is_grad_enabled()}") or advance(*a))
    monkeypatch.setattr(torch.autograd, "backward", lambda *a: calls.append("backward") or backward(*a))
    replay.memory_replay(model, random_rollout(config, 3), model.initial_state(3))
    assert calls == ["advance False"] * 2 + ["read", "backward"] * 3


@pytest.mark.parametrize("name", [*ONE_OF_EACH, "compressive conv-attention_reconstruction"])
@pytest.mark.parametrize("method", replay.BACKPROP)
def test_bfloat16_trains(method, name):
    """The results are finite and close to float32, and every parameter gets gradient."""
    torch.set_default_dtype(torch.float32)
    model_class, config = EVERY_MODEL[name]
    model = model_class(config)
    segments = random_rollout(config, 3)
    state = carried_state(model)
    exact = rows_of(replay.BACKPROP[method], model, segments, state, torch.float32)
    rough = rows_of(replay.BACKPROP[method], model, segments, state, torch.bfloat16)
    assert math.isclose(exact["loss"].item(), rough["loss"].item(), rel_tol=0.02)
    grads = [n for n, _ in model.named_parameters()]
    assert all(torch.isfinite(rough[n]).all() and rough[n].any() for n in grads if exact[n].any())
    flat = [torch.cat([rows[n].flatten() for n in grads]) for rows in (exact, rough)]
    assert torch.nn.functional.cosine_similarity(*flat, dim=0) > 0.98


def test_replace_lanes_selects_and_routes_gradient():
    initial = CounterState(torch.ones(3, 1, requires_grad=True), torch.tensor([9, 9, 9]))
    old = CounterState(torch.zeros(3, 1, requires_grad=True), torch.tensor([1, 2, 3]))
    state = replace_lanes(torch.tensor([True, False, True]), initial, old)
    assert state.last.tolist() == [9, 2, 9] and state.total[:, 0].tolist() == [1, 0, 1]
    state.total.sum().backward()
    assert initial.total.grad[:, 0].tolist() == [1, 0, 1] and old.total.grad[:, 0].tolist() == [0, 1, 0]


def test_an_initial_state_is_made_only_if_a_lane_starts():
    [segment], state = random_rollout(SMALL, 1), CounterState(torch.zeros(3, 1), torch.zeros(3))
    assert replay.begin(None, segment._replace(starts=torch.zeros(3, dtype=torch.bool)), state) is state
    starting = segment._replace(starts=torch.tensor([False, True, False]))
    assert replay.begin(Counter(), starting, state).total[:, 0].tolist() == [0, pytest.approx(0.2), 0]


def test_state_helpers():
    state = CounterState(torch.ones(3, 1, requires_grad=True) * 2, torch.tensor([1, 2, 3]))
    leaf = require_gradient(state)
    assert leaf.total.is_leaf and leaf.total.requires_grad and not leaf.last.requires_grad
    assert not detach(state).total.requires_grad
    restored = state_from(state, (torch.zeros(3, 1), torch.zeros(3)))
    assert isinstance(restored, CounterState) and not restored.total.any()
