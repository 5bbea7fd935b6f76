"""An experiment with a command of its own: rows that are trained with several seeds, kept in a record as soon as they are.

Every row is trained with seeds 0, 1 and 2, one at a time. The same command continues after an interruption; only what was being
trained begins anew. The page is written at the end.
"""

import argparse
import datetime
import itertools
import json
import signal
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from accelerated.evaluation.figures import figure_class, new_figure, save_figure
from accelerated.lab.trials import SEEDS, machine
from accelerated.program.errors import InputError, check_choice
from accelerated.program.files import disk_errors, locked, written_whole
from accelerated.program.progress import Progress
from accelerated.training.options import OptionParser

ADVICE = "give another --out"


class Experiment(NamedTuple):
    """What a command trains; a run is whatever `train` returns, and its seconds, and goes to the record as JSON."""

    program: str  # the command is python -m accelerated.lab.PROGRAM
    about: str  # its help
    name: str  # of the record and its pages
    rows: Sequence[str]
    settings: dict  # that all runs of a record have in common
    train: Callable[[str, int], dict]  # a row with a seed
    said: Callable[[dict], str]  # what came out of a run, in a line
    page: Callable[[dict], str]  # of a record, in Markdown
    draw: Callable[[dict, Path], None] | None = None  # a record's picture


def parse_options(experiment: Experiment, argv: list[str]) -> argparse.Namespace:
    """The rows, seeds and folder of a command line; raises InputError if one cannot be."""
    rows = textwrap.fill(", ".join(experiment.rows), 114, break_on_hyphens=False)
    parser = OptionParser(
        prog=f"python -m accelerated.lab.{experiment.program}", allow_abbrev=False
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = f"{experiment.about}\nRows are\n\n{textwrap.indent(rows, '    ')}"
    parser.add_argument(
        "--rows", nargs="+", default=list(experiment.rows), metavar="NAME", help="(default all)"
    )
    parser.add_argument(
        "--seeds", nargs="+", type=int, default=list(SEEDS), metavar="N", help="(default 0 1 2)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("docs/results"),
        metavar="FOLDER",
        help="(default docs/results)",
    )
    options = parser.parse(argv)
    for row in options.rows:
        check_choice("--rows", row, experiment.rows, InputError)
    if min(options.seeds) < 0:
        raise InputError(f"--seeds {min(options.seeds)} must be at least 0")
    with disk_errors(options.out, ADVICE):
        options.out.mkdir(parents=True, exist_ok=True)
    return options


def read_record(path: Path, settings: dict) -> dict:
    """The record of earlier runs, or an empty one; raises InputError if they were trained otherwise."""
    record = {"settings": settings, "machine": machine(), "torch": torch.__version__, "runs": {}}
    try:
        record = json.loads(path.read_text()) if path.exists() else record
        if record["settings"] == settings:
            return record
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} cannot be read ({error!r}); remove it, or {ADVICE}") from None
    raise InputError(
        f"{path} has runs of other settings, {record['settings']} and not {settings}; {ADVICE}, or the same options"
    )


def train_missing(experiment: Experiment, options: argparse.Namespace) -> None:
    """Train the runs that the record lacks; write the record after each, and at the end the picture and the page."""
    paths = {kind: options.out / f"{experiment.name}.{kind}" for kind in ("json", "md", "svg")}
    record = read_record(paths["json"], experiment.settings)
    runs = record["runs"]
    for seed, row in itertools.product(options.seeds, options.rows):
        if str(seed) in runs.get(row, {}):
            continue
        began = time.monotonic()
        run = experiment.train(row, seed) | {"seconds": round(time.monotonic() - began, 1)}
        runs[row] = dict(
            sorted((runs.get(row, {}) | {str(seed): run}).items(), key=lambda pair: int(pair[0]))
        )
        record["runs"] = runs = {name: runs[name] for name in experiment.rows if name in runs}
        record["date"] = datetime.date.today().isoformat()
        if machine() not in record["machine"]:
            record["machine"] += f" and {machine()}"
        with written_whole(paths["json"], ADVICE) as path:
            path.write_text(json.dumps(record) + "\n")
        Progress.say(f"{row}, seed {seed}: {experiment.said(run)}, {run['seconds']:.0f} s")
    if experiment.draw:
        experiment.draw(record, paths["svg"])
    with written_whole(paths["md"], ADVICE) as path:
        path.write_text(experiment.page(record))


def conduct(experiment: Experiment, argv: list[str]) -> None:
    """Train what a command line asks for and is missing, and write what came out; one process at a time for a folder."""
    options = parse_options(experiment, argv)
    if experiment.draw:
        figure_class()  # says now if matplotlib is missing
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    torch.set_num_threads(1)  # models so small are slower with more
    said = f"another process trains for {options.out / experiment.name}.md; wait until it ends, or {ADVICE}"
    try:
        with locked(options.out / f"{experiment.name}.lock", said):
            train_missing(experiment, options)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            "what was trained is kept; continue with the same command"
        ) from None
    print(f"wrote {options.out / experiment.name}.md and .json")


def draw_shares(
    path: Path, curves: dict[str, tuple[Sequence, np.ndarray, str]], guess: float, **labels: str
) -> None:
    """Draw {row: (x (n,), percentages (n, seeds), line)}: the mean of the seeds, each seed thinly, and what a guess reaches."""
    figure, [axes] = new_figure()
    for number, (row, (x, values, line)) in enumerate(curves.items()):
        axes.plot(x, values, color=f"C{number}", linewidth=0.5, alpha=0.4)
        axes.plot(x, values.mean(1), line, color=f"C{number}", label=row)
    axes.axhline(guess, color="0.5", linewidth=1, linestyle=":")
    axes.set(ylim=(0, 102), **labels)
    axes.legend(frameon=False, fontsize=8)
    save_figure(figure, path)
