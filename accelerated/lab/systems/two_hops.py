"""Generated questions of two hops, as HotpotQA's (Yang et al. 2018), and its scores of answers. reader.py answers them."""

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from accelerated.data.sources import standard_library
from accelerated.data.windows import SPLITS

KINDS = ("yes", "no")  # answers that are no spans
PUNCTUATION = str.maketrans("", "", string.punctuation)
THINGS = ("key", "file", "list", "name", "value", "message", "string", "object")
PLACES = {  # {holder: its places}
    "parser": ("module", "package", "header"),
    "server": ("path", "directory", "code"),
    "thread": ("block", "line", "test"),
    "child": ("class", "index", "table"),
}
YES_NO = (
    0.25  # share of the generated questions that are answered by yes or no, half of them by each
)
PROSE = re.compile(rb"^[ #]*([A-Z][A-Za-z0-9 ,'-]{30,70}\.)$", re.MULTILINE)
OF_FACTS = re.compile(rf"\b({'|'.join([*PLACES, *sum(PLACES.values(), ())])})s?\b", re.IGNORECASE)


class Question(NamedTuple):
    """A question, the text to answer it from, its answer, and the hops, those sentences of the text that support it.

    An answer that is a span stands in the last of these.
    """

    question: str
    text: str
    answer: str
    hops: tuple[tuple[int, int], ...]  # (start, end) in characters


def normalised(answer: str) -> str:
    """An answer in lower case without punctuation, articles and extra white space, as HotpotQA's evaluation compares it."""
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", answer.lower().translate(PUNCTUATION)).split())


def f1(given: str, answer: str) -> float:
    """The harmonic mean of precision and recall of the words; 0 if only one of the two is yes, no or noanswer."""
    ours, theirs = normalised(given), normalised(answer)
    if ours != theirs and {ours, theirs} & {*KINDS, "noanswer"}:
        return 0.0
    ours, theirs = ours.split(), theirs.split()
    common = (Counter(ours) & Counter(theirs)).total()
    return (
        2 * common / (len(ours) + len(theirs)) if common else 0.0
    )  # 2PR / (P + R), P = common/ours, R = common/theirs


def prose() -> tuple[list[str], list[str]]:
    """(training lines, others) of the standard library that look like a sentence without a word of the facts."""
    lines = {split: {} for split in SPLITS}
    for split, text in standard_library().texts():
        sentences = (line.decode() for line in PROSE.findall(text.read()))
        lines[split] |= dict.fromkeys(line for line in sentences if not OF_FACTS.search(line))
    return [*lines["train"]], [
        line for split in SPLITS[1:] for line in lines[split] if line not in lines["train"]
    ]


def two_hops(lines: Sequence[str], between: tuple[int, int], rng: np.random.Generator) -> Question:
    """A question of two hops; its text has `between` (least, most) paragraphs of a line each besides those of facts.

        Name    key parser.
        Test    a line
        File    server path, parser module, thread block, child class,         all holders, in any order

    A paragraph is a line with its title and one with its sentences. "key?" asks where the key is. File alone leaves a guess among
    as many places as there are holders: no two holders share a place. Some questions, "key module?", ask whether it is there.
    """
    thing, holders = rng.choice(THINGS), rng.permutation(list(PLACES))
    places = [rng.choice(PLACES[holder]) for holder in holders]
    asked, other = rng.permutation(len(holders))[:2]
    paragraphs = [
        f"Test\n {line}\n" for line in rng.choice(lines, rng.integers(*between, endpoint=True))
    ]
    at, after = np.sort(rng.integers(len(paragraphs) + 1, size=2))
    facts = [f" {holder} {place}," for holder, place in zip(holders, places, strict=True)]
    paragraphs.insert(after, f"File\n{''.join(facts)}\n")
    paragraphs.insert(at, f"Name\n {thing} {holders[asked]}.\n")
    text = "".join(paragraphs)
    hops = tuple(
        re.search(re.escape(fact), text).span()
        for fact in (f" {thing} {holders[asked]}.", facts[asked])
    )
    question, answer = f" {thing}?", str(places[asked])
    if rng.random() < YES_NO:
        right = rng.random() < 0.5
        question, answer = (
            f" {thing} {places[asked if right else other]}?",
            "yes" if right else "no",
        )
    return Question(question, text, answer, hops)


def drawn(
    count: int, lines: Sequence[str], seed: int, between: tuple[int, int] = (2, 6)
) -> list[Question]:
    """Questions of two hops; a seed gives the same ones."""
    rng = np.random.default_rng(seed)
    return [two_hops(lines, between, rng) for _ in range(count)]
