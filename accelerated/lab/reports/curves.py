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
        what = f"{run} has no line of training in its {METRICS} yet"
        raise InputError(f"{what}; wait for it, or leave it out")
    return curves


def row_of(run: str, training: dict, validation: dict) -> dict:
    """The last losses and the best validation of a run; None without a validation."""
    step = max(training)
    best = min(validation, key=lambda step: validation[step], default=None)
    return {
        "run": run,
        "step": step,
        "bits_per_byte": training[step],
        "validation_bits_per_byte": validation.get(max(validation, default=None)),
        "best_validation_bits_per_byte": validation.get(best),
        "best_step": best,
    }


def report(runs: list[str], options: argparse.Namespace) -> tuple[dict, list[str]]:
    """eval.py curves: the losses of each run, which --plot draws too."""
    curves = {run: read_curves(run) for run in runs}
    if options.plot:
        draw_several(curves, options.plot)
    rows = [row_of(run, *losses) for run, losses in curves.items()]
    lines = ["the last losses in bits per byte"]
    for row in rows:
        text = f"step {row['step']:,}: training {row['bits_per_byte']:.4f}"
        if row["best_step"]:
            text += f", validation {row['validation_bits_per_byte']:.4f}"
            best = row["best_validation_bits_per_byte"]
            text += f", at best {best:.4f} at step {row['best_step']:,}"
        lines.append(f"{text}   {row['run']}")
    return {"runs": rows}, lines


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
