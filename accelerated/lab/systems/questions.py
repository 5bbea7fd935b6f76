"""Questions about texts in HotpotQA's format (Yang et al. 2018): files are read, answers found in the text, and scored.

A file is a JSON list of {"_id", "question", "answer", "supporting_facts", "context"}; other fields are not used. The context has
paragraphs [title, [sentences]], supporting_facts name sentences as [title, index]. two_hops.py makes such questions, reader.py
answers them.
"""

import json
import re
import string
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from accelerated.program.errors import InputError

KINDS = ("yes", "no")  # answers that are no spans
ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


class Question(NamedTuple):
    """A question, the paragraphs (title, sentences) to answer it from, its answer, and the sentences that support it."""

    name: str
    question: str
    context: tuple[tuple[str, tuple[str, ...]], ...]
    answer: str
    supporting_facts: tuple[tuple[str, int], ...] = ()  # (title, index)


def is_pairs(value: Any, first: type, check: Any) -> bool:
    """Whether a value is a list of pairs whose first parts are of a type and whose second parts pass a check."""
    return isinstance(value, list) and all(
        isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], first) and check(pair[1]) for pair in value
    )


def is_text(value: Any) -> bool:
    """Whether a value is text with more than white space."""
    return isinstance(value, str) and bool(value.strip())


def is_context(value: Any) -> bool:
    """Whether a value is a list of [title, [sentences]] with any text."""
    pairs = is_pairs(value, str, lambda own: isinstance(own, list) and all(isinstance(sentence, str) for sentence in own))
    return pairs and any(map(is_text, (sentence for _, sentences in value for sentence in sentences)))


FIELDS = {  # {field: (check, what it must be)}
    "_id": (is_text, "text"),
    "question": (is_text, "text"),
    "context": (is_context, "a list of [title, [sentences]] with text in it"),
    "answer": (is_text, "text"),
    "supporting_facts": (lambda value: is_pairs(value, str, lambda n: type(n) is int), "a list of [title, sentence's index]"),
}


def read_questions(path: str | Path) -> list[Question]:
    """The questions of a file; raises InputError that names the file, and the entry and its field, if it is in another format."""
    try:
        entries = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; give a file of HotpotQA") from None
    except ValueError as error:
        raise InputError(f"{path} is not JSON ({error}); give a file of HotpotQA, such as hotpot_train_v1.1.json") from None
    if not isinstance(entries, list) or not entries:
        raise InputError(f"{path} is not a list of questions; give a file of HotpotQA, such as hotpot_train_v1.1.json")
    return [read_entry(entry, f"{path}, entry {number}") for number, entry in enumerate(entries, start=1)]


def read_entry(entry: Any, place: str) -> Question:
    """The Question of an entry; raises InputError that begins with its place."""
    if not isinstance(entry, dict):
        raise InputError(f"{place} is not an object; expected the fields {', '.join(FIELDS)}")
    for field, (passes, expected) in FIELDS.items():
        if field not in entry:
            raise InputError(f"{place} has no field {field!r}; expected {expected}")
        if not passes(entry[field]):
            raise InputError(f"{place}: the field {field!r} is not {expected}")
    context = tuple((title, tuple(sentences)) for title, sentences in entry["context"])
    facts = tuple((title, number) for title, number in entry["supporting_facts"])
    return Question(entry["_id"], entry["question"], context, entry["answer"], facts)


class Text(NamedTuple):
    """What is read of a question's context, and where its sentences stand in it, in characters (start, end)."""

    text: str
    sentences: dict[tuple[str, int], tuple[int, int]]  # by title and index


def text_of(question: Question) -> Text:
    """The Text of a question: each paragraph is its title, a line's end, its sentences and a line's end."""
    parts, at, places = [], 0, {}
    for title, sentences in question.context:
        for number, part in enumerate([f"{title}\n", *sentences, "\n"], start=-1):
            if 0 <= number < len(sentences):
                places.setdefault((title, number), (at, at + len(part)))
            parts.append(part)
            at += len(part)
    return Text("".join(parts), places)


def place_of_answer(question: Question, text: Text) -> tuple[int, int] | None:
    """The answer's characters (start, end): its first place in a supporting sentence, or else in the text; None without any.

    A place at the borders of words is preferred to one inside a word.
    """
    whole = re.compile(rf"(?<!\w){re.escape(question.answer)}(?!\w)")
    regions = [*(text.sentences[fact] for fact in question.supporting_facts if fact in text.sentences), (0, len(text.text))]
    for pattern in (whole, re.compile(re.escape(question.answer))):
        for region in regions:
            if found := pattern.search(text.text, *region):
                return found.span()
    return None


# The scores of HotpotQA's official evaluation


def normalised(answer: str) -> str:
    """An answer in lower case without punctuation, articles and extra white space."""
    return " ".join(ARTICLES.sub(" ", answer.lower().translate(PUNCTUATION)).split())


def exact_match(found: str, answer: str) -> float:
    """1 if two answers are the same when normalised, otherwise 0."""
    return float(normalised(found) == normalised(answer))


def f1(found: str, answer: str) -> float:
    """The harmonic mean of precision and recall of the words; 0 if only one of the two is yes, no or noanswer."""
    ours, theirs = normalised(found), normalised(answer)
    if ours != theirs and {ours, theirs} & {*KINDS, "noanswer"}:
        return 0.0
    ours, theirs = ours.split(), theirs.split()
    common = (Counter(ours) & Counter(theirs)).total()
    return 2 * common / (len(ours) + len(theirs)) if common else 0.0  # 2PR / (P + R), P = common/ours, R = common/theirs


def mean_scores(found: Sequence[str], answers: Sequence[str]) -> dict[str, float]:
    """{"f1", "exact match"} in percent, means over the questions."""
    pairs = list(zip(found, answers, strict=True))
    scores = {"f1": f1, "exact match": exact_match}
    return {name: 100 * sum(score(*pair) for pair in pairs) / len(pairs) for name, score in scores.items()}
