"""The harness of all experiments: rows, seeds, records and intervals, as plain functions.

A record is a file of what was measured. What it has is not measured again, and its page says what
it has. A part of an experiment is written beside no page of a whole one.
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
import textwrap
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from accelerated.evaluation.figures import figure_class
from accelerated.evaluation.options import at_least
from accelerated.program.errors import InputError, check_choice
from accelerated.program.files import locked, regular, written_whole
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
def parser_of(program: str, about: str | None) -> OptionParser:
    """A parser of python -m accelerated.lab.PROGRAM, whose help says `about` as it stands."""
    return OptionParser(
        prog=f"python -m accelerated.lab.{program}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def add_seeds(parser: OptionParser, default: Sequence[int] | None, said: str) -> None:
    """Add the option --seeds."""
    numbers = {"nargs": "+", "type": at_least(0), "metavar": "N"}
    parser.add_argument("--seeds", default=default, help=f"(default {said})", **numbers)


def add_part(parser: OptionParser) -> None:
    """Add the options of a part: --rows, --seeds and --out."""
    parser.add_argument("--rows", nargs="+", metavar="ROW", help="(default all)")
    add_seeds(parser, None, "0 1 2")
    where = f"for pages (default {RESULTS}, of some --rows or --seeds {PARTS})"
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=where)


def settle_part(options: argparse.Namespace, rows: Collection[str]) -> None:
    """Check the rows of a part and make its folder; raises InputError if it has others' pages."""
    for row in options.rows or ():
        check_choice("--rows", row, rows, InputError)
    is_part = bool(options.rows or options.seeds)
    options.out = options.out or (PARTS if is_part else RESULTS)
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
        record = json.loads(regular(path).read_bytes())
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


# What seeds say
def mean_of(values: Iterable[float | None]) -> float:
    """The mean of the seeds that did not diverge, NaN if all did."""
    finite = [value for value in values if value is not None]
    return statistics.mean(finite) if finite else math.nan


def paired(better: Mapping, worse: Mapping) -> list[float]:
    """worse - better of each seed that both {seed: value} have.

    Runs of one seed read the same text in the same order. One that diverged is infinitely bad.
    """
    pairs = [(better[seed], worse[seed]) for seed in better if seed in worse]
    return [(math.inf if b is None else b) - (math.inf if a is None else a) for a, b in pairs]


def mean_and_interval(differences: list[float]) -> tuple[float, float]:
    """The mean of differences, and half the width of its 95% interval.

    That is infinite of one value, and NaN if a run diverged.
    """
    mean = statistics.fmean(differences)
    if len(differences) == 1:
        return mean, math.inf
    if not all(map(math.isfinite, differences)):
        return mean, math.nan
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return mean, STUDENT[len(differences) - 1] * error


def plus_minus(mean: float, half: float) -> str:
    """A mean difference with half its interval, as text."""
    return f"{mean:+.3f} ± {half:.3f}"


def seeds_in_words(by_row: Mapping[str, Sequence], last: str = " and ") -> str:
    """The seeds of {row: its seeds}, if all rows have the same."""
    seeds = {tuple(map(str, own)) for own in by_row.values()}
    if len(seeds) != 1:
        return "seeds"
    [[*first, end]] = seeds
    return f"seeds {', '.join(first)}{last}{end}" if first else f"seed {end}"


def part_in_words(by_row: Mapping[str, Sequence], planned: Mapping[str, Sequence]) -> str:
    """What part {row: its seeds} is of what is planned, "" if nothing is missing."""
    missing = 0
    for row, seeds in planned.items():
        missing += len({*map(str, seeds)} - {*map(str, by_row.get(row, ()))})
    if not missing:
        return ""
    rows = f"{len(by_row)} of {len(planned)} rows"
    return f"A part: {rows}, {seeds_in_words(by_row)}. The command makes the whole."


# An experiment whose runs are trained one at a time
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
    draw: Callable[[dict, Path], Any]  # a record's picture


def part_of(record: dict, rows: Sequence[str]) -> str:
    """What part of an experiment's rows a record has, "" if it has all."""
    return part_in_words(record["runs"], dict.fromkeys(rows, SEEDS))


def train_missing(experiment: Experiment, options: argparse.Namespace) -> None:
    """Train the runs that the record lacks; write the record after each, and the page at the end.

    Raises InputError if the record has runs of other settings.
    """
    path = options.out / f"{experiment.name}.json"
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
    asked = itertools.product(options.seeds or SEEDS, options.rows or experiment.rows)
    for seed, row in asked:
        if str(seed) in runs.get(row, {}):
            continue
        began = time.monotonic()
        run = experiment.train(row, seed)
        run["seconds"] = round(time.monotonic() - began, 1)
        by_seed = runs.get(row, {}) | {str(seed): run}
        runs[row] = {seed: by_seed[seed] for seed in sorted(by_seed, key=int)}
        record["runs"] = {row: runs[row] for row in experiment.rows if row in runs}
        record["date"] = origin()["date"]
        if machine() not in record["machine"]:
            record["machine"] += f" and {machine()}"
        write_record(path, record)
        Progress.say(f"{row}, seed {seed}: {experiment.said(run)}, {run['seconds']:.0f} s")
    write_page(path, record, experiment.page, experiment.draw)


def begin() -> None:
    """Say now if matplotlib is missing, and hear SIGTERM as Ctrl-C."""
    figure_class()
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def conduct(experiment: Experiment, argv: list[str]) -> None:
    """Train what a command line asks for and is missing, and write what came out.

    One process works at a time in a folder.
    """
    rows = textwrap.fill(", ".join(experiment.rows), 94, break_on_hyphens=False)
    about = f"{experiment.about}\nRows are\n\n{textwrap.indent(rows, '    ')}"
    parser = parser_of(experiment.program, about)
    add_part(parser)
    options = parser.parse(argv)
    settle_part(options, experiment.rows)
    begin()
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
