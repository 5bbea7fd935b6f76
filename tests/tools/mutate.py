"""python -m tests.tools.mutate: plants small faults in the maths, one at a time, and lists those
that no test notices.

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
FILES = (
    *(f"{side}/{paper}.py" for side in ("reference", "accelerated") for paper in NAMES),
    *("reference/roberta.py", "accelerated/lab/systems/roberta.py", "reference/rollout.py"),
    *(f"accelerated/{name}.py" for name in ("adaptive", "protocol", "replay")),
    *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("accelerated/attention/[a-z]*.py")),
    *(
        "accelerated/data/windows.py",
        "accelerated/evaluation/score.py",
        "accelerated/training/optimization.py",
    ),
)
TESTS = (
    *(
        "tests/reference",
        "tests/attention",
        *(str(path) for path in sorted(ROOT.glob("tests/test_*.py"))),
    ),
    *(
        "tests/data/test_lanes.py",
        "tests/data/test_windows.py",
        "tests/evaluation/test_positions.py",
    ),
    *("tests/evaluation/test_score.py", "tests/lab/reports", "tests/lab/systems/test_roberta.py"),
    *("tests/training/test_optimization.py", "tests/house/test_check.py"),
)
EQUIVALENT = ROOT / "tests" / "tools" / "equivalent_mutants.txt"
FORK = multiprocessing.get_context("fork")


def main() -> int:
    """Plant the faults that the command line asks for; return the exit code."""
    parser = argparse.ArgumentParser(
        "python -m tests.tools.mutate", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "--count",
        type=int,
        default=400,
        help="faults, drawn in turn from every file and kind (default 400)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument(
        "--files", nargs="+", default=FILES, metavar="FILE", help="files to plant faults in"
    )
    parser.add_argument(
        "--tests",
        nargs="+",
        default=[str(ROOT / test) for test in TESTS],
        metavar="TEST",
        help="tests to run",
    )
    parser.add_argument(
        "--equivalent",
        type=Path,
        default=EQUIVALENT,
        metavar="FILE",
        help="survivors that change nothing",
    )
    parser.add_argument("-j", "--jobs", type=int, default=2, help="faults at a time (default 2)")
    options = parser.parse_args()
    found = [mutant for file in options.files for mutant in mutants_of(ROOT, file)]
    chosen = sample(found, options.count, options.seed)
    explained = read_equivalent(options.equivalent)
    faults = [
        mutant for mutant in chosen if (mutant.file, mutant.before, mutant.after) not in explained
    ]
    print(
        f"{len(faults)} of {len(found)} faults, "
        f"and {len(chosen) - len(faults)} that change nothing",
        flush=True,
    )
    if any(code for _, code in tried([None], options.tests, 1)):
        print("Without any fault these tests do not pass")
        return 2
    survivors = []
    for mutant, code in tried(faults, options.tests, options.jobs):
        verdict = "caught" if code else "survived"
        place = f"{mutant.file}:{mutant.line}"
        print(f"{verdict:<9} {place} {mutant.kind}: {mutant.after}", flush=True)
        survivors += [] if code else [mutant]
    print(
        *(f"\n{m.file}:{m.line} {m.kind} survived\n- {m.before}\n+ {m.after}" for m in survivors),
        sep="\n",
    )
    return 1 if survivors else 0


def tried(faults: Iterable[Mutant | None], tests: list[str], jobs: int) -> Iterator[tuple]:
    """Yield (fault, exit code of the tests with it) of each, `jobs` at a time; None is no fault."""
    faults = iter(faults)
    running = {}
    while True:
        for fault in itertools.islice(faults, jobs - len(running)):
            child = FORK.Process(target=run_tests, args=(fault, tests))
            child.start()
            running[child.sentinel] = fault, child
        if not running:
            return
        fault, child = running.pop(wait(running)[0])
        child.join()
        yield fault, child.exitcode


def run_tests(fault: Mutant | None, tests: list[str]) -> None:
    """In a child: plant the fault and exit with pytest's code.

    What is printed with a fault is lost.
    """
    plugins = []
    if fault:
        plant(fault)
        plugins.append(NearestFirst(Path(fault.file).stem))
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    words = [
        "-x",
        "-q",
        "-o",
        "addopts=",
        "-p",
        "no:cacheprovider",
        "--import-mode=importlib",
        "--no-header",
        "--tb=no",
    ]
    sys.exit(
        pytest.main(
            [*words, f"--rootdir={ROOT}", f"--config-file={ROOT / 'pyproject.toml'}", *tests],
            plugins,
        )
    )


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
        return (
            compile(planted(fault), path, "exec")
            if loader.path == path
            else unchanged(loader, name)
        )

    SourceFileLoader.get_code = get_code


def read_equivalent(path: Path) -> dict[tuple[str, str, str], str]:
    """{(file, statement before, and after): why it changes nothing}."""
    rows = [block.split("\n", 3) for block in path.read_text().strip().split("\n\n")]
    return {(file, before[2:], after[2:]): why for file, before, after, why in rows}


if __name__ == "__main__":
    sys.exit(main())
