"""The harness of all experiments: rows, seeds, records and intervals, as plain functions.

A record is a file of what was measured. What it has is not measured again. A page is made of a
record that has all rows and seeds; a part of an experiment has a record and no page.
"""

import argparse
import datetime
import itertools
import json
import math
import os
import platform
import re
import signal
import statistics
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from accelerated.evaluation.figures import figure_class
from accelerated.evaluation.options import at_least
from accelerated.program.errors import InputError, check_choice, run_program
from accelerated.program.files import locked, written_whole
from accelerated.program.parser import OptionParser
from accelerated.program.progress import Progress

RESULTS = Path("docs/results")
PARTS = Path("runs/parts")
SEEDS = (0, 1, 2)
HEADLINE_SEEDS = (0, 1, 2, 3, 4)
ADVICE = "give another --out"
# {values - 1: standard errors within which the mean is, 95 times in 100}
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}


# The command line
def run_command(name: str, main: Callable[[list[str]], None]) -> None:
    """Run main with the words of the command line; SIGTERM stops it as Ctrl-C does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    run_program(name, main, sys.argv[1:])


def parser_of(program: str, about: str | None) -> OptionParser:
    """A parser of python -m accelerated.lab.PROGRAM, whose help says `about` as it stands."""
    return OptionParser(
        prog=f"python -m accelerated.lab.{program}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def part_parser(program: str, about: str | None) -> OptionParser:
    """A parser_of, with the options of a part: --rows, --seeds and --out."""
    parser = parser_of(program, about)
    add = parser.add_argument
    add("--rows", nargs="+", metavar="ROW", help="(default all)")
    add("--seeds", nargs="+", type=at_least(0), metavar="N", help="(default 0 1 2)")
    where = f"of the record (default {RESULTS} if it has a page, else {PARTS})"
    add("--out", type=Path, metavar="FOLDER", help=where)
    return parser


def settle_part(options: argparse.Namespace, rows: Collection[str], has_page: bool = True) -> None:
    """Check the rows of a part and make its folder.

    Raises InputError if the folder has others' pages, or if a page needs matplotlib and it is not
    installed.
    """
    if has_page:
        figure_class()
    for row in options.rows or ():
        check_choice("--rows", row, rows, InputError)
    is_part = bool(options.rows or options.seeds)
    options.out = options.out or (RESULTS if has_page and not is_part else PARTS)
    if is_part and options.out.resolve() == RESULTS.resolve():
        raise InputError(f"--out {options.out} has the pages of whole tables; {ADVICE} for a part")
    options.out.mkdir(parents=True, exist_ok=True)


# Records
def machine() -> str:
    """The processor or the GPU, in words."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    processors = Path("/proc/cpuinfo")
    found = None
    if processors.exists():
        found = re.search(r"model name\s*: *(.+)", processors.read_text(encoding="utf-8"))
    return f"{os.cpu_count()} cores of {found[1] if found else platform.machine()}"


def origin() -> dict[str, str]:
    """When, where and by what a record is made."""
    return {
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "torch": torch.__version__.partition("+")[0],
        "python": platform.python_version(),  # its library may be the text
    }


def read_record(path: Path, needed: set[str]) -> dict:
    """The record in a file; raises InputError if it is none, or lacks something needed."""
    try:
        record = json.loads(path.read_bytes())
        missing = needed - record.keys()
        if missing:
            raise ValueError(f"it has no {min(missing)}")
    except (AttributeError, RecursionError, ValueError) as error:
        raise InputError(
            f"{path} is no record of runs ({error}); restore it, or {ADVICE}"
        ) from None
    return record


def write_record(path: Path, record: dict, indent: int | None = None) -> None:
    """Write a record whole."""
    with written_whole(path, ADVICE) as temporary:
        temporary.write_text(json.dumps(record, indent=indent) + "\n", encoding="utf-8")


def write_page(path: Path, record: dict, page: Callable, draw: Callable) -> None:
    """Write the picture and the page of the record at path: page(record), draw(record, file)."""
    draw(record, path.with_suffix(".svg"))
    with written_whole(path.with_suffix(".md"), ADVICE) as temporary:
        temporary.write_text(page(record), encoding="utf-8")
    print(f"wrote {path.with_suffix('.md')} and its picture")


# What seeds say
def mean_and_interval(differences: list[float]) -> tuple[float, float]:
    """The mean of differences, and half the width of its 95% interval, infinite of one value."""
    mean = statistics.fmean(differences)
    if len(differences) == 1:
        return mean, math.inf
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return mean, STUDENT[len(differences) - 1] * error


def plus_minus(mean: float, half: float) -> str:
    """A mean difference with half its interval, as text."""
    return f"{mean:+.3f} ± {half:.3f}"


# An experiment whose runs are trained one at a time
class Experiment(NamedTuple):
    """What a command trains.

    A run is whatever `train` returns, and its seconds, and goes to the record as JSON.
    """

    name: str  # of the record and its page
    rows: Collection[str]
    settings: dict  # that all runs of a record have in common
    train: Callable[[str, int], dict]  # a row with a seed
    said: Callable[[dict], str]  # what came out of a run, in a line
    shown: tuple[Callable, Callable] | None = None  # what makes its page and picture: write_page


def train_missing(experiment: Experiment, options: argparse.Namespace, path: Path) -> dict:
    """Train the runs that the record lacks, and write it after each; returns the record.

    Raises InputError if the record has runs of other settings.
    """
    settings = experiment.settings
    record: dict[str, Any] = {"settings": settings, **origin(), "runs": {}}
    if path.exists():
        record = read_record(path, {*record})
    if record["settings"] != settings:
        raise InputError(
            f"{path} has runs of other settings, {record['settings']} and not {settings}; "
            f"{ADVICE}, or the same options"
        )
    runs = record["runs"]
    for seed, row in itertools.product(options.seeds or SEEDS, options.rows or experiment.rows):
        if str(seed) in runs.get(row, {}):
            continue
        began = time.monotonic()
        run = experiment.train(row, seed)
        run["seconds"] = round(time.monotonic() - began, 1)
        runs.setdefault(row, {})[str(seed)] = run
        record["date"] = origin()["date"]
        if machine() not in record["machine"]:
            record["machine"] += f" and {machine()}"
        write_record(path, record)
        Progress.say(f"{row}, seed {seed}: {experiment.said(run)}, {run['seconds']:.0f} s")
    return record


def conduct(experiment: Experiment, options: argparse.Namespace) -> None:
    """Train what the record lacks of what `options` ask for; of a whole record write the page.

    The options are a part_parser's. One process works at a time in a folder.
    """
    settle_part(options, experiment.rows, experiment.shown is not None)
    path = options.out / f"{experiment.name}.json"
    busy = f"another process trains for {path}; wait until it ends, or {ADVICE}"
    try:
        with locked(path.with_suffix(".lock"), busy):
            record = train_missing(experiment, options, path)
    except KeyboardInterrupt:
        kept = "what was trained is kept; continue with the same command"
        raise KeyboardInterrupt(kept) from None
    seeds = {*map(str, SEEDS)}
    is_whole = all(seeds <= record["runs"].get(row, {}).keys() for row in experiment.rows)
    print(f"wrote {path}")
    if is_whole and experiment.shown:
        write_page(path, record, *experiment.shown)
