"""Judges answers: on fixed examples of different sizes, then on random small ones.

__main__.py and test_practice.py use it. Each file is run in a process of its own (answering.py),
which is ended if it takes too long, and what it returned is compared here. An answer that loops,
prints, raises, ends Python, changes its arguments or returns something else than arrays is refused
with one sentence, and the next one is judged.
"""

import contextlib
import copy
import functools
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from hypothesis import HealthCheck, Phase, find, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample

from docs.practice.answering import NOT_BEGUN, Refused, results_of
from docs.practice.symptoms import Example, drawing, symptom_of, where_wrong
from docs.practice.tasks import Task, mistaken, tasks_of

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
BEGIN = HERE / "begin"
FILES = ("transformer", "compressive", "block_recurrent", "memformer", "pretrained_recurrence")
SECONDS = 5.0  # that an answer may take for one example; a right one takes a thousandth
START = 60.0  # that Python may take to start
FIXED = 4  # examples of different sizes, by which a symptom is named
RANDOM = 40  # examples that Hypothesis draws
SEARCH = settings(
    max_examples=RANDOM,
    database=None,
    deadline=None,
    derandomize=True,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=[*HealthCheck],
)
Ask = Callable[[dict, int], dict]  # (sizes, seed of an example) -> {result: array}, or Refused


class Verdict(NamedTuple):
    """What is said of an answer."""

    task: str
    status: str  # done, wrong, not begun
    lines: tuple = ()


# ----------------------------------------------------------------------------
# the process that runs a reader's file
class Runner:
    """Asks a process for the results of a file's answers; one that was ended is started again."""

    def __init__(self, path: Path):
        self.path = path
        self.process: Any = None

    def ask(self, task: str, sizes: dict, seed: int) -> dict:
        """{result: array} of an answer on an example; Refused if there is none to compare."""
        self.start()
        request = {"path": str(self.path), "task": task, "sizes": sizes, "seed": seed}
        with self.ending_after(SECONDS) as rung:
            with contextlib.suppress(OSError):  # it has ended: no reply follows
                self.process.stdin.write(json.dumps(request).encode() + b"\n")
                self.process.stdin.flush()
            results = self.reply()
        if results is not None:
            return results
        self.end()
        if rung:
            raise Refused(f"it loops: no result after {SECONDS:.0f} seconds, on small arrays")
        raise Refused("it ends Python, or uses too much memory")

    def reply(self) -> dict | None:
        """{result: array}, or None if the process ended before; Refused as the process says."""
        try:
            head = json.loads(self.process.stdout.readline())
            if "refused" in head:
                raise Refused(str(head["refused"]))
            body = io.BytesIO(self.process.stdout.read(head["bytes"]))
            with np.load(body, allow_pickle=False) as arrays:
                return dict(arrays)
        except (ValueError, KeyError, TypeError, OSError):  # no reply, or not all of it
            return None

    def start(self) -> None:
        """Start the process, unless it runs, and wait until it listens."""
        if self.process is not None:
            return
        command = [sys.executable, "-m", "docs.practice.answering"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, cwd=ROOT, **pipes)
        with self.ending_after(START):
            self.process.stdout.readline()

    @contextlib.contextmanager
    def ending_after(self, seconds: float) -> Iterator[list]:
        """End the process if the block takes longer; the list then has an item."""
        rung: list = []

        def ring() -> None:
            rung.append(True)
            kill(self.process)

        timer = threading.Timer(seconds, ring)
        timer.start()
        try:
            yield rung
        finally:
            timer.cancel()

    def end(self) -> None:
        """End the process and all that it started."""
        if self.process is not None:
            kill(self.process)
            self.process.communicate()
            self.process = None


def kill(process: subprocess.Popen) -> None:
    """End a process, and its group where there are such."""
    with contextlib.suppress(OSError, AttributeError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()


@contextlib.contextmanager
def running(path: Path) -> Iterator[Runner]:
    """A Runner of a file, whose process is ended after the block."""
    runner = Runner(path)
    try:
        yield runner
    finally:
        runner.end()


# ----------------------------------------------------------------------------
# judging
def judge(task: Task, ask: Ask) -> Verdict:
    """What is said of the answer that `ask` runs."""
    try:
        wrong = wrong_examples(task, ask)
    except Refused as refused:
        if str(refused) == NOT_BEGUN:
            return Verdict(task.name, NOT_BEGUN)
        return Verdict(task.name, "wrong", (str(refused),))
    if not wrong:
        return Verdict(task.name, "done")

    name, sentence = symptom_of(wrong)
    smallest = wrong[-1]
    if name not in smallest.wrong:  # it is wrong in another result
        smallest = wrong[0]
    found = smallest.found[name]
    right = smallest.right[name]
    if name == task.also:
        return Verdict(task.name, "wrong", (name,))
    sizes = " ".join(f"{letter}={size}" for letter, size in smallest.sizes.items())
    lines = (
        f"{name}: {sentence}",
        f"smallest example: {sizes}; {where_wrong(found, right)}",
        *drawing(found, right),
        f"a hint: python -m docs.practice --hint {task.name} {hint_for(sentence)}",
    )
    return Verdict(task.name, "wrong", lines)


def hint_for(sentence: str) -> int:
    """Which hint helps with a symptom: 3, the formula, for a factor, a sign or a term of it.

    2, the shape of the derivation, is for shapes, axes and keys; what is not known asks for 1.
    """
    if re.search("factor|sign|term|softmax|divided|multiplied|missing", sentence):
        return 3
    is_known = not sentence.startswith("other numbers")
    return 2 if is_known else 1


def wrong_examples(task: Task, ask: Ask) -> list[Example]:
    """Fixed examples that are wrong, and the smallest one that Hypothesis finds, last; or none."""
    wrong = []
    for seed, sizes in enumerate(sizes_of(task)):
        one = example_of(task, ask, sizes, seed)
        if one.wrong:
            wrong.append(one)

    def is_wrong(drawn: tuple) -> list:
        return example_of(task, ask, *drawn).wrong

    letters = {letter: st.integers(*ends) for letter, ends in task.sizes.items()}
    drawn = st.tuples(st.fixed_dictionaries(letters), st.integers(0, 99))
    with contextlib.suppress(NoSuchExample):
        wrong.append(example_of(task, ask, *find(drawn, is_wrong, settings=SEARCH)))
    return [explained(task, one) for one in wrong]


def explained(task: Task, one: Example) -> Example:
    """An example with what well-known mistakes return."""
    judged = sys.modules[task.right.__module__]
    known = []
    for sentence, function in mistaken(judged, task.name):
        known.append((sentence, results_of(task, function, copy.deepcopy(one.given))))
    return one._replace(mistakes=known)


def sizes_of(task: Task) -> list[dict]:
    """Sizes of the fixed examples, in each of which no two letters are alike if that can be."""
    rng = np.random.default_rng(0)
    chosen = []
    while len(chosen) < FIXED:
        for _ in range(200):
            sizes = {letter: int(rng.integers(a, b + 1)) for letter, (a, b) in task.sizes.items()}
            large = [size for size in sizes.values() if size > 1]
            if len({*large}) == len(sizes):
                break
        chosen.append(sizes)
    return chosen


def example_of(task: Task, ask: Ask, sizes: dict, seed: int) -> Example:
    """An answer's call beside the right one's."""
    given = task.given(np.random.default_rng(seed), sizes)
    right = results_of(task, task.right, copy.deepcopy(given))
    found = ask(sizes, seed)
    for name, array in right.items():
        check_type(name, found[name], array)
    return Example(sizes, given, found, right, task.returns, [])


def check_type(name: str, found: np.ndarray, right: np.ndarray) -> None:
    """Refused unless a result holds numbers of the right kind."""
    expected = {"b": "bool", "i": "integers"}.get(right.dtype.kind, "float64")
    kinds = {"bool": "b", "integers": "iu", "float64": "fiu"}[expected]
    if found.dtype.kind not in kinds:
        raise Refused(f"{name} is an array of {found.dtype}; expected {expected}")


def judge_file(folder: Path, file: str, only: str = "") -> list[Verdict]:
    """What is said of the answers of a file, or of one of them."""
    chosen = [task for task in tasks_of(file) if only in ("", task.name)]
    with running((folder / f"{file}.py").absolute()) as runner:
        return [judge(task, functools.partial(runner.ask, task.name)) for task in chosen]
