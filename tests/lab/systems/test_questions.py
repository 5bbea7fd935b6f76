"""HotpotQA's files are read or refused in one line, answers are found in the text, and scores are those of its description."""

import json
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelerated.lab.systems.questions import (
    Question,
    exact_match,
    f1,
    mean_scores,
    normalised,
    place_of_answer,
    read_questions,
    text_of,
)  # fmt: skip
from accelerated.program.errors import InputError

ENTRY = {
    "_id": "5a8b57f25542995d1e6f1371",
    "question": "Were Scott Derrickson and Ed Wood of the same nationality?",
    "answer": "yes",
    "supporting_facts": [["Scott Derrickson", 0], ["Ed Wood", 0]],
    "context": [["Ed Wood", ["Ed Wood is a film.", " It is of 1994."]], ["Scott Derrickson", ["He is an American director."]]],
    "type": "comparison",
    "level": "hard",
}


def written(tmp_path, *entries):
    path = tmp_path / "hotpot.json"
    path.write_text(json.dumps(list(entries)))
    return path


def test_a_file_is_read_as_it_is(tmp_path):
    assert read_questions(written(tmp_path, ENTRY))[0] == Question(
        ENTRY["_id"], ENTRY["question"],
        (("Ed Wood", ("Ed Wood is a film.", " It is of 1994.")), ("Scott Derrickson", ("He is an American director.",))),
        "yes", (("Scott Derrickson", 0), ("Ed Wood", 0)),
    )  # fmt: skip


@pytest.mark.parametrize(
    "change,line",
    [
        ({"_id": 3}, r"hotpot\.json, entry 2: the field '_id' is not text"),
        ({"question": " "}, "entry 2: the field 'question' is not text"),
        ({"answer": None}, "entry 2: the field 'answer' is not text"),
        ({"context": []}, r"entry 2: the field 'context' is not a list of \[title, \[sentences\]\] with text in it"),
        ({"context": [["a", []], ["b", [" "]]]}, "entry 2: the field 'context' is not a list of"),
        ({"context": [["a", "b"]]}, "entry 2: the field 'context' is not a list of"),
        ({"context": [["a", ["b"], "c"]]}, "entry 2: the field 'context' is not a list of"),
        ({"supporting_facts": [["a", True]]}, r"the field 'supporting_facts' is not a list of \[title, sentence's index\]"),
        ({"supporting_facts": {"a": 1}}, "entry 2: the field 'supporting_facts' is not a list of"),
    ],
)
def test_a_wrong_field_is_named(tmp_path, change, line):
    with pytest.raises(InputError, match=line):
        read_questions(written(tmp_path, ENTRY, ENTRY | change))


@pytest.mark.parametrize("field", ["_id", "question", "context", "answer", "supporting_facts"])
def test_a_missing_field_is_named(tmp_path, field):
    path = written(tmp_path, {name: value for name, value in ENTRY.items() if name != field})
    with pytest.raises(InputError, match=f"entry 1 has no field '{field}'; expected"):
        read_questions(path)


def test_another_file_is_refused(tmp_path):
    path = tmp_path / "hotpot.json"
    with pytest.raises(InputError, match=r"cannot read .*hotpot\.json: No such file or directory; give a file of HotpotQA"):
        read_questions(path)
    for content, line in (
        ("[{", r"is not JSON \(.*\); give a file of HotpotQA"), ("\xff", "is not JSON"), ("{}", "is not a list of questions"),
        ("[]", "is not a list of questions"), ("[3]", r"entry 1 is not an object; expected the fields _id, question, context, "),
    ):  # fmt: skip
        path.write_text(content, encoding="latin-1")
        with pytest.raises(InputError, match=line):
            read_questions(path)


WORDS = st.text("ab é\n", max_size=6)


@given(st.lists(st.tuples(WORDS, st.lists(WORDS, max_size=3).map(tuple)), max_size=4).map(tuple))
def test_the_parts_of_a_text_stand_where_it_says(context):
    text = text_of(Question("", "", context, ""))
    assert text.text == "".join(f"{title}\n{''.join(sentences)}\n" for title, sentences in context)
    first = {}
    for title, sentences in context:
        for number, sentence in enumerate(sentences):
            first.setdefault((title, number), sentence)
    assert {key: text.text[slice(*place)] for key, place in text.sentences.items()} == first


def test_of_two_paragraphs_with_one_title_the_first_counts():
    text = text_of(Question("", "", (("T", ("a", "b")), ("T", ("c",))), ""))
    assert [text.text[slice(*text.sentences["T", number])] for number in (0, 1)] == ["a", "b"]


def test_an_answer_is_looked_for_in_the_supporting_sentences_first():
    context = (("A cat", ("cats and a cat.", " Another cat.")), ("B", ("The concatenation.",)))

    def found(answer, *facts):
        question = Question("", "", context, answer, facts)
        text = text_of(question)
        place = place_of_answer(question, text)
        return place and (place[0], text.text[slice(*place)])

    at = text_of(Question("", "", context, "")).text.index
    assert found("cat") == (2, "cat")
    assert found("cat", ("A cat", 0)) == (at("a cat.") + 2, "cat"), "whole words come first"
    assert found("cat", ("A cat", 1), ("A cat", 0)) == (at("Another cat") + 8, "cat")
    assert found("cat", ("B", 0)) == (2, "cat"), "a whole word elsewhere comes before a part of a word"
    assert found("atena", ("A cat", 0), ("Z", 9)) == (at("atena"), "atena")
    assert found("cat.") == (at("cat."), "cat.") and found("dog") is None and found("A cat") == (0, "A cat")


def test_scores_of_known_answers():
    assert normalised(" The  Quick-brown an apple, A. ") == "quickbrown apple"
    assert normalised("7 a.m.") == "7 am", "punctuation goes first"
    assert exact_match("The U.S.", "us") == 1 and exact_match("us", "u s") == 0
    assert f1("the red house", "Red house, old") == pytest.approx(0.8)  # precision 1, recall 2/3
    assert f1("a b b c", "b b b d") == pytest.approx(2 * (2 / 3) * 0.5 / (2 / 3 + 0.5))
    assert f1("yes", "yes, indeed") == 0 and f1("noanswer", "an answer") == 0 and f1("Yes.", "yes") == 1 and f1("no", "yes") == 0
    assert f1("yes sir", "yes mam") == 0.5, "only a whole answer is yes"
    assert mean_scores(["x", "the red house"], ["x", "Red house, old"]) == pytest.approx({"f1": 90, "exact match": 50})


ANSWERS = st.lists(st.sampled_from(["red", "The", "a", "blue.", "yes", "no", "house"]), max_size=5).map(" ".join)


@given(ANSWERS, ANSWERS)
def test_scores_are_consistent(found, answer):
    assert f1(found, answer) == f1(answer, found)
    assert 0 <= f1(found, answer) <= 1
    if exact_match(found, answer):
        assert f1(found, answer) == (1 if normalised(answer) else 0)
    same = sorted(normalised(found).split()) == sorted(normalised(answer).split())
    assert (f1(found, answer) == 1) == (same and normalised(found) != "")


@given(ANSWERS, st.sampled_from(string.punctuation))
def test_case_articles_and_punctuation_do_not_count(answer, mark):
    assert exact_match(f"  an {answer.upper()}{mark} the", answer) == 1
