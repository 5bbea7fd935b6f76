"""The command of Table 3 trains each row on one task from the same weights, and says what came out."""

import math

import numpy as np
import pytest
import torch

from accelerated.data.tokenizers import tokenizer_of_ranks
from accelerated.lab import experiment
from accelerated.lab.systems import questions, reader, two_hops

BPE = tokenizer_of_ranks("bpe", {bytes([byte]): byte for byte in range(256)})
SMALLEST = {"width": 8, "layers": 2, "heads": 2, "feed_forward": 8, "segment": 24, "module_width": 8, "dropout": 0.0}


def test_the_page_says_what_came_out(tmp_path, capsys, monkeypatch):
    """Of models that are trained at once: recurrent ones are always right, disjoint ones if the hops are near."""
    pytest.importorskip("matplotlib", reason="drawing needs the extra plot: matplotlib")
    calls, drawn = [], [reader.cut(question, BPE, 40) for question in two_hops.drawn(60, ["A line."], 0)]
    examples = [example._replace(distance=number % 4) for number, example in enumerate(drawn)]

    def answers(row, asked):
        for example in asked:
            yield example.question.answer if row == "recurrent" or example.distance == 0 else "neither"

    monkeypatch.setattr(questions, "trained", lambda row, seed: calls.append((row, seed)) or row)
    monkeypatch.setattr(reader, "answers", answers)
    monkeypatch.setattr(questions, "task", lambda: questions.Task(None, [], examples))
    monkeypatch.setattr(experiment.torch, "set_num_threads", lambda count: None)  # of this whole process
    experiment.conduct(questions.EXPERIMENT, ["--out", str(tmp_path)])
    assert calls == [(row, seed) for seed in range(3) for row in ("disjoint", "recurrent")]
    page = (tmp_path / "pretrained_recurrence-3.md").read_text()
    assert "| disjoint | 0, 1, 2 | 25.0 | 25.0 | 100 | 0 |" in page
    assert "| recurrent | 0, 1, 2 | 100.0 | 100.0 | 100 | 100 | 100 |" in page
    assert max(map(len, page.splitlines())) <= 120 and "](pretrained_recurrence-3.svg)" in page
    assert "python -m accelerated.lab.systems.questions\n" in page and '"rate": 0.002' in page.replace("\n", " ")
    assert (tmp_path / "pretrained_recurrence-3.svg").read_text().startswith("<?xml")
    assert "recurrent, seed 2: F1 100.0, exact match 100.0, " in capsys.readouterr().out


def test_parts_are_counted_apart_and_one_without_answers_is_nan():
    answers = [[0, True, 1], [0, True, 0], [1, True, 1], [1, False, 0], [2, True, 1], [2, True, 0], [2, True, 0]]
    assert [questions.share({"answers": answers}, part) for part in questions.PARTS.values()] == [50, 50, 0]
    shares = [questions.share({"answers": answers[:1]}, part) for part in questions.PARTS.values()]
    assert shares[0] == 100 and all(map(math.isnan, shares[1:]))


@pytest.fixture
def small(monkeypatch):
    """The task of small texts and models."""
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
    weights, other, recurrent = (model(*which).state_dict() for which in ((False, 0), (False, 5), (True, 5)))
    assert any(not torch.equal(value, fresh.state_dict()[name]) for name, value in weights.items())
    assert all(torch.equal(value, recurrent[name]) and torch.equal(value, other[name]) for name, value in weights.items())
    assert {name.split(".")[0] for name in recurrent.keys() - weights.keys()} == {"module"}
    modules = [model(True, seed).module["inserted"] for seed in (1, 1, 2)]
    assert torch.equal(modules[0], modules[1]) and not torch.equal(modules[0], modules[2])


def test_a_row_is_trained_on_short_texts_then_longer_ones_and_answers_of_unseen_lines(small, monkeypatch):
    task, stages, fine_tune = questions.task(), [], reader.fine_tune
    (short, first), (long, second) = task.stages
    assert (first, second, len(short), len(long), len(task.asked)) == (1, 2, 20, 20, 10)
    assert all(example.question.text.count("\n") in (4, 6) for example in short)
    assert all(e.question.text.count("Test\n Three.\n") == e.question.text.count("Test") > 0 for e in task.asked)
    assert "Three" not in "".join(example.question.text for example in short + long)
    monkeypatch.setattr(reader, "fine_tune", lambda *how: stages.append(how[1:6]) or fine_tune(*how))
    run = questions.run("recurrent", 3)
    assert stages == [(examples, updates, 32, 0.002, 3) for examples, updates in task.stages]
    assert [row[:2] for row in run["answers"]] == [[e.distance, e.question.answer not in ("yes", "no")] for e in task.asked]
    assert run["exact match"] == pytest.approx(100 * np.mean([row[2] for row in run["answers"]]))


def test_a_text_of_the_task_has_so_many_windows_and_no_others(monkeypatch):
    every = [len(reader.cut(question, BPE, 24).tokens) for question in two_hops.drawn(40, ["A.", "Two."], 1)]
    least, most = min(every) + 2, min(every) + 4
    monkeypatch.setattr(questions, "SMALL", questions.SMALL | {"windows": [least, most]})
    lengths = [len(example.tokens) for example in questions.task_examples(20, ["A.", "Two."], BPE, 1)]
    assert {*lengths} == {least, least + 1, most}
    assert lengths == [length for length in every if least <= length <= most][:20]
