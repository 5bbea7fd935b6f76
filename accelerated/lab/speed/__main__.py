"""The command `python -m accelerated.lab.speed TABLE`.

Measures speed and memory and prints a table in Markdown.

    steps       one training step of a model and of its baseline
    horizons    time and peak memory of the three back-propagation methods, through 1 to 32 segments
    packages    one training step beside that of a public package, if one is installed
    generation  time per generated token after 1,000 and after 100,000 tokens

Variants take turns (A B A B ...) in one process, and ratios are computed pair by pair, so that a
noisy machine affects all variants equally. A printed ratio is the median over pairs.
"""

import argparse

import torch

from accelerated.evaluation.options import at_least
from accelerated.lab.harness import parser_of, run_command
from accelerated.lab.speed import packages, steps
from accelerated.lab.speed.variants import MEASURED, sizes_on
from accelerated.models import DEFAULT
from accelerated.training.process import choose_device, keep_freed_memory
from accelerated.training.settings import DEVICES

TABLES = {
    "steps": steps.report_steps,
    "horizons": steps.report_horizons,
    "packages": packages.report_packages,
    "generation": steps.report_generation,
}


def parse_options(argv: list[str]) -> argparse.Namespace:
    """The options of a command line."""
    parser = parser_of("speed", __doc__)
    add = parser.add_argument
    add("table", nargs="?", choices=TABLES, default="steps", help="(default %(default)s)")
    add("--device", choices=DEVICES, default="auto", help="auto takes a GPU if there is one")
    add("--dtype", choices=("float32", "bfloat16"), default="float32")
    add("--repeats", type=at_least(1), default=9, help="turns of each (default %(default)s)")
    add("--model", choices=MEASURED, nargs="+", default=[DEFAULT], help=f"(default {DEFAULT})")
    of_horizons = "of the table horizons (default the model's)"
    add("--horizons", type=at_least(1), nargs="+", help=of_horizons)
    return parser.parse(argv)


def main(argv: list[str]) -> None:
    """Print the table that the command line asks for."""
    options = parse_options(argv)
    keep_freed_memory()
    device = choose_device(options.device)
    print(
        f"{device}, {torch.get_num_threads()} threads, torch {torch.__version__}, {options.dtype}, "
        f"{options.repeats} turns\n"
    )
    for model in options.model:
        given = vars(options) | {"model": model, "device": device} | sizes_on(device, model)
        TABLES[options.table](argparse.Namespace(**given))


if __name__ == "__main__":
    run_command("bench", main)
