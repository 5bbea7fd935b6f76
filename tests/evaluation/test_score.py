"""Scores and the losses of single tokens do not depend on lanes and order, and equal documents read
one by one.
"""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelerated import block_recurrent
from accelerated.data.corpus import TextDocuments
from accelerated.data.lanes import joined_for_lanes
from accelerated.data.windows import Document, cut
from accelerated.evaluation import score
from accelerated.evaluation.score import Score, evaluate, score_lines, score_record, token_nats
from tests.conftest import examples
from tests.helpers.texts import BYTES, document_from, documents_and_tokenizer, documents_of
from tests.helpers.variants import ONE_OF_EACH, PAPERS, variant

WINDOWED = dataclasses.replace(
    PAPERS["pretrained_recurrence"].small, vocabulary=264
)  # as many as MERGED has
BLOCKS = dataclasses.replace(PAPERS["block_recurrent"].small, vocabulary=264)


def model_of(config):
    """A model with weights so large that every token of a context has an effect."""
    is_block_recurrent = isinstance(config, block_recurrent.Config)
    paper = "block_recurrent" if is_block_recurrent else "pretrained_recurrence"
    return PAPERS[paper].random_model(config)


@torch.no_grad()
def one_by_one(model, document, clear=False):
    """(-log p of each target, NaN if it is not scored; how many were the most probable), segment by
    segment in one lane.
    """
    config, state, size = model.config, model.initial_state(1), len(document.inputs)
    nats, right = np.full(size, math.nan), 0
    for window in cut(size + 1, config.segment, getattr(config, "overlap", 0)):
        tokens = torch.zeros(1, config.segment, dtype=torch.long)
        tokens[0, : window.stop - window.start] = torch.tensor(
            document.inputs[window.start : window.stop].astype(int)
        )
        logits, state, _ = model(tokens, model.initial_state(1) if clear else state)
        for place in range(window.first - 1, window.stop):
            if document.scored[place]:
                logs, target = (
                    logits[0, place - window.start].log_softmax(-1),
                    int(document.targets[place]),
                )
                nats[place], right = -logs[target].item(), right + int(logs.argmax() == target)
    return nats, right


@examples(40)
@given(
    corpus=documents_and_tokenizer(least=1),
    recurrent=st.booleans(),
    window=st.integers(1, 8),
    vectors=st.integers(0, 2),
    lanes=st.integers(1, 5),
    clear=st.booleans(),
    data=st.data(),
)
def test_scores_equal_documents_read_one_by_one(
    corpus, recurrent, window, vectors, lanes, clear, data
):
    """Of blocks, and of windows of any size and overlap with and without a vector: each token's
    loss, and all sums.
    """
    overlap, (documents, tokenizer) = data.draw(st.integers(0, window - 1)), corpus
    config = (
        BLOCKS
        if recurrent
        else dataclasses.replace(WINDOWED, segment=window, overlap=overlap, vectors=vectors)
    )
    model = model_of(config)
    expected = [one_by_one(model, document, clear) for document in documents]
    for actual, (losses, _) in zip(
        token_nats(model, documents, lanes, clear), expected, strict=True
    ):
        assert actual.dtype == np.float64
        np.testing.assert_allclose(actual, losses, rtol=1e-9)
    score = evaluate(model, documents[::-1], tokenizer, lanes, clear)
    scored = [int(target) for document in documents for target in document.targets[document.scored]]
    assert score.nats == pytest.approx(sum(np.nansum(losses) for losses, _ in expected), rel=1e-11)
    assert (score.tokens, score.right) == (len(scored), sum(right for _, right in expected))
    assert score.text_bytes == len(tokenizer.decode(scored))


def test_lanes_without_text_are_not_computed(monkeypatch):
    """Three documents in eight lanes: a batch has three rows, and one when only the longest
    document is left.
    """
    model, rows = model_of(dataclasses.replace(WINDOWED, overlap=0)), []
    read = model.read
    monkeypatch.setattr(
        model, "read", lambda tokens, state: rows.append(len(tokens)) or read(tokens, state)
    )
    evaluate(model, documents_of([31, 13, 8]), BYTES, 8)
    assert rows == [3, 3, 1, 1, 1]


def test_a_score_has_its_units():
    score = Score(nats=6 * math.log(2), tokens=3, right=2, text_bytes=12)
    assert (score.bits_per_token, score.bits_per_byte, score.accuracy) == pytest.approx(
        (2, 0.5, 2 / 3)
    )
    assert score.perplexity(3) == pytest.approx(4) and score.perplexity(6) == pytest.approx(2)
    record, lines = score_record(score, (6, "counted")), score_lines(score, (6, "counted"), 9)
    expected = {
        "bits_per_byte": 0.5,
        "bits_per_token": 2,
        "perplexity": 4,
        "word_perplexity": 2,
        "accuracy": 2 / 3,
    }
    assert {name: record[name] for name in expected} == pytest.approx(expected)
    shown = [line.split()[-1] for line in lines[:3]]
    assert shown == ["0.5000", "2.0000", "4.000"] and "per word            2 (6 words" in lines[3]


def test_scores_have_no_dropout_the_mode_is_restored_and_clearing_matters():
    config = dataclasses.replace(BLOCKS, dropout=0.5)
    model = block_recurrent.BlockRecurrent(config).train()
    documents = [document_from("the theatre " * 4, BYTES)]
    first, again, cleared = (
        token_nats(model, documents, 1, clear)[0] for clear in (False, False, True)
    )
    assert (first == again).all() and (first != cleared).any()
    assert model.training and all(p.grad is None for p in model.parameters())
    assert (
        not model.eval().training
        and evaluate(model, documents, BYTES, 1).tokens == 47
        and not model.training
    )


def joined_by_hand(documents):
    """The documents' text as one Document; the first token of each is not predicted."""
    documents = [document for document in documents if len(document.inputs)]
    tokens = [
        int(token) for document in documents for token in (*document.inputs, document.targets[-1])
    ]
    scored = [flag for document in documents for flag in (*document.scored, False)]
    return Document("all", np.array(tokens[:-1]), np.array(tokens[1:]), np.array(scored[:-1]))


@pytest.mark.parametrize(
    "paper,name,clear",
    [
        *((*each, False) for each in ONE_OF_EACH),
        ("pretrained_recurrence", "plain", False),
        (*ONE_OF_EACH[0], True),
    ],
)
def test_memory_that_is_carried_over_documents_is_that_of_their_joined_text(paper, name, clear):
    """In one lane, and in three lanes that each start at a third of the text; every token is scored
    once.
    """
    model = PAPERS[paper].model(dataclasses.replace(variant(paper, name), vocabulary=256)).eval()
    documents = documents_of([30, 1, 9, 0, 2, 41])
    text = joined_by_hand(documents)
    thirds = [
        Document(str(at), *(field[at : at + 27] for field in text[1:4])) for at in (0, 27, 54)
    ]
    assert len(text.inputs) == 81 and text.scored.sum() == 78 == sum(
        len(document.inputs) for document in documents
    )
    for lanes, parts in ((1, [text]), (3, thirds)):
        joined = joined_for_lanes(lanes, documents)
        expected = [one_by_one(model, part, clear)[0] for part in parts]
        for actual, losses in zip(token_nats(model, joined, lanes, clear), expected, strict=True):
            np.testing.assert_allclose(actual, losses, rtol=1e-9)
        score = evaluate(model, joined, BYTES, lanes, clear)
        assert score.tokens == 78 and score.nats == pytest.approx(
            sum(np.nansum(losses) for losses in expected), rel=1e-12
        )
    apart = evaluate(model, documents, BYTES, 3, clear)
    assert apart.tokens == 78 and abs(apart.nats / score.nats - 1) > 1e-9, (
        "which is not that of each document alone"
    )


def test_an_official_count_is_used_only_for_a_text_that_has_it(monkeypatch):
    """WikiText's counts every line's end as a word, PG-19's does not; a text with other words has
    its own count.
    """
    monkeypatch.setattr(
        score, "OFFICIAL_WORDS", {name: {"test": 9} for name in score.OFFICIAL_WORDS}
    )
    counted, official = "counted between white space", "official count"
    for (
        data,
        words,
        line_ends,
        expected,
    ) in (  # of two documents of 20 tokens, one with these words, one with these line ends
        ("pg19", 9, 4, (9, official)),
        ("pg19", 8, 1, (8, counted)),
        ("wikitext-103", 6, 3, (9, official)),
        ("wikitext-103-raw", 7, 2, (9, official)),
        ("wikitext-103", 9, 3, (9, counted)),
        ("book.txt", 9, 0, (9, counted)),
    ):
        documents = TextDocuments(
            np.zeros(40, np.uint8), np.array([[0, 20, words, 0], [20, 20, 0, line_ends]])
        )
        run = score.TrainedRun("", None, None, {}, None, 1, data, {"test": documents})
        assert run.words() == expected, (data, words, line_ends)
