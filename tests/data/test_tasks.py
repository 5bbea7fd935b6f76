"""The training tasks: what is masked, and which lane predicts what."""

import collections
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelerated.data import tasks as tasks
from accelerated.data.lanes import Lanes
from accelerated.data.tasks import MultiTask, TaskConfig, mask_spans, span_lengths
from reference import memformer as ref
from tests.helpers.texts import documents_of

SPECIAL = ref.Config().special
MASK, BEGIN = SPECIAL("mask"), SPECIAL("begin")
ALL = TaskConfig(infilling=0.4, recall=0.3)


@given(
    n=st.integers(1, 40),
    masked=st.floats(0.01, 0.99),
    span=st.floats(0.2, 9),
    seed=st.integers(0, 999),
)
def test_masked_texts_equal_the_references(n, masked, span, seed):
    text = np.random.default_rng(seed).integers(256, size=n)
    ours = mask_spans(text, MASK, np.random.default_rng(seed), masked, span)
    assert (
        ours.tolist()
        == ref.mask_spans(text, MASK, masked, span, np.random.default_rng(seed)).tolist()
    )


@given(
    n=st.integers(1, 60),
    masked=st.floats(0.01, 0.99),
    span=st.floats(0.2, 9),
    seed=st.integers(0, 999),
)
def test_spans_mask_the_budget_and_nothing_else(n, masked, span, seed):
    """There is a mask for every span, the rest is in order, and no text grows."""
    budget = round(masked * n)
    text = 1000 + np.arange(n)  # each token shows its position
    lengths = span_lengths(budget, span, np.random.default_rng(seed))
    out = mask_spans(text, MASK, np.random.default_rng(seed), masked, span).tolist()
    assert sum(lengths) == budget and min(lengths, default=0) >= 0
    assert 1 <= len(out) == n - budget + len(lengths) <= n and out.count(MASK) == len(lengths), (
        "never empty"
    )
    gaps, at, masks = [], 0, 0  # tokens missing at each run of masks
    for item in [*out, 1000 + n]:
        if item == MASK:
            masks += 1
            continue
        missing = item - 1000 - at
        assert missing >= 0 and (masks or not missing), "tokens are missing only at masks"
        gaps += [missing] if masks else []
        at, masks = item - 999, 0
    assert sum(gaps) == sum(lengths)
    if len(gaps) == len(lengths):  # no two masks side by side
        assert sorted(gaps) == sorted(lengths)


def test_span_lengths_are_poisson():
    """Mean, variance and fraction of empty spans; the budget is so large that cutting the last does not matter."""
    lengths = span_lengths(40_000, 3.5, np.random.default_rng(0))
    assert np.mean(lengths) == pytest.approx(3.5, rel=0.02) and np.var(lengths) == pytest.approx(
        3.5, rel=0.05
    )
    assert np.mean(np.array(lengths) == 0) == pytest.approx(np.exp(-3.5), rel=0.15)


def dealt(config, lengths, count, horizon=3, lanes=3, seed=5, length=8):
    """Return a MultiTask over documents of these lengths, and `count` of its rollouts."""
    work = MultiTask(Lanes(documents_of(lengths), lanes, length, seed), config, SPECIAL, seed)
    return work, [work.rollout(horizon) for _ in range(count)]


@given(seed=st.integers(0, 99), horizon=st.integers(1, 4))
def test_tasks_ask_for_what_the_lane_has_read(seed, horizon):
    """By each lane's history: continuation asks for the segment, infilling for the previous one, recall for the one before it."""
    config = TaskConfig(infilling=0.4, recall=0.4)
    _, rollouts = dealt(config, [70, 33, 9, 120], 6, horizon, seed=seed)
    plain, history = Lanes(documents_of([70, 33, 9, 120]), 3, 8, seed), [[], [], []]
    for rollout in rollouts:
        drawn = [set() for _ in range(3)]
        for segment in rollout:
            expected = next(plain)
            assert torch.equal(segment.tokens, expected.tokens) and torch.equal(
                segment.starts, expected.starts
            )
            for lane in range(3):
                if segment.starts[lane]:
                    history[lane] = []
                kind, before = int(segment.task.kind[lane]), history[lane]
                previous = before[-1] if before else [BEGIN] * 8
                reading = segment.task.reading[lane][segment.task.readable[lane]].tolist()
                targets, scored = segment.targets[lane].tolist(), segment.scored[lane]
                if kind == 0:
                    assert targets == expected.targets[lane].tolist() and torch.equal(
                        scored, expected.scored[lane]
                    )
                    assert segment.task.prompt[lane].tolist() == segment.tokens[lane].tolist()
                else:
                    asked = before[
                        -kind
                    ]  # exists: recall needs two previous segments, infilling one
                    assert targets == asked == segment.task.prompt[lane].tolist() and scored.all()
                    assert len(before) >= kind
                    drawn[lane].add(kind)
                if kind == 1:
                    assert reading.count(MASK) >= 1 and len(reading) <= 8
                    rest = [t for t in reading if t != MASK]
                    assert len(rest) == 6 and all(
                        t in previous for t in rest
                    )  # 8 less round(0.3 * 8) that are masked
                else:
                    assert reading == previous and segment.task.readable[lane].all()
                history[lane] = [*before, segment.tokens[lane].tolist()]
        assert all(len(kinds) <= 1 for kinds in drawn), "one task per rollout and lane"


def test_shares_are_as_configured():
    """The documents are long, so that every task is possible."""
    _, rollouts = dealt(ALL, [5000] * 4, 600, horizon=1, lanes=4)
    alike = sum(len(set(segment.task.kind.tolist())) == 1 for [segment] in rollouts[3:]) / 597
    assert alike == pytest.approx(0.3**4 + 0.4**4 + 0.3**4, abs=0.03), (
        "each lane draws its own task"
    )
    kinds = collections.Counter(
        int(kind) for [segment] in rollouts[3:] for kind in segment.task.kind
    )
    total = sum(kinds.values())
    assert [kinds[kind] / total for kind in range(3)] == pytest.approx([0.3, 0.4, 0.3], abs=0.03)
    assert (
        ALL.fractions == pytest.approx((0.3, 0.4, 0.3))
        and TaskConfig(infilling=0.3, recall=0.7).fractions[0] == 0
    )


@pytest.mark.parametrize("kind", [1, 2])
def test_a_task_begins_as_soon_as_the_document_is_long_enough(kind):
    _, rollouts = dealt(TaskConfig(**{tasks.TASKS[kind]: 1.0}), [70, 33, 120], 6)
    age = np.zeros(3, int)
    for segment in (segment for rollout in rollouts for segment in rollout):
        age = np.where(segment.starts, 0, age + 1)
        assert segment.task.kind.tolist() == [kind if read >= kind else 0 for read in age]


def test_continuing_from_a_position_gives_the_same_rollouts():
    """Without tasks the segments are the lanes' own; they move with their task."""
    whole, rollouts = dealt(ALL, [70, 33, 120], 6)
    cut, first = dealt(ALL, [70, 33, 120], 3)
    resumed = MultiTask(Lanes(documents_of([70, 33, 120]), 3, 8, 5), ALL, SPECIAL, 5)
    resumed.seek(cut.position())
    again = first + [resumed.rollout(3) for _ in range(3)]
    plain, (_, alone) = (
        Lanes(documents_of([70, 33, 120]), 3, 8, 5),
        dealt(TaskConfig(), [70, 33, 120], 6),
    )
    for x, y, other in zip(
        *map(itertools.chain.from_iterable, (rollouts, again, alone)), strict=True
    ):
        y = y.to(torch.device("cpu"))
        assert all(
            torch.equal(p, q) for p, q in zip((*x[:4], *x.task), (*y[:4], *y.task), strict=True)
        )
        assert other.task is None and all(
            torch.equal(p, q) for p, q in zip(other[:4], next(plain)[:4], strict=True)
        )
    assert whole.position() == resumed.position()
    old = {
        name: value for name, value in cut.position().items() if name not in ("rollouts", "history")
    }
    resumed.seek(old)  # of a checkpoint without tasks
    assert resumed.rollouts == 0


def test_impossible_settings_are_refused():
    for values, words in (
        ({"infilling": -0.1}, "infilling is -0.1"),
        ({"recall": 1.5}, "recall is 1.5"),
        ({"infilling": 0.7, "recall": 0.7}, "add up to more than 1"),
    ):
        with pytest.raises(ValueError, match=words):
            TaskConfig(**values)
