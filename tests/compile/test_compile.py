"""--compile: compiled methods of layers compute what they computed before.

They are compiled in the first two iterations only.
"""

import itertools
import shutil

import pytest
import torch

from accelerated.attention import heads
from accelerated.attention.heads import ParameterModule
from accelerated.memory_replay import detach, drawn_seeds, replay, seeded
from accelerated.protocol import computing_in, evaluating
from accelerated.training.optimization import backprop_of
from accelerated.training.settings import TrainingConfig
from tests.helpers.comparison import assert_agree, named
from tests.helpers.rollouts import gradients, setting
from tests.helpers.variants import ONE_OF_EACH, PAPERS, over

METHODS = itertools.cycle(["through_time", "memory_replay"])
CASES = [(paper, name) for paper, name in ONE_OF_EACH if PAPERS[paper].has_compilable]
TYPED = [(case, method, torch.float64) for case, method in zip(CASES, METHODS, strict=False)]
TYPED += [(CASES[1], "memory_replay", torch.bfloat16)]


@pytest.fixture
def nothing_compiled():
    """Nothing is compiled before the test, and nothing stays compiled after it."""
    heads.compiled_once.cache_clear()
    torch._dynamo.reset()
    yield
    heads.compiled_once.cache_clear()


@pytest.fixture
def graphs(monkeypatch, nothing_compiled):
    """A list that grows by one for each graph that is compiled.

    It is without torch's code generator, which takes minutes.
    """
    compile_whole = torch.compile
    found = []

    def without_generating(function, fullgraph, dynamic):
        assert fullgraph
        assert not dynamic

        def backend(graph, _):
            found.append(graph)
            return graph.forward

        return compile_whole(function, backend=backend, fullgraph=True, dynamic=False)

    monkeypatch.setattr(torch, "compile", without_generating)
    return found


def trained(paper, name, method, compiling, watch=lambda: None, dtype=torch.float64, again=False):
    """The last gradients and state of a model after four rollouts in dtype.

    It is evaluated in between. A document starts in the first rollout, and in both lanes of the
    last. With `again`, layers are computed again in the backward pass.
    """
    model, segments, _ = setting(paper, name, dropout=0.2)
    training = TrainingConfig(backprop=method, compile=compiling, checkpoint_layers=again)
    backprop = backprop_of(model, training)
    with computing_in(model, dtype):
        state = detach(model.initial_state(2))
    nowhere = torch.zeros(2, dtype=torch.bool)
    first, *others = (segment._replace(starts=nowhere) for segment in segments)
    for number in range(4):
        first = first._replace(starts=torch.tensor([number in (0, 3), number == 3]))
        model.zero_grad()
        torch.manual_seed(number)
        with computing_in(model, dtype):
            loss, _, state = backprop(model, [first, *others], state)
            with evaluating(model), torch.no_grad():
                for lanes in (2, 1):
                    model.read(first.tokens[:lanes], model.initial_state(lanes))
        watch()
    return {"loss": loss} | gradients(model) | named("state", state)


NAMES = [f"{' '.join(case)} {dtype}" for case, _, dtype in TYPED]


@pytest.mark.parametrize("case, method, dtype", TYPED, ids=NAMES)
def test_methods_are_compiled_in_the_first_two_rollouts_alone(case, method, dtype, graphs):
    """Neither for a state that documents begin, nor for fewer lanes in evaluation."""
    counts = []  # of graphs, after each rollout
    actual = trained(*case, method, "inductor", lambda: counts.append(len(graphs)), dtype)
    first, second, *later = counts
    assert first >= 1
    assert later == [second, second], "it was compiled again in a later rollout"
    if dtype == torch.float64:
        assert_agree(trained(*case, method, "none"), actual, 1e-12)


@over(CASES[:2])
def test_layers_that_are_computed_again_use_compiled_methods(paper, name, graphs):
    """The second time they drop what they dropped the first time."""
    actual = trained(paper, name, "through_time", "inductor", again=True)
    assert graphs
    assert_agree(trained(paper, name, "through_time", "none"), actual, 1e-12)


class Dropping(ParameterModule):
    """A step whose memory drops out, in a compilable method."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(3))

    @heads.compilable
    def kept(self, rows):
        return torch.nn.functional.dropout(rows, 0.5, self.training)

    def forward(self, x, state):
        after = self.kept(state + self.scale * x)
        return after.square().sum(), after


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler on a CPU")
def test_both_passes_of_memory_replay_drop_the_same(nothing_compiled):
    """By torch's code generator, which has random numbers of its own.

    Otherwise memory replay would not recompute the states that it stored.
    """
    step = Dropping()
    step.compiled = True
    inputs = torch.randn(3, 2, 3)
    first = torch.zeros(2, 3)
    torch.manual_seed(0)
    expected = 0.0
    state = first
    for x, seed in zip(inputs, drawn_seeds(3), strict=True):
        with seeded(seed, torch.device("cpu")):
            loss, state = step(x, state)
        expected = expected + loss
    torch.manual_seed(0)
    found, last = replay(step, inputs, first)
    assert_agree({"loss": expected, "state": state}, {"loss": found, "state": last}, 1e-11)
