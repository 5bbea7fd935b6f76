"""Topics: pieces are drawn evenly, divergences are those of the definition, and a context's own words are near it."""

import json
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelerated.data.windows import Document
from accelerated.evaluation.generation import read_prompt
from accelerated.lab.reports import topics
from accelerated.pretrained_recurrence import PretrainedRecurrence
from accelerated.program.errors import InputError
from tests.helpers.programs import WINDOWED, evaluate, train
from tests.helpers.variants import PAPERS

GARDEN, SEA = "rose tulip soil seed rain garden ", "ship sail wave salt harbour wind "


def documents_with(texts):
    """Documents whose tokens are these bytes."""
    ids = [np.frombuffer(text, np.uint8) for text in texts]
    return [Document(str(n), own[:-1], own[1:], np.ones(max(0, len(own) - 1), bool)) for n, own in enumerate(ids)]


@given(st.lists(st.integers(0, 30), min_size=1, max_size=5), st.integers(2, 12), st.integers(1, 20))
def test_pieces_come_from_single_documents(sizes, length, count):
    texts = [bytes(range(40 * number, 40 * number + size)) for number, size in enumerate(sizes)]
    documents, rng = documents_with(texts), np.random.default_rng(0)
    if max(sizes) < length:
        with pytest.raises(InputError, match=f"no document has {length} tokens; give longer ones, or a shorter --segment"):
            topics.drawn_pieces(documents, count, length, rng)
        return
    pieces = topics.drawn_pieces(documents, count, length, rng)
    assert pieces.shape == (count, length) and all(any(bytes(piece.tolist()) in text for text in texts) for piece in pieces)


def test_every_place_is_as_likely():
    documents = documents_with([bytes(range(12)), bytes(range(20, 25)), b"", bytes(range(30, 33))])
    pieces = topics.drawn_pieces(documents, 6000, 3, np.random.default_rng(0))
    starts, counts = np.unique(pieces[:, 0], return_counts=True)
    assert starts.tolist() == [*range(10), 20, 21, 22, 30] and (np.abs(counts - 6000 / 14) < 90).all()


def test_divergence_is_that_of_the_definition():
    p, q = np.array([[1, 0, 0], [0.5, 0.5, 0], [0.2, 0.3, 0.5]]), np.array([[0, 1, 0], [0.5, 0.5, 0], [0.6, 0.3, 0.1]])
    middle = [0.4, 0.3, 0.3]
    third = sum(0.5 * a * math.log2(a / m) for own in (p[2], q[2]) for a, m in zip(own, middle, strict=True))
    assert np.allclose(topics.jensen_shannon(p, q), [1, 0, third], atol=1e-12)


def test_texts_of_a_topic_are_near_each_other():
    pytest.importorskip("sklearn", reason="needs the extra topics: scikit-learn")
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.permutation((GARDEN if n % 2 else SEA).split())) for n in range(200)]
    found = topics.topic_model(texts).transform([GARDEN, SEA, "soil seed", "harbour wind", "unknown"])
    assert found.shape == (5, topics.TOPICS) and np.allclose(found.sum(1), 1) and np.allclose(found[4], 1 / topics.TOPICS)
    same, other = topics.jensen_shannon(found[:2], found[2:4]), topics.jensen_shannon(found[:2], found[3:1:-1])
    assert (same + 0.2 < other).all()
    with pytest.raises(InputError, match="the training split has too few words for a topic model"):
        topics.topic_model(["+ - *"] * 9)


def test_continuations_are_greedy_and_in_a_new_window():
    """One by one they are the same as together."""
    model = PretrainedRecurrence(PAPERS["pretrained_recurrence"].small).eval()
    run = SimpleNamespace(model=model)
    contexts = np.random.default_rng(0).integers(11, size=(topics.LANES + 3, model.config.segment))
    found = topics.continuations(run, contexts, 4)
    assert found.shape == (topics.LANES + 3, 4)
    assert np.array_equal(topics.continuations(run, contexts[: topics.LANES], 1), found[: topics.LANES, :1])
    for context, own in zip(contexts[-3:], found[-3:], strict=True):
        logits, state = read_prompt(model, torch.as_tensor(context)[None], new_window=True)
        for token in own:
            assert logits.argmax(-1) == token
            logits, state = model.step(torch.tensor([token]), state)


def test_the_report_says_how_near_topics_are(tmp_path, capsys, monkeypatch):
    """A context is at 0 from itself; continuations by a model that has learned nothing are not."""
    pytest.importorskip("sklearn", reason="needs the extra topics: scikit-learn")
    text = tmp_path / "text.txt"
    text.write_text((GARDEN * 40 + SEA * 40) * 8)
    brief = ("--steps", 1, "--sample", 0, "--validation-segments", 1)
    train("--data", text, *WINDOWED, *brief, "--out", tmp_path / "run")
    capsys.readouterr()
    printed = []
    monkeypatch.setattr(topics, "FITTED", 300)
    for _ in range(2):
        evaluate("topics", tmp_path / "run", "--contexts", 20, "--tokens", 5)
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] and "Jensen-Shannon divergence of topics, context to continuation: 0." in printed[0]
    assert "20 contexts of 8 tokens, continued by 5; 20 topics" in printed[0]
    found = []
    for continued in (topics.continuations, lambda run, contexts, count: contexts):
        monkeypatch.setattr(topics, "continuations", continued)
        evaluate("topics", tmp_path / "run", "--contexts", 20, "--tokens", 5, "--json")
        found.append(json.loads(capsys.readouterr().out))
    assert found[0]["mean"] > 0.01 and found[1]["mean"] < 1e-9 and len(found[0]["divergences"]) == 20
    assert abs(np.mean(found[0]["divergences"]) - found[0]["mean"]) < 1e-3


def test_a_missing_package_is_one_line(monkeypatch):
    for name in ("sklearn", "sklearn.decomposition", "sklearn.feature_extraction", "sklearn.feature_extraction.text"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        InputError, match=r"topics needs the package scikit-learn; install the extra: pip install -e '\.\[topics\]'"
    ):
        topics.sklearn("decomposition")
