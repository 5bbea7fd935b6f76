"""What a run was measured at as it went, a JSON object a line, and curves of it."""

import contextlib
import json
import math
import os
import sys
import time
from pathlib import Path

from accelerated.errors import InputError, disk_errors

REDRAW = 30.0  # seconds


def metrics_path(run):
    return Path(run) / "metrics.jsonl"


def curves_path(run):
    return Path(run) / "curves.png"


def read_metrics(run):
    """The records of a run's metrics.jsonl, [] where there is none; a line cut off by a crash is left out."""
    records = []
    path = metrics_path(run)
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records


class Metrics:
    """Writes a run's metrics.jsonl; what a run that goes on from `step` had written after it is dropped.

    Losses are added up until `record`, which writes their means.
    """

    def __init__(self, run, step=0, plot=False, pending=(0.0, 0, 0)):
        self.run, self.plot, self.drawn = run, plot, time.monotonic()
        kept = [record for record in read_metrics(run) if record["step"] <= step]
        self.pending = tuple(pending)  # summed -log p, scored tokens, their bytes, since the last record
        with disk_errors(metrics_path(run), "free some space, then --resume"):
            temporary = metrics_path(run).with_suffix(".writing")
            temporary.write_text("".join(json.dumps(record) + "\n" for record in kept))
            os.replace(temporary, metrics_path(run))

    def add(self, nats, scored, text_bytes):
        """An iteration's summed -log p of so many scored tokens, which spell so many bytes."""
        self.pending = tuple(a + b for a, b in zip(self.pending, (nats, scored, text_bytes), strict=True))

    def record(self, step, **others):
        """Write the means of what was added since the last record, with other numbers of this moment."""
        nats, scored, text_bytes = self.pending
        self.write(step=step, loss=nats / max(1, scored), bits_per_byte=nats / math.log(2) / max(1, text_bytes), **others)
        self.pending = (0.0, 0, 0)

    def write(self, **record):
        with disk_errors(metrics_path(self.run), "free some space, then --resume"), open(metrics_path(self.run), "a") as file:
            file.write(json.dumps(record) + "\n")
        if self.plot and time.monotonic() - self.drawn > REDRAW:
            self.draw()

    def close(self):
        """Draw the curves to their end."""
        if self.plot:
            self.draw()

    def draw(self):
        """Refresh the run's curves.png; a run goes on without it."""
        self.drawn = time.monotonic()
        try:
            draw_curves(read_metrics(self.run), curves_path(self.run))
        except InputError as error:
            print(f"warning: {error}", file=sys.stderr)


def draw_curves(records, path):
    """A PNG of training and validation loss, learning rate and gradient norm against steps."""
    figure = figure_class()(figsize=(8, 6), dpi=120, layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    training = [record for record in records if "loss" in record]
    validation = [record for record in records if "validation_bits_per_byte" in record]
    steps = [record["step"] for record in training]
    upper.plot(steps, [record["bits_per_byte"] for record in training], linewidth=1, label="training")
    if validation:
        bits = [record["validation_bits_per_byte"] for record in validation]
        upper.plot([record["step"] for record in validation], bits, marker="o", markersize=4, label="validation")
    upper.legend(frameon=False)
    lower.plot(steps, [record["learning_rate"] for record in training], linewidth=1)
    norms = lower.twinx()
    norms.plot(steps, [record["gradient_norm"] for record in training], linewidth=0.7, color="tab:gray")
    norms.set(yscale="log", ylabel="gradient norm (grey)")
    plain_axes(upper).set(ylabel="loss (bits per byte)", title=path.parent.name)
    plain_axes(lower).set(ylabel="learning rate", xlabel="step")
    norms.spines["top"].set_visible(False)
    save_figure(figure, path)


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
