"""Questions of two hops, generated in HotpotQA's format: the key is with the parser, and the parser is in the module.

    Name    key parser.
    Test    a line of the standard library
    File    server path, parser module, thread block, child class,         all holders, in any order

The question "key?" asks where the key is. Who has read both paragraphs can answer. Who reads the second one alone must guess
among as many places as there are holders, because nothing there depends on who has the thing. Every holder has places of its own,
as a city answers one question and a year another. A quarter of the questions, "key module?", ask whether it is there. Sentences
are short so that windows can be. questions.py reads the files, reader.py answers them.
"""

import re
from collections.abc import Sequence

import numpy as np

from accelerated.data.sources import standard_library
from accelerated.data.windows import SPLITS
from accelerated.lab.systems.questions import Question

THINGS = ("key", "file", "list", "name", "value", "message", "string", "object")
PLACES = {  # {holder: its places}
    "parser": ("module", "package", "header"),
    "server": ("path", "directory", "code"),
    "thread": ("block", "line", "test"),
    "child": ("class", "index", "table"),
}
FIRST, SECOND, OTHERS = "Name", "File", "Test"  # titles
YES_NO = 0.25  # share of the questions that are answered by yes or no, half of them by each
BETWEEN = (2, 6)  # least and most paragraphs of a text, besides those of facts
PROSE = re.compile(rb"^[ #]*([A-Z][A-Za-z0-9 ,'-]{30,70}\.)$", re.MULTILINE)
OF_FACTS = re.compile(rf"\b({'|'.join([*PLACES, *sum(PLACES.values(), ())])})s?\b", re.IGNORECASE)


def prose() -> dict[str, list[str]]:
    """Lines of the standard library that look like a sentence, by split; none has a word of the facts, none is in two splits."""
    found = {split: {} for split in SPLITS}
    for split, text in standard_library().texts():
        for open_file in text.files:
            with open_file() as file:
                lines = (line.decode() for line in PROSE.findall(file.read()))
                found[split] |= dict.fromkeys(line for line in lines if not OF_FACTS.search(line))
    seen = found["train"]
    return {split: [line for line in lines if split == "train" or line not in seen] for split, lines in found.items()}


def two_hops(name: str, lines: Sequence[str], between: tuple[int, int], rng: np.random.Generator) -> Question:
    """A question whose text has `between` (least, most) paragraphs of a line each besides those of facts."""
    thing, holders = rng.choice(THINGS), rng.permutation(list(PLACES))
    places = [rng.choice(PLACES[holder]) for holder in holders]
    asked, other = rng.permutation(len(holders))[:2]
    count = rng.integers(*between, endpoint=True)
    paragraphs = [(OTHERS, (f" {line}",)) for line in rng.choice(lines, count)]
    at, after = np.sort(rng.integers(len(paragraphs) + 1, size=2))
    pairs = zip(holders, places, strict=True)
    paragraphs.insert(after, (SECOND, tuple(f" {holder} {place}," for holder, place in pairs)))
    paragraphs.insert(at, (FIRST, (f" {thing} {holders[asked]}.",)))
    question, answer = f" {thing}?", str(places[asked])
    if rng.random() < YES_NO:
        right = rng.random() < 0.5
        question, answer = f" {thing} {places[asked if right else other]}?", "yes" if right else "no"
    return Question(name, question, tuple(paragraphs), answer, ((FIRST, 0), (SECOND, int(asked))))


def drawn(count: int, lines: Sequence[str], seed: int, between: tuple[int, int] = BETWEEN) -> list[Question]:
    """Questions of two hops; a seed gives the same ones."""
    rng = np.random.default_rng(seed)
    return [two_hops(str(number), lines, between, rng) for number in range(count)]
