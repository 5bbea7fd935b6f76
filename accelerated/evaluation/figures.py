"""Figures that reports draw with matplotlib, an extra."""

from pathlib import Path
from typing import Any

from accelerated.program.errors import InputError, optional_package
from accelerated.program.files import check_writable, written_whole

FIGURE_WIDTH = 5.6  # inches of a figure, 403 points: on a phone its letters keep their size


def figure_class() -> Any:
    """matplotlib's Figure; raises InputError if it is not installed."""
    return optional_package("matplotlib.figure", "plots need", "plot").Figure


def empty_figure(height: float) -> Any:
    """A Figure, as wide as a phone, of this height in inches."""
    return figure_class()(figsize=(FIGURE_WIDTH, height), dpi=150, layout="constrained")


def new_figure(panels: int = 1) -> tuple[Any, list[Any]]:
    """A Figure, as wide as a phone, and the axes of its panels, one below the other.

    They have light horizontal lines and no box.
    """
    figure = empty_figure(3.6 * panels)
    [*column] = figure.subplots(panels, squeeze=False)[:, 0]
    for axes in column:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="0.9")
        axes.set_axisbelow(True)
    return figure, column


def check_figure(name: str | Path) -> None:
    """Raise InputError unless a figure can be written to a file, in the format of its suffix."""
    path = Path(name)
    formats = figure_class()().canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        known = " ".join("." + name for name in sorted(formats))
        raise InputError(f"cannot draw {path}: give a name that ends in one of {known}")
    check_writable(path, "give another path")


def save_figure(figure: Any, path: str | Path) -> None:
    """Write a figure to path; the same figure gives the same SVG.

    Raises InputError, and leaves no half-written file, if that fails.
    """
    kind = Path(path).suffix[1:].lower()
    same_each_time = {"Date": None} if kind == "svg" else None
    matplotlib = optional_package("matplotlib", "plots need", "plot")
    salted = matplotlib.rc_context({"svg.hashsalt": "palimpsest"})
    with salted, written_whole(path, "give another path") as temporary:
        figure.savefig(temporary, format=kind, metadata=same_each_time)
