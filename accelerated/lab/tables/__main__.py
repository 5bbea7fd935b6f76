"""The command `python -m accelerated.lab.tables NAME`: measures a table and writes its page.

Every table tunes each of its rows alike on seed 0, then trains seeds 0, 1 and 2, of headline rows 0
to 4, in one to three hours on two cores. What was interrupted is resumed by the same command; what
was trained before, for this table or another, is not trained again. A record that has all of a
table is not measured again: its page is written. With --rows or --seeds it is a part, at the rates
of the published record: its numbers are printed, and it has no page.
"""

import argparse
import os
import platform
from pathlib import Path

from accelerated.evaluation.options import at_least
from accelerated.lab.harness import part_parser, run_command, settle_part
from accelerated.lab.tables.measure import measure
from accelerated.lab.tables.table import TABLES
from accelerated.lab.trials import Workshop
from accelerated.program.errors import InputError, check_choice


def parse_options(argv: list[str]) -> argparse.Namespace:
    """The options of a command line."""
    lines = "\n".join(f"    {name:<29}  {table.title}" for name, table in TABLES.items())
    parser = part_parser("tables", f"{__doc__}\nNAME is one of\n\n{lines}")
    add = parser.add_argument
    add("name", metavar="NAME", help="what to measure")
    runs = "for runs, many gigabytes (default %(default)s)"
    add("--runs", type=Path, default="runs/experiments", metavar="FOLDER", help=runs)
    of_jobs = "runs at a time (default one a core, %(default)s)"
    add("--jobs", type=at_least(1), default=os.cpu_count() or 1, metavar="N", help=of_jobs)
    options = parser.parse(argv)
    check_choice("NAME", options.name, TABLES, InputError)
    pinned = TABLES[options.name].python
    here = ".".join(platform.python_version_tuple()[:2])
    if pinned not in ("", here):
        raise InputError(
            f"{options.name} reads Python {pinned}'s library, and that of {here} is another text; "
            f"run it with Python {pinned}"
        )
    settle_part(options, TABLES[options.name].rows)
    options.runs.mkdir(parents=True, exist_ok=True)
    return options


def main(argv: list[str]) -> None:
    """Measure the table that the command line names."""
    options = parse_options(argv)
    try:
        measure(options, Workshop(options.runs.absolute(), options.jobs))
    except KeyboardInterrupt:
        raise KeyboardInterrupt("runs are saved; continue with the same command") from None


if __name__ == "__main__":
    run_command("tables", main)
