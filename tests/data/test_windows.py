"""Windows: every token after the first is scored exactly once, in order, however they are cut."""

from hypothesis import given
from hypothesis import strategies as st

from accelerated.data.windows import Window, count_windows, cut


@st.composite
def sizes(draw):
    """Return (tokens of a document, tokens of a window, overlap)."""
    window = draw(st.integers(1, 12))
    return draw(st.integers(0, 60)), window, draw(st.integers(0, window - 1))


@given(sizes())
def test_every_token_after_the_first_is_scored_once_in_order(size):
    length, window, overlap = size
    windows = cut(length, window, overlap)
    scored = []
    for w in windows:
        scored += range(w.first, w.stop + 1)
    assert scored == list(range(1, length))
    assert len(windows) == count_windows(length, window, overlap)


@given(sizes())
def test_every_prediction_has_at_least_the_overlap_and_at_most_the_window_before_it(size):
    """Windows stand T - o tokens apart, and all except the last are whole."""
    length, window, overlap = size
    windows = cut(length, window, overlap)
    for index, w in enumerate(windows):
        tokens = w.stop - w.start
        assert w.start == index * (window - overlap)
        assert w.stop <= length - 1
        assert 1 <= tokens <= window
        assert tokens == window or w == windows[-1]
        context = w.first - w.start  # of the first prediction that counts
        assert context == (overlap + 1 if index else 1)


def test_the_papers_example():
    """T = 10, o = 3: inputs 1:10, 8:17, 15:24; targets 2:11, 12:18, 19:25 (counted from 1)."""
    assert cut(25, 10, 3) == [Window(0, 10, 1), Window(7, 17, 11), Window(14, 24, 18)]


FIGURE_3 = {  # {(tokens, overlap): first and last token of a window, and the first that is scored}
    (8, 1): [(1, 3, 2), (3, 5, 5), (5, 7, 7)],
    (7, 2): [(1, 3, 2), (2, 4, 5), (3, 5, 6), (4, 6, 7)],  # token by token
    (7, 0): [(1, 3, 2), (4, 6, 5)],  # disjoint
}


def test_figure_3():
    """T = 3; counted from 1."""
    for (tokens, overlap), expected in FIGURE_3.items():
        windows = cut(tokens, 3, overlap)
        assert [(each.start + 1, each.stop, each.first + 1) for each in windows] == expected
