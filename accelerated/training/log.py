"""The measurements of a run (metrics.jsonl, one JSON object per line), curves of them, and figures.

train.py writes the log, eval.py curves draws the logs of several runs; evaluation/ and lab/ draw with the last functions.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from accelerated.program.errors import InputError, optional_package
from accelerated.program.files import check_writable, disk_errors, written_whole
from accelerated.training.folder import METRICS, SETTINGS

ADVICE = "make it writable, then --resume"


def read_metrics(run: str | Path) -> list[dict]:
    """The records of a run's metrics.jsonl, [] if there is no such file; skips a line that a crash cut off."""
    records = []
    path = Path(run) / METRICS
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records


def is_finished(run: str | Path, step: int) -> bool:
    """Whether a run's log has the last report, made after this step."""
    return any(record.get("final") and record["step"] == step for record in read_metrics(run))


def title_of(settings: Any) -> str:
    """The main Settings of a run in one line, for its curves."""
    training, config = settings.training, settings.model_config
    read = f"{training.batch} lanes x {training.horizon} x {config.segment} tokens"
    rate = f"{training.optimizer} at {training.learning_rate:g}"
    return f"{settings.model}, width {config.width}, on {Path(settings.data.data).name}; {read}; {rate}"


class Log:
    """Writes a run's metrics.jsonl; if the run resumes at `step`, drops the lines of later steps first.

    add() sums losses and record() writes their means. Only the first of several processes is `writing`; the others only sum.
    """

    def __init__(self, run: Path, step: int = 0, pending: tuple = (0.0, 0, 0), writing: bool = True):
        self.path, self.writing = run / METRICS, writing
        self.pending = tuple(pending)  # summed -log p, scored tokens, their bytes, since the last record
        if writing:
            kept = [record for record in read_metrics(run) if record["step"] <= step]
            with written_whole(self.path, ADVICE) as temporary:
                temporary.write_text("".join(json.dumps(record) + "\n" for record in kept))

    def add(self, nats: float, scored: int, text_bytes: int) -> None:
        """Add one iteration's summed -log p, its number of scored tokens, and the bytes of text that these stand for."""
        self.pending = tuple(a + b for a, b in zip(self.pending, (nats, scored, text_bytes), strict=True))

    def record(self, step: int, **others: float) -> None:
        """Write the means over what was added since the last record, with other numbers of the last iteration alone."""
        nats, scored, text_bytes = self.pending
        self.write(step=step, loss=nats / max(1, scored), bits_per_byte=nats / math.log(2) / max(1, text_bytes), **others)
        self.pending = (0.0, 0, 0)

    def write(self, **record: float) -> None:
        """Write one line."""
        if self.writing:
            with disk_errors(self.path, ADVICE), open(self.path, "a") as file:
                file.write(json.dumps(record) + "\n")

    def validation(self, step: int, carried: Any, cleared: Any = None, **others: bool) -> None:
        """Write a validation's Score, and the one with the memory cleared at every segment if that was measured."""
        record = {"validation_bits_per_byte": carried.bits_per_byte, "validation_loss": carried.nats / carried.tokens}
        record |= {"validation_accuracy": carried.accuracy, "validation_tokens": carried.tokens}
        if cleared:
            record |= {"cleared_bits_per_byte": cleared.bits_per_byte, "cleared_accuracy": cleared.accuracy}
        self.write(step=step, **record, **others)


def draw_curves(records: list[dict], path: Path, title: str) -> None:
    """Write a PNG of training and validation loss, learning rate and gradient norm against steps, named after the run."""
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
    plain_axes(upper).set(ylabel="loss (bits per byte)")
    upper.set_title(f"{path.parent.name}\n{title}", fontsize=10)
    plain_axes(lower).set(ylabel="learning rate", xlabel="step")
    norms.spines["top"].set_visible(False)
    save_figure(figure, path)


class Curves(NamedTuple):
    """The losses of one run in bits per byte."""

    run: str
    training: dict[int, float]  # {step: mean since the previous line}
    validation: dict[int, float]
    tokens: int  # read in a step, padding and overlaps included


def read_curves(run: str) -> Curves:
    """The Curves of a run, from its log and config.json alone; it may still be training. Raises InputError if it has none."""
    try:
        losses = [
            {record["step"]: record[name] for record in read_metrics(run) if name in record}
            for name in ("bits_per_byte", "validation_bits_per_byte")
        ]
        settings = json.loads((Path(run) / SETTINGS).read_text())
        training = settings["training_config"]
        tokens = training["batch"] * training["horizon"] * settings["model_config"]["segment"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{run} has no log of train.py that can be read ({error!r}); give a folder that it wrote") from None
    if not losses[0]:
        raise InputError(f"{run} has no line of training in its {METRICS} yet; wait for it, or leave it out")
    return Curves(run, *losses, tokens)


def summary(curves: Curves) -> dict:
    """A run's last losses and its best validation; None if it has not been validated."""
    run, training, validation, tokens = curves
    step, last, best = max(training), max(validation, default=None), min(validation, key=validation.get, default=None)
    losses = {"bits_per_byte": training[step], "validation_bits_per_byte": validation.get(last)}
    losses |= {"best_validation_bits_per_byte": validation.get(best), "best_step": best}
    return {"run": run, "step": step, "tokens_per_step": tokens} | losses


def report_curves(runs: list[str], options: argparse.Namespace) -> tuple[dict, list[str]]:
    """eval.py curves: the last and the best losses of each run, drawn as curves too."""
    curves = [read_curves(run) for run in runs]
    if options.plot:
        draw_several(curves, options.plot, tokens=options.against == "tokens")
    rows = [summary(each) for each in curves]
    lines = ["losses in bits per byte", f"{'step':>10}{'training':>12}{'validation':>12}{'its best':>12}{'at step':>10}   run"]
    for row in rows:
        run, step, _, *losses, best_step = row.values()
        cells = "".join(f"{'-' if loss is None else format(loss, '.4f'):>12}" for loss in losses)
        lines.append(f"{step:10,d}{cells}{'-' if best_step is None else format(best_step, ',d'):>10}   {run}")
    return {"runs": rows}, lines


def draw_several(curves: list[Curves], path: str, tokens: bool = False) -> None:
    """Draw the curves of runs, one colour each, against steps or the tokens read: a line for training, dots for validation."""
    figure, axes = new_figure()
    names = [Path(each.run).name for each in curves]
    for number, (each, name) in enumerate(zip(curves, names, strict=True)):
        scale, colour = each.tokens if tokens else 1, colour_of(number, len(curves))
        label = name if names.count(name) == 1 else each.run
        places, marked = ([scale * step for step in part] for part in (each.training, each.validation))
        axes.plot(places, [*each.training.values()], linewidth=0.8, alpha=0.7, color=colour, label=label)
        axes.plot(marked, [*each.validation.values()], linestyle=":", linewidth=1, marker="o", markersize=4, color=colour)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.xaxis.set_major_formatter(lambda place, _: f"{place:,.0f}")
    axes.set(xlabel="tokens read" if tokens else "step", ylabel="loss (bits per byte)")
    axes.set_title("Training (lines) and validation (dots)", fontsize=10)
    axes.legend(frameon=False)
    save_figure(figure, path)


def colour_of(number: int, count: int) -> Any:
    """The colour of one of so many curves."""
    from matplotlib import colormaps

    return colormaps["tab10"](number) if count <= 10 else colormaps["turbo"](number / (count - 1))


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
