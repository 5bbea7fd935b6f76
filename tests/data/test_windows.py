"""Windows: every token after the first is scored exactly once, in order, at any length, window and overlap."""

from hypothesis import given
from hypothesis import strategies as st

from accelerated.data.windows import Window, count_windows, cut


@st.composite
def sizes(draw):
    window = draw(st.integers(1, 12))
    return draw(st.integers(0, 60)), window, draw(st.integers(0, window - 1))


@given(sizes())
def test_every_token_after_the_first_is_scored_once_in_order(size):
    windows = cut(*size)
    assert [target for w in windows for target in range(w.first, w.stop + 1)] == [
        *range(1, size[0])
    ]
    assert len(windows) == count_windows(*size)


@given(sizes())
def test_every_prediction_has_at_least_the_overlap_and_at_most_the_window_before_it(size):
    """Windows stand T - o tokens apart, and all except the last are whole."""
    length, window, overlap = size
    windows = cut(length, window, overlap)
    for index, w in enumerate(windows):
        assert w.start == index * (window - overlap) and w.stop <= length - 1
        assert w.stop - w.start == window or (w == windows[-1] and 1 <= w.stop - w.start <= window)
        assert w.first - w.start == (overlap + 1 if index else 1), (
            "the context of the first prediction that counts"
        )


def test_the_papers_example():
    """T = 10, o = 3: inputs 1:10, 8:17, 15:24; targets 2:11, 12:18, 19:25 (counted from 1)."""
    assert cut(25, 10, 3) == [Window(0, 10, 1), Window(7, 17, 11), Window(14, 24, 18)]


def test_figure_3():
    """T = 3, with overlaps 1, 2 (token by token) and 0 (disjoint)."""
    assert [(w.start + 1, w.stop, w.first + 1) for w in cut(8, 3, 1)] == [
        (1, 3, 2),
        (3, 5, 5),
        (5, 7, 7),
    ]
    assert [(w.start + 1, w.stop) for w in cut(7, 3, 2)] == [(1, 3), (2, 4), (3, 5), (4, 6)]
    assert [(w.start + 1, w.stop) for w in cut(7, 3, 0)] == [(1, 3), (4, 6)]
