"""Windows: every token after the first is scored exactly once, in order, at any length, window and overlap."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelerated.windows import Window, count_windows, cut


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


@given(sizes())
def test_positions_run(size):
    """(n - 1) + (W - 1) o inputs in all."""
    length, window, overlap = size
    windows = cut(length, window, overlap)
    if windows:
        assert sum(w.stop - w.start for w in windows) == length - 1 + (len(windows) - 1) * overlap


def test_the_papers_example():
    """T = 10, o = 3: inputs 1:10, 8:17, 15:24; targets 2:11, 12:18, 19:25 (counted from 1)."""
    assert cut(25, 10, 3) == [Window(0, 10, 1), Window(7, 17, 11), Window(14, 24, 18)]


def test_extremes():
    assert cut(0, 5) == cut(1, 5) == []
    assert cut(2, 5, 4) == [Window(0, 1, 1)]
    assert cut(6, 5, 4) == [Window(0, 5, 1)]
    assert [w.scored for w in cut(9, 5, 4)] == [5, 1, 1, 1]


@pytest.mark.parametrize("window,overlap", [(0, 0), (4, 4), (4, -1)])
def test_impossible_windows_are_refused(window, overlap):
    with pytest.raises(ValueError, match=r"window|overlap"):
        cut(9, window, overlap)
