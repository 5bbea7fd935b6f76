"""Windows as the paper cuts them; start_here/test_overlap.py has the rest."""

from accelerated.data.windows import Window, cut


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
