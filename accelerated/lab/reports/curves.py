"""eval.py curves: the last and the best losses of runs, finished or not, from their logs alone."""

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

from accelerated.evaluation.figures import new_figure, save_figure
from accelerated.program.errors import InputError
from accelerated.training.folder import METRICS, SETTINGS
from accelerated.training.log import read_metrics


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


def report(runs: list[str], options: argparse.Namespace) -> tuple[dict, list[str]]:
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
