"""The command `gpu`: prints a page on one GPU in less than ten minutes, by a process for each table.

So an error that a process cannot recover from, or a table that takes too long, does not cost the others.
"""

import datetime
import subprocess
import sys
from argparse import Namespace

import torch

from accelerated.models import NAMES
from accelerated.program.errors import InputError

EACH = f"--dtype bfloat16 --model {' '.join(NAMES)}"
SECTIONS = {  # title: (words of the bench, most seconds); together below ten minutes
    "Agreement with the CPU": ("agreement", 60),
    "A training step": (f"steps --seconds 20 {EACH}", 150),
    "Memory replay": ("horizons --model memformer --horizons 4 --seconds 15 --dtype bfloat16", 50),
    "Generation": (f"generation --seconds 10 {EACH}", 120),
    "torch.compile": (f"compile --seconds 30 {EACH}", 190),  # last: what a compiler takes is not known before
}


def report(options: Namespace) -> None:
    """Print the page, each table when it is measured; exits with code 1 if one is not whole, or disagrees with the CPU."""
    if not torch.cuda.is_available():
        raise InputError("gpu measures a CUDA GPU, and torch finds none here; the table counts needs none")
    print(f"# {torch.cuda.get_device_name()}, {datetime.date.today().isoformat()}\n\nSizes and dropout are the papers'.")
    codes = []
    for title, (words, limit) in SECTIONS.items():
        print(f"\n## {title}\n", flush=True)
        command = [sys.executable, "-m", "accelerated.lab.speed", *words.split(), "--device", "cuda"]
        try:
            codes.append(subprocess.run(command, timeout=limit).returncode)
        except subprocess.TimeoutExpired:
            codes.append(f"none: it took more than {limit} seconds")
        if codes[-1]:
            print(f"Exit code: {codes[-1]}.", flush=True)
    if any(codes):
        raise SystemExit(1)
