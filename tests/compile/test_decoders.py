"""Memformer's decoders in one batch, as a GPU takes them, equal one after another: on a CPU."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelerated import replay
from accelerated.fast import decoders
from accelerated.memory_replay import detach
from accelerated.training.optimization import backprop_of
from accelerated.training.settings import TrainingConfig
from reference.rollout import Segment
from tests.conftest import examples
from tests.helpers.comparison import assert_agree
from tests.helpers.rollouts import (
    back_propagated,
    both_sides,
    check_back_propagation,
    setting,
    torch_segments,
)
from tests.helpers.variants import ONE_OF_EACH, PAPERS, over, variant

ENCODERS = [("memformer", name) for name in PAPERS["memformer"].tasks]
ROUNDED = 1e-11


def joined(segments, parts):
    """The segments, so many at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoders, "TOGETHER", parts * segments[0].tokens.numel())
        patch.setattr(decoders, "BATCHES", 1)
        return decoders.joined(segments)


def hidden_rows(model, segments, state):
    """{a segment and its lane: the hidden states that predict there}."""
    rows = []
    for segment in segments:
        reading = replay.read_segment(model, segment, state)
        rows += reading.hidden.detach()
        state = detach(reading.state)
    lanes = len(state[0])
    return {f"segment {at // lanes}, lane {at % lanes}": row for at, row in enumerate(rows)}


@over(ENCODERS)
@examples(2)
@given(
    joins=st.sampled_from([2, 1, 3]),
    parts=st.sampled_from([2, 3, 1]),
    lanes=st.sampled_from([3, 2, 1]),
    scored=st.sampled_from([0.7, 0.0, 1.0]),
    begins=st.sampled_from([0.4, 0.0]),
    tasks=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_it_equals_one_after_another(paper, name, joins, parts, lanes, scored, begins, tasks, seed):
    """By all methods, with documents that begin inside, tokens that are not scored, and tasks.

    Some lane always reads a text, as keys of a segment of begin tokens get no gradient. Rows that
    differ were decoded from what another segment or lane encoded. If they agree and gradients do
    not, a gradient went to another one.
    """
    own = PAPERS[paper]
    config, rng, _, _, model, state = both_sides(paper, name, lanes, seed)
    segments = []
    for number in range(joins * parts):
        tokens, targets = rng.integers(config.vocabulary, size=(2, lanes, config.segment))
        is_scored = rng.random(tokens.shape) < scored
        starts = rng.random(lanes) < begins * (number > 0)
        task = own.random_task(config, rng, rng.integers(3, size=lanes)) if tasks else None
        segments.append(Segment(tokens, targets, is_scored, starts, task))
    segments = torch_segments(paper, segments)
    several = joined(segments, parts)
    assert len(several) == joins

    rows = [hidden_rows(model, read, state) for read in (segments, several)]
    title = f"{parts} segments at once; is one decoded from what another segment or lane encoded?"
    assert_agree(*rows, ROUNDED, title)
    expected = back_propagated("through_time", model, segments, state)
    found = check_back_propagation(model, several, state)
    assert_agree(expected, found, ROUNDED, f"{parts} segments are decoded at once, by full BPTT")


@over(ONE_OF_EACH)
def test_a_gpu_joins_the_segments_of_an_encoder_decoder_alone(paper, name):
    """The meta device stands for one; on a CPU memory replay would keep more for little."""
    for device in ("cpu", "meta"):
        model = PAPERS[paper].model(variant(paper, name)).to(device)
        is_plain = backprop_of(model, TrainingConfig()) in replay.BACKPROP.values()
        alone = device == "cpu" or name != "encoder-decoder"
        assert is_plain == alone, f"on {device} its segments are {'not ' * is_plain}joined"


def test_the_host_knows_what_begins_in_a_part():
    """A part that asked a GPU would wait for it."""
    _, segments, state = setting("memformer", "encoder-decoder")
    moved = [segment.to(segment.tokens.device) for segment in segments[1:3]]
    [several] = joined(moved, 2)
    assert several.host_starts == any(segment.host_starts for segment in moved)
    for part in decoders.parts_of(several, state):
        assert part.host_starts == several.host_starts


def test_segments_are_joined_to_equally_many():
    """A graph is recorded for one shape: of 6 segments 3 are joined, though 5 have room."""
    *_, segments, _ = setting("memformer", "encoder-decoder")
    assert [len(each.tokens) for each in joined(segments[1:2] * 6, 5)] == [6, 6]
    assert [len(each.tokens) for each in joined(segments, 0)] == [2] * 4, "one has no room"
    four = decoders.joined(segments[1:2] * 8)
    assert len(four) == 4, "memory replay would keep more than a quarter of a rollout"
    with pytest.raises(TypeError, match="NoneType"):
        joined(segments, 2)  # a task would be lost: the first one has none
