"""python -m tests.tools.mutate: plants small faults in the maths, one at a time, and lists those that no test notices.

A fault (mutants.py) is put into functions that are already imported, in a child process that is forked after pytest has
collected the tests. So a fault costs only the tests that reach its function, the fastest first, until one fails. The kept tools
do not fit: mutmut, cosmic-ray and poodle know no dropped terms, ends of slices, swapped arguments, removed lines or lost detach,
and the last two start pytest, and import torch, anew for each fault.

Faults that change nothing stand with the reason in equivalent_mutants.txt: a file, the line before and after, the reason. They
are not planted. Survivors make the exit code 1. What a test reaches is kept in pytest's cache until the program or its file
changes. It needs Linux.
"""

import argparse
import ast
import gc
import hashlib
import itertools
import json
import math
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FunctionType

import pytest
from _pytest.runner import runtestprotocol
from hypothesis import HealthCheck, Phase, settings

from tests.tools.mutants import KINDS, Mutant, changed, mutants_of, sample

ROOT = Path(__file__).parents[2]
PAPERS = ("block_recurrent", "compressive", "memformer", "memorizing", "pretrained_recurrence")
FILES = (
    *(f"{side}/{paper}.py" for side in ("reference", "accelerated") for paper in PAPERS),
    *("reference/roberta.py", "accelerated/lab/systems/roberta.py"),
    *("reference/rollout.py", "accelerated/protocol.py", "accelerated/replay.py"),
    *(f"accelerated/attention/{name}.py" for name in ("content", "heads", "on_a_cpu", "relative_shift", "retrieval")),
    *(f"accelerated/attention/{name}.py" for name in ("signed_distance", "sliding_window", "slots")),
    "accelerated/adaptive.py",
    *("accelerated/data/windows.py", "accelerated/evaluation/score.py", "accelerated/training/optimization.py"),
)
TESTS = (
    *("tests/reference", "tests/attention", *(f"tests/test_{paper}.py" for paper in PAPERS)),
    *(f"tests/test_{name}.py" for name in ("adaptive", "contract", "edges", "loss", "protocol", "reach")),
    *(f"tests/test_{name}.py" for name in ("replay", "streams", "types")),
    *(f"tests/data/test_{name}.py" for name in ("corpus", "lanes", "windows")),
    *(f"tests/evaluation/test_{name}.py" for name in ("positions", "score")),
    *(f"tests/lab/reports/test_{name}.py" for name in ("dynamic", "memories")),
    *("tests/training/test_optimization.py", "tests/lab/systems/test_roberta.py"),
)
EQUIVALENT = ROOT / "tests" / "tools" / "equivalent_mutants.txt"
PATIENCE, LEAST = 8, 20.0  # a test may take 8 times its time and 20 s more
MEMORY = 8 * 2**30  # bytes that a fault may add
RECORD = "mutate/tests"  # in pytest's cache
CHUNK = 40  # tests that one child runs to see what they reach


def main() -> int:
    """Plant the faults that the command line asks for; return the exit code."""
    options = parse()
    found = [mutant for file in options.files for mutant in mutants_of(ROOT, file)]
    chosen = found if options.all else sample(found, options.count, options.seed)
    if options.list:
        print(*(f"{m.file}:{m.line} {m.kind}\n    - {m.before}\n    + {m.after}" for m in chosen), sep="\n")
        return 0
    print(f"{len(chosen)} of {len(found)} faults", flush=True)
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: jobs are the parallel work, and threads do not survive a fork
    run = Run(chosen, options)
    words = ["-o", "addopts=", "--import-mode=importlib", "-qq", "-s", "--no-header", "--no-summary", "-p", "no:randomly"]
    words += [f"--rootdir={ROOT}", f"--config-file={ROOT / 'pyproject.toml'}"]
    code = pytest.main([*words, *options.tests], plugins=[run])
    return run.exit_code if run.exit_code is not None else int(code)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.tools.mutate", description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=400, help="faults, drawn in turn from every file and kind (default 400)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--all", action="store_true", help="every fault")
    parser.add_argument("--files", nargs="+", default=FILES, metavar="FILE", help="files to plant faults in")
    parser.add_argument("--tests", nargs="+", default=[str(ROOT / test) for test in TESTS], metavar="TEST", help="tests to run")
    parser.add_argument("--equivalent", type=Path, default=EQUIVALENT, metavar="FILE", help="survivors that change nothing")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds of tests for each fault (default all)")
    parser.add_argument("--list", action="store_true", help="show the faults only")
    parser.add_argument("-j", "--jobs", type=int, default=2, help="faults at a time (default 2)")
    return parser.parse_args()


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
        record = self.record(session.config.cache)
        failed = [name for name, test in record.items() if not test["passed"]]
        if failed:
            print("Without any fault these tests fail:", *failed, sep="\n  ")
            self.exit_code = 2
        else:
            self.exit_code = self.plant(record)
        return True

    def record(self, cache):
        """{test: its seconds, whether it passed, the functions that it reached}, all without a fault."""
        helpers = (path for path in ROOT.glob("tests/helpers/*.py"))
        program = [*map(ROOT.joinpath, self.options.files), *helpers, *ROOT.glob("accelerated/**/*.py")]
        digests = {path: digest_of([*program, path], self.options.files) for path in {item.path for item in self.items.values()}}
        own = {name: digests[item.path] for name, item in self.items.items()}
        kept = cache.get(RECORD, {})  # of other tests too
        record = {name: test for name, test in kept.items() if own.get(name) == test["digest"]}
        names = [name for name in own if name not in record]
        if names:
            print(f"first {len(names)} tests without a fault", flush=True)
        chunks = [names[at : at + CHUNK] for at in range(0, len(names), CHUNK)]
        for chunk, result, _ in forked(chunks, self.reached, self.options.jobs):
            found = result or {name: {"passed": False} for name in chunk}
            record |= {name: test | {"digest": own[name]} for name, test in found.items()}
            cache.set(RECORD, kept | record)
        return record

    def reached(self, names):
        """What each of the tests reaches, and whether it passes."""
        found = {}
        for name, after in itertools.pairwise([*names, None]):
            codes, began = set(), time.process_time()
            sys.settrace(lambda frame, event, value, codes=codes: codes.add(frame.f_code))
            passed = passes(self.items[name], self.items.get(after))
            sys.settrace(None)
            own = sorted({name_of(code) for code in codes} & self.functions.keys())
            found[name] = {"seconds": time.process_time() - began, "passed": passed, "functions": own}
        return found

    def plant(self, record):
        """Plant every fault; print how it ended; return the exit code."""
        explained, ends, survivors, began = read_equivalent(self.options.equivalent), Counter(), [], time.monotonic()
        unknown = [mutant for mutant in self.mutants if key_of(mutant) not in explained]

        def tried(mutant):
            try:
                function = install(mutant, self.functions)
            except (SyntaxError, ValueError) as error:  # of a function whose variables from outside are others
                return f"unplanted ({error})"
            seconds = {name: t["seconds"] for name, t in record.items() if function is None or function in t["functions"]}
            tests = within(in_turn(seconds), seconds, self.options.budget)
            return "caught" if self.notice(tests, seconds) else f"survived ({len(tests)} of {len(seconds)} tests)"

        tries = itertools.chain(
            ((mutant, "equivalent", None) for mutant in self.mutants if key_of(mutant) in explained),
            forked(unknown, tried, self.options.jobs),
        )
        for mutant, result, how in tries:
            end = result or how
            for row in (mutant.kind, mutant.file):
                ends[row, end.partition(" ")[0]] += 1
            print(f"{end:<12} {mutant.file}:{mutant.line} {mutant.kind}: {mutant.after}", flush=True)
            if end.startswith("survived"):
                survivors.append(mutant)
        print(table(ends), f"{len(self.mutants)} faults in {time.monotonic() - began:.0f} s", sep="\n")
        for mutant in survivors:
            print(f"\n{mutant.file}:{mutant.line} {mutant.kind} survived\n- {mutant.before}\n+ {mutant.after}")
        return 1 if survivors else 0

    def notice(self, tests, seconds):
        """Whether one of the tests fails."""
        for name, after in itertools.pairwise([*tests, None]):
            signal.setitimer(signal.ITIMER_PROF, PATIENCE * seconds[name] + LEAST)
            if not passes(self.items[name], self.items.get(after)):
                return True
        return False


def in_turn(seconds: dict[str, float]) -> list[str]:
    """Tests, fast ones first; of one test function's many parameters the n-th waits as if it took n times as long."""
    ranks, turns = Counter(), {}
    for name in sorted(seconds, key=seconds.get):
        function = name.partition("[")[0]
        ranks[function] += 1
        turns[name] = ranks[function] * seconds[name]
    return sorted(turns, key=turns.get)


def within(tests: list[str], seconds: dict[str, float], budget: float) -> list[str]:
    """The first tests, as many as fit into the budget."""
    sums = itertools.accumulate(seconds[name] for name in tests)
    return [name for name, total in zip(tests, sums, strict=True) if total <= budget]


def key_of(mutant: Mutant) -> tuple[str, str, str]:
    return mutant.file, mutant.before, mutant.after


def digest_of(paths: list[Path], chosen: Sequence[str]) -> str:
    """Of the files' contents and the names of the chosen ones, because a test's record names their functions alone."""
    parts = [*(path.read_bytes() for path in sorted(set(paths))), *(name.encode() for name in sorted(chosen))]
    return hashlib.sha256(bytes(1).join(parts)).hexdigest()


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


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """A code and all that stand in it."""
    yield code
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from codes_in(part)


def install(mutant: Mutant, functions: dict[str, list[FunctionType]]) -> str | None:
    """Plant a fault in the functions; return the name of the changed function, None if it is a module's constant."""
    path, text = str(ROOT / mutant.file), changed(ROOT, mutant)
    name = None
    for code in codes_in(compile(text, path, "exec")):
        for function in functions.get(name_of(code), ()):
            if function.__code__ != code:
                function.__code__, name = code, name_of(code)
    if name is None:
        set_constant(ast.parse(text), mutant.line, path)
    return name


def set_constant(tree: ast.Module, line: int, path: str) -> None:
    """Set a module's constant, and what other modules imported as it."""
    node = next(node for node in tree.body if node.lineno <= line <= node.end_lineno)
    own = next(vars(module) for module in [*sys.modules.values()] if getattr(module, "__file__", None) == path)
    name = node.targets[0].id
    value, old = eval(compile(ast.Expression(node.value), path, "eval"), own), own[name]
    for module in [*sys.modules.values()]:
        if getattr(module, "__dict__", {}).get(name) is old:
            setattr(module, name, value)


def forked(tasks: list, work: Callable, jobs: int) -> Iterator[tuple]:
    """Run work(task) in a child process each, `jobs` at a time; yield (task, its result or None, how it ended)."""
    waiting, running = [*tasks], {}
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < jobs:
                task, path = waiting.pop(0), os.path.join(folder, str(len(waiting)))
                sys.stdout.flush()
                child = os.fork()
                if not child:
                    in_child(work, task, path)
                running[child] = task, path
            child, status = os.wait()
            task, path = running.pop(child)
            result = json.loads(Path(path).read_text()) if status == 0 else None
            late = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF
            yield task, result, "timeout" if late else "crashed"


def in_child(work: Callable, task: object, path: str) -> None:
    """Write work(task) to a file, and end; what it prints is lost."""
    status, errors = 1, os.dup(2)
    try:
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (1, 2):
            os.dup2(nowhere, stream)
        Path(path).write_text(json.dumps(work(task)))
        status = 0
    except Exception:
        os.write(errors, traceback.format_exc().encode())
    finally:
        os._exit(status)


def read_equivalent(path: Path) -> dict[tuple[str, str, str], str]:
    """{(file, line before, line after): why it changes nothing}."""
    blocks = path.read_text().strip().split("\n\n") if path.exists() else []
    rows = [block.split("\n", 3) for block in blocks if block]
    return {(file, before[2:], after[2:]): why for file, before, after, why in rows}


def table(ends: Counter) -> str:
    """How many faults of each kind, and of each file, ended how."""
    columns = ("caught", "timeout", "crashed", "equivalent", "survived", "unplanted")
    lines = [f"{'':<40}" + "".join(f"{column:>12}" for column in columns)]
    names = [*KINDS, *sorted({name for name, _ in ends} - KINDS.keys())]
    lines += [f"{name:<40}" + "".join(f"{ends[name, column]:>12}" for column in columns) for name in names]
    totals = "".join(f"{sum(ends[kind, column] for kind in KINDS):>12}" for column in columns)
    return "\n".join([*lines, f"{'all':<40}{totals}"])


if __name__ == "__main__":
    sys.exit(main())
