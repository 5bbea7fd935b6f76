"""Windows: every token after the first is scored exactly once, in order, at any length, window and overlap."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelerated.data.windows import Window, count_windows, cut, overlap_of
from accelerated.training.settings import preset_settings


@st.composite
def sizes(draw):
    window = draw(st.integers(1, 12))
    return draw(st.integers(0, 60)), window, draw(st.integers(0, window - 1))


@given(sizes())
def test_every_token_after_the_first_is_scored_once_in_order(size):
    length, window, overlap = size
    scored = [target for w in cut(length, window, overlap) for target in range(w.first, w.stop + 1)]
    assert scored == list(range(1, length))
    assert sum(w.scored for w in cut(length, window, overlap)) == max(length - 1, 0)


@given(sizes())
def test_windows_stand_on_their_grid(size):
    length, window, overlap = size
    windows = cut(length, window, overlap)
    assert len(windows) == count_windows(length, window, overlap)
    for index, w in enumerate(windows):
        assert w.start == index * (window - overlap)
        assert 1 <= w.stop - w.start <= window and w.stop <= length - 1
        assert w.first - 1 - w.start == (overlap if index else 0), "tokens read before the first prediction that counts"
    assert all(w.stop - w.start == window for w in windows[:-1])


def test_the_papers_example():
    """T = 10, o = 3: inputs 1:10, 8:17, 15:24; targets 2:11, 12:18, 19:25 (counted from 1)."""
    assert cut(25, 10, 3) == [Window(0, 10, 1), Window(7, 17, 11), Window(14, 24, 18)]


def test_figure_3():
    """T = 3, with overlaps 1, 2 (token by token) and 0 (disjoint)."""
    assert [(w.start + 1, w.stop, w.first + 1) for w in cut(8, 3, 1)] == [(1, 3, 2), (3, 5, 5), (5, 7, 7)]
    assert [(w.start + 1, w.stop) for w in cut(7, 3, 2)] == [(1, 3), (2, 4), (3, 5), (4, 6)]
    assert [(w.start + 1, w.stop) for w in cut(7, 3, 0)] == [(1, 3), (4, 6)]


def test_overlap_of_a_config():
    assert overlap_of(preset_settings("memformer", "tiny").model_config) == 0
    config = preset_settings("pretrained_recurrence", "tiny").model_config
    assert overlap_of(config) == 0 and overlap_of(dataclasses.replace(config, overlap=7)) == 7


def test_extremes():
    assert cut(0, 5) == cut(1, 5) == []
    assert cut(2, 5, 4) == [Window(0, 1, 1)]
    assert cut(6, 5, 4) == [Window(0, 5, 1)]
    assert [w.scored for w in cut(9, 5, 4)] == [5, 1, 1, 1]


@pytest.mark.parametrize("window,overlap", [(0, 0), (4, 4), (4, -1)])
def test_impossible_windows_are_refused(window, overlap):
    with pytest.raises(ValueError, match=r"window|overlap"):
        cut(9, window, overlap)


@given(sizes())
def test_every_prediction_has_at_least_the_overlap_and_at_most_the_window_before_it(size):
    """A prediction's context is the tokens of its window up to it: at least o + 1, except in the first window."""
    length, window, overlap = size
    for index, w in enumerate(cut(length, window, overlap)):
        contexts = [target - w.start for target in range(w.first, w.stop + 1)]
        assert contexts[0] == (overlap + 1 if index else 1) and contexts[-1] <= window
        assert contexts == list(range(contexts[0], contexts[0] + w.scored))


def rolling_windows(tokens, window, context):
    """The targets of lm-evaluation-harness's rolling windows, by its rule.

    The first window starts with a prefix token and predicts the first `window` tokens. Every later one predicts the next
    window - context + 1 tokens, or as many as are left, and ends with the last of them.
    """
    targets, at = [tokens[:window]] if tokens else [], window
    while at < len(tokens):
        targets.append(tokens[at : at + window - context + 1])
        at += window - context + 1
    return targets


@given(sizes())
def test_the_targets_are_those_of_rolling_windows_with_one_token_more_context(size):
    """Token 0 is the prefix, context_len = o + 1. (Its last window is moved back, ours is not; the targets are the same.)"""
    length, window, overlap = size
    expected = rolling_windows(list(range(1, length)), window, overlap + 1)
    assert [list(range(w.first, w.stop + 1)) for w in cut(length, window, overlap)] == expected
