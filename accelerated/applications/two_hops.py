"""Questions of two hops, generated in HotpotQA's format: "Where is the key?" with the parser, and the parser is in the cache.

    Holders   The file is with the client. The key is with the parser. ...          CHAINS things
    ...       lines of the standard library
    Places    The parser is in the cache. The client is in the queue. ...           their holders

Who has read both paragraphs can answer. Who reads the second one alone must guess among CHAINS places, because the two
paragraphs are drawn independently. A quarter of the questions ask "Is the key in the cache?". questions.py reads them.
"""

import re
from collections.abc import Sequence

import numpy as np

from accelerated.applications.questions import Question
from accelerated.data.sources import standard_library
from accelerated.data.windows import SPLITS

CHAINS = 4
THINGS = ("key", "file", "list", "name", "value", "message", "string", "object")
HOLDERS = ("parser", "method", "server", "user", "parent", "child", "thread", "process")
PLACES = ("header", "module", "directory", "package", "class", "test", "block", "index")
FIRST, SECOND = "Holders", "Places"  # titles
YES_NO = 0.25  # share of the questions that are answered by yes or no, half of them by each
PARAGRAPHS = (3, 7)  # least and most of a text, without those of facts
LINES = (2, 3)  # least and most in a paragraph without facts
PROSE = re.compile(rb"^[ #]*([A-Z][A-Za-z0-9 ,'-]{30,70}\.)$", re.MULTILINE)


def prose() -> dict[str, list[str]]:
    """Lines of the standard library that look like a sentence, by split; each line stands in one split alone."""
    found = {split: {} for split in SPLITS}
    for split, text in standard_library().texts():
        for open_file in text.files:
            with open_file() as file:
                found[split] |= dict.fromkeys(line.decode() for line in PROSE.findall(file.read()))
    seen = found["train"]
    return {split: [line for line in lines if split == "train" or line not in seen] for split, lines in found.items()}


def facts(rng: np.random.Generator) -> tuple[list[str], list[str], list[str]]:
    """CHAINS things, their holders and the holders' places."""
    return tuple(rng.choice(words, CHAINS, replace=False).tolist() for words in (THINGS, HOLDERS, PLACES))


def two_hops(name: str, lines: Sequence[str], rng: np.random.Generator) -> Question:
    """A question whose text is filled up with lines."""
    things, holders, places = facts(rng)
    first, second = rng.permutation(CHAINS), rng.permutation(CHAINS)
    paragraphs = [
        (f"Notes {number}", tuple(f" {line}" for line in rng.choice(lines, rng.integers(*LINES, endpoint=True))))
        for number in range(1, rng.integers(*PARAGRAPHS, endpoint=True) + 1)
    ]
    at, after = np.sort(rng.integers(len(paragraphs) + 1, size=2))
    paragraphs.insert(after, (SECOND, tuple(f" The {holders[i]} is in the {places[i]}." for i in second)))
    paragraphs.insert(at, (FIRST, tuple(f" The {things[i]} is with the {holders[i]}." for i in first)))
    question, answer = f"Where is the {things[0]}?", places[0]
    if rng.random() < YES_NO:
        right = rng.random() < 0.5
        question, answer = f"Is the {things[0]} in the {places[0 if right else 1]}?", "yes" if right else "no"
    support = (FIRST, int(np.argmin(first))), (SECOND, int(np.argmin(second)))
    return Question(name, question, tuple(paragraphs), answer, support)


def drawn(count: int, lines: Sequence[str], seed: int) -> list[Question]:
    """Questions of two hops; a seed gives the same ones."""
    rng = np.random.default_rng(seed)
    return [two_hops(str(number), lines, rng) for number in range(count)]
