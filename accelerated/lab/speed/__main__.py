"""The command `python -m accelerated.lab.speed TABLE`: measures or counts speed and memory and prints one table.

    steps       one training step of a model, of its baseline and, if installed, of its paper's public package
    horizons    time and peak memory of the three back-propagation methods, through 1 to 32 segments
    generation  time per generated token after 1,000 and after 100,000 tokens, for all models
    counts      kernels, bytes and FLOPs of a step at the papers' sizes on a GPU, and each preset's memory; needs no GPU
    gpu         a Markdown page (--out FILE.md): agreement with the CPU, then all of the above on one GPU, in ten minutes

Variants take turns (A B A B ...) in one process, and ratios are computed pair by pair, so that a noisy machine affects all
variants equally. A printed ratio is the median over pairs.
"""

import argparse
import sys

import torch

from accelerated.lab.speed import counts, generation, gpu, horizons, steps
from accelerated.lab.speed.timing import BATCH, config_for
from accelerated.models import NAMES
from accelerated.program.errors import InputError, run_program
from accelerated.training.options import OptionParser
from accelerated.training.process import choose_device, keep_freed_memory
from accelerated.training.settings import DEVICES

MEASURED = {"steps": steps.report, "horizons": horizons.report, "generation": generation.report}
TABLES = MEASURED | {"counts": counts.report, "gpu": gpu.report}


def parse_options(argv: list[str]) -> argparse.Namespace:
    """The options of a command line; its first word is a table, `steps` if it is not given."""
    table, *rest = argv if argv and not argv[0].startswith("-") else ("steps", *argv)
    parser = OptionParser(
        prog="python -m accelerated.lab.speed", usage="python -m accelerated.lab.speed [TABLE] [options]", allow_abbrev=False,
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("table", choices=TABLES, metavar="TABLE", help=f"{', '.join(TABLES)} (default steps)")
    parser.set_defaults(model="", device="cpu", dtype="float32", batch=None, repeats=1)
    if table in MEASURED:
        parser.add_argument("--repeats", type=int, default=9, help="how often each variant is measured (default 9)")
    if table == "gpu":
        parser.add_argument("--out", metavar="FILE.md", required=True, help="the page to write; it must not exist yet")
    if table in ("steps", "horizons"):
        parser.add_argument("--model", choices=NAMES, default="block_recurrent", help="(default block_recurrent)")
        parser.add_argument("--device", choices=DEVICES, default="auto", help="auto takes a GPU if there is one (default auto)")
        parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="(default float32)")
        parser.add_argument("--batch", type=int, help="rows of a batch (default 4, or 8: memformer, pretrained_recurrence)")
    options = parser.parse([table, *rest])
    options.batch = BATCH.get(options.model, 1) if options.batch is None else options.batch
    if min(options.repeats, options.batch) < 1:
        raise InputError(f"--repeats {options.repeats} and --batch {options.batch} must be at least 1")
    return options


def main(argv: list[str]) -> None:
    """Print the table that the command line asks for."""
    options = parse_options(argv)
    if options.table not in MEASURED:
        TABLES[options.table](options)
        return
    keep_freed_memory()
    device = options.device = choose_device(options.device, options.dtype)
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{hardware}, torch {torch.__version__}, {options.dtype}")
    options.config = config_for(options.model, device) if options.model else None
    TABLES[options.table](options)


if __name__ == "__main__":
    run_program("bench", main, sys.argv[1:])
