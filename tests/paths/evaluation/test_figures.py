"""Figures that cannot be drawn."""

import sys

import pytest

from accelerated.evaluation.figures import check_figure
from accelerated.program.errors import InputError


def test_figures_that_cannot_be_drawn_are_refused(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="curves need the extra plot: matplotlib")
    check_figure(tmp_path / "figure.svg")
    for path, words in (
        (tmp_path / "figure.doc", "give a name that ends in one of"),
        (tmp_path / "no" / "a.png", "No such file"),
    ):
        with pytest.raises(InputError, match=words):
            check_figure(path)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(InputError, match="plots need the package matplotlib; install the extra"):
        check_figure(tmp_path / "figure.svg")
