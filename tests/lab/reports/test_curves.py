"""The curves of several runs."""

import pytest

from accelerated.lab.reports import curves as report


def test_each_run_has_its_colour_in_a_plot_of_several(tmp_path, monkeypatch):
    """A line for training and dots for validation, against steps or tokens; runs of one name are named by their paths."""
    pytest.importorskip("matplotlib", reason="curves need the extra plot: matplotlib")
    drawn, runs = [], [f"a/{number}" for number in range(10)] + ["b/3", "c/new"]
    monkeypatch.setattr(report, "save_figure", lambda figure, path: drawn.append(figure.axes[0]))
    for some, tokens in ((runs[:2], True), (runs, False)):
        curves = [report.Curves(run, {4: 8.0, 8: 7.0 + n}, {8: 6.0 + n}, 100 + n) for n, run in enumerate(some)]
        report.draw_several(curves, tmp_path / "curves.png", tokens=tokens)
        axes = drawn.pop()
        lines, dots = axes.lines[::2], axes.lines[1::2]
        for n, (line, own) in enumerate(zip(lines, dots, strict=True)):
            scale = 100 + n if tokens else 1
            assert line.get_xydata().tolist() == [[4 * scale, 8], [8 * scale, 7 + n]]
            assert own.get_xydata().tolist() == [[8 * scale, 6 + n]] and own.get_marker() == "o"
            assert line.get_color() == own.get_color()
        assert len({line.get_color() for line in lines}) == len(some)
        assert axes.get_xlabel() == ("tokens read" if tokens else "step")
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["0", "1", "2", "a/3", "4", "5", "6", "7", "8", "9", "b/3", "new"]
