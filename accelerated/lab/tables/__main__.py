"""The command `python -m accelerated.lab.tables NAME`: measures a table and writes its page.

Every table tunes each of its rows alike on seed 0, then trains seeds 0, 1 and 2, of headline rows 0
to 4, in one to three hours on two cores. What was interrupted is resumed by the same command; what
was trained before, for this table or another, is not trained again. With --rows or --seeds a few
runs of a published table are made again, beside what its record says.
"""

import argparse
import math
import os
import platform
import signal
import sys
from pathlib import Path

from accelerated.evaluation.options import POSITIVE, at_least
from accelerated.lab.command import parser_of
from accelerated.lab.tables.measure import measure, measure_again
from accelerated.lab.tables.table import TABLES
from accelerated.lab.trials import SEEDS, Workshop
from accelerated.program.errors import InputError, check_choice, run_program


def parse_options(argv: list[str]) -> argparse.Namespace:
    """The options of a command line."""
    lines = "\n".join(f"    {name:<29}  {table.title}" for name, table in TABLES.items())
    parser = parser_of("tables", f"{__doc__}\nNAME is one of\n\n{lines}")
    add = parser.add_argument
    add("name", metavar="NAME", help="what to measure")
    a_folder = {"type": Path, "metavar": "FOLDER"}
    add("--out", default="docs/results", help="for pages (default %(default)s)", **a_folder)
    of_runs = "for runs, many gigabytes (default %(default)s)"
    add("--runs", default="runs/experiments", help=of_runs, **a_folder)
    of_jobs = "runs at a time (default one a core, %(default)s)"
    add("--jobs", type=at_least(1), default=os.cpu_count() or 1, metavar="N", help=of_jobs)
    of_minutes = "stop runs in time for a page after so many minutes (default: no end)"
    add("--minutes", type=POSITIVE, default=math.inf, metavar="N", help=of_minutes)
    add("--rows", nargs="+", metavar="ROW", help="(default all)")
    add("--seeds", nargs="+", type=at_least(0), metavar="N", help="(default 0 1 2)")
    options = parser.parse(argv)
    check_choice("NAME", options.name, TABLES, InputError)
    pinned = TABLES[options.name].python
    here = ".".join(platform.python_version_tuple()[:2])
    if pinned not in ("", here):
        raise InputError(
            f"{options.name} reads Python {pinned}'s library, and that of {here} is another text; "
            f"run it with Python {pinned}"
        )
    for row in options.rows or ():
        check_choice("--rows", row, TABLES[options.name].rows, InputError)
    for folder in (options.out, options.runs):
        folder.mkdir(parents=True, exist_ok=True)
    return options


def main(argv: list[str]) -> None:
    """Measure the table that the command line names."""
    options = parse_options(argv)
    # as Ctrl-C: the runs are told to save
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    runs = options.runs.absolute()
    workshop = Workshop(runs, options.jobs, minutes=options.minutes)
    table = TABLES[options.name]
    try:
        if options.rows or options.seeds:
            rows = options.rows or list(table.rows)
            seeds = options.seeds or list(SEEDS)
            measure_again(options.name, rows, seeds, workshop, options.out)
            return
        measure(options.name, table, workshop, options.out)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("runs are saved; continue with the same command") from None
    print(f"wrote {options.out / options.name}.md and .json")


if __name__ == "__main__":
    run_program("tables", main, sys.argv[1:])
