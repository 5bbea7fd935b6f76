"""Figures that reports draw with matplotlib, an extra."""

from pathlib import Path
from typing import Any

from accelerated.program.errors import InputError, optional_package
from accelerated.program.files import check_writable, written_whole


def figure_class() -> type:
    """matplotlib's Figure; raises InputError if it is not installed."""
    return optional_package("matplotlib.figure", "plots need", "plot", "matplotlib").Figure


def plain_axes(axes: Any) -> Any:
    """Give axes light horizontal lines and no box; returns them."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.9")
    axes.set_axisbelow(True)
    return axes


def new_figure() -> tuple:
    """An empty Figure and its axes."""
    figure = figure_class()(figsize=(7, 4.2), dpi=150, layout="constrained")
    return figure, plain_axes(figure.add_subplot())


def check_figure(path: str | Path) -> None:
    """Raise InputError unless a figure can be written to path, in the format of its suffix."""
    path, formats = Path(path), figure_class()().canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        known = " ".join("." + name for name in sorted(formats))
        raise InputError(f"cannot draw {path}: give a name that ends in one of {known}")
    if path.is_dir():
        raise InputError(f"cannot draw {path}: it is a folder; give the name of a file")
    check_writable(path, "give another path")


def save_figure(figure: Any, path: str | Path) -> None:
    """Write a figure to path; raises InputError, and leaves no half-written file, if that fails."""
    with written_whole(path, "give another path") as temporary:
        figure.savefig(temporary, format=Path(path).suffix[1:].lower())
