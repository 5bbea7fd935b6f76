"""Calls a reader's functions, and refuses what cannot be compared.

It runs in the judge's process, as a test does.
"""

import contextlib
import copy
import inspect
import io
import runpy
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np

from docs.practice.tasks import Task

NOT_BEGUN = "not begun"
MAY_RAISE = (Exception, SystemExit)  # but Ctrl-C ends the judge


class Refused(Exception):
    """An answer that cannot be compared; the message is the sentence to print."""


def load(path: Path) -> dict:
    """{name: value} of the reader's file; Refused if Python cannot run it."""
    if not path.is_file():
        raise Refused(f"{path}: no such file; --copy FOLDER makes the files")
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return runpy.run_path(str(path))
    except MAY_RAISE as error:
        raise Refused(f"{path.name} cannot be read: {in_words(error)}") from None


def answer_of(names: dict, task: str) -> Callable:
    """The function of a task; Refused if the file has none."""
    if not inspect.isfunction(names.get(task)):
        raise Refused(f"the file has no function {task}")
    return names[task]


def results_of(task: Task, answer: Callable, given: dict) -> dict:
    """{result: array} of a call; Refused if there is none that can be compared."""
    before = copy.deepcopy(given)
    printed = io.StringIO()
    try:
        with (
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(printed),
            warnings.catch_warnings(),
            np.errstate(all="ignore"),
        ):
            warnings.simplefilter("ignore")
            returned = task.call(answer, given)
    except Refused:
        raise
    except MAY_RAISE as error:
        raise Refused(why_it_raises(error, task, answer)) from None
    for name, value in before.items():
        if not same(given[name], value):
            words = f"it changes its argument {name}: the caller still needs it, so copy it first"
            raise Refused(words)
    if printed.getvalue():
        first = printed.getvalue().splitlines()[0]
        raise Refused(f"it prints {first[:60]!r}: take that out")
    return named_results(task, returned)


def why_it_raises(error: BaseException, task: Task, answer: Callable) -> str:
    """What is said of an answer that raises: that a task is not begun, or the error."""
    if isinstance(error, NotImplementedError):
        name = traceback.extract_tb(error.__traceback__)[-1].name
        return NOT_BEGUN if name == task.name else f"it calls {name}, which is not written yet"
    file = answer.__code__.co_filename
    lines = [
        place.lineno
        for place in traceback.extract_tb(error.__traceback__)[1:]
        if place.filename == file
    ]
    where = f" in line {lines[-1]} of {Path(file).name}" if lines else ""
    return f"it raises {in_words(error)}{where}"


def in_words(error: BaseException) -> str:
    """An error's type and the first line of what it says."""
    first, *_ = [*str(error).splitlines(), ""]
    return f"{type(error).__name__}: {first}"


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
    for part in parts:
        is_numbers = isinstance(part, np.ndarray | np.generic | float | int)
        if not is_numbers or np.asarray(part).dtype.kind not in "biufc":
            kind = type(part).__name__
            raise Refused(f"it returns a {kind}, which is no array of numbers; {expected}")
    return dict(zip(names, map(np.asarray, parts), strict=True))
