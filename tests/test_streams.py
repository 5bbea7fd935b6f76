"""`step` reads a segment token by token into rows of fixed shapes, so that it can be compiled, and continued from earlier."""

import itertools

import pytest
import torch
from torch.utils._pytree import tree_leaves

from accelerated.evaluation.generation import GraphedStep
from accelerated.protocol import computing_in, repeat_lane
from tests.compile.test_device_waits import NoQuestions
from tests.helpers.comparison import assert_agree
from tests.helpers.variants import EVERY_VARIANT, ONE_OF_EACH, PAPERS, over
from tests.test_contract import both_sides

MORE_KINDS = [  # variants whose tokens read or write other rows
    *ONE_OF_EACH,
    ("block_recurrent", "slide"),
    ("block_recurrent", "lstm-dual-feedback"),
    ("compressive", "most_used-none"),
    ("compressive", "transformer-xl"),
    ("compressive", "simplified-attention_reconstruction"),
    ("compressive", "simplified-short-memory-most-used"),
    ("memformer", "encoder-decoder-xl"),
    ("memformer", "decoder-only-xl"),
    ("pretrained_recurrence", "plain"),
    ("pretrained_recurrence", "several-vectors"),
]


def text_of(config, rng, length, lanes=2):
    return torch.tensor(rng.integers(config.vocabulary, size=(lanes, length)))


def read_on(model, tokens, stream):
    """(logits (B, n, V), streams after each token) of tokens (B, n), n >= 1."""
    logits, streams = [], []
    for token in tokens.unbind(1):
        found, stream = model.step(token, stream)
        logits.append(found)
        streams.append(stream)
    return torch.stack(logits, 1), streams


def span_of(model):
    """How many tokens a stream's segment has."""
    return getattr(model.config, "window", model.config.segment)


@over(EVERY_VARIANT)
def test_the_rows_keep_their_shapes_and_are_shared_within_a_segment(paper, name):
    """Each segment has rows of its own, so that a stream of an earlier one does not see later text; the State never changes."""
    config, rng, _, _, model, state = both_sides(paper, name)
    before = [field.clone() for field in state]
    logits, streams = read_on(model, text_of(config, rng, 3 * span_of(model)), state)
    shapes = {tuple((tensor.shape, tensor.dtype) for tensor in tree_leaves(stream.rows)) for stream in streams}
    assert len(shapes) == 1 and not logits.requires_grad
    for earlier, later in itertools.pairwise(streams):
        pairs = zip(tree_leaves(earlier.rows), tree_leaves(later.rows), strict=True)
        shared = [a.data_ptr() == b.data_ptr() for a, b in pairs if a.numel()]
        assert all(shared) if later.read == earlier.read + 1 else not any(shared)
    assert all(torch.equal(a, b) for a, b in zip(before, state, strict=True))
    for stream in streams:
        own = {tensor.untyped_storage().data_ptr() for tensor in tree_leaves(stream.rows) if tensor.numel()}
        assert not own & {field.untyped_storage().data_ptr() for field in stream.state if field.numel()}


@over(EVERY_VARIANT)
def test_an_earlier_stream_of_a_segment_can_be_continued(paper, name):
    """With other tokens; what came after it, up to the segment's end and beyond, leaves no trace."""
    config, rng, _, _, model, state = both_sides(paper, name)
    span, cut = span_of(model), max(1, span_of(model) // 2)
    first, other = text_of(config, rng, 2 * span), text_of(config, rng, 3 * span)
    whole, _ = read_on(model, torch.cat([first[:, :cut], other], 1), state)
    _, streams = read_on(model, first[:, :cut], state)
    read_on(model, first[:, span // 2 :], streams[-1])
    again, _ = read_on(model, other, streams[-1])
    assert torch.equal(again, whole[:, cut:])


@over(ONE_OF_EACH)
def test_streams_of_another_model_or_number_of_lanes_are_refused(paper, name):
    """In the middle of a segment too, by `step` and in a CUDA graph."""
    _, _, _, _, model, state = both_sides(paper, name)
    token = torch.zeros(2, dtype=torch.long)
    _, stream = model.step(token, state)
    others = (PAPERS[other].model(PAPERS[other].small).eval() for other in PAPERS if other != paper)
    strange = [other.step(token, other.initial_state(2))[1] for other in others]
    for step in (model.step, GraphedStep(model)):
        for given in ((token[:1], stream), (torch.cat([token, token]), stream), *((token, each) for each in strange)):
            with pytest.raises(ValueError, match="the state"):
                step(*given)


@over(ONE_OF_EACH)
def test_copies_of_a_lane_are_detached_and_share_no_memory(paper, name):
    """So that no update keeps the graph of the state that a run began with, and lanes can be changed in place."""
    _, _, _, _, model, _ = both_sides(paper, name)
    one, state = model.initial_state(1), repeat_lane(model.initial_state(1), 3)
    assert not any(field.requires_grad for field in state)
    assert all(torch.equal(field, torch.cat([own] * 3)) for field, own in zip(state, one, strict=True))
    fields = [field for field in state if field.numel()]
    storages = {field.untyped_storage().data_ptr() for field in fields}
    assert len(storages) == len(fields) and not storages & {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert all(field.untyped_storage().nbytes() == field.nbytes for field in fields)


@over(MORE_KINDS)
def test_a_token_asks_the_device_for_nothing(paper, name):
    """Over two segments, on a CPU and on the meta device, whose tensors have no numbers."""
    config, rng, _, _, model, state = both_sides(paper, name)
    tokens = text_of(config, rng, 2 * span_of(model))
    with NoQuestions():
        read_on(model, tokens, state)
        logits, streams = read_on(model.to("meta"), tokens.to("meta"), type(state)(*(field.to("meta") for field in state)))
    assert logits.is_meta and all(tensor.is_meta for tensor in tree_leaves(streams[-1].rows))


@over(MORE_KINDS)
def test_a_token_compiles_to_one_graph_for_all_positions(paper, name):
    """Without a break, and no second time in three segments; the logits are those of `step`."""
    config, rng, _, _, model, state = both_sides(paper, name)
    tokens, graphs, found = text_of(config, rng, 3 * span_of(model)), [], []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    read_token = torch.compile(model.read_token, backend=backend, fullgraph=True, dynamic=False)
    with torch.no_grad():
        stream = model.stream(state)
        for token in tokens.unbind(1):
            found.append(read_token(token, torch.tensor([stream.read]), stream.rows))
            stream = model.next_stream(stream)
    assert len(graphs) == 1
    assert_agree({"logits": read_on(model, tokens, state)[0]}, {"logits": torch.stack(found, 1)}, 1e-12)


@over(EVERY_VARIANT)
def test_a_model_in_bfloat16_steps_as_it_reads(paper, name):
    """Over two segments within bfloat16's rounding; the rows of keys and values are in bfloat16."""
    torch.set_default_dtype(torch.float32)
    config, rng, _, _, model, _ = both_sides(paper, name)
    segment = text_of(config, rng, config.segment)
    with torch.no_grad(), computing_in(model, torch.bfloat16):
        state = model.advance(segment, model.initial_state(2))
        expected = model(segment, state).logits
        actual, streams = read_on(model, segment, state)
    assert {field.dtype for kind in ("keys", "values") for field in getattr(streams[-1].rows, kind)} == {torch.bfloat16}
    assert_agree({"logits": expected}, {"logits": actual}, 0.1)
