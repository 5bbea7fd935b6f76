"""The command of Table 3 trains each row on one task from the same weights, and counts what is right."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from accelerated.data.tokenizers import tokenizer_of_ranks
from accelerated.lab.systems import questions, reader, two_hops
from accelerated.lab.systems.two_hops import Question

BPE = tokenizer_of_ranks("bpe", {bytes([byte]): byte for byte in range(256)})
SMALLEST = {"width": 8, "layers": 2, "heads": 2, "feed_forward": 8, "segment": 24, "module_width": 8, "dropout": 0.0}

ANSWERED = [  # windows between the hops, the answer, what a model says, whether it is right
    *[(0, "block", "The block.", 1), (0, "block", "line block", 0), (1, "test", "test", 1), (2, "test", "test", 1)],
    *[(3, "test", "line", 0), (0, "no", "no", 1), (1, "yes", "no", 0), (2, "yes", "block", 0)],
]


def test_a_run_says_of_each_answer_its_distance_its_kind_and_whether_it_is_right(monkeypatch):
    """Shares are counted apart; one without answers is NaN."""
    asked = [SimpleNamespace(distance=distance, question=Question("", "", answer, ())) for distance, answer, *_ in ANSWERED]
    monkeypatch.setattr(questions, "task", lambda: questions.Task(None, [], asked))
    monkeypatch.setattr(questions, "trained", lambda row, seed: (row, seed))
    monkeypatch.setattr(reader, "answers", lambda model, some: (said for _, _, said, _ in ANSWERED if model == ("disjoint", 5)))
    run = questions.run("disjoint", 5)
    assert run["answers"] == [[distance, answer not in ("yes", "no"), right] for distance, answer, _, right in ANSWERED]
    assert run["exact match"] == 50 and run["f1"] == pytest.approx((4 + 2 / 3) / 8 * 100)
    assert [questions.share(run, part) for part in questions.PARTS.values()] == pytest.approx([50, 200 / 3, 100 / 3])
    assert math.isnan(questions.share({"answers": run["answers"][:1]}, questions.PARTS["yes or no"]))


@pytest.fixture
def small(monkeypatch):
    """The task of small texts and models."""
    monkeypatch.setattr(questions, "SIZES", SMALLEST)
    changed = {"pretraining": [2, 2, 0.01], "updates": [1, 2], "questions": [20, 10], "windows": [1, 99]}
    monkeypatch.setattr(questions, "SMALL", questions.SMALL | changed)
    monkeypatch.setattr(questions, "train_bpe", lambda source, vocabulary: BPE)
    text = SimpleNamespace(tokens=np.arange(999, dtype=np.uint16) % 256)
    monkeypatch.setattr(questions, "tokenised", lambda *source: SimpleNamespace(splits={"train": text}))
    monkeypatch.setattr(two_hops, "prose", lambda: (["A line.", "Two."], ["Three."]))
    yield questions.task.cache_clear()
    questions.task.cache_clear()


def test_both_rows_begin_with_the_same_pretrained_weights(small):
    """The seed draws the recurrence's weights alone."""
    fresh = questions.small_model(260, False, 0)
    assert 0.8 < fresh.layers[0].query.std().item() / (0.02 * (768 / 8) ** 0.5) < 1.2
    sines = [0.02 * 2**0.5 * wave(1) for wave in (math.sin, math.cos)]  # of the second position's first and fifth number
    assert fresh.positions[1, [0, 4]].tolist() == pytest.approx(sines)
    model = questions.task().model
    weights, recurrent, same, other = (model(*which).state_dict() for which in ((False, 0), (True, 5), (True, 5), (True, 6)))
    assert any(not torch.equal(value, fresh.state_dict()[name]) for name, value in weights.items())
    assert all(torch.equal(value, recurrent[name]) and torch.equal(value, other[name]) for name, value in weights.items())
    drawn = [own["module.inserted"] for own in (recurrent, same, other)]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


def test_a_row_is_trained_on_short_texts_then_longer_ones_and_answers_of_unseen_lines(small, monkeypatch):
    task, stages, fine_tune = questions.task(), [], reader.fine_tune
    (short, first), (long, second) = task.stages
    assert (first, second, len(short), len(long), len(task.asked)) == (1, 2, 20, 20, 10)
    assert all(example.question.text.count("\n") in (4, 6) for example in short)
    assert all(e.question.text.count("Test\n Three.\n") == e.question.text.count("Test") > 0 for e in task.asked)
    assert "Three" not in "".join(example.question.text for example in short + long)
    monkeypatch.setattr(reader, "fine_tune", lambda *how: stages.append(how[1:6]) or fine_tune(*how))
    assert len(questions.run("recurrent", 3)["answers"]) == 10
    assert stages == [(examples, updates, 32, 0.002, 3) for examples, updates in task.stages]


def test_a_text_of_the_task_has_so_many_windows_and_no_others(monkeypatch):
    every = [len(reader.cut(question, BPE, 24).tokens) for question in two_hops.drawn(40, ["A.", "Two."], 1)]
    least, most = min(every) + 2, min(every) + 4
    monkeypatch.setattr(questions, "SMALL", questions.SMALL | {"windows": [least, most]})
    lengths = [len(example.tokens) for example in questions.task_examples(20, ["A.", "Two."], BPE, 1)]
    assert {*lengths} == {least, least + 1, most}
    assert lengths == [length for length in every if least <= length <= most][:20]
