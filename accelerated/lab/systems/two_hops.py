"""Generated questions of two hops, as HotpotQA's (Yang et al. 2018), and its scores of answers.

reader.py answers them.
"""

import re
import string
from collections import Counter
from typing import NamedTuple

import numpy as np

KINDS = ("yes", "no")  # answers that are no spans
PUNCTUATION = str.maketrans("", "", string.punctuation)
THINGS = ("key", "file", "list", "name", "value", "message", "string", "object")
PLACES = {  # {holder: its places}
    "parser": ("module", "package", "header"),
    "server": ("path", "directory", "code"),
    "thread": ("block", "line", "test"),
    "child": ("class", "index", "table"),
}
YES_NO = 0.25  # share of the questions that are answered by yes or no, half of them by each
LINES = (  # of the other paragraphs
    "It says little.",
    "Nobody reads this twice.",
    "One more page of it.",
    "Words, and then it ends.",
)


class Question(NamedTuple):
    """A question, the text to answer it from, its answer, and the hops.

    Hops are the sentences of the text that support the answer. One that is a span stands in the
    last of these, if the question is generated.
    """

    question: str
    text: str
    answer: str
    hops: tuple[tuple[int, int], ...]  # (start, end) in characters


def normalised(answer: str) -> str:
    """An answer in lower case without punctuation, articles and extra white space.

    So HotpotQA's evaluation compares it.
    """
    words = answer.lower().translate(PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", words).split())


def f1(given: str, answer: str) -> float:
    """The harmonic mean of precision and recall of the words.

    It is 0 if only one of the two is yes, no or noanswer.
    """
    ours = normalised(given)
    theirs = normalised(answer)
    no_spans = {*KINDS, "noanswer"}
    if ours != theirs and no_spans & {ours, theirs}:
        return 0.0
    ours = ours.split()
    theirs = theirs.split()
    common = (Counter(ours) & Counter(theirs)).total()
    if common == 0:
        return 0.0
    # 2PR / (P + R), P = common/ours, R = common/theirs
    return 2 * common / (len(ours) + len(theirs))


def is_right(given: str, answer: str) -> bool:
    """Whether an answer is an exact match, normalised."""
    return normalised(given) == normalised(answer)


def two_hops(between: tuple[int, int], rng: np.random.Generator) -> Question:
    """A question of two hops; its text has `between` (least, most) paragraphs besides the facts.

        Name    key parser.
        Test    a line
        File    server path, parser module, thread block, child class,    all holders, in any order

    A paragraph is a line with its title and one with its sentences. "key?" asks where the key is.
    File alone leaves a guess among as many places as there are holders: no two holders share a
    place. Some questions, "key module?", ask whether it is there.
    """
    thing = rng.choice(THINGS)
    holders = rng.permutation(list(PLACES))
    places = [rng.choice(PLACES[holder]) for holder in holders]
    asked, other = rng.permutation(len(holders))[:2]
    some = rng.choice(LINES, rng.integers(*between, endpoint=True))
    paragraphs = [f"Test\n {line}\n" for line in some]
    at, after = np.sort(rng.integers(len(paragraphs) + 1, size=2))

    name = f" {thing} {holders[asked]}."
    facts = [f" {holder} {place}," for holder, place in zip(holders, places, strict=True)]
    paragraphs.insert(after, f"File\n{''.join(facts)}\n")
    paragraphs.insert(at, f"Name\n{name}\n")
    text = "".join(paragraphs)
    hops = (span_of(name, text), span_of(facts[asked], text))

    if rng.random() >= YES_NO:
        return Question(f" {thing}?", text, str(places[asked]), hops)
    if rng.random() < 0.5:
        return Question(f" {thing} {places[asked]}?", text, "yes", hops)
    return Question(f" {thing} {places[other]}?", text, "no", hops)


def span_of(part: str, text: str) -> tuple[int, int]:
    """Where a part of a text first begins, and where it ends."""
    start = text.index(part)
    return start, start + len(part)


def drawn(count: int, between: tuple[int, int], seed: int) -> list[Question]:
    """Questions of two hops; a seed gives the same ones."""
    rng = np.random.default_rng(seed)
    return [two_hops(between, rng) for _ in range(count)]
