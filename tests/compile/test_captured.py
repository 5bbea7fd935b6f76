"""graphs.py's back-propagation equals replay's, with a graph that computes again what it has
recorded: on a CPU. Below are a GPU's own graphs, which need one.
"""

import pytest
import torch
from torch.utils._pytree import tree_leaves

from accelerated import replay
from accelerated.fast import graphs as graphs_module
from accelerated.fast.decoders import join
from accelerated.fast.graphs import CapturedBackprop, takes_graphs
from accelerated.protocol import computing_in, keep_lanes
from accelerated.training.optimization import backprop_of
from accelerated.training.settings import TrainingConfig
from tests.helpers import rollouts
from tests.helpers.comparison import assert_agree
from tests.helpers.rollouts import back_propagated, check_back_propagation
from tests.helpers.variants import EVERY_VARIANT, ONE_OF_EACH, over

METHODS = ("through_time", "memory_replay")
# The output matrix and the model each round their gradient of an embedding, where else the sum is
# rounded; by the type of the parameters, float32
ROUNDED_TWICE = 1e-6


def setting(paper, name):
    """That of rollouts without shorter segments, of which no graph is recorded."""
    model, segments, state = rollouts.setting(paper, name)
    length = model.config.segment
    return model, [each for each in segments if each.tokens.shape[1] == length], state


class Recomputed:
    """Stands for a CUDA graph: a replay computes again, into the memory of the first results."""

    def __init__(self, function, graphs):
        self.function = function
        self.graphs = graphs
        self.results = function()

    def replay(self):
        with self.graphs.computing_with_leaves():
            results = self.function()
        for place, result in zip(tree_leaves(self.results), tree_leaves(results), strict=True):
            if isinstance(place, torch.Tensor):
                place.data.copy_(result.data)


def recomputed(functions, graphs):
    """What graphs.record returns."""
    recorded = []
    with graphs.computing_with_leaves():
        for function in functions:
            graph = Recomputed(function, graphs)
            recorded.append((graph, graph.results))
    return recorded


@pytest.fixture
def on_a_cpu(monkeypatch):
    monkeypatch.setattr(graphs_module, "record", recomputed)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)


@pytest.mark.parametrize("method", METHODS)
@over(EVERY_VARIANT)
def test_it_equals_the_method_with_dropout(paper, name, method, on_a_cpu):
    """Twice, as the second time nothing is recorded; a document starts in the second segment."""
    model, segments, state = setting(paper, name)
    expected = back_propagated(method, model, segments, state)
    backprop = CapturedBackprop(model, method)
    for time in ("recorded", "replayed"):
        found = back_propagated(backprop, model, segments, state)
        assert_agree(expected, found, ROUNDED_TWICE, f"fast/graphs.py, {name}, {time}")


@pytest.mark.parametrize("method", METHODS)
@over(ONE_OF_EACH)
def test_a_replay_reads_its_own_segments_and_leaves_earlier_results(paper, name, method, on_a_cpu):
    """Tokens, tasks and where documents start are not those of the recording.

    The state that the first call has returned stays as it is, though graphs write to fixed memory.
    """
    model, segments, state = setting(paper, name)
    backprop = CapturedBackprop(model, method)
    first = back_propagated(backprop, model, segments, state)
    kept = {key: row.clone() for key, row in first.items()}
    others = [segment.keep_lanes([1, 0]) for segment in segments]  # a document starts in lane 0
    expected = back_propagated(method, model, others, state)
    found = back_propagated(backprop, model, others, state)
    assert_agree(expected, found, ROUNDED_TWICE, f"fast/graphs.py reads what was recorded, {name}")
    for key, row in kept.items():
        assert torch.equal(first[key], row), f"{name}: a later replay overwrites {key}"


@pytest.mark.parametrize("method", METHODS)
def test_segments_that_share_a_graph_leave_each_others_results(method, on_a_cpu):
    """Six segments of two kinds: states of the first pass, and auxiliary losses, are copies."""
    model, segments, state = setting("compressive", "conv-attention_reconstruction")
    segments += segments
    expected = back_propagated(method, model, segments, state)
    found = back_propagated(CapturedBackprop(model, method), model, segments, state)
    assert_agree(expected, found, ROUNDED_TWICE, "fast/graphs.py overwrites an earlier segment's")


def test_all_methods_drop_the_same_in_joined_segments(on_a_cpu):
    """Memory replay draws again what its first pass drew: encoders before decoders."""
    model, segments, state = setting("memformer", "encoder-decoder")
    several = [join(segments[1:3]), join(segments[2:4])]
    expected = check_back_propagation(model, several, state)
    for method in METHODS:
        found = back_propagated(CapturedBackprop(model, method), model, several, state)
        assert_agree(expected, found, ROUNDED_TWICE, f"{method}, recorded")


@pytest.mark.parametrize("method", METHODS)
@over(ONE_OF_EACH)
def test_gradients_are_added_to_those_that_are_there(paper, name, method, on_a_cpu):
    """A parameter without gradient keeps none."""
    model, segments, state = setting(paper, name)
    found = []
    for backprop in (replay.BACKPROP[method], CapturedBackprop(model, method)):
        model.zero_grad()
        for seed in (1, 2):
            torch.manual_seed(seed)
            with computing_in(model, torch.float64):
                backprop(model, segments, state, 17.0, 0.25)
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    assert_agree(*found, ROUNDED_TWICE, "fast/graphs.py loses gradients that are there: Graphs.end")


def test_other_shapes_or_weights_are_recorded_anew(on_a_cpu):
    """As graphs of the old ones would read memory that is not there any more.

    Another share weighs auxiliary losses anew, which are recorded with their weight.
    """
    model, segments, state = setting("memformer", "encoder-decoder")
    backprop = CapturedBackprop(model, "through_time")
    backprop(model, segments, state)
    graphs = backprop.graphs
    backprop(model, segments, state)
    assert backprop.graphs is graphs
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    backprop(model, segments, state)
    assert backprop.graphs is not graphs
    graphs = backprop.graphs
    backprop(model, segments, state, share=0.5)
    assert backprop.graphs is not graphs, "auxiliary losses keep their old weight"
    graphs = backprop.graphs
    backprop(model, [each.keep_lanes([1]) for each in segments], keep_lanes(state, [1]), share=0.5)
    assert backprop.graphs is not graphs, "one lane is read by the graphs of two"


def test_segments_of_several_lengths_take_no_graphs(on_a_cpu):
    model, segments, state = setting("memformer", "decoder-only")
    shorter = segments[1]._replace(tokens=segments[1].tokens[:, :-1])
    backprop = CapturedBackprop(model, "through_time")
    with pytest.raises(ValueError, match="a segment of"):  # the method's own, which reads it
        backprop(model, [segments[0], shorter], state)
    assert backprop.graphs is None


@pytest.mark.parametrize(
    "options, device, expected",
    [
        ({"backprop": "memory_replay"}, "cuda", True),
        ({"compile": "cudagraphs"}, "cuda", True),
        ({"compile": "none"}, "cuda", False),
        ({"checkpoint_layers": True}, "cuda", False),
        ({"backprop": "checkpointed"}, "cuda", False),
        ({}, "cpu", False),
    ],
)
def test_a_gpu_takes_graphs_unless_something_is_computed_again(options, device, expected):
    config = TrainingConfig(**{"compile": "auto"} | options)
    assert takes_graphs(config, torch.device(device)) == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("method", METHODS)
@over(ONE_OF_EACH)
def test_graphs_equal_the_method_on_a_gpu(paper, name, method, dtype):
    """With dropout: a graph draws what its seed says."""
    torch.set_default_dtype(torch.float32)
    model, segments, state = setting(paper, name)
    model.float().cuda()
    segments = [segment.to(torch.device("cuda")) for segment in segments]
    if name == "encoder-decoder":
        segments = [join(segments[1:3]), join(segments[2:4])]  # the first one has no task
    state = state._make(field.cuda() for field in state)
    config = TrainingConfig(compile="auto", backprop=method, horizon=len(segments))
    backprop = backprop_of(model, config)
    expected = back_propagated(method, model, segments, state, dtype)
    for _ in range(2):
        found = back_propagated(backprop, model, segments, state, dtype)
        # In bfloat16 the embedding's two gradients are rounded before their sum
        assert_agree(expected, found, 1e-5 if dtype == torch.float32 else 2e-2)
