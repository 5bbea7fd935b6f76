"""Topics: pieces are drawn evenly, and divergences are those of the definition.

A context's own words are near it.
"""

import math
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from accelerated.data.windows import lengths_of
from accelerated.generation.any_model import stepper_of
from accelerated.generation.continuation import read_prompt
from accelerated.lab.reports import topics
from accelerated.pretrained_recurrence import PretrainedRecurrence
from tests.helpers.programs import BRIEF, WINDOWED, as_json, refusal, refused, train
from tests.helpers.texts import documents_of
from tests.helpers.variants import PAPERS


def test_pieces_come_from_single_documents_and_every_place_is_as_likely():
    documents = documents_of([12, 5, 0, 3])  # 1, 2, ...; 11, 12, ...; none; 31, 32, 33
    rng = np.random.default_rng(0)
    pieces = topics.drawn_pieces(documents, 6000, 3, rng)
    assert pieces.shape == (6000, 3)
    assert (np.diff(pieces.astype(int)) == 1).all()
    starts, counts = np.unique(pieces[:, 0], return_counts=True)
    assert starts.tolist() == [*range(1, 14), 31]
    assert (np.abs(counts - 6000 / 14) < 90).all()
    [whole] = topics.drawn_pieces(documents, 1, 12, rng)
    assert whole.tolist() == [*range(1, 13)]
    error = refusal(topics.drawn_pieces, documents, 1, 13, rng)
    assert "no document has 13 tokens" in error


def test_divergence_is_that_of_the_definition():
    p = np.array([[1, 0, 0], [0.5, 0.5, 0], [0.2, 0.3, 0.5]])
    q = np.array([[0, 1, 0], [0.5, 0.5, 0], [0.6, 0.3, 0.1]])
    third = 0.0
    for a, b, middle in ((0.2, 0.6, 0.4), (0.3, 0.3, 0.3), (0.5, 0.1, 0.3)):
        third += 0.5 * a * math.log2(a / middle) + 0.5 * b * math.log2(b / middle)
    assert np.allclose(topics.jensen_shannon(p, q), [1, 0, third], atol=1e-12)


def test_continuations_are_greedy_and_in_a_new_window():
    """More than are continued at a time."""
    model = PretrainedRecurrence(PAPERS["pretrained_recurrence"].small).eval()
    count = topics.LANES + 3
    contexts = np.random.default_rng(0).integers(11, size=(count, model.config.segment))
    found = topics.continuations(SimpleNamespace(model=model), contexts, 4)
    stepper = stepper_of(model)
    for place in (0, -3, -2, -1):
        prompt = torch.as_tensor(contexts[place])[None]
        logits, state = read_prompt(stepper, prompt, new_window=True)
        for token in found[place]:
            assert logits.argmax(-1) == token
            logits, state = stepper.step(torch.tensor([token]), state)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that has learned nothing, of a text about gardens and the sea."""
    folder = tmp_path_factory.mktemp("topics")
    garden = "rose tulip soil seed rain garden "
    sea = "ship sail wave salt harbour wind "
    (folder / "text.txt").write_text((garden * 40 + sea * 40) * 8)
    train("--data", folder / "text.txt", *WINDOWED, *BRIEF, "--out", folder / "run")
    return folder / "run"


def test_the_report_says_how_near_topics_are(run, capsys, monkeypatch):
    """The same each time.

    A context is at 0 from itself; continuations by a model that has learned nothing are not.
    """
    monkeypatch.setattr(topics, "FITTED", 300)
    drawn = Mock(wraps=topics.drawn_pieces)
    monkeypatch.setattr(topics, "drawn_pieces", drawn)
    argv = ("topics", run, "--contexts", 20, "--tokens", 5)
    record = as_json(capsys, *argv)
    contexts, fitted = (lengths_of(call.args[0]).sum() for call in drawn.call_args_list)
    assert fitted > 10 * contexts, "topics are those of the training split"
    divergences = record["divergences"]
    assert len(divergences) == 20
    assert as_json(capsys, *argv)["divergences"] == divergences
    assert as_json(capsys, *argv, "--seed", 1)["divergences"] != divergences
    assert record["mean"] == pytest.approx(np.mean(divergences), abs=1e-3)
    assert record["mean"] > 0.01
    error = np.std(divergences, ddof=1) / 20**0.5
    assert record["standard_error"] == pytest.approx(error, rel=5e-3)
    monkeypatch.setattr(topics, "continuations", lambda run, contexts, count: contexts)
    assert as_json(capsys, *argv[:3], 2)["mean"] < 1e-9


def test_what_has_no_mean_or_no_topics_is_refused(run, capsys):
    """A word of the topic model stands in at least five texts, and in at most half of them."""
    error = refused(capsys, "topics", run, "--contexts", 1)
    assert "--contexts: 1 was given; it must be at least 2" in error
    error = refusal(topics.topic_model, ["rose ship"] * 4 + ["wave wind"] * 4)
    assert "the training split has too few words for a topic model" in error
