"""The training tasks: what is masked, and which lane predicts what."""

import collections
import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelerated.data.config import TASKS
from accelerated.data.lanes import Lanes
from accelerated.data.tasks import SPAN, MultiTask, TaskConfig, mask_spans, span_lengths
from reference.memformer import Config
from tests.helpers.texts import documents_of

SPECIAL = Config().special
MASK = SPECIAL("mask")
BEGIN = SPECIAL("begin")
ALL = TaskConfig(infilling=0.4, recall=0.3)
LENGTHS = [70, 33, 120]  # of documents


spans = {
    "n": st.integers(1, 60),
    "masked": st.floats(0.01, 0.99),
    "span": st.floats(0.2, 9),
    "seed": st.integers(0, 999),
}


@given(**spans)
def test_spans_mask_the_budget_and_nothing_else(n, masked, span, seed):
    """There is a mask for every span, the rest is in order, and no text grows."""
    budget = round(masked * n)
    text = 1000 + np.arange(n)  # each token shows its position
    lengths = span_lengths(budget, span, np.random.default_rng(seed))
    out, gone = mask_spans(text, MASK, np.random.default_rng(seed), masked, span)
    is_mask = out == MASK
    assert sum(lengths) == budget, "spans mask more or less than their share"
    assert min(lengths, default=0) >= 0, "a span has a negative length"
    assert 1 <= len(out) <= n, "it never grows, and is never empty"
    assert is_mask.sum() == len(lengths), "a mask for every span"
    assert text[~gone].tolist() == out[~is_mask].tolist(), "what is left is another text"

    edges = [-1, *np.flatnonzero(~is_mask), len(out)]  # what is left, with an end before and after
    missing = np.diff([-1, *np.flatnonzero(~gone), n]) - 1  # between two tokens that are left
    masks = np.diff(edges) - 1
    assert not missing[masks == 0].any(), "tokens are missing only at masks"
    if masks.max() <= 1:  # no two masks side by side
        assert sorted(missing[masks == 1]) == sorted(lengths), "other lengths are masked"


def test_span_lengths_are_poisson():
    """Mean, variance and fraction of empty spans; of so many the last counts little."""
    lengths = np.array(span_lengths(40_000, SPAN, np.random.default_rng(0)))
    assert np.mean(lengths) == pytest.approx(3.5, rel=0.02), "the mean length of a span"
    assert np.var(lengths) == pytest.approx(3.5, rel=0.05), "the variance of a length"
    assert np.mean(lengths == 0) == pytest.approx(np.exp(-3.5), rel=0.15), "empty spans"


def dealt(config, lengths, count, horizon=3, lanes=3, seed=5):
    """Return a MultiTask over documents of these lengths, and `count` of its rollouts."""
    dealer = Lanes(documents_of(lengths), lanes, 8, seed)
    work = MultiTask(dealer, config, SPECIAL, seed)
    return work, [work.rollout(horizon) for _ in range(count)]


@given(seed=st.integers(0, 99), horizon=st.integers(1, 4))
def test_tasks_ask_for_what_the_lane_has_read(seed, horizon):
    """By each lane's history.

    Continuation asks for the segment, infilling for the previous one, recall for the one before it.
    """
    lengths = [70, 33, 9, 120]
    config = TaskConfig(infilling=0.4, recall=0.4)
    _, rollouts = dealt(config, lengths, 6, horizon, seed=seed)
    plain = Lanes(documents_of(lengths), 3, 8, seed)
    history = [[], [], []]  # the segments that each lane has read of its document
    for rollout in rollouts:
        drawn = [set(), set(), set()]  # the tasks of each lane
        for segment in rollout:
            expected = next(plain)
            assert torch.equal(segment.tokens, expected.tokens), "a task changes what is read"
            assert torch.equal(segment.starts, expected.starts), "a task moves a start"
            for lane in range(3):
                if segment.starts[lane]:
                    history[lane] = []
                check_task(segment, expected, lane, history[lane])
                history[lane].append(segment.tokens[lane].tolist())
                kind = int(segment.task.kind[lane])
                drawn[lane] |= {kind} - {0}
        assert all(len(kinds) <= 1 for kinds in drawn), "one task per rollout and lane"


def check_task(segment, expected, lane, history):
    """Assert that a lane is asked for what it has read; `expected` is the segment without tasks."""
    kind = int(segment.task.kind[lane])
    targets = segment.targets[lane].tolist()
    prompt = segment.task.prompt[lane].tolist()
    readable = segment.task.readable[lane]
    reading = segment.task.reading[lane][readable].tolist()
    previous = history[-1] if history else [BEGIN] * 8
    if kind == TASKS.index("continuation"):
        assert targets == expected.targets[lane].tolist(), "continuation asks for the text"
        assert torch.equal(segment.scored[lane], expected.scored[lane]), "what is scored"
        assert prompt == segment.tokens[lane].tolist(), "its prompt is the segment"
    else:
        assert len(history) >= kind, "infilling needs one previous segment, recall two"
        assert targets == prompt == history[-kind], "it asks for another segment"
        assert segment.scored[lane].all(), "all of a task is scored"
    if kind == TASKS.index("infilling"):
        rest = [token for token in reading if token != MASK]
        assert MASK in reading, "nothing is masked"
        assert len(reading) <= 8, "a masked text grows"
        assert len(rest) == 6, "8 less round(0.3 * 8) that are masked"
        assert set(rest) <= set(previous), "what is read is of another segment"
    else:
        assert reading == previous, "the encoder reads the segment before"
        assert readable.all(), "the encoder reads padding"


def test_infilling_may_predict_the_masked_tokens_alone():
    """Section 2.3: "The model needs to predict these masked tokens". By default it predicts all."""
    config = TaskConfig(infilling=0.5, recall=0.3, masked_only=True)
    _, rollouts = dealt(config, LENGTHS, 8)
    _, of_all = dealt(dataclasses.replace(config, masked_only=False), LENGTHS, 8)
    infilled = 0
    for rollout, whole_rollout in zip(rollouts, of_all, strict=True):
        for segment, whole in zip(rollout, whole_rollout, strict=True):
            assert all(map(torch.equal, segment.task, whole.task)), "only what is scored changes"
            is_infilling = segment.task.kind == TASKS.index("infilling")
            infilled += int(is_infilling.sum())
            assert torch.equal(segment.scored[~is_infilling], whole.scored[~is_infilling]), (
                "another task's scored tokens change"
            )
            for lane in is_infilling.nonzero()[:, 0]:
                seen = segment.task.reading[lane][segment.task.readable[lane]]
                scored = segment.scored[lane]
                assert segment.targets[lane][~scored].tolist() == seen[seen != MASK].tolist(), (
                    "what is not scored is what was read"
                )
                assert scored.sum() == 2, "round(0.3 * 8)"
    assert infilled > 3


def test_each_lane_and_segment_has_spans_of_its_own():
    """If all masked the same places, a model would learn where masks are."""
    config = TaskConfig(infilling=1.0, masked_only=True)
    _, rollouts = dealt(config, [5000] * 4, 9, horizon=2, lanes=4)
    for rollout in rollouts[1:]:
        masked = [tuple(row) for segment in rollout for row in segment.scored.tolist()]
        assert len({*masked}) > 2, f"8 texts of a rollout are masked at {sorted({*masked})}"


def test_shares_are_as_configured():
    """The documents are long, so that every task is possible after two segments."""
    assert TaskConfig(infilling=0.3, recall=0.7).fractions[0] == 0, "and not a little less"
    _, rollouts = dealt(ALL, [5000] * 4, 600, horizon=1, lanes=4)
    kinds = [segment.task.kind.tolist() for [segment] in rollouts[3:]]
    alike = sum(len(set(of_lanes)) == 1 for of_lanes in kinds) / len(kinds)
    by_chance = 0.3**4 + 0.4**4 + 0.3**4
    assert alike == pytest.approx(by_chance, abs=0.03), "each lane draws its own task"
    counts = collections.Counter(itertools.chain.from_iterable(kinds))
    shares = [counts[kind] / counts.total() for kind in range(3)]
    assert shares == pytest.approx([0.3, 0.4, 0.3], abs=0.03), "continuation, infilling, recall"


@pytest.mark.parametrize("kind", [1, 2])
def test_a_task_begins_as_soon_as_the_document_is_long_enough(kind):
    _, rollouts = dealt(TaskConfig(**{TASKS[kind]: 1.0}), LENGTHS, 6)
    age = np.zeros(3, int)  # segments that each lane has read of its document
    for segment in itertools.chain.from_iterable(rollouts):
        age = np.where(segment.starts, 0, age + 1)
        expected = [kind if read >= kind else 0 for read in age]
        assert segment.task.kind.tolist() == expected, "a task begins too early or late"


def test_continuing_from_a_position_gives_the_same_rollouts():
    whole, rollouts = dealt(ALL, LENGTHS, 6)
    stopped, again = dealt(ALL, LENGTHS, 3)
    resumed, _ = dealt(ALL, LENGTHS, 0)
    resumed.load_state_dict(stopped.state_dict())
    again += [resumed.rollout(3) for _ in range(3)]
    chain = itertools.chain.from_iterable
    for expected, segment in zip(chain(rollouts), chain(again), strict=True):
        assert all(map(torch.equal, expected[:4], segment[:4])), "it differs once resumed"
        assert all(map(torch.equal, expected.task, segment.task)), "its task differs once resumed"
    assert whole.state_dict() == resumed.state_dict(), "the places after as many segments"


def test_a_segment_moves_with_its_task():
    _, [[segment]] = dealt(ALL, LENGTHS, 1, horizon=1)
    moved = segment.to(torch.device("meta"))
    for field, value in moved.task._asdict().items():
        assert value.is_meta, f"{field} of the task stays where it was"
