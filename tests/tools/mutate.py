"""python -m tests.tools.mutate: plants small faults in the maths, one at a time, and lists those that no test notices.

A fault (mutants.py) is put into functions that are already imported, in a child process that is forked after pytest has
collected the tests. So a fault costs only the tests that reach its function, the fastest first, until one fails. mutmut,
cosmic-ray and poodle know no dropped terms, swapped arguments or lost detach, and the last two import torch for each fault.

Faults that change nothing stand in equivalent_mutants.txt: a file, the statement before and after, the reason. They are not
planted. Survivors make the exit code 1. It needs Linux.
"""

import argparse
import ast
import gc
import itertools
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import CodeType, FunctionType

import pytest
from _pytest.runner import runtestprotocol
from hypothesis import HealthCheck, Phase, settings

from accelerated.models import NAMES
from tests.tools.mutants import Mutant, mutants_of, planted, sample

ROOT = Path(__file__).parents[2]
FILES = (
    *(f"{side}/{paper}.py" for side in ("reference", "accelerated") for paper in NAMES),
    *("reference/roberta.py", "accelerated/lab/systems/roberta.py", "reference/rollout.py"),
    *(f"accelerated/{name}.py" for name in ("adaptive", "protocol", "replay")),
    *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("accelerated/attention/[a-z]*.py")),
    *("accelerated/data/windows.py", "accelerated/evaluation/score.py", "accelerated/training/optimization.py"),
)
TESTS = (
    *("tests/reference", "tests/attention", *(str(path) for path in sorted(ROOT.glob("tests/test_*.py")))),
    *("tests/data/test_lanes.py", "tests/data/test_windows.py", "tests/evaluation/test_positions.py"),
    *("tests/evaluation/test_score.py", "tests/lab/reports", "tests/lab/systems/test_roberta.py"),
    *("tests/training/test_optimization.py", "tests/house/test_check.py"),
)
EQUIVALENT = ROOT / "tests" / "tools" / "equivalent_mutants.txt"
PATIENCE, LEAST = 8, 20.0  # a test may take 8 times its time and 20 s more
MEMORY = 8 * 2**30  # bytes that a fault may add
CHUNK = 40  # tests that one child runs to see what they reach


def main() -> int:
    """Plant the faults that the command line asks for; return the exit code."""
    parser = argparse.ArgumentParser("python -m tests.tools.mutate", description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=400, help="faults, drawn in turn from every file and kind (default 400)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--files", nargs="+", default=FILES, metavar="FILE", help="files to plant faults in")
    parser.add_argument("--tests", nargs="+", default=[str(ROOT / test) for test in TESTS], metavar="TEST", help="tests to run")
    parser.add_argument("--equivalent", type=Path, default=EQUIVALENT, metavar="FILE", help="survivors that change nothing")
    parser.add_argument("-j", "--jobs", type=int, default=2, help="faults at a time (default 2)")
    options = parser.parse_args()
    found = [mutant for file in options.files for mutant in mutants_of(ROOT, file)]
    chosen, explained = sample(found, options.count, options.seed), read_equivalent(options.equivalent)
    planted = [mutant for mutant in chosen if (mutant.file, mutant.before, mutant.after) not in explained]
    print(f"{len(planted)} of {len(found)} faults, and {len(chosen) - len(planted)} that change nothing", flush=True)
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: jobs are the parallel work, and threads do not survive a fork
    run = Run(planted, options)
    words = ["-o", "addopts=", "--import-mode=importlib", "-qq", "-s", "--no-header", "--no-summary"]
    words += [f"--rootdir={ROOT}", f"--config-file={ROOT / 'pyproject.toml'}"]
    code = pytest.main([*words, *options.tests], plugins=[run])
    return code if run.exit_code is None else run.exit_code


class Run:
    """The pytest plugin that plants the faults once the tests are collected."""

    def __init__(self, mutants: list[Mutant], options: argparse.Namespace):
        self.mutants, self.options, self.exit_code = mutants, options, None

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session):
        """Examples are always the same ones, and a failure is not made smaller."""
        how = {"deadline": None, "derandomize": True, "database": None, "suppress_health_check": list(HealthCheck)}
        settings.register_profile("faults", settings(), phases=(Phase.explicit, Phase.generate), **how)
        settings.load_profile("faults")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session):
        session.config._tmp_path_factory.getbasetemp()  # one for all children
        if session.testsfailed:
            return None
        os.nice(10)
        self.items = {f"{item.path}::{item.nodeid.partition('::')[2]}": item for item in session.items}
        self.functions = functions_of({str(ROOT / file) for file in self.options.files})
        gc.freeze()  # or a child's collector would touch, and so copy, all that the parent holds
        print(f"first {len(self.items)} tests without a fault", flush=True)
        names, record = [*self.items], {}
        chunks = [names[at : at + CHUNK] for at in range(0, len(names), CHUNK)]
        for chunk, result, _ in forked(chunks, self.reached, self.options.jobs):
            record |= result or {name: {"passed": False} for name in chunk}
        if failed := [name for name, test in record.items() if not test["passed"]]:
            print("Without any fault these tests fail:", *failed, sep="\n  ")
        self.exit_code = 2 if failed else self.plant(record)
        return True

    def reached(self, names):
        """{test: its seconds, whether it passes, the functions that it reaches}."""
        found = {}
        for name, after in itertools.pairwise([*names, None]):
            codes, began = set(), time.process_time()
            sys.settrace(lambda frame, event, value, codes=codes: codes.add(frame.f_code))
            passed = passes(self.items[name], self.items.get(after))
            sys.settrace(None)
            own = [*{name_of(code) for code in codes} & self.functions.keys()]
            found[name] = {"seconds": time.process_time() - began, "passed": passed, "functions": own}
        return found

    def plant(self, record):
        """Plant every fault; print how it ended; return the exit code."""
        ends, survivors, began = Counter(), [], time.monotonic()
        for mutant, result, how in forked(self.mutants, lambda mutant: self.tried(mutant, record), self.options.jobs):
            end = result or how
            ends[end.partition(" ")[0]] += 1
            print(f"{end:<12} {mutant.file}:{mutant.line} {mutant.kind}: {mutant.after}", flush=True)
            survivors += [mutant] if end.startswith("survived") else []
        print(*(f"{count} {how}," for how, count in ends.most_common()), f"in {time.monotonic() - began:.0f} s")
        print(*(f"\n{m.file}:{m.line} {m.kind} survived\n- {m.before}\n+ {m.after}" for m in survivors), sep="\n")
        return 1 if survivors else 0

    def tried(self, mutant, record):
        """Whether the tests that reach a fault catch it, the fastest first."""
        try:
            function = install(mutant, self.functions)
        except (SyntaxError, ValueError) as error:  # of a function whose variables from outside are others
            return f"unplanted ({error})"
        seconds = {name: t["seconds"] for name, t in record.items() if function is None or function in t["functions"]}
        for name, after in itertools.pairwise([*sorted(seconds, key=seconds.get), None]):
            signal.setitimer(signal.ITIMER_PROF, PATIENCE * seconds[name] + LEAST)
            if not passes(self.items[name], self.items.get(after)):
                return "caught"
        return f"survived ({len(seconds)} tests)"


def passes(item: pytest.Item, after: pytest.Item | None) -> bool:
    return not any(report.failed for report in runtestprotocol(item, log=False, nextitem=after))


def name_of(code: CodeType) -> str:
    """What a function's code is known by, also after a fault was planted in its file."""
    return f"{code.co_filename}:{code.co_firstlineno}:{code.co_name}"


def functions_of(paths: set[str]) -> dict[str, list[FunctionType]]:
    """All functions that stand in the files, wherever they are held: methods, decorated ones, entries of tables."""
    found = {}
    for thing in gc.get_objects():
        if type(thing) is FunctionType and thing.__code__.co_filename in paths:
            found.setdefault(name_of(thing.__code__), []).append(thing)
    return found


def install(mutant: Mutant, functions: dict[str, list[FunctionType]]) -> str | None:
    """Plant a fault in the functions; return the changed one's name. None: it is a module's constant, changed wherever it is."""
    path, tree, name = str(ROOT / mutant.file), planted(mutant), None
    codes = [compile(tree, path, "exec")]
    for code in codes:
        codes += [part for part in code.co_consts if isinstance(part, CodeType)]
        for function in functions.get(name_of(code), ()):
            if function.__code__ != code:
                function.__code__, name = code, name_of(code)
    if name is None:
        node = next(node for node in tree.body if node.lineno <= mutant.line <= node.end_lineno)
        constant, modules = node.targets[0].id, [*sys.modules.values()]
        own = next(vars(module) for module in modules if getattr(module, "__file__", None) == path)
        value, old = eval(compile(ast.Expression(node.value), path, "eval"), own), own[constant]
        for module in modules:
            if getattr(module, "__dict__", {}).get(constant) is old:
                setattr(module, constant, value)
    return name


def forked(tasks: Iterator, work: Callable, jobs: int) -> Iterator[tuple]:
    """Run work(task) in a child process each, `jobs` at a time; yield (task, its result or None, how it ended)."""
    running, tasks, context = {}, iter(tasks), multiprocessing.get_context("fork")
    while True:
        for task in itertools.islice(tasks, jobs - len(running)):
            receiver, sender = context.Pipe(duplex=False)
            child = context.Process(target=in_child, args=(work, task, sender))
            child.start()
            sender.close()
            running[receiver] = task, child
        if not running:
            return
        receiver = wait(running)[0]
        task, child = running.pop(receiver)
        try:
            result = receiver.recv()
        except EOFError:  # it ended before it was done
            result = None
        child.join()
        yield task, result, "timeout" if child.exitcode == -signal.SIGPROF else "crashed"


def in_child(work: Callable, task: object, sender: Connection) -> None:
    """Send work(task); what it prints is lost."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_RDWR), stream)
    sender.send(work(task))


def read_equivalent(path: Path) -> dict[tuple[str, str, str], str]:
    """{(file, statement before, and after): why it changes nothing}."""
    rows = [block.split("\n", 3) for block in path.read_text().strip().split("\n\n")]
    return {(file, before[2:], after[2:]): why for file, before, after, why in rows}


if __name__ == "__main__":
    sys.exit(main())
