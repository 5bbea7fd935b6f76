"""The generated questions need both hops; answers are found in the text, and scores are those of HotpotQA's description."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelerated.lab.systems import two_hops
from accelerated.lab.systems.two_hops import f1, normalised

LINES = [f"Line number {number} says little." for number in range(9)]


def paragraphs_of(question):
    """[(title, its line of sentences)] of a question's text."""
    lines = question.text.splitlines()
    return list(zip(lines[::2], lines[1::2], strict=True))


@given(st.integers(0, 2**31))
def test_answers_follow_from_the_two_paragraphs(seed):
    [question] = two_hops.drawn(1, LINES, seed)
    assert two_hops.drawn(1, LINES, seed) == [question]
    paragraphs = dict(paragraphs_of(question))
    thing, holder = paragraphs["Name"].removesuffix(".").split()
    places = dict(sentence.split() for sentence in paragraphs["File"].removesuffix(",").split(","))
    assert places.keys() == two_hops.PLACES.keys() and all(places[own] in two_hops.PLACES[own] for own in places)
    asked, *guess = question.question.removesuffix("?").split()
    assert asked == thing and len(guess) == (question.answer in ("yes", "no"))
    if guess:
        assert (guess[0] == places[holder]) == (question.answer == "yes") and guess[0] in places.values()
    else:
        assert question.answer == places[holder]
    assert [question.text[slice(*hop)] for hop in question.hops] == [paragraphs["Name"], f" {holder} {places[holder]},"]
    titles = [title for title, _ in paragraphs_of(question)]
    assert titles.index("Name") < titles.index("File")
    assert {sentences for title, sentences in paragraphs_of(question) if title == "Test"} <= {f" {line}" for line in LINES}


def test_the_places_alone_say_nothing_of_the_answer():
    """No two holders share a place; every holder is as likely to be asked for, and hops are at all distances."""
    every = [place for own in two_hops.PLACES.values() for place in own]
    assert len(set(every)) == len(every) and not {*every, *two_hops.PLACES} & {*two_hops.THINGS}
    questions = two_hops.drawn(4000, LINES, 0)
    spans = [question for question in questions if question.answer not in ("yes", "no")]
    asked = Counter(q.text[: q.hops[1][0]].rpartition("File\n")[2].count(",") for q in spans)
    assert set(asked) == {0, 1, 2, 3} and min(asked.values()) > 0.22 * len(spans)
    counts = Counter(question.answer for question in questions)
    assert 0.1 < counts["yes"] / 4000 < 0.15 and 0.1 < counts["no"] / 4000 < 0.15
    titles = [[title for title, _ in paragraphs_of(question)] for question in questions]
    between = Counter(own.index("File") - own.index("Name") - 1 for own in titles)
    assert set(between) == set(range(7)) and between[1] > between[3] > between[6] > 0
    assert {len(own) - 2 for own in titles} == {2, 3, 4, 5, 6}


def test_no_line_of_the_others_is_for_training():
    train, others = two_hops.prose()
    assert len(train) >= 20 and len(others) >= 20 and not set(train) & set(others)
    words = {word.strip(".,'").lower() for line in train + others for word in line.split()}
    assert not words & ({*two_hops.PLACES} | {place for places in two_hops.PLACES.values() for place in places})
    assert all(line[0].isupper() and line[-1] == "." and 31 < len(line) < 74 and "\n" not in line for line in train + others)


def test_answers_are_compared_as_hotpotqa_does():
    assert normalised(" The  Quick-brown an apple, A. ") == "quickbrown apple"
    assert normalised("7 a.m.") == "7 am", "punctuation goes first"
    assert normalised("The U.S.") == normalised("us") != normalised("u s")
    assert f1("the red house", "Red house, old") == pytest.approx(0.8), "precision 1, recall 2/3"
    assert f1("a b b c", "b b b d") == pytest.approx(2 * (2 / 3) * 0.5 / (2 / 3 + 0.5))
    assert f1("yes", "yes, indeed") == f1("noanswer", "an answer") == f1("no", "yes") == f1("", "the") == 0
    assert f1("Yes.", "yes") == 1 and f1("yes sir", "yes mam") == 0.5, "only a whole answer is yes"
