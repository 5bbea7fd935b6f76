"""Figures by matplotlib, an optional extra."""

import contextlib
import os
from pathlib import Path

from accelerated.errors import InputError, disk_errors


def figure_class():
    """matplotlib's Figure; InputError where it is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("plots need the package matplotlib; install the extra: pip install -e '.[plot]'") from None
    return Figure


def plain_axes(axes):
    """Axes with light lines at their values and no box."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.9")
    axes.set_axisbelow(True)
    return axes


def new_figure():
    """An empty Figure and its axes."""
    figure = figure_class()(figsize=(7, 4.2), dpi=150, layout="constrained")
    return figure, plain_axes(figure.add_subplot())


def check_figure(path):
    """Raise InputError unless a figure can be written to path, in the format that its suffix names."""
    path, formats = Path(path), figure_class()().canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        known = " ".join("." + name for name in sorted(formats))
        raise InputError(f"cannot draw {path}: give a name that ends in one of {known}")
    if not path.parent.is_dir():
        raise InputError(f"cannot draw {path}: there is no folder {path.parent}")


def save_figure(figure, path):
    """Write a figure beside path, then rename; raises InputError where that fails."""
    check_figure(path)
    path = Path(path)
    temporary = path.with_name(path.name + ".writing")
    try:
        with disk_errors(path, "free some space, or give another place"):
            figure.savefig(temporary, format=path.suffix[1:].lower())
            os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
