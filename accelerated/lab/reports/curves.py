"""eval.py curves: the last and the best losses of runs, finished or not, from their logs alone."""

import argparse
import json
from pathlib import Path
from typing import NamedTuple

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
        records, names = read_metrics(run), ("bits_per_byte", "validation_bits_per_byte")
        losses = [
            {record["step"]: record[name] for record in records if name in record} for name in names
        ]
        settings = json.loads((Path(run) / SETTINGS).read_text())
        training = settings["training_config"]
        tokens = training["batch"] * training["horizon"] * settings["model_config"]["segment"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{run} has no log of train.py that can be read ({error!r}); give a folder that it wrote"
        ) from None
    if not losses[0]:
        raise InputError(
            f"{run} has no line of training in its {METRICS} yet; wait for it, or leave it out"
        )
    return Curves(run, *losses, tokens)


def report(runs: list[str], options: argparse.Namespace) -> tuple[dict, list[str]]:
    """eval.py curves: the last losses and the best validation of each run, None without a validation; drawn as curves too."""
    curves = [read_curves(run) for run in runs]
    if options.plot:
        draw_several(curves, options.plot, tokens=options.against == "tokens")
    lines = [
        "losses in bits per byte",
        f"{'step':>10}{'training':>12}{'validation':>12}{'its best':>12}{'at step':>10}   run",
    ]
    rows = []
    for run, training, validation, tokens in curves:
        step, last, best = (
            max(training),
            max(validation, default=None),
            min(validation, key=validation.get, default=None),
        )
        row = {"run": run, "step": step, "tokens_per_step": tokens, "bits_per_byte": training[step]}
        row |= {
            "validation_bits_per_byte": validation.get(last),
            "best_validation_bits_per_byte": validation.get(best),
        }
        rows.append(row | {"best_step": best})
        cells = (f"{validation[at]:12.4f}" if validation else f"{'-':>12}" for at in (last, best))
        lines.append(
            f"{step:10,d}{training[step]:12.4f}{''.join(cells)}{f'{best:,d}' if validation else '-':>10}   {run}"
        )
    return {"runs": rows}, lines


def draw_several(curves: list[Curves], path: str, tokens: bool = False) -> None:
    """Draw the curves of runs, one colour each, against steps or the tokens read: a line for training, dots for validation."""
    figure, [axes] = new_figure()
    from matplotlib import colormaps  # here: it is an extra

    shades = (
        colormaps["tab10"].colors
        if len(curves) <= 10
        else map(tuple, colormaps["turbo"].resampled(len(curves)).colors)
    )
    names = [Path(each.run).name for each in curves]
    for each, name, colour in zip(curves, names, shades, strict=False):
        scale = each.tokens if tokens else 1
        label = name if names.count(name) == 1 else each.run
        places, marked = (
            [scale * step for step in part] for part in (each.training, each.validation)
        )
        axes.plot(
            places, [*each.training.values()], linewidth=0.8, alpha=0.7, color=colour, label=label
        )
        axes.plot(
            marked,
            [*each.validation.values()],
            linestyle=":",
            linewidth=1,
            marker="o",
            markersize=4,
            color=colour,
        )
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.xaxis.set_major_formatter(lambda place, _: f"{place:,.0f}")
    axes.set(xlabel="tokens read" if tokens else "step", ylabel="loss (bits per byte)")
    axes.set_title("Training (lines) and validation (dots)", fontsize=10)
    axes.legend(frameon=False)
    save_figure(figure, path)
