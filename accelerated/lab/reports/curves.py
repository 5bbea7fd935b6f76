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
    """The Curves of a run, from its log and config.json alone; it may still be training.

    Raises InputError if it has none.
    """
    try:
        records = read_metrics(run)
        training = losses_of(records, "bits_per_byte")
        validation = losses_of(records, "validation_bits_per_byte")
        settings = json.loads((Path(run) / SETTINGS).read_text())
        config = settings["training_config"]
        tokens = config["batch"] * config["horizon"] * settings["model_config"]["segment"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"{run} has no log of train.py that can be read ({error!r})"
        raise InputError(f"{what}; give a folder that it wrote") from None
    if not training:
        what = f"{run} has no line of training in its {METRICS} yet"
        raise InputError(f"{what}; wait for it, or leave it out")
    return Curves(run, training, validation, tokens)


def losses_of(records: list[dict], name: str) -> dict[int, float]:
    """{step: the loss of this name} of the records that have one."""
    return {record["step"]: record[name] for record in records if name in record}


def row_of(curves: Curves) -> dict:
    """The last losses and the best validation of a run; None without a validation."""
    step = max(curves.training)
    last = max(curves.validation, default=None)
    best = min(curves.validation, key=curves.validation.get, default=None)
    return {
        "run": curves.run,
        "step": step,
        "tokens_per_step": curves.tokens,
        "bits_per_byte": curves.training[step],
        "validation_bits_per_byte": curves.validation.get(last),
        "best_validation_bits_per_byte": curves.validation.get(best),
        "best_step": best,
    }


def line_of(row: dict) -> str:
    """The line of a row_of."""
    cells = [f"{row['step']:10,d}", f"{row['bits_per_byte']:12.4f}"]
    if row["best_step"] is None:
        cells += [f"{'-':>12}", f"{'-':>12}", f"{'-':>10}"]
    else:
        cells.append(f"{row['validation_bits_per_byte']:12.4f}")
        cells.append(f"{row['best_validation_bits_per_byte']:12.4f}")
        cells.append(f"{row['best_step']:10,d}")
    return f"{''.join(cells)}   {row['run']}"


def report(runs: list[str], options: argparse.Namespace) -> tuple[dict, list[str]]:
    """eval.py curves: the losses of each run, which --plot draws too."""
    curves = [read_curves(run) for run in runs]
    if options.plot:
        draw_several(curves, options.plot, tokens=options.against == "tokens")
    rows = [row_of(each) for each in curves]
    head = f"{'step':>10}{'training':>12}{'validation':>12}{'its best':>12}{'at step':>10}   run"
    return {"runs": rows}, ["losses in bits per byte", head, *map(line_of, rows)]


def draw_several(curves: list[Curves], path: str, tokens: bool = False) -> None:
    """Draw the curves of runs, one colour each, against steps or the tokens read.

    A line is for training, dots for validation.
    """
    figure, [axes] = new_figure()
    names = [Path(each.run).name for each in curves]
    for number, each in enumerate(curves):
        colour = f"C{number}"
        scale = each.tokens if tokens else 1
        name = names[number]
        label = name if names.count(name) == 1 else each.run
        steps = [scale * step for step in each.training]
        losses = list(each.training.values())
        axes.plot(steps, losses, linewidth=0.8, alpha=0.7, color=colour, label=label)
        steps = [scale * step for step in each.validation]
        losses = list(each.validation.values())
        axes.plot(steps, losses, "o:", linewidth=1, markersize=4, color=colour)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.xaxis.set_major_formatter(lambda place, _: f"{place:,.0f}")
    axes.set(xlabel="tokens read" if tokens else "step", ylabel="loss (bits per byte)")
    axes.set_title("Training (lines) and validation (dots)", fontsize=10)
    axes.legend(frameon=False)
    save_figure(figure, path)
