"""Table 3 of Adding Recurrence on files: HotpotQA's form, RoBERTa's folder, and the command."""

import json
from unittest.mock import Mock

import torch

from accelerated.lab.systems import hotpotqa, reader

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


def test_a_question_that_no_span_answers_is_asked_and_not_trained_on(monkeypatch):
    questions = {
        answer: hotpotqa.question_of(ITEM | {"answer": answer})
        for answer in ("Athens", "yes", "Chios")
    }
    drawn = hotpotqa.chosen(questions)
    assert sorted(question.answer for question in drawn) == ["Chios", "yes"]
    assert drawn == hotpotqa.chosen(questions)
    monkeypatch.setattr(hotpotqa, "QUESTIONS", 1)
    assert len(hotpotqa.chosen(questions)) == 1


def test_ids_are_robertas_own(folder):
    """Those of transformers' tokenizer; how windows are cut is a property in test_questions.py."""
    import transformers

    bpe = hotpotqa.tokenizer_of_file(folder / "vocab.json", "")
    [example] = hotpotqa.cut_all([hotpotqa.question_of(ITEM)], bpe)
    theirs = transformers.RobertaTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    text = theirs(example.question.text, add_special_tokens=False)["input_ids"]
    assert example.tokens[example.text].tolist() == text
    special = [theirs.cls_token_id, theirs.pad_token_id, theirs.sep_token_id]
    assert special == [reader.CLS, reader.PAD, reader.SEP]


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
    """On questions that it has learned by heart every answer is right.

    What was trained is kept, and other settings are refused: test_harness.py.
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
