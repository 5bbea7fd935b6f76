"""eval.py curves: the last and the best losses of runs, finished or not, from their logs alone."""

import argparse

from accelerated.evaluation.figures import new_figure, save_figure
from accelerated.program.errors import InputError
from accelerated.training.folder import METRICS, read_metrics

LOSSES = ("bits_per_byte", "validation_bits_per_byte")


def read_curves(run: str) -> list[dict]:
    """[{step: training's mean since the previous line}, {step: validation}] in bits per byte.

    The run may still be training; raises InputError if it has no line.
    """
    records = read_metrics(run)
    curves = [{each["step"]: each[name] for each in records if name in each} for name in LOSSES]
    if not curves[0]:
        raise InputError(
            f"{run} has no line of training in its {METRICS} yet; wait for it, or leave it out"
        )
    return curves


def row_of(run: str, training: dict, validation: dict) -> dict:
    """The last losses and the best validation of a run; None without a validation."""
    last = max(validation, default=None)
    best = min(validation, key=lambda step: validation[step], default=None)
    step = max(training)
    return {
        "run": run,
        "step": step,
        "bits_per_byte": training[step],
        "validation_bits_per_byte": validation.get(last),
        "best_validation_bits_per_byte": validation.get(best),
        "best_step": best,
    }


def line_of(row: dict) -> str:
    """The line of a row_of."""

    def cell(number: float | None, form: str) -> str:
        return "-" if number is None else f"{number:{form}}"

    run, step, training, validation, best, best_step = row.values()
    of_training = f"{step:10,d}{training:12.4f}"
    of_validation = f"{cell(validation, '.4f'):>12}{cell(best, '.4f'):>12}"
    return f"{of_training}{of_validation}{cell(best_step, ',d'):>10}   {run}"


def report(runs: list[str], options: argparse.Namespace) -> tuple[dict, list[str]]:
    """eval.py curves: the losses of each run, which --plot draws too."""
    curves = {run: read_curves(run) for run in runs}
    if options.plot:
        draw_several(curves, options.plot)
    rows = [row_of(run, *losses) for run, losses in curves.items()]
    head = f"{'step':>10}{'training':>12}{'validation':>12}{'its best':>12}{'at step':>10}   run"
    return {"runs": rows}, ["losses in bits per byte", head, *map(line_of, rows)]


def draw_several(curves: dict[str, list[dict]], path: str) -> None:
    """Draw the curves of runs, one colour each: a line for training, dots for validation."""
    figure, [axes] = new_figure()
    for number, (run, (training, validation)) in enumerate(curves.items()):
        colour = f"C{number}"
        axes.plot(list(training), list(training.values()), color=colour, label=run)
        axes.plot(list(validation), list(validation.values()), "o:", color=colour)
    axes.set(xlabel="step", ylabel="loss (bits per byte)")
    axes.set_title("Training (lines) and validation (dots)", fontsize=10)
    axes.legend(frameon=False)
    save_figure(figure, path)
