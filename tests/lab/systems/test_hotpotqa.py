"""Table 3 of Adding Recurrence on files: HotpotQA's form, RoBERTa's folder, and the command."""

import json
from unittest.mock import Mock

import pytest
import torch

from accelerated.lab.systems import hotpotqa, reader
from tests.helpers.programs import refusal

ITEM = {
    "_id": "5a8b57f25542995d1e6f1371",
    "question": "Where was the poet of the Iliad born?",
    "answer": "Chios",
    "type": "bridge",
    "level": "hard",
    "supporting_facts": [["Iliad", 0], ["Homer", 1], ["Homer", 9]],
    "context": [
        ["Chios", ["Chios is an island.", " Wine is grown there."]],
        ["Iliad", ["The Iliad is Homer's.", " It is of Troy."]],
        ["Homer", ["Homer was a poet.", " He was born in Chios, some say.", " Or Smyrna."]],
    ],
}


def with_(**changed):
    """ITEM with other fields; one that is None is missing."""
    return {name: value for name, value in (ITEM | changed).items() if value is not None}


def test_a_questions_text_is_titles_and_sentences_and_its_hops_are_supporting_facts():
    """A supporting fact that the context does not have, as in some questions, is left out."""
    question = hotpotqa.question_of(ITEM)
    assert question.text == (
        "Chios\nChios is an island. Wine is grown there.\n"
        "Iliad\nThe Iliad is Homer's. It is of Troy.\n"
        "Homer\nHomer was a poet. He was born in Chios, some say. Or Smyrna.\n"
    )
    hops = [question.text[start:end] for start, end in question.hops]
    assert hops == ["The Iliad is Homer's.", " He was born in Chios, some say."]
    assert (question.question, question.answer) == (ITEM["question"], "Chios")


@pytest.mark.parametrize(
    "answer, before",
    [
        ("Chios", "He was born in "),  # in the last supporting sentence, though it stands before
        ("Homer", "The Iliad is "),  # in the last one that has it
        ("Wine", "an island. "),  # in none of them
    ],
)
def test_the_answer_is_read_where_a_supporting_sentence_has_it(answer, before):
    question = hotpotqa.question_of(with_(answer=answer))
    start = reader.answer_start(question)
    assert question.text[:start].endswith(before)
    assert question.text[start:].startswith(answer)


def test_a_question_that_no_span_answers_is_asked_and_not_trained_on(monkeypatch):
    questions = {
        "a": hotpotqa.question_of(with_(answer="Athens")),
        "b": hotpotqa.question_of(with_(answer="yes")),
        "c": hotpotqa.question_of(ITEM),
    }
    drawn = hotpotqa.chosen(questions)
    assert sorted(question.answer for question in drawn) == ["Chios", "yes"]
    assert drawn == hotpotqa.chosen(questions)
    monkeypatch.setattr(hotpotqa, "QUESTIONS", 1)
    assert len(hotpotqa.chosen(questions)) == 1


FAULTS = {  # {what: (the file, the message)}
    "no JSON": ("{", "question 1, cannot be read (JSONDecodeError"),
    "no question": ("[]", "has no question"),
    "no context": (json.dumps([ITEM, with_(context=None)]), "question 2, cannot be read (KeyError"),
}


@pytest.mark.parametrize("what", FAULTS)
def test_a_file_of_another_form_is_refused(tmp_path, what):
    content, message = FAULTS[what]
    file = tmp_path / "hotpot.json"
    file.write_text(content)
    words = refusal(hotpotqa.read_questions, file)
    assert str(file) in words
    assert message in words
    assert words.endswith("context}, as HotpotQA's")
    assert "\n" not in words


def test_windows_hold_robertas_own_ids(folder, monkeypatch):
    """Those of transformers' tokenizer, between its own special tokens."""
    import transformers

    monkeypatch.setattr(hotpotqa, "SEGMENT", 40)
    bpe = hotpotqa.tokenizer_of_file(folder / "vocab.json", "")
    [example] = hotpotqa.cut_all([hotpotqa.question_of(ITEM)], bpe)
    theirs = transformers.RobertaTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    asked = theirs(ITEM["question"], add_special_tokens=False)["input_ids"][:18]  # the most of 40
    prefix = [theirs.cls_token_id, *asked, theirs.sep_token_id]
    assert (example.tokens[:, : len(prefix)] == prefix).all()
    text = theirs(example.question.text, add_special_tokens=False)["input_ids"]
    assert example.tokens[example.text].tolist() == text
    assert example.tokens[-1, -1] == theirs.pad_token_id


SHORT = [["Homer", ["Homer was a poet.", " Born in Chios."]]]
QUESTIONS = {"Where?": "Chios", "Was he?": "yes", "Was who?": "no", "Who wrote?": "Homer"}


def questions_file(path, **others):
    """A file of short questions, and of others {question: answer}."""
    items = []
    for question, answer in (QUESTIONS | others).items():
        facts = [["Homer", 0], ["Homer", 1]]
        item = {"_id": question, "question": question, "answer": answer, "context": SHORT}
        items.append(item | {"supporting_facts": facts})
    path.write_text(json.dumps(items))
    return path


def test_the_command_trains_and_asks_each_row_once(folder, tmp_path, monkeypatch):
    """The same command continues, another one is refused.

    On questions that it has learned by heart every answer is right.
    """
    torch.set_default_dtype(torch.float32)
    asked = questions_file(tmp_path / "asked.json")
    file = questions_file(tmp_path / "train.json", **{"Who was born?": "Homer"})
    out = tmp_path / "out"
    fine_tune = Mock(wraps=reader.fine_tune)
    monkeypatch.setattr(reader, "fine_tune", fine_tune)
    for name, value in {"SEGMENT": 24, "BATCH": 4, "EPOCHS": 60, "RATE": 0.02}.items():
        monkeypatch.setattr(hotpotqa, name, value)
    command = ["--init", folder, "--train", file, "--asked", asked, "--out", out, "--seeds", 0]
    command = [str(word) for word in command]
    hotpotqa.main(command)
    assert {call.args[2] for call in fine_tune.call_args_list} == {75}, "60 passes of 5 by fours"
    record = json.loads((out / "hotpotqa.json").read_text())
    assert record["settings"] == {"init": str(folder), "train": str(file), "asked": str(asked)}
    for row in ("disjoint", "recurrent"):
        run = record["runs"][row]["0"]
        assert (run["F1"], run["exact match"]) == (100, 100)

    monkeypatch.setattr(reader, "fine_tune", lambda *_: pytest.fail("trained again"))
    hotpotqa.main(command)
    other = str(questions_file(tmp_path / "other.json"))
    assert "hotpotqa.json has runs of other settings" in refusal(
        hotpotqa.main, [*command, "--train", other]
    )
