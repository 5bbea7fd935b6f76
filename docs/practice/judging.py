"""Judges answers: on fixed examples of different sizes, then on random small ones.

__main__.py and the book's pages use it. An answer that loops, prints, raises, changes its arguments
or returns something else than arrays is refused with one sentence, and the next one is judged.
"""

import contextlib
import copy
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from hypothesis import HealthCheck, Phase, find, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample

from docs.practice.answering import NOT_BEGUN, Refused, answer_of, load, results_of
from docs.practice.symptoms import Example, symptom_of, where_wrong
from docs.practice.tasks import Task, mistaken, tasks_of

SECONDS = 5  # that an answer may take for one example; a right one takes a thousandth
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
    return Example(sizes, given, found, right, task.returns, [])


def judge_file(path: Path, only: str = "") -> list[Verdict]:
    """What is said of the answers of a file, or of one of them."""
    chosen = [task for task in tasks_of(path.stem) if only in ("", task.name)]
    try:
        names = load(path)
    except Refused as refused:
        return [Verdict(task.name, "wrong", (str(refused),)) for task in chosen]
    return [judge(task, asking(task, names)) for task in chosen]


def asking(task: Task, names: dict) -> Ask:
    """The function by which judge asks for an answer's results, among names of a reader's file."""

    def ask(sizes: dict, seed: int) -> dict:
        given = task.given(np.random.default_rng(seed), sizes)
        with ending_after(SECONDS):
            return results_of(task, answer_of(names, task.name), given)

    return ask


@contextlib.contextmanager
def ending_after(seconds: float) -> Iterator[None]:
    """Refuse the block if it takes longer, where the system has such an alarm (not on Windows)."""
    if not hasattr(signal, "setitimer"):
        yield
        return

    def ring(number: int, frame: object) -> None:
        raise Refused(f"it loops: no result after {seconds} seconds, on small arrays")

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
