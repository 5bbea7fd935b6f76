"""The log of a run: means weighted by tokens, and the curves."""

import math
import sys

import pytest

from accelerated.program.errors import InputError
from accelerated.training import log
from accelerated.training.log import Log, check_figure, read_metrics


def test_means_are_weighted_by_tokens(tmp_path):
    record = Log(tmp_path)
    record.add(10.0, 5, 20)
    record.add(2.0, 1, 4)
    record.record(2, learning_rate=0.1)
    record.add(3.0, 1, 1)
    record.record(3)
    first, second = read_metrics(tmp_path)
    assert first == {"step": 2, "loss": 2.0, "bits_per_byte": pytest.approx(0.5 / math.log(2)), "learning_rate": 0.1}
    assert second["loss"] == 3.0, "each record begins anew"


def test_a_resumed_run_drops_the_lines_after_its_checkpoint(tmp_path):
    """It also drops a line that a crash cut off, and keeps the sums that were not yet written."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 6, "loss": 2.0}\n{"step": 7, "loss": 1.0}\n{"step": 8, "lo')
    record = Log(tmp_path, step=6, pending=(10.0, 5, 20))
    record.add(2.0, 1, 4)
    record.record(7)
    assert [(line["step"], line["loss"]) for line in read_metrics(tmp_path)] == [(6, 2.0), (7, 2.0)]


def test_only_the_first_process_writes(tmp_path):
    record = Log(tmp_path, writing=False)
    record.add(10.0, 5, 20)
    assert record.pending == (10.0, 5, 20)
    record.record(1)
    assert not list(tmp_path.iterdir()) and record.pending == (0.0, 0, 0)


@pytest.mark.parametrize("tokens", [False, True])
def test_each_run_has_its_colour_in_a_plot_of_several(tmp_path, monkeypatch, tokens):
    """A line for training and dots for validation, against steps or tokens; runs of one name are named by their paths."""
    pytest.importorskip("matplotlib", reason="curves need the extra plot: matplotlib")
    drawn, runs = [], [f"a/{number}" for number in range(10)] + ["b/3", "c/new"]
    monkeypatch.setattr(log, "save_figure", lambda figure, path: drawn.append(figure.axes[0]))
    for some in (runs[:2], runs):
        curves = [log.Curves(run, {4: 8.0, 8: 7.0 + n}, {8: 6.0 + n}, 100 + n) for n, run in enumerate(some)]
        log.draw_several(curves, tmp_path / "curves.png", tokens=tokens)
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


def test_figures_that_cannot_be_drawn_are_refused(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="curves need the extra plot: matplotlib")
    check_figure(tmp_path / "figure.svg")
    for path, words in ((tmp_path / "figure.doc", "give a name that ends in one of"), (tmp_path / "no" / "a.png", "no folder")):
        with pytest.raises(InputError, match=words):
            check_figure(path)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(InputError, match="plots need the package matplotlib; install the extra"):
        check_figure(tmp_path / "figure.svg")
