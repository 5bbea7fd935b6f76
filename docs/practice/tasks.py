"""What the judge knows of a task, and how it makes well-known mistakes of the right answer.

The files in judged/ list their tasks, in the order of learning. Beside each lies a text of
mistakes: blocks of `task in function: sentence`, lines of the function after "- ", and what a
mistaken reader writes instead after "+ ". The function is one of the judge's file or of the paper's
reference.
"""

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import numpy as np

from reference.gradients import modules_of

BEGIN = Path(__file__).parent / "begin"
FILES = ("transformer", "compressive", "block_recurrent", "memformer", "pretrained_recurrence")


def called_plainly(answer: Callable, given: dict) -> object:
    """What an answer returns."""
    return answer(**given)


class Task(NamedTuple):
    """A function that the reader writes."""

    right: Callable  # called like the reader's, and so named; returns one result or a tuple
    returns: dict  # {result: letters of its shape}, in order
    sizes: dict  # {letter: (smallest, largest)}
    # {argument: letters of its shape} of random numbers, or (rng, **sizes) -> {argument: value}
    inputs: dict | Callable
    call: Callable = called_plainly  # (answer, inputs) -> results; it may add what else it sees
    also: str = ""  # the name of a result that `call` adds: what is said if it is wrong

    @property
    def name(self) -> str:
        """The function's name."""
        return self.right.__name__

    def given(self, rng: np.random.Generator, sizes: dict) -> dict:
        """{argument: value} of an example."""
        if callable(self.inputs):
            return self.inputs(rng, **sizes)
        return normals(rng, sizes, self.inputs)


def tasks_of(file: str) -> list[Task]:
    """The tasks of a file, in order."""
    return importlib.import_module(f"docs.practice.judged.{file}").TASKS


def backward_task(
    right: Callable, sizes: dict, arrives: str, shapes: dict, inputs: Callable | None = None
) -> Task:
    """A task that returns the gradient of all that has a shape, in order.

    arrives are the letters of the gradient that is given, the first argument.
    """
    given, *_ = inspect.signature(right).parameters
    returns = {f"d{name}": letters for name, letters in shapes.items()}
    return Task(right, returns, sizes, inputs or {given: arrives} | shapes)


def hints_of(file: str, task: str) -> list[str]:
    """A task's hints, in order: the idea, the shape of the derivation, the formula."""
    text = (Path(__file__).parent / "hints" / f"{file}.txt").read_text(encoding="utf-8")
    blocks = dict(block.split("\n", 1) for block in text.strip().split("\n\n"))
    return [" ".join(hint.split()) for hint in blocks[task].removeprefix("- ").split("\n- ")]


class Mistake(NamedTuple):
    """A text in a function on the way to the right answer, and what is written instead."""

    task: str
    function: str  # of the paper's reference; "" if the text is in the judge's own
    sentence: str
    old: str
    new: str


def blocks(path: Path) -> Iterator[Mistake]:
    """The mistakes of a text; an empty line is between two."""
    for block in path.read_text(encoding="utf-8").strip().split("\n\n"):
        head, *lines = block.splitlines()
        names, _, sentence = head.partition(": ")
        task, _, function = names.partition(" in ")
        old, new = ("\n".join(line[2:] for line in lines if line[0] == sign) for sign in "-+")
        yield Mistake(task, function, sentence, old, new)


@functools.cache
def mistaken(judged: ModuleType, task: str) -> list[tuple[str, Callable]]:
    """[(sentence, answer)] of a task's well-known mistakes."""
    path = Path(str(judged.__file__)).with_suffix(".txt")
    found = []
    for mistake in blocks(path):
        if mistake.task == task:
            found.append((mistake.sentence, getattr(with_mistake(judged, mistake), task)))
    return found


def with_mistake(judged: ModuleType, mistake: Mistake) -> ModuleType:
    """The judge's file, with the mistake in it or in its reference."""
    task, function, _, old, new = mistake
    if not function:
        return changed(judged, task, old, new)
    whole = changed(judged, task, "", "")
    modules = modules_of(changed(judged.reference, function, old, new))
    vars(whole).update(zip(("reference", "variants"), modules, strict=False))
    return whole


def changed(module: ModuleType, function: str, old: str, new: str) -> ModuleType:
    """A copy of a module with another text in a function, or anywhere if that is "".

    The copy of a paper's file has a copy of its variants, in which the text may stand. An empty old
    text changes nothing. Raises ValueError without the text.
    """
    modules = modules_of(module)
    texts = [inspect.getsource(each) for each in modules]
    sources = texts
    if function:
        defined = [getattr(each, function, None) for each in modules]
        sources = [inspect.getsource(each) if each else "" for each in defined]
    found = [old in source for source in sources]
    if not any(found):
        raise ValueError(f"{module.__name__}.{function} has no {old!r}")
    if old:
        at = found.index(True)
        texts[at] = texts[at].replace(sources[at], sources[at].replace(old, new))
    copy, *variants = map(executed, modules, texts)
    for variant in variants:
        vars(variant)["paper"] = copy
        # What the copy imports when a config asks for a variant
        imported = {f"reference.variants.{module.__name__.rpartition('.')[2]}": variant}
        vars(copy)["importlib"] = SimpleNamespace(import_module=imported.__getitem__)
    return copy


def executed(module: ModuleType, text: str) -> ModuleType:
    """A module of another text, with the name and the file of a module."""
    copy = ModuleType(module.__name__)
    copy.__file__ = str(module.__file__)
    before = sys.modules[copy.__name__]
    sys.modules[copy.__name__] = copy  # dataclasses look there
    try:
        exec(compile(text, copy.__file__, "exec"), vars(copy))
    finally:
        sys.modules[copy.__name__] = before
    return copy


def ranges(**ends: int | tuple) -> dict:
    """{letter: (smallest, largest)} of each letter; a number alone is the largest, from 1."""
    return {letter: (1, end) if isinstance(end, int) else end for letter, end in ends.items()}


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Random numbers of a shape."""
    return rng.standard_normal(shape)


def normals(rng: np.random.Generator, sizes: dict, shapes: dict) -> dict:
    """{name: random numbers} of {name: letters of its shape}, such as "B, S, 1 + N"."""
    return {name: rng.standard_normal(eval(shape, {}, sizes)) for name, shape in shapes.items()}
