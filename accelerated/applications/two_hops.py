"""Questions of two hops, generated in HotpotQA's format: "Where is the key?" with the parser, and the parser is in the module.

    Holder   The key is with the parser.
    ...      lines of the standard library
    Places   The server is in the path. The parser is in the module. ...       all of HOLDERS, in any order

Who has read both paragraphs can answer. Who reads the second one alone must guess among as many places as there are holders,
because nothing there depends on who has the thing. Every holder has places of its own, as a city answers one question and a year
another. A quarter of the questions ask "Is the key in the module?". questions.py reads the files, reader.py answers them.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from accelerated.applications.questions import Question, as_entry
from accelerated.data.sources import standard_library
from accelerated.data.windows import SPLITS
from accelerated.program.files import written_whole

THINGS = ("key", "file", "list", "name", "value", "message", "string", "object")
PLACES = {  # {holder: its places}
    "parser": ("module", "package", "header"),
    "server": ("path", "directory", "code"),
    "thread": ("block", "line", "test"),
    "child": ("class", "index", "table"),
}
FIRST, SECOND = "Name", "File"  # titles
YES_NO = 0.25  # share of the questions that are answered by yes or no, half of them by each
PARAGRAPHS = (2, 5)  # least and most of a text, without those of facts
LINES = (1, 1)  # least and most in a paragraph without facts
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


def two_hops(name: str, lines: Sequence[str], rng: np.random.Generator) -> Question:
    """A question whose text is filled up with lines."""
    thing, holders = rng.choice(THINGS), rng.permutation(list(PLACES))
    places = [rng.choice(PLACES[holder]) for holder in holders]
    asked, other = rng.permutation(len(holders))[:2]
    paragraphs = [
        ("Test", tuple(f" {line}" for line in rng.choice(lines, rng.integers(*LINES, endpoint=True))))
        for number in range(1, rng.integers(*PARAGRAPHS, endpoint=True) + 1)
    ]
    at, after = np.sort(rng.integers(len(paragraphs) + 1, size=2))
    paragraphs.insert(after, (SECOND, tuple(f" {own} {place}," for own, place in zip(holders, places, strict=True))))
    paragraphs.insert(at, (FIRST, (f" {thing} {holders[asked]}.",)))
    question, answer = f" {thing}?", str(places[asked])
    if rng.random() < YES_NO:
        right = rng.random() < 0.5
        question, answer = f" {thing} {places[asked if right else other]}?", "yes" if right else "no"
    return Question(name, question, tuple(paragraphs), answer, ((FIRST, 0), (SECOND, int(asked))))


def drawn(count: int, lines: Sequence[str], seed: int) -> list[Question]:
    """Questions of two hops; a seed gives the same ones."""
    rng = np.random.default_rng(seed)
    return [two_hops(str(number), lines, rng) for number in range(count)]


def write(questions: Sequence[Question], path: Path) -> None:
    """Write questions to a file in HotpotQA's format."""
    with written_whole(path, "give another file") as temporary:
        temporary.write_text(json.dumps([as_entry(question) for question in questions]) + "\n")
