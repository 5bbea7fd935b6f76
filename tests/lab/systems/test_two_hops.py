"""The generated questions need both hops: facts are true, and the second paragraph alone says nothing of the answer."""

import json
from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from accelerated.data.windows import SPLITS
from accelerated.lab.systems import two_hops
from accelerated.lab.systems.questions import place_of_answer, read_questions, text_of

LINES = [f"Line number {number} says little." for number in range(9)]


@given(st.integers(0, 2**31))
def test_answers_follow_from_the_two_paragraphs(seed):
    [question] = two_hops.drawn(1, LINES, seed)
    paragraphs = {title: sentences for title, sentences in question.context if title != "Test"}
    thing, holder = paragraphs["Name"][0].removesuffix(".").split()
    places = dict(sentence.removesuffix(",").split() for sentence in paragraphs["File"])
    assert places.keys() == two_hops.PLACES.keys() and all(places[own] in two_hops.PLACES[own] for own in places)
    asked, *guess = question.question.removesuffix("?").split()
    assert asked == thing and len(guess) == (question.answer in ("yes", "no"))
    if guess:
        assert (guess[0] == places[holder]) == (question.answer == "yes") and guess[0] in places.values()
    else:
        text = text_of(question)
        _, end = place_of_answer(question, text)
        assert question.answer == places[holder] and text.text[: end + 1].endswith(f" {holder} {places[holder]},")
    assert question.supporting_facts == (("Name", 0), ("File", list(places).index(holder)))
    titles = [title for title, _ in question.context]
    assert titles.index("Name") < titles.index("File")
    others = [sentences for title, sentences in question.context if title == "Test"]
    assert 2 <= len(others) <= 6 and all(len(own) == 1 and own[0][0] == " " and own[0][1:] in LINES for own in others)


def test_no_holder_owns_the_place_of_another():
    every = [place for own in two_hops.PLACES.values() for place in own]
    assert len(set(every)) == len(every) and not {*every, *two_hops.PLACES} & {*two_hops.THINGS}


def test_the_places_alone_say_nothing_of_the_answer():
    """Given the question and the places, every holder is as likely to be asked for; hops are at all distances."""
    questions = two_hops.drawn(4000, LINES, 0)
    spans = [question for question in questions if question.answer not in ("yes", "no")]
    asked = Counter(question.supporting_facts[1][1] for question in spans)
    assert set(asked) == {0, 1, 2, 3} and min(asked.values()) > 0.22 * len(spans)
    holders = Counter((q.question, dict(q.context)["Name"][0].split()[1]) for q in spans)
    assert len(holders) == len(two_hops.THINGS) * 4 and min(holders.values()) > 0.5 * len(spans) / 32
    counts = Counter(question.answer for question in questions)
    assert 0.1 < counts["yes"] / 4000 < 0.15 and 0.1 < counts["no"] / 4000 < 0.15
    titles = [[title for title, _ in question.context] for question in questions]
    between = Counter(own.index("File") - own.index("Name") - 1 for own in titles)
    assert set(between) == set(range(7)) and between[1] > between[3] > between[6] > 0
    assert {len(own) - 2 for own in titles} == {2, 3, 4, 5, 6}
    short = two_hops.drawn(99, LINES, 0, (0, 1))
    assert {len(question.context) for question in short} == {2, 3}


def test_a_seed_gives_the_same_questions_and_a_file_of_them_is_read(tmp_path):
    questions = two_hops.drawn(3, LINES, 5)
    assert questions == two_hops.drawn(3, LINES, 5) != two_hops.drawn(3, LINES, 6)
    path = tmp_path / "two_hops.json"
    path.write_text(json.dumps([{"_id": question.name} | question._asdict() for question in questions]))
    assert read_questions(path) == questions


def test_no_line_stands_in_two_splits():
    lines = two_hops.prose()
    assert list(lines) == list(SPLITS) and all(len(own) >= 20 for own in lines.values())
    assert not set(lines["train"]) & (set(lines["valid"]) | set(lines["test"]))
    every = [line for own in lines.values() for line in own]
    words = {word.strip(".,'").lower() for line in every for word in line.split()}
    assert not words & ({*two_hops.PLACES} | {place for own in two_hops.PLACES.values() for place in own})
    assert all(line[0].isupper() and line[-1] == "." and 31 < len(line) < 74 and "\n" not in line for line in every)
    assert np.mean([len(line.split()) for line in every]) > 5
