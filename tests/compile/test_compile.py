"""--compile: compiled methods of layers compute what they computed before.

They are compiled in the first two iterations only.
"""

import itertools
import shutil
from typing import NamedTuple

import pytest
import torch

from accelerated.attention import heads
from accelerated.data.lanes import Segment
from accelerated.memory_replay import detach
from accelerated.protocol import Model, Reading, computing_in, evaluating
from accelerated.training.optimization import backprop_of
from accelerated.training.settings import TrainingConfig
from tests.helpers.comparison import assert_agree, named
from tests.helpers.rollouts import back_propagated, gradients, setting
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


class Total(NamedTuple):
    rows: torch.Tensor  # (B, D)


class Dropping(Model):
    """The least model of the protocol whose memory drops out."""

    attention_reach = 0

    def __init__(self):
        super().__init__(config=None)
        self.embedding = torch.nn.Parameter(torch.randn(5, 3))
        self.scale = torch.nn.Parameter(torch.ones(3))

    def describe(self):
        return "all that was read, summed"

    def state_shapes(self, batch):
        return {"rows": (batch, 3)}

    def output_matrix(self):
        return self.embedding

    def initial_state(self, batch):
        return Total(torch.zeros(batch, 3).to(self.embedding))

    @heads.compilable
    def kept(self, rows):
        return torch.nn.functional.dropout(rows, 0.5, self.training)

    def read(self, tokens, state):
        kept = self.kept(state.rows + self.scale * self.embedding[tokens].sum(1))
        hidden = kept[:, None].expand(-1, tokens.shape[1], -1)
        return Reading(hidden, Total(kept), {})

    def advance(self, tokens, state):
        return self.read(tokens, state).state


def some_segments(count):
    """Segments for it, of four tokens in two lanes."""
    nowhere = torch.zeros(2, dtype=torch.bool)
    drawn = torch.randint(5, (count, 2, 4))
    return [Segment(each, each, each >= 0, nowhere) for each in drawn]


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler on a CPU")
def test_both_passes_of_memory_replay_drop_the_same(nothing_compiled):
    """By torch's code generator, which has random numbers of its own.

    Otherwise memory replay would not recompute the states that it stored.
    """
    model = Dropping().train()
    given = (model, some_segments(3), model.initial_state(2))
    found = []
    for method in ("through_time", "memory_replay"):
        backprop_of(model, TrainingConfig(compile="inductor", backprop=method))
        found.append(back_propagated(method, *given))
    assert found[0]["loss"].isfinite()
    assert_agree(*found, 1e-11)
