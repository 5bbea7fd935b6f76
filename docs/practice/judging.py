"""Runs answers and judges them: on fixed examples of different sizes, then on random small ones.

__main__.py and test_practice.py use it. An answer that loops, prints, raises, changes its arguments
or returns something else than arrays is refused with one sentence, and the next one is judged.
"""

import contextlib
import copy
import importlib
import inspect
import io
import os
import runpy
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from hypothesis import HealthCheck, Phase, find, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample

from docs.practice.symptoms import Example, drawing, symptom_of, where_wrong
from docs.practice.tasks import Task, mistaken

HERE = Path(__file__).parent
BEGIN = HERE / "begin"
FILES = ("transformer", "compressive", "block_recurrent", "memformer", "pretrained_recurrence")
SECONDS = 5.0  # that an answer may take for one example; a right one takes a thousandth
CATCHES = 5  # how often an answer may catch that it takes too long
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


class Refused(Exception):
    """An answer that cannot be compared; the message is the sentence to print."""


class TooLong(BaseException):
    """An answer took too long; `except Exception` does not catch it."""


class Verdict(NamedTuple):
    """What is said of an answer."""

    task: str
    status: str  # done, wrong, not begun
    lines: tuple = ()


# ----------------------------------------------------------------------------
# running
@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise TooLong in the block if it takes longer; without an alarm clock, on Windows, never.

    It is raised again and again: a bare except in the block catches it. After some times the
    program ends.
    """
    if not hasattr(signal, "setitimer"):
        yield
        return
    rung = []

    def ring(number, frame):
        rung.append(number)
        if len(rung) > CATCHES:
            os.write(2, b"an endless loop in a bare except cannot be ended; name the error\n")
            os._exit(1)
        raise TooLong

    before = signal.signal(signal.SIGALRM, ring)
    another = signal.setitimer(signal.ITIMER_REAL, seconds, 0.2)  # of pytest-timeout
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *another)
        signal.signal(signal.SIGALRM, before)


def load(path: Path) -> dict:
    """{name: value} of the reader's file; Refused if Python cannot run it."""
    if not path.is_file():
        raise Refused(f"{path}: no such file; --copy FOLDER makes the files")
    try:
        with at_most(SECONDS), contextlib.redirect_stdout(io.StringIO()):
            return runpy.run_path(str(path))
    except TooLong:
        raise Refused(f"{path.name} does not end when it is read") from None
    except (Exception, SystemExit) as error:
        words = f"{path.name} cannot be read: {type(error).__name__}: {error}"
        raise Refused(words) from None


def results_of(task: Task, answer: Callable, given: dict) -> dict:
    """{result: array} of a call; Refused if there is none that can be compared."""
    before = copy.deepcopy(given)
    printed = io.StringIO()
    try:
        with (
            at_most(SECONDS),
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(printed),
            warnings.catch_warnings(),
            np.errstate(all="ignore"),
        ):
            warnings.simplefilter("ignore")
            returned = task.call(answer, given)
    except TooLong:
        words = f"it loops: no result after {SECONDS:.0f} seconds, on arrays of a few numbers"
        raise Refused(words) from None
    except NotImplementedError as error:
        name = traceback.extract_tb(error.__traceback__)[-1].name
        if name == task.name:
            raise
        raise Refused(f"it calls {name}, which is not written yet") from None
    except Refused:
        raise
    except (Exception, SystemExit) as error:
        raise Refused(f"it raises {raised(error, answer)}") from None
    for name, value in before.items():
        if not same(given[name], value):
            words = f"it changes its argument {name}: the caller still needs it, so copy it first"
            raise Refused(words)
    if printed.getvalue():
        first = printed.getvalue().splitlines()[0]
        raise Refused(f"it prints {first[:60]!r}: take that out")
    return named_results(task, returned)


def raised(error: BaseException, answer: Callable) -> str:
    """An error in words, with its line in the reader's file."""
    code = getattr(inspect.unwrap(answer), "__code__", None)
    file = code.co_filename if code else ""
    lines = [
        place.lineno
        for place in traceback.extract_tb(error.__traceback__)[1:]
        if place.filename == file
    ]
    where = f" in line {lines[-1]} of {Path(file).name}" if lines else ""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}{where}"


def same(one: object, two: object) -> bool:
    """Whether an argument is what it was."""
    if isinstance(one, np.ndarray):
        return np.array_equal(one, two, equal_nan=True)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same, one, two))
    return True


def named_results(task: Task, returned: object) -> dict:
    """{result: array} of what an answer returned; Refused if it is of another kind."""
    names = [*task.returns]
    several = len(names) > 1
    expected = f"expected {'a tuple' if several else 'a NumPy array'}: {', '.join(names)}"
    parts = returned if several else (returned,)
    if returned is None:
        raise Refused(f"it returns nothing; {expected}")
    if not isinstance(parts, tuple):
        raise Refused(f"it returns a {type(returned).__name__}; {expected}")
    if len(parts) != len(names):
        raise Refused(f"it returns {len(parts)} results; {expected}")
    for name, part in zip(names, parts, strict=True):
        if not isinstance(part, np.ndarray | np.generic | float | int):
            what = f"as {name} " if several else ""
            raise Refused(f"it returns {what}a {type(part).__name__}; {expected}")
    return {name: np.asarray(part) for name, part in zip(names, parts, strict=True)}


# ----------------------------------------------------------------------------
# judging
def judge(task: Task, answer: Callable) -> Verdict:
    """What is said of an answer."""
    try:
        wrong = wrong_examples(task, answer)
    except NotImplementedError:
        return Verdict(task.name, "not begun")
    except Refused as refused:
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
    )
    return Verdict(task.name, "wrong", lines)


def wrong_examples(task: Task, answer: Callable) -> list[Example]:
    """Fixed examples that are wrong, and the smallest one that Hypothesis finds, last; or none."""
    wrong = []
    for seed, sizes in enumerate(sizes_of(task)):
        one = example_of(task, answer, sizes, seed)
        if one.wrong:
            wrong.append(one)

    def is_wrong(drawn: tuple) -> list:
        return example_of(task, answer, *drawn).wrong

    letters = {letter: st.integers(*ends) for letter, ends in task.sizes.items()}
    drawn = st.tuples(st.fixed_dictionaries(letters), st.integers(0, 99))
    with contextlib.suppress(NoSuchExample):
        wrong.append(example_of(task, answer, *find(drawn, is_wrong, settings=SEARCH)))
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


def example_of(task: Task, answer: Callable, sizes: dict, seed: int) -> Example:
    """An answer's call beside the right one's."""
    given = task.given(np.random.default_rng(seed), sizes)
    right = results_of(task, task.right, copy.deepcopy(given))
    found = results_of(task, answer, copy.deepcopy(given))
    for name, array in found.items():
        check_type(name, array, right[name])
    return Example(sizes, given, found, right, task.returns, [])


def check_type(name: str, found: np.ndarray, right: np.ndarray) -> None:
    """Refused unless a result holds numbers of the right kind."""
    expected = {"b": "bool", "i": "integers"}.get(right.dtype.kind, "float64")
    kinds = {"bool": "b", "integers": "iu", "float64": "fiu"}[expected]
    if found.dtype.kind not in kinds:
        raise Refused(f"{name} is an array of {found.dtype}; expected {expected}")


def tasks_of(file: str) -> list[Task]:
    """The tasks of a file, in order."""
    return importlib.import_module(f"docs.practice.judged.{file}").TASKS


def judge_file(folder: Path, file: str, only: str = "") -> list[Verdict]:
    """What is said of the answers of a file, or of one of them."""
    chosen = [task for task in tasks_of(file) if only in ("", task.name)]
    try:
        answers = load(folder / f"{file}.py")
    except Refused as refused:
        return [Verdict(task.name, "wrong", (str(refused),)) for task in chosen]
    verdicts = []
    for task in chosen:
        if callable(answers.get(task.name)):
            verdicts.append(judge(task, answers[task.name]))
        else:
            words = f"{file}.py has no function {task.name}"
            verdicts.append(Verdict(task.name, "wrong", (words,)))
    return verdicts
