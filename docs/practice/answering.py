"""Runs a reader's file: the process that judging.py starts, which is ended if it does not answer.

A request is a line of JSON on standard input: the file, a task, the sizes and the seed of an
example. The reply on standard output is a line of JSON, `refused` with a sentence or `bytes`, and
then so many bytes of .npz with the results. The inputs of an example are drawn here, as some of
them are functions; what is right is computed outside, by the judge.
"""

import contextlib
import copy
import importlib.util
import inspect
import io
import json
import os
import runpy
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np

from docs.practice.tasks import Task, tasks_of

MEMORY = 4 * 2**30  # bytes of addresses that an answer may use, where the system can limit them
LARGEST = 10**6  # numbers in a result; a right one has some hundred
CAN_LIMIT = importlib.util.find_spec("resource") is not None  # not on Windows
STARTS = ("os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec", "subprocess.Popen")
NOT_BEGUN = "not begun"


class Refused(Exception):
    """An answer that cannot be compared; the message is the sentence to print."""


# ----------------------------------------------------------------------------
# the file and its functions
def load(path: Path) -> dict:
    """{name: value} of the reader's file; Refused if Python cannot run it."""
    if not path.is_file():
        raise Refused(f"{path}: no such file; --copy FOLDER makes the files")
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return runpy.run_path(str(path))
    except BaseException as error:  # whatever a file may raise
        raise Refused(f"{path.name} cannot be read: {in_words(error)}") from None


def answer_of(names: dict, file: str, task: str) -> Callable:
    """The function of a task; Refused if the file has none."""
    if not callable(names.get(task)):
        raise Refused(f"{file}.py has no function {task}")
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
    except BaseException as error:  # whatever an answer may raise
        raise Refused(why_it_raises(error, task, answer)) from None
    for name, value in before.items():
        if not same(given[name], value):
            words = f"it changes its argument {name}: the caller still needs it, so copy it first"
            raise Refused(words)
    if not printed.closed and printed.getvalue():
        first = printed.getvalue().splitlines()[0]
        raise Refused(f"it prints {first[:60]!r}: take that out")
    return named_results(task, returned)


def why_it_raises(error: BaseException, task: Task, answer: Callable) -> str:
    """What is said of an answer that raises: that a task is not begun, or the error."""
    if isinstance(error, NotImplementedError):
        name = traceback.extract_tb(error.__traceback__)[-1].name
        return NOT_BEGUN if name == task.name else f"it calls {name}, which is not written yet"
    code = getattr(inspect.unwrap(answer), "__code__", None)
    file = code.co_filename if code else ""
    lines = [
        place.lineno
        for place in traceback.extract_tb(error.__traceback__)[1:]
        if place.filename == file
    ]
    where = f" in line {lines[-1]} of {Path(file).name}" if lines else ""
    return f"it raises {in_words(error)}{where}"


def in_words(error: BaseException) -> str:
    """An error's type and the first line of what it says, if it can say it."""
    try:
        said = str(error).splitlines()
    except BaseException:  # a __str__ of the reader's own
        said = []
    return f"{type(error).__name__}: {said[0] if said else ''}"


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
    found = {}
    for name, part in zip(names, parts, strict=True):
        if not isinstance(part, np.ndarray | np.generic | float | int):
            what = f"as {name} " if several else ""
            raise Refused(f"it returns {what}a {type(part).__name__}; {expected}")
        found[name] = np.asarray(part)
        if found[name].size > LARGEST:
            raise Refused(f"{name} has {found[name].size:,} numbers, shape {found[name].shape}")
        if found[name].dtype.kind not in "biufc":
            raise Refused(f"{name} is an array of {found[name].dtype}; expected numbers")
    return found


# ----------------------------------------------------------------------------
# the process
def refuse_processes(event: str, arguments: tuple) -> None:
    """An audit hook: Python asks it before it starts a process."""
    if event in STARTS:
        raise Refused("it starts another process; an answer needs none")


def limit() -> None:
    """Let this process start no other, use little memory, and be ended with all its children."""
    sys.addaudithook(refuse_processes)
    if CAN_LIMIT:
        import resource

        os.setsid()
        with contextlib.suppress(OSError, ValueError):  # a lower limit is set already
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


def reply_to(request: dict, names: dict) -> dict:
    """{result: array} of a request; Refused if there is none. Functions are kept in `names`."""
    path = Path(request["path"])
    if not names:
        names |= load(path)
    answer = answer_of(names, path.stem, request["task"])
    (task,) = (task for task in tasks_of(path.stem) if task.name == request["task"])
    given = task.given(np.random.default_rng(request["seed"]), request["sizes"])
    return results_of(task, answer, given)


def main() -> None:
    """Answer requests until there are none; answers cannot reach the two pipes by their names."""
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
    replies = os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    limit()
    replies.write(b"ready\n")
    replies.flush()
    names: dict = {}
    for line in requests:
        body = io.BytesIO()
        try:
            np.savez(body, **reply_to(json.loads(line), names))
            head = {"bytes": len(body.getvalue())}
        except Refused as refused:
            body = io.BytesIO()
            head = {"refused": str(refused)}
        replies.write(json.dumps(head).encode() + b"\n" + body.getvalue())
        replies.flush()


if __name__ == "__main__":
    main()
