"""Plants small faults in the maths, one at a time, and lists those that no test notices.

    python -m tests.tools.mutate

A fault (mutants.py) is compiled in place of its file, in a child process that is forked before the
project is imported. The child runs the tests until one fails, first those with the file's name in
theirs. mutmut, cosmic-ray and poodle know no dropped terms, swapped arguments or lost detach, and
the last two import torch for each fault.

Faults that change nothing stand in equivalent_mutants.txt: a file, the statement before and after,
the reason. They are not planted. Survivors make the exit code 1. It needs Linux.
"""

import argparse
import itertools
import multiprocessing
import os
import sys
from collections.abc import Iterable, Iterator
from importlib.machinery import SourceFileLoader
from multiprocessing.connection import wait
from pathlib import Path

import hypothesis  # noqa: F401  imported once, before the forks
import pytest
import torch  # noqa: F401  the same

from accelerated.models import NAMES
from tests.tools.mutants import Mutant, mutants_of, planted, sample

ROOT = Path(__file__).parents[2]
VARIANTS = ROOT / "reference" / "variants"
ROOMS = ("accelerated/attention", "accelerated/generation", "accelerated/fast/generation")
FILES = [f"{side}/{model}.py" for side in ("reference", "accelerated") for model in NAMES]
FILES += sorted(f"reference/variants/{path.name}" for path in VARIANTS.glob("[a-z]*.py"))
FILES += ["accelerated/lab/systems/roberta.py", "reference/rollout.py"]
FILES += [f"accelerated/{name}.py" for name in ("adaptive", "protocol", "replay")]
for room in ROOMS:
    FILES += sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(f"{room}/[a-z]*.py"))
OTHERS = "data/windows evaluation/score training/optimization fast/devices"
OTHERS += " fast/loss fast/paths fast/retrieval"
FILES += [f"accelerated/{name}.py" for name in OTHERS.split()]
TESTS = ["tests/reference", "tests/attention", "tests/generation"]
TESTS += sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/test_*.py"))
TESTS += ["tests/data/test_lanes.py", "tests/data/test_windows.py", "tests/evaluation"]
TESTS += ["tests/lab/reports", "tests/lab/systems/test_roberta.py"]
TESTS += ["tests/training/test_optimization.py", "tests/house/test_check.py"]
EQUIVALENT = ROOT / "tests" / "tools" / "equivalent_mutants.txt"
FORK = multiprocessing.get_context("fork")


def main() -> int:
    """Plant the faults that the command line asks for; return the exit code."""
    options = parse_options()
    faults = faults_to_plant(options)
    if any(code for _, code in tried([None], 1)):
        print("Without any fault these tests do not pass")
        return 2
    survivors = []
    for fault, code in tried(faults, options.jobs):
        verdict = "caught" if code else "survived"
        print(f"{verdict:<9} {fault.file}:{fault.line} {fault.kind}: {fault.after}", flush=True)
        if not code:
            survivors.append(fault)
    for fault in survivors:
        print(f"\n{fault.file}:{fault.line} {fault.kind} survived")
        print(f"- {fault.before}\n+ {fault.after}")
    return 1 if survivors else 0


def parse_options() -> argparse.Namespace:
    """The options of the command line."""
    summary = __doc__.partition("\n\n")[0]
    parser = argparse.ArgumentParser("python -m tests.tools.mutate", description=summary)
    add = parser.add_argument
    add("--count", type=int, default=400, help="faults that are drawn (default 400)")
    add("--seed", type=int, default=0, help="of the draw")
    add("--files", nargs="+", default=FILES, metavar="FILE", help="files to plant faults in")
    add("-j", "--jobs", type=int, default=2, help="faults at a time (default 2)")
    return parser.parse_args()


def faults_to_plant(options: argparse.Namespace) -> list[Mutant]:
    """The faults that are drawn, without those that are explained; says how many."""
    found = [mutant for file in options.files for mutant in mutants_of(ROOT, file)]
    chosen = sample(found, options.count, options.seed)
    explained = read_equivalent()
    faults = []
    for mutant in chosen:
        if (mutant.file, mutant.before, mutant.after) not in explained:
            faults.append(mutant)
    unplanted = len(chosen) - len(faults)
    print(f"{len(faults)} of {len(found)} faults, and {unplanted} that change nothing", flush=True)
    return faults


def tried(faults: Iterable[Mutant | None], jobs: int) -> Iterator[tuple]:
    """Yield (fault, exit code of the tests with it) of each, `jobs` at a time; None is no fault."""
    faults = iter(faults)
    running = {}
    while True:
        for fault in itertools.islice(faults, jobs - len(running)):
            child = FORK.Process(target=run_tests, args=(fault,))
            child.start()
            running[child.sentinel] = fault, child
        if not running:
            return
        fault, child = running.pop(wait(running)[0])
        child.join()
        yield fault, child.exitcode


def run_tests(fault: Mutant | None) -> None:
    """In a child: plant the fault and exit with pytest's code.

    What is printed with a fault is lost.
    """
    plugins = []
    if fault:
        plant(fault)
        plugins.append(NearestFirst(Path(fault.file).stem))
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    words = "-x -q -o addopts= -p no:cacheprovider --import-mode=importlib --no-header --tb=no"
    places = [f"--rootdir={ROOT}", f"--config-file={ROOT / 'pyproject.toml'}"]
    tests = [str(ROOT / test) for test in TESTS]
    sys.exit(pytest.main([*words.split(), *places, *tests], plugins))


class NearestFirst:
    """A pytest plugin: tests whose names have a file's in them run first."""

    def __init__(self, stem: str):
        self.stem = stem

    def pytest_collection_modifyitems(self, items: list) -> None:
        items.sort(key=lambda item: self.stem not in item.nodeid)


def plant(fault: Mutant) -> None:
    """Have Python import the fault's file with the fault."""
    path = str(ROOT / fault.file)
    unchanged = SourceFileLoader.get_code

    def get_code(loader, name):
        if loader.path != path:
            return unchanged(loader, name)
        return compile(planted(fault), path, "exec")

    SourceFileLoader.get_code = get_code


def read_equivalent() -> dict[tuple[str, str, str], str]:
    """{(file, statement before, and after): why it changes nothing}."""
    rows = [block.split("\n", 3) for block in EQUIVALENT.read_text().strip().split("\n\n")]
    return {(file, before[2:], after[2:]): why for file, before, after, why in rows}


if __name__ == "__main__":
    sys.exit(main())
