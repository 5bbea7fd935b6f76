"""The command `python -m accelerated.lab.tables NAME`: measures a table and writes its page.

Every table tunes each of its rows alike on seed 0, then trains seeds 0, 1 and 2, of headline rows 0
to 4, in one to three hours on two cores. What was interrupted is resumed by the same command; what
was trained before, for this table or another, is not trained again.
"""

import argparse
import os
import signal
import sys
from pathlib import Path

from accelerated.evaluation.options import at_least
from accelerated.lab.tables.measure import measure
from accelerated.lab.tables.table import TABLES
from accelerated.lab.trials import Workshop
from accelerated.program.errors import InputError, check_choice, run_program
from accelerated.program.files import disk_errors
from accelerated.program.parser import OptionParser


def parse_options(argv: list[str]) -> argparse.Namespace:
    """The options of a command line."""
    lines = "\n".join(f"    {name:<29}  {table.title}" for name, table in TABLES.items())
    parser = OptionParser(
        prog="python -m accelerated.lab.tables",
        description=f"{__doc__}\nNAME is one of\n\n{lines}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    pages = Path("docs/results")
    runs = Path("runs/experiments")
    cores = os.cpu_count() or 1
    parser.add_argument("name", metavar="NAME", help="what to measure")
    a_folder = {"type": Path, "metavar": "FOLDER"}
    parser.add_argument("--out", default=pages, help=f"for pages (default {pages})", **a_folder)
    of_runs = f"for runs, many gigabytes (default {runs})"
    parser.add_argument("--runs", default=runs, help=of_runs, **a_folder)
    of_jobs = f"runs at a time (default one a core, {cores})"
    parser.add_argument("--jobs", type=at_least(1), default=cores, metavar="N", help=of_jobs)
    options = parser.parse(argv)
    check_choice("NAME", options.name, TABLES, InputError)
    for folder in (options.out, options.runs):
        with disk_errors(folder, "give another folder"):
            folder.mkdir(parents=True, exist_ok=True)
    return options


def main(argv: list[str]) -> None:
    """Measure the table that the command line names."""
    options = parse_options(argv)
    # as Ctrl-C: the runs are told to save
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    workshop = Workshop(options.runs.absolute(), options.jobs)
    try:
        measure(options.name, TABLES[options.name], workshop, options.out)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("runs are saved; continue with the same command") from None
    print(f"wrote {options.out / options.name}.md and .json")


if __name__ == "__main__":
    run_program("tables", main, sys.argv[1:])
