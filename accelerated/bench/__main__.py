"""The command `python -m accelerated.bench TABLE`: measures speed and memory and prints one table.

    steps       a training step of a model beside its baseline, and beside the public package of its paper if that is installed
    horizons    time and peak memory of the three ways of back-propagation at horizons 1 to 32
    generation  time of a token after 1,000 tokens and after 100,000, for all models

What is compared takes turns (A B A B ...) in one process, and a ratio is the median of the ratios pair by pair, so that a noisy
machine disturbs both sides alike.
"""

import argparse

import torch

from accelerated.bench import generation, horizons, steps
from accelerated.bench.sizes import BATCH, SIZES
from accelerated.errors import InputError, run_program
from accelerated.models import MODELS
from accelerated.training.options import OptionParser
from accelerated.training.process import choose_device, keep_freed_memory
from accelerated.training.settings import DEVICES

TABLES = {"steps": steps.report, "horizons": horizons.report, "generation": generation.report}


def parse_options(argv: list[str]) -> argparse.Namespace:
    """The options of a command line, whose first word is a table unless it is `steps` that is wanted."""
    table, *rest = argv if argv and not argv[0].startswith("-") else ("steps", *argv)
    parser = OptionParser(
        prog="python -m accelerated.bench", usage="python -m accelerated.bench [TABLE] [options]", allow_abbrev=False,
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("table", choices=TABLES, metavar="TABLE", help="one of those above (default steps)")
    parser.add_argument("--repeats", type=int, default=9, help="measurements of each variant (default 9)")
    parser.set_defaults(model="", device="cpu", dtype="float32", batch=None)
    if table != "generation":  # which runs all models on a CPU
        parser.add_argument("--model", choices=MODELS, default="block_recurrent", help="default block_recurrent")
        parser.add_argument("--device", choices=DEVICES, default="auto", help="auto takes a GPU if there is one (default auto)")
        parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="bfloat16 is autocast")
        parser.add_argument("--batch", type=int, help="lanes (default 4; 8 of memformer and pretrained_recurrence)")
    options = parser.parse([table, *rest])
    options.batch = BATCH.get(options.model, 1) if options.batch is None else options.batch
    if min(options.repeats, options.batch) < 1:
        raise InputError(f"--repeats {options.repeats} and --batch {options.batch} must be at least 1")
    return options


def main(argv: list[str]) -> None:
    """Print the table that the command line asks for."""
    options = parse_options(argv)
    keep_freed_memory()
    device = options.device = choose_device(options.device)
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{hardware}, torch {torch.__version__}, {options.dtype}")
    options.config = SIZES.get((options.model, device.type))
    TABLES[options.table](options)


if __name__ == "__main__":
    run_program("bench", main)
