"""The generated questions need both hops: facts are true, and the second paragraph alone says nothing of the answer."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from accelerated.applications import two_hops
from accelerated.applications.questions import as_entry, place_of_answer, read_questions, text_of
from accelerated.data.windows import SPLITS

LINES = [f"Line number {number} says little." for number in range(9)]


def facts_of(question, title, between):
    """{who or what: what is said of it} in a paragraph."""
    [sentences] = [sentences for own, sentences in question.context if own == title]
    return dict(sentence.removeprefix(" The ").removesuffix(".").split(between) for sentence in sentences)


@given(st.integers(0, 2**31))
def test_answers_follow_from_the_two_paragraphs(seed):
    [question] = two_hops.drawn(1, LINES, seed)
    holders, places = facts_of(question, "Holders", " is with the "), facts_of(question, "Places", " is in the ")
    assert len(holders) == len(places) == two_hops.CHAINS and set(holders.values()) == set(places)
    words = question.question.removesuffix("?").split(" the ")
    place = places[holders[words[1].split()[0]]]
    if question.answer in ("yes", "no"):
        assert words[0] == "Is" and (words[2] == place) == (question.answer == "yes") and words[2] in places.values()
    else:
        assert words[0] == "Where is" and question.answer == place
        start, end = place_of_answer(question, text := text_of(question))
        assert text.text[start - 7 : end + 1] == f"in the {place}."
    for title, number in question.supporting_facts:
        sentence = text_of(question).sentences[title, number]
        assert holders[words[1].split()[0]] in text_of(question).text[slice(*sentence)]
    titles = [title for title, _ in question.context]
    assert titles.index("Holders") < titles.index("Places")
    notes = [sentences for title, sentences in question.context if title not in ("Holders", "Places")]
    assert 3 <= len(notes) <= 7 and all(len(own) in (2, 3) and {line[1:] for line in own} <= set(LINES) for own in notes)


def test_the_places_alone_say_nothing_of_the_answer():
    """The answer is each of the four as often, wherever it stands; the first paragraph may come at any distance."""
    questions = two_hops.drawn(4000, LINES, 0)
    spans = [question for question in questions if question.answer not in ("yes", "no")]
    at = Counter(question.supporting_facts[1][1] for question in spans)
    assert set(at) == set(range(two_hops.CHAINS)) and min(at.values()) > 0.22 * len(spans)
    first = Counter(question.supporting_facts for question in spans)
    assert len(first) == two_hops.CHAINS**2 and min(first.values()) > 0.04 * len(spans)
    counts = Counter(question.answer for question in questions)
    assert 0.1 < counts["yes"] / 4000 < 0.15 and 0.1 < counts["no"] / 4000 < 0.15
    titles = [[title for title, _ in question.context] for question in questions]
    between = Counter(own.index("Places") - own.index("Holders") - 1 for own in titles)
    assert set(between) == set(range(8)) and between[0] > between[1] > between[4] > between[7] > 0


def test_a_seed_gives_the_same_questions_and_a_file_of_them_is_read(tmp_path):
    questions = two_hops.drawn(3, LINES, 5)
    assert questions == two_hops.drawn(3, LINES, 5) != two_hops.drawn(3, LINES, 6)
    two_hops.write(questions, tmp_path / "two_hops.json")
    assert read_questions(tmp_path / "two_hops.json") == questions
    assert as_entry(questions[0])["context"] == questions[0].context


def test_no_line_stands_in_two_splits():
    lines = two_hops.prose()
    assert list(lines) == list(SPLITS) and all(len(own) >= 20 for own in lines.values())
    assert not set(lines["train"]) & (set(lines["valid"]) | set(lines["test"]))
    every = [line for own in lines.values() for line in own]
    assert all(line[0].isupper() and line[-1] == "." and 31 < len(line) < 74 and "\n" not in line for line in every)
    assert np.mean([len(line.split()) for line in every]) > 5
