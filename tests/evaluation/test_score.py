"""Scores and losses do not depend on lanes and order, and equal documents read one by one."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelerated.data.corpus import TextDocuments
from accelerated.evaluation import score
from accelerated.evaluation.score import (
    Score,
    TrainedRun,
    carried_through,
    evaluate,
    score_lines,
    score_record,
    token_nats,
)
from tests.helpers.reading import read_alone
from tests.helpers.texts import BYTES, document_from, documents_and_tokenizer, documents_of
from tests.helpers.variants import PAPERS

VOCABULARY = 264  # as many as the tokenizer MERGED has
BLOCKS = dataclasses.replace(PAPERS["block_recurrent"].small, vocabulary=VOCABULARY)
WINDOWS = dataclasses.replace(PAPERS["pretrained_recurrence"].small, vocabulary=VOCABULARY)


@torch.no_grad()
def one_by_one(model, document, clear):
    """(-log p of each target, NaN if it is not scored; how many were the most probable)."""
    nats = np.full(len(document.inputs), math.nan)
    right = 0
    for window, logits, _ in read_alone(model, document.inputs[None], lambda index: clear):
        log_probabilities = logits[0].log_softmax(-1)
        for place in range(window.first - 1, window.stop):
            if document.scored[place]:
                target = int(document.targets[place])
                row = log_probabilities[place - window.start]
                nats[place] = -row[target]
                right += int(row.argmax() == target)
    return nats, right


@given(
    corpus=documents_and_tokenizer(least=1),
    blocks=st.booleans(),
    lanes=st.integers(1, 5),
    clear=st.booleans(),
)
def test_scores_equal_documents_read_one_by_one(corpus, blocks, lanes, clear):
    """Of blocks, and of windows that overlap; of any other size: start_here/test_overlap.py.

    Weights are so large that every token of a context has an effect.
    """
    documents, tokenizer = corpus
    paper, config = ("block_recurrent", BLOCKS) if blocks else ("pretrained_recurrence", WINDOWS)
    model = PAPERS[paper].random_model(config)

    by_hand = [one_by_one(model, document, clear) for document in documents]
    found = token_nats(model, documents, lanes, clear)
    for losses, (expected, _) in zip(found, by_hand, strict=True):
        assert losses.dtype == np.float64, "losses are float64 on the host"
        np.testing.assert_allclose(losses, expected, rtol=1e-9)

    total = evaluate(model, documents[::-1], tokenizer, lanes, clear)
    scored = []
    for document in documents:
        scored += document.targets[document.scored].tolist()
    nats = sum(np.nansum(losses) for losses, _ in by_hand)
    assert total.nats == pytest.approx(nats, rel=1e-11), "the sum of all losses"
    right = sum(right for _, right in by_hand)
    counts = {"tokens": len(scored), "right": right, "text_bytes": len(tokenizer.decode(scored))}
    for name, expected in counts.items():
        found = getattr(total, name)
        assert found == expected, f"{found} {name} are counted, and {expected} one by one"


def test_a_segment_has_its_number_in_its_document():
    """Of two lanes the first ends while the other is in the middle of its second document."""
    step = BLOCKS.segment
    documents = documents_of([3 * step + 1, 2 * step + 1, 2 * step + 1])
    model = PAPERS["block_recurrent"].model(BLOCKS)
    for segment, number, _, _ in carried_through(model, documents, 2, predict=False):
        expected = segment.place[:, 1] // step
        said = f"{number} are the numbers of segments {expected}: look at carried_through"
        assert (number == expected).all(), said


def test_a_score_has_its_units():
    total = Score(nats=6 * math.log(2), tokens=3, right=2, text_bytes=12)
    assert total.bits_per_token == pytest.approx(2), "6 bits of 3 tokens"
    assert total.bits_per_byte == pytest.approx(0.5), "6 bits of 12 bytes"
    assert total.accuracy == pytest.approx(2 / 3), "2 right of 3 tokens"
    assert total.perplexity(3) == pytest.approx(4), "exp(nats / 3)"
    assert total.perplexity(6) == pytest.approx(2), "per word: exp(nats / words)"
    assert Score(nats=1e6, tokens=1).perplexity(1) == math.inf, "no double holds it"

    record = score_record(total, (6, "counted"))
    expected = {
        "bits_per_byte": 0.5,
        "bits_per_token": 2,
        "perplexity": 4,
        "word_perplexity": 2,
        "accuracy": 2 / 3,
    }
    assert {name: record[name] for name in expected} == pytest.approx(expected)
    lines = score_lines(total, (6, "counted"), 9_000)
    assert [line.split()[-1] for line in lines[:3]] == ["0.5000", "2.0000", "4.000"]
    assert "perplexity per word 2 (6 words" in lines[3]
    assert lines[-1].endswith("3 of 9,000 in the split"), "large counts have commas"


@pytest.mark.parametrize("training", [True, False])
def test_scores_have_no_dropout(training):
    """The model is afterwards in the mode in which it was before."""
    config = dataclasses.replace(BLOCKS, dropout=0.5)
    model = PAPERS["block_recurrent"].model(config).train(training)
    documents = [document_from("the theatre " * 4, BYTES)]
    [first] = token_nats(model, documents, 1)
    [again] = token_nats(model, documents, 1)
    assert (first == again).all(), "scoring drops entries"
    for name, parameter in model.named_parameters():
        assert parameter.grad is None, f"scoring leaves a gradient on {name}"
    assert model.training == training, "scoring changes the mode of the model"


COUNTED = "counted between white space"
OFFICIAL = "official count"


@pytest.mark.parametrize(
    "data, words, line_ends, expected",
    [
        ("pg19", 900, 4, (900, OFFICIAL)),
        ("pg19", 891, 9, (900, "official count; here 891 are counted")),
        ("wikitext-103", 600, 300, (900, OFFICIAL)),
        ("wikitext-103", 900, 10, (900, COUNTED)),
        ("book.txt", 900, 0, (900, COUNTED)),
    ],
)
def test_an_official_count_is_used_for_its_own_text(monkeypatch, data, words, line_ends, expected):
    """It divides, as the papers ask, if ours is within 1% of it; else the text is another one.

    WikiText's counts every line's end as a word, PG-19's does not.
    """
    counts = {name: {"test": 900} for name in score.OFFICIAL_WORDS}
    monkeypatch.setattr(score, "OFFICIAL_WORDS", counts)
    # Two documents of 20 tokens, one with these words, one with these line ends
    table = np.array([[0, 20, words, 0], [20, 20, 0, line_ends]])
    documents = TextDocuments(np.zeros(40, np.uint8), table)
    run = TrainedRun("", None, None, {}, None, 1, data, {"test": documents})
    assert run.words() == expected, "words, and how they were counted"
    documents.whole = False
    assert run.words() == (words, COUNTED), "of a part of a split no official count"
