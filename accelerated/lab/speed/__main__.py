"""The command `python -m accelerated.lab.speed TABLE`: measures or counts speed and memory and prints a table in Markdown.

    steps       one training step of a model and of its baseline
    horizons    time and peak memory of the three back-propagation methods, through 1 to 32 segments
    compile     one training step with each choice of train.py's --compile
    generation  time per generated token after 1,000 and after 100,000 tokens
    agreement   every model on a device against the CPU in float64
    counts      kernels, bytes and FLOPs of a step at the papers' sizes on a GPU, and each preset's memory; needs no GPU

Variants take turns (A B A B ...) in one process, and ratios are computed pair by pair, so that a noisy machine affects all
variants equally. A printed ratio is the median over pairs.
"""

import argparse
import math
import sys

import torch

from accelerated.lab.speed import agreement, counts, steps
from accelerated.lab.speed.variants import options_of
from accelerated.models import DEFAULT, NAMES
from accelerated.program.errors import InputError, run_program
from accelerated.training.options import OptionParser
from accelerated.training.process import choose_device, keep_freed_memory
from accelerated.training.settings import DEVICES

OPTIONS = {
    "--device": {
        "choices": DEVICES,
        "default": "auto",
        "help": "auto takes a GPU if there is one (default auto)",
    },
    "--dtype": {
        "choices": ("float32", "bfloat16"),
        "default": "float32",
        "help": "(default float32)",
    },
    "--repeats": {
        "type": int,
        "default": 9,
        "help": "how often each variant is measured (default 9)",
    },
    "--seconds": {
        "type": float,
        "default": math.inf,
        "help": "begin no turn of a model's variants later (default no limit)",
    },
    "--model": {
        "choices": NAMES,
        "nargs": "+",
        "default": [DEFAULT],
        "help": f"one or more (default {DEFAULT})",
    },
    "--horizons": {
        "type": int,
        "nargs": "+",
        "help": "segments of a rollout (default: the model's)",
    },
}
TABLES = {  # name: (function that prints it, how many of OPTIONS it takes)
    "steps": (steps.report_steps, 5),
    "horizons": (steps.report_horizons, 6),
    "compile": (steps.report_compiled, 5),
    "generation": (steps.report_generation, 5),
    "agreement": (agreement.report, 1),
    "counts": (counts.report, 0),
}


def parse_options(argv: list[str]) -> argparse.Namespace:
    """The options of a command line; its first word is a table, `steps` if it is not given."""
    table, *rest = argv if argv and not argv[0].startswith("-") else ("steps", *argv)
    form, prog = argparse.RawDescriptionHelpFormatter, "python -m accelerated.lab.speed"
    parser = OptionParser(prog=prog, description=__doc__, formatter_class=form, allow_abbrev=False)
    parser.add_argument(
        "table", choices=TABLES, metavar="TABLE", help=f"{', '.join(TABLES)} (default steps)"
    )
    _, taken = TABLES.get(table, ("", 0))
    for number, (flag, how) in enumerate(OPTIONS.items()):
        if number < taken:
            parser.add_argument(flag, **how)
        else:
            parser.set_defaults(**{flag[2:]: how.get("default")})
    options = parser.parse([table, *rest])
    for name, numbers in (("repeats", [options.repeats]), ("horizons", options.horizons or [1])):
        if min(numbers) < 1:
            raise InputError(f"--{name} {min(numbers)}: it must be at least 1")
    return options


def main(argv: list[str]) -> None:
    """Print the table that the command line asks for."""
    options = parse_options(argv)
    report, taken = TABLES[options.table]
    if not taken:
        report(options)
        return
    keep_freed_memory()
    device = choose_device(options.device)
    print(
        f"{device}, {torch.get_num_threads()} threads, torch {torch.__version__}, {options.dtype}\n"
    )
    for model in options.model:
        report(argparse.Namespace(**vars(options) | vars(options_of(model, device, options.dtype))))


if __name__ == "__main__":
    run_program("bench", main, sys.argv[1:])
