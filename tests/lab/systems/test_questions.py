"""The command of Table 3 keeps each run, continues, and says what came out; both rows begin with the same weights."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from accelerated.data.tokenizers import tokenizer_of_ranks
from accelerated.lab import experiment
from accelerated.lab.systems import questions, reader, two_hops
from accelerated.program.errors import InputError

RESULTS = Path(__file__).parents[3] / "docs" / "results"
BPE = tokenizer_of_ranks("bpe", {bytes([byte]): byte for byte in range(256)})
SMALLEST = {"width": 8, "layers": 2, "heads": 2, "feed_forward": 8, "segment": 24, "module_width": 8, "dropout": 0.0}


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setattr(experiment.torch, "set_num_threads", lambda count: None)  # of this whole process
    pytest.importorskip("matplotlib", reason="drawing needs the extra plot: matplotlib")


@pytest.fixture
def trained(monkeypatch):
    """Models that are trained at once: recurrent ones are always right, disjoint ones if the hops are near."""
    calls, drawn = [], [reader.cut(question, BPE, 40) for question in two_hops.drawn(60, ["A line."], 0)]
    examples = [example._replace(distance=number % 4) for number, example in enumerate(drawn)]

    def answers(row, asked):
        for example in asked:
            yield example.question.answer if row == "recurrent" or example.distance == 0 else "neither"

    monkeypatch.setattr(questions, "trained", lambda row, seed: calls.append((row, seed)) or row)
    monkeypatch.setattr(reader, "answers", answers)
    monkeypatch.setattr(questions, "task", lambda: questions.Task(None, [], examples))
    return calls


def test_the_page_says_what_came_out(trained, tmp_path, capsys):
    questions.main(["--seeds", "0", "--out", str(tmp_path)])
    questions.main(["--out", str(tmp_path)])
    assert trained == [(row, seed) for seed in range(3) for row in ("disjoint", "recurrent")]
    page = (tmp_path / "pretrained_recurrence-3.md").read_text()
    assert "| disjoint | 0, 1, 2 | 25.0 | 25.0 | 100 | 0 |" in page
    assert "| recurrent | 0, 1, 2 | 100.0 | 100.0 | 100 | 100 | 100 |" in page
    assert max(map(len, page.splitlines())) <= 120 and "](pretrained_recurrence-3.svg)" in page
    assert "python -m accelerated.lab.systems.questions\n" in page and '"rate": 0.002' in page.replace("\n", " ")
    assert (tmp_path / "pretrained_recurrence-3.svg").read_text().startswith("<?xml")
    assert "recurrent, seed 2: F1 100.0, exact match 100.0, " in capsys.readouterr().out


def test_input_that_cannot_work_is_one_line(trained, tmp_path, capsys):
    with pytest.raises(InputError, match="--rows is 'both'; it must be one of disjoint, recurrent"):
        questions.main(["--rows", "both", "--out", str(tmp_path)])
    with pytest.raises(SystemExit):
        questions.main(["--train", "a"])
    assert capsys.readouterr().err.count("\n") == 1 and not trained and not list(tmp_path.iterdir())


@pytest.fixture
def small(monkeypatch, tmp_path):
    """A task as small as can be, whose BPE is only bytes."""
    monkeypatch.setattr(questions, "SIZES", SMALLEST)
    changed = {"pretraining": [2, 2, 0.01], "updates": [1, 2], "questions": [20, 10], "windows": [1, 99]}
    monkeypatch.setattr(questions, "SMALL", questions.SMALL | changed)
    monkeypatch.setattr(questions, "train_bpe", lambda source, vocabulary: BPE)
    corpus = type("Corpus", (), {"splits": {"train": type("Tokens", (), {"tokens": np.arange(999, dtype=np.uint16) % 256})}})
    monkeypatch.setattr(questions, "tokenised", lambda *source: corpus)
    monkeypatch.setattr(two_hops, "prose", lambda: (["A line.", "Two."], ["Three."]))
    yield questions.task.cache_clear()
    questions.task.cache_clear()


def test_both_rows_begin_with_the_same_pretrained_weights(small):
    fresh = questions.small_model(260, False, 0)
    deviation = fresh.layers[0].query.std().item()
    assert 0.8 < deviation / (0.02 * (768 / 8) ** 0.5) < 1.2 and 0.018 < fresh.positions.square().mean().sqrt() < 0.022
    model = questions.task().model
    weights = model(False, 0).state_dict()
    assert any(not torch.equal(value, fresh.state_dict()[name]) for name, value in weights.items())
    recurrent = model(True, 5).state_dict()
    assert all(torch.equal(value, recurrent[name]) and torch.equal(value, model(False, 5).state_dict()[name])
               for name, value in weights.items())  # fmt: skip
    assert {name.split(".")[0] for name in recurrent.keys() - weights.keys()} == {"module"}
    modules = [model(True, seed).module["inserted"] for seed in (1, 1, 2)]
    assert torch.equal(modules[0], modules[1]) and not torch.equal(modules[0], modules[2])


def test_the_task_is_short_texts_then_longer_ones_and_unseen_lines(small):
    task = questions.task()
    (short, first), (long, second) = task.stages
    assert (first, second, len(short), len(long), len(task.asked)) == (1, 2, 20, 20, 10)
    assert all(len(example.question.context) in (2, 3) for example in short)
    lines = [dict(e.question.context).get("Test") for e in task.asked]
    assert {*lines} == {(" Three.",)} and b"Three" not in b"".join(example.spelled for example in short + long)


def test_a_row_is_trained_in_stages_and_answers(small, monkeypatch):
    task, stages, fine_tune = questions.task(), [], reader.fine_tune
    monkeypatch.setattr(reader, "fine_tune", lambda *how: stages.append(how[1:6]) or fine_tune(*how))
    run = questions.run("recurrent", 3)
    assert stages == [(examples, updates, 32, 0.002, 3) for examples, updates in task.stages]
    assert [row[:2] for row in run["answers"]] == [[e.distance, e.question.answer not in ("yes", "no")] for e in task.asked]
    assert run["exact match"] == pytest.approx(100 * np.mean([row[2] for row in run["answers"]])) and run["seconds"] > 0


def test_a_text_of_the_task_has_so_many_windows_and_no_others(monkeypatch):
    drawn = two_hops.drawn(40, ["A.", "Two."], 1)
    every = [len(reader.cut(question, BPE, questions.SIZES["segment"]).tokens) for question in drawn]
    least, most = min(every) + 2, min(every) + 4
    monkeypatch.setattr(questions, "SMALL", questions.SMALL | {"windows": [least, most]})
    lengths = [len(example.tokens) for example in questions.task_examples(20, ["A.", "Two."], BPE, 1)]
    assert {*lengths} == {least, least + 1, most}
    assert lengths == [length for length in every if least <= length <= most][:20]


def test_the_kept_page_is_that_of_its_record():
    record = json.loads((RESULTS / "pretrained_recurrence-3.json").read_text())
    assert (RESULTS / "pretrained_recurrence-3.md").read_text() == questions.page(record)
    assert list(record["runs"]) == list(questions.ROWS) and record["settings"] == questions.SMALL
