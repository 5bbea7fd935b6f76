"""An experiment with a command of its own: rows that are trained with several seeds.

Every row is trained with seeds 0, 1 and 2, one at a time, and kept in a record. The same command
continues after an interruption; only what was being trained begins anew. The page is written at the
end.
"""

import argparse
import datetime
import itertools
import json
import platform
import signal
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from accelerated.evaluation.figures import figure_class
from accelerated.evaluation.options import at_least
from accelerated.lab.command import parser_of
from accelerated.lab.trials import SEEDS, machine
from accelerated.program.errors import InputError, check_choice
from accelerated.program.files import locked, regular, written_whole
from accelerated.program.progress import Progress

ADVICE = "give another --out"


class Experiment(NamedTuple):
    """What a command trains.

    A run is whatever `train` returns, and its seconds, and goes to the record as JSON.
    """

    program: str  # the command is python -m accelerated.lab.PROGRAM
    about: str | None  # its help
    name: str  # of the record and its pages
    rows: Sequence[str]
    settings: dict  # that all runs of a record have in common
    train: Callable[[str, int], dict]  # a row with a seed
    said: Callable[[dict], str]  # what came out of a run, in a line
    page: Callable[[dict], str]  # of a record, in Markdown
    draw: Callable[[dict, Path], None]  # a record's picture


def parse_options(experiment: Experiment, argv: list[str]) -> argparse.Namespace:
    """The rows, seeds and folder of a command line; raises InputError if one cannot be."""
    rows = textwrap.fill(", ".join(experiment.rows), 94, break_on_hyphens=False)
    about = f"{experiment.about}\nRows are\n\n{textwrap.indent(rows, '    ')}"
    parser = parser_of(experiment.program, about)
    add = parser.add_argument
    add("--rows", nargs="+", default=experiment.rows, metavar="NAME", help="(default all)")
    add("--seeds", nargs="+", type=at_least(0), default=SEEDS, metavar="N", help="(default 0 1 2)")
    default = "(default %(default)s)"
    add("--out", type=Path, default="docs/results", metavar="FOLDER", help=default)
    options = parser.parse(argv)
    for row in options.rows:
        check_choice("--rows", row, experiment.rows, InputError)
    options.out.mkdir(parents=True, exist_ok=True)
    return options


def read_record(path: Path, needed: set[str]) -> dict:
    """The record in a file; raises InputError if it is none, or lacks something needed."""
    try:
        record = json.loads(regular(path).read_bytes())
        missing = needed - record.keys()
        if missing:
            raise ValueError(f"it has no {min(missing)}")
    except (AttributeError, RecursionError, ValueError) as error:
        raise InputError(
            f"{path} is no record of runs ({error}); restore it, or {ADVICE}"
        ) from None
    return record


def train_missing(experiment: Experiment, options: argparse.Namespace) -> None:
    """Train the runs that the record lacks; write the record after each.

    At the end write the picture and the page. Raises InputError if the record has runs of other
    settings.
    """
    path = options.out / f"{experiment.name}.json"
    settings = experiment.settings
    record = {
        "settings": settings,
        "machine": machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),  # its library may be the text
        "runs": {},
    }
    if path.exists():
        record = read_record(path, {*record})
    if record["settings"] != settings:
        raise InputError(
            f"{path} has runs of other settings, {record['settings']} and not {settings}; "
            f"{ADVICE}, or the same options"
        )
    runs = record["runs"]
    for seed, row in itertools.product(options.seeds, options.rows):
        if str(seed) in runs.get(row, {}):
            continue
        began = time.monotonic()
        run = experiment.train(row, seed)
        run["seconds"] = round(time.monotonic() - began, 1)
        by_seed = runs.get(row, {}) | {str(seed): run}
        runs[row] = {seed: by_seed[seed] for seed in sorted(by_seed, key=int)}
        record["runs"] = {row: runs[row] for row in experiment.rows if row in runs}
        record["date"] = datetime.date.today().isoformat()
        if machine() not in record["machine"]:
            record["machine"] += f" and {machine()}"
        with written_whole(path, ADVICE) as temporary:
            temporary.write_text(json.dumps(record) + "\n")
        Progress.say(f"{row}, seed {seed}: {experiment.said(run)}, {run['seconds']:.0f} s")
    experiment.draw(record, path.with_suffix(".svg"))
    with written_whole(path.with_suffix(".md"), ADVICE) as temporary:
        temporary.write_text(experiment.page(record))


def conduct(experiment: Experiment, argv: list[str]) -> None:
    """Train what a command line asks for and is missing, and write what came out.

    One process works at a time in a folder.
    """
    options = parse_options(experiment, argv)
    figure_class()  # says now if matplotlib is missing
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    torch.set_num_threads(1)  # models so small are slower with more
    page = options.out / f"{experiment.name}.md"
    busy = f"another process trains for {page}; wait until it ends, or {ADVICE}"
    try:
        with locked(page.with_suffix(".lock"), busy):
            train_missing(experiment, options)
    except KeyboardInterrupt:
        kept = "what was trained is kept; continue with the same command"
        raise KeyboardInterrupt(kept) from None
    print(f"wrote {page} and .json")
