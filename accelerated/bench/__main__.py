"""The command `python -m accelerated.bench TABLE`: measures speed and memory and prints one table.

    steps       a training step of a model beside its baseline, and beside the public package of its paper if that is installed
    horizons    time and peak memory of the three ways of back-propagation at horizons 1 to 32
    overlaps    evaluation of plain GPT-2 at several overlaps of its windows
    tokenising  megabytes of text a second
    loading     the share of a training step that dealing its tokens takes
    generation  time of a token after 1,000 tokens and after 100,000
    memory      what train.py holds with 1 GB of text, over what it holds with 1 MB

What is compared takes turns (A B A B ...) in one process, and a ratio is the median of the ratios pair by pair, so that a noisy
machine disturbs both sides alike.
"""

import argparse

import torch

from accelerated.bench import horizons, overlaps, steps, throughput
from accelerated.bench.sizes import BATCH, SIZES
from accelerated.errors import InputError, run_program
from accelerated.models import MODELS
from accelerated.training.options import OptionParser
from accelerated.training.process import choose_device, keep_freed_memory
from accelerated.training.settings import DEVICES

OF_A_MODEL = {"steps": steps.report, "horizons": horizons.report}
TABLES = OF_A_MODEL | {
    "overlaps": overlaps.report,
    "tokenising": throughput.report_tokenising,
    "loading": throughput.report_loading,
    "generation": throughput.report_generation,
    "memory": throughput.report_memory,
}
ON_A_DEVICE = ("steps", "horizons", "overlaps")  # the others measure this machine's processors


def parse_options(argv: list[str]) -> argparse.Namespace:
    """The options of a command line, whose first word is a table unless it is `steps` that is wanted."""
    table, *rest = argv if argv and not argv[0].startswith("-") else ("steps", *argv)
    parser = OptionParser(
        prog="python -m accelerated.bench", usage="python -m accelerated.bench [TABLE] [options]", allow_abbrev=False,
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("table", choices=TABLES, metavar="TABLE", help="one of those above (default steps)")
    parser.add_argument("--repeats", type=int, default=9, help="measurements of each variant (default 9)")
    if table in OF_A_MODEL:
        parser.add_argument("--model", choices=MODELS, default="block_recurrent", help="default block_recurrent")
    if table in ON_A_DEVICE:
        parser.add_argument("--device", choices=DEVICES, default="auto", help="auto takes a GPU if there is one (default auto)")
        parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="bfloat16 is autocast")
        parser.add_argument("--batch", type=int, help="lanes (default 4; 8 of memformer and pretrained_recurrence)")
    options = parser.parse([table, *rest])
    if options.repeats < 1:
        raise InputError(f"--repeats is {options.repeats}; it must be at least 1")
    if table in ON_A_DEVICE:
        options.model = options.model if table in OF_A_MODEL else "pretrained_recurrence"
        options.batch = BATCH[options.model] if options.batch is None else options.batch
        if options.batch < 1:
            raise InputError(f"--batch is {options.batch}; it must be at least 1")
    return options


def main(argv: list[str]) -> None:
    """Print the table that the command line asks for."""
    options = parse_options(argv)
    keep_freed_memory()
    options.device = choose_device(options.device if options.table in ON_A_DEVICE else "cpu")
    cuda = options.device.type == "cuda"
    hardware = torch.cuda.get_device_name(options.device) if cuda else f"CPU, {torch.get_num_threads()} threads"
    print(f"{hardware}, torch {torch.__version__}", end=f", {options.dtype}\n" if options.table in ON_A_DEVICE else "\n")
    if options.table in ON_A_DEVICE:
        options.config = SIZES[options.model, options.device.type]
    TABLES[options.table](options)


if __name__ == "__main__":
    run_program("bench", main)
