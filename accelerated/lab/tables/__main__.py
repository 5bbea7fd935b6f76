"""The command `python -m accelerated.lab.tables NAME`: trains what is missing of a table, evaluates it and writes its page.

Every table tunes each of its rows alike on seed 0, then trains seeds 0, 1 and 2. What was interrupted is resumed by the same
command; what was trained before, for this table or another, is not trained again.
"""

import argparse
import os
import signal
import sys
from pathlib import Path

from accelerated.lab.tables import block_recurrent, compressive, memformer, pretrained_recurrence, recall
from accelerated.lab.tables.measure import measure
from accelerated.lab.tables.page import stem
from accelerated.lab.tables.table import Table
from accelerated.lab.trials import Workshop
from accelerated.program.errors import InputError, check_choice, run_program
from accelerated.program.files import disk_errors
from accelerated.training.options import OptionParser

TABLES: dict[str, Table] = (
    block_recurrent.TABLES | compressive.TABLES | memformer.TABLES | pretrained_recurrence.TABLES | recall.TABLES
)
GPU_JOBS = 4  # runs at a time that share a GPU


def parse_options(argv: list[str]) -> argparse.Namespace:
    """The options of a command line."""
    width = max(map(len, TABLES))
    lines = "\n".join(f"    {name:<{width}}  {table.title}" for name, table in TABLES.items())
    parser = OptionParser(
        prog="python -m accelerated.lab.tables", usage="python -m accelerated.lab.tables NAME [options]", allow_abbrev=False,
        description=f"{__doc__}\nNAME is one of\n\n{lines}", formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("name", metavar="NAME", help="what to measure")
    text = "small: two cores, an hour or two a table; gpu: one large GPU, half an hour (default small)"
    parser.add_argument("--scale", choices=("small", "gpu"), default="small", help=text)
    parser.add_argument(
        "--out", type=Path, default=Path("docs/results"), metavar="FOLDER", help="for pages (default docs/results)"
    )
    text = "folder for the runs, which may take gigabytes (default runs/experiments)"
    parser.add_argument("--runs", type=Path, default=Path("runs/experiments"), metavar="FOLDER", help=text)
    cores = os.cpu_count() or 1
    text = f"runs at a time (default one for each core, {cores}; with --scale gpu {GPU_JOBS})"
    parser.add_argument("--jobs", type=int, metavar="N", help=text)
    options = parser.parse(argv)
    check_choice("NAME", options.name, TABLES, InputError)
    if options.scale not in (scales := TABLES[options.name].scales):
        raise InputError(f"{options.name} has no --scale {options.scale}; give {' or '.join(scales)}")
    if options.jobs is None:
        options.jobs = cores if options.scale == "small" else GPU_JOBS
    if options.jobs < 1:
        raise InputError(f"--jobs {options.jobs} must be at least 1")
    for folder in (options.out, options.runs):
        with disk_errors(folder, "give another folder"):
            folder.mkdir(parents=True, exist_ok=True)
    return options


def main(argv: list[str]) -> None:
    """Measure the table that the command line names."""
    options = parse_options(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the runs are told to save
    workshop = Workshop(options.runs.absolute(), options.jobs)
    try:
        measure(options.name, TABLES[options.name], options.scale, workshop, options.out)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("runs are saved; continue with the same command") from None
    print(f"wrote {options.out / stem(options.name, options.scale)}.md and .json")


if __name__ == "__main__":
    run_program("experiments", main, sys.argv[1:])
