"""Scores do not depend on lanes and order and equal documents read whole; so do the losses of single tokens."""

import dataclasses
import math
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelerated.block_recurrent import BlockRecurrent
from accelerated.data.lanes import Joined, Lanes, joined_for_lanes
from accelerated.data.windows import Document, count_words, cut
from accelerated.evaluation.score import (
    Score,
    carried_through,
    carries_nothing,
    check_score,
    count_bytes,
    evaluate,
    token_nats,
)
from accelerated.pretrained_recurrence import PretrainedRecurrence
from accelerated.program.errors import InputError
from accelerated.protocol import Reading
from tests.conftest import examples
from tests.helpers.texts import BYTES, MERGED, document_from, documents_and_tokenizer, documents_of, text_document
from tests.helpers.variants import ONE_OF_EACH, PAPERS, variant

WINDOWED = PAPERS["pretrained_recurrence"].small
CONFIG = dataclasses.replace(PAPERS["block_recurrent"].small, vocabulary=256)


def nats_of_whole_documents(model, documents, clear=False):
    """Score each document separately, padded to whole segments, with the state carried by hand."""
    total, right, n = 0.0, 0, model.config.segment
    for document in documents:
        state = model.initial_state(1)
        for at in range(0, len(document.inputs), n):
            tokens = torch.zeros(1, n, dtype=torch.long)
            piece = torch.tensor(document.inputs[at : at + n].astype(int))
            tokens[0, : len(piece)] = piece
            logits, state, _ = model(tokens, model.initial_state(1) if clear else state)
            logs = logits[0, : len(piece)].log_softmax(-1)
            targets = torch.tensor(document.targets[at : at + n].astype(int))
            total -= logs[torch.arange(len(piece)), targets].sum().item()
            right += int((logs.argmax(-1) == targets).sum())
    return total, right


@examples(12)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=4).filter(lambda ns: max(ns) > 1),
    lanes=st.integers(1, 4),
    clear=st.booleans(),
)
def test_scores_equal_documents_read_one_by_one(lengths, lanes, clear):
    documents, model = documents_of(lengths), BlockRecurrent(CONFIG).eval()
    score = evaluate(model, documents, BYTES, lanes, clear_memory=clear)
    nats, right = nats_of_whole_documents(model, documents, clear)
    assert math.isclose(score.nats, nats, rel_tol=1e-10)
    assert score.tokens == score.text_bytes == sum(max(n - 1, 0) for n in lengths) and score.right == right


def test_there_are_no_more_lanes_than_documents_or_windows(monkeypatch):
    """A million lanes cost no more than as many as there is something to read for."""
    documents, sizes, model = documents_of([31, 0, 13, 1, 8]), [], windowed()
    initial, expected = model.initial_state, [evaluate(windowed(), documents_of([31, 0, 13, 1, 8]), BYTES, 2, c) for c in (0, 1)]
    monkeypatch.setattr(model, "initial_state", lambda batch: sizes.append(batch) or initial(batch))
    for clear, lanes in ((False, 3), (True, sum(len(cut(n, WINDOWED.segment, WINDOWED.overlap)) for n in (31, 13, 8)))):
        sizes.clear()
        assert evaluate(model, documents, BYTES, 10**6, clear).nats == pytest.approx(expected[clear].nats, rel=1e-12)
        assert max(sizes) == lanes


@examples(15)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=4).filter(lambda ns: max(ns) > 1),
    lanes=st.integers(1, 5),
    size=st.integers(1, 8),
    independent=st.booleans(),
    data=st.data(),
)
def test_progress_counts_each_segment_once(lengths, lanes, size, independent, data):
    documents, overlap = documents_of(lengths), data.draw(st.integers(0, size - 1))
    model = PretrainedRecurrence(dataclasses.replace(WINDOWED, vocabulary=256, segment=size, overlap=overlap))
    with mock.patch("accelerated.evaluation.score.Progress") as progress:
        segments = [segment for segment, *_ in carried_through(model, documents, lanes, int(independent), predict=False)]
    bar, counts = progress.return_value.__enter__.return_value, [np.count_nonzero(s.place[:, 0] >= 0) for s in segments]
    assert sum(counts) == sum(len(cut(length, size, overlap)) for length in lengths) == progress.call_args.args[1]
    assert [call.args[0] for call in bar.update.call_args_list] == counts and min(counts) > 0 and max(counts) <= lanes


def test_a_score_that_is_nan_is_refused():
    assert check_score(Score(2.0, 1)).nats == 2.0 and check_score(Score(math.inf, 1)).nats == math.inf
    with pytest.raises(InputError, match="predictions are NaN"):
        check_score(Score(math.nan, 1))


class Uniform(torch.nn.Module):
    """Equal logits for 256 tokens."""

    config = CONFIG

    def __init__(self):
        super().__init__()
        self.logit = torch.nn.Parameter(torch.zeros(1))

    def initial_state(self, batch):
        return (torch.zeros(batch, 1),)

    def output_matrix(self):
        return torch.ones(256, 1)

    def read(self, tokens, state):
        return Reading(self.logit.expand(*tokens.shape, 1), state, {})


class OneField(tuple):
    def __new__(cls, *fields):
        return super().__new__(cls, fields)


def test_a_constant_model_has_eight_bits_per_byte(monkeypatch):
    model = Uniform()
    monkeypatch.setattr(model, "initial_state", lambda batch: OneField(torch.zeros(batch, 1)))
    score = evaluate(model, documents_of([33, 5]), BYTES, 3)
    assert math.isclose(score.bits_per_byte, 8) and math.isclose(score.bits_per_token, 8)
    assert math.isclose(math.exp(score.nats / score.tokens), 256)


def test_bytes_of_scored_tokens_are_counted():
    documents = [document_from("the baa\n" * 6 + "é", MERGED), document_from("he", MERGED)]
    segments = list(Lanes(documents, 2, 8))
    expected = sum(int(MERGED.token_bytes[document.targets].sum()) for document in documents)
    assert count_bytes(segments, MERGED) == expected > sum(segment.count_scored for segment in segments)


def windowed(**changes):
    """A pretrained_recurrence model over bytes, with weights large enough to have an effect."""
    config = dataclasses.replace(WINDOWED, vocabulary=256, **changes)
    model = PretrainedRecurrence(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())))
    return model


@torch.no_grad()
def nats_window_by_window(model, documents):
    """Score documents, windows (unpadded) and predictions one by one."""
    total, config = 0.0, model.config
    for document in documents:
        state = model.initial_state(1)
        for w in cut(len(document.inputs) + 1, config.segment, config.overlap):
            logits, state, _ = model(torch.tensor(document.inputs[w.start : w.stop].astype(int))[None], state)
            for target in range(w.first, w.stop + 1):
                total -= logits[0, target - 1 - w.start].log_softmax(-1)[int(document.targets[target - 1])].item()
    return total


@examples(20)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=4).filter(lambda ns: max(ns) > 1),
    lanes=st.integers(1, 5),
    window=st.integers(1, 8),
    vectors=st.integers(0, 2),
    data=st.data(),
)
def test_any_window_and_overlap_in_any_batch_and_order(lengths, lanes, window, vectors, data):
    """The summed log-probability equals windows read one by one: plain ones in any batch, recurrent ones in lanes."""
    overlap, documents = data.draw(st.integers(0, window - 1)), documents_of(lengths)
    model = windowed(segment=window, overlap=overlap, vectors=vectors)
    expected = nats_window_by_window(model, documents)
    for some in (documents, documents[::-1]):
        score = evaluate(model, some, BYTES, lanes)
        assert math.isclose(score.nats, expected, rel_tol=1e-11)
        assert score.tokens == sum(max(n - 1, 0) for n in lengths)


def test_plain_gpt2s_windows_stand_beside_each_other(monkeypatch):
    """The number of batches is the number of windows divided by the lanes, for documents of any length."""
    documents, calls = documents_of([70, 9, 3]), []
    for vectors, expected in ((0, 9), (1, 33)):
        model = windowed(overlap=4, vectors=vectors)
        assert carries_nothing(model) == (vectors == 0) and not carries_nothing(BlockRecurrent(CONFIG))
        monkeypatch.setattr(model, "read", lambda tokens, state, run=model.read: calls.append(len(tokens)) or run(tokens, state))
        evaluate(model, documents, BYTES, 4)
        windows = sum(len(cut(n, 6, 4)) for n in (70, 9, 3))
        assert windows == 36 and len(calls) == expected
        calls.clear()


def test_idle_lanes_are_not_computed(monkeypatch):
    calls, model = [], windowed(overlap=0)
    read = model.read
    monkeypatch.setattr(model, "read", lambda tokens, state: calls.append(len(tokens)) or read(tokens, state))
    evaluate(model, documents_of([31, 13, 8]), BYTES, 8)
    assert calls == [3, 3, 1, 1, 1]


@given(vocabulary=st.integers(2, 300), overlap=st.integers(0, 15))
def test_a_constant_model_has_the_perplexity_of_its_vocabulary(vocabulary, overlap):
    """Exactly, at any overlap: each token is scored once, and padding is not counted."""
    config = dataclasses.replace(WINDOWED, vocabulary=vocabulary, segment=16, max_positions=16, vectors=0, overlap=overlap)
    model = PretrainedRecurrence(config)
    torch.nn.init.zeros_(model.embedding)
    documents = [
        Document("d", np.arange(n) % vocabulary, np.arange(1, n + 1) % vocabulary, np.ones(n, bool)) for n in (50, 1, 17)
    ]
    score = evaluate(model, documents, Anything(vocabulary), 3)
    assert score.tokens == 68 and math.exp(score.nats / score.tokens) == pytest.approx(vocabulary, rel=1e-12)


class Anything:
    """A tokenizer with `vocabulary` tokens of one byte each."""

    def __init__(self, vocabulary):
        self.token_bytes = np.ones(vocabulary, int)


def test_words_are_those_of_the_original_text():
    documents = [text_document(name, text, BYTES) for name, text in (("a", b"one  two\nthree "), ("b", b""), ("c", b"x"))]
    assert [document.words for document in documents] == [3, 0, 1] and count_words(documents) == 4
    score = Score(nats=6 * math.log(2), tokens=3, right=2, text_bytes=12)
    assert (score.bits_per_token, score.bits_per_byte, score.accuracy) == pytest.approx((2, 0.5, 2 / 3))
    score = Score(nats=10.0, tokens=30, right=1, text_bytes=60)
    assert score.perplexity(4) == pytest.approx(math.exp(2.5)) and score.perplexity(30) == pytest.approx(math.exp(1 / 3))
    assert Score(1e9, 1, 0, 1).perplexity(1) == math.inf and math.isnan(Score(math.nan, 1, 0, 1).perplexity(1))


def model_of(kind, tokenizer):
    """A small model over the tokenizer's vocabulary, with weights large enough to have an effect."""
    config = CONFIG if kind == "block-recurrent" else WINDOWED
    changes = {"block-recurrent": {}, "overlapping": {"overlap": 4}, "disjoint": {"overlap": 0}, "plain": {"vectors": 0}}[kind]
    config = dataclasses.replace(config, vocabulary=max(256, len(tokenizer.token_bytes)), **changes)
    model = (BlockRecurrent if kind == "block-recurrent" else PretrainedRecurrence)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())))
    return model


KINDS = ("block-recurrent", "overlapping", "disjoint", "plain")
MODELS = {}  # built once, in double precision


def model_for(kind, tokenizer):
    key = (kind, type(tokenizer).__name__)
    MODELS[key] = MODELS.get(key) or model_of(kind, tokenizer)
    return MODELS[key]


@torch.no_grad()
def nats_one_by_one(model, document, clear):
    """Score segments and predictions one by one; clear: whether the state is cleared at every segment."""
    nats, config, state = [math.nan] * len(document.inputs), model.config, model.initial_state(1)
    for w in cut(len(document.inputs) + 1, config.segment, getattr(config, "overlap", 0)):
        tokens = torch.zeros(1, config.segment, dtype=torch.long)
        for place in range(w.start, w.stop):
            tokens[0, place - w.start] = int(document.inputs[place])
        logits, state, _ = model(tokens, model.initial_state(1) if clear else state)
        for place in range(w.first - 1, w.stop):
            if document.scored[place]:
                nats[place] = -logits[0, place - w.start].log_softmax(-1)[int(document.targets[place])].item()
    return nats


@examples(40)
@given(corpus=documents_and_tokenizer(least=1), kind=st.sampled_from(KINDS), lanes=st.integers(1, 5), clear=st.booleans())
def test_every_token_has_the_loss_of_documents_read_one_by_one(corpus, kind, lanes, clear):
    documents, tokenizer = corpus
    model = model_for(kind, tokenizer)
    nats = token_nats(model, documents, lanes, clear)
    for actual, document in zip(nats, documents, strict=True):
        assert actual.dtype == np.float64
        np.testing.assert_allclose(actual, nats_one_by_one(model, document, clear), rtol=1e-9)
    score = evaluate(model, documents, tokenizer, lanes, clear)
    assert sum(np.nansum(losses) for losses in nats) == pytest.approx(score.nats, rel=1e-12)
    assert sum(np.isfinite(losses).sum() for losses in nats) == score.tokens


@pytest.mark.parametrize("kind,clear", [(kind, False) for kind in KINDS] + [("block-recurrent", True), ("overlapping", True)])
def test_documents_of_all_lengths_in_lanes_that_fall_idle(kind, clear):
    """One of two lanes ends while the other is inside its second document."""
    documents = [document_from("the baa\n" * n + "é", MERGED) for n in (0, 6, 1, 0, 8, 5)] + [document_from("", MERGED)]
    model = model_for(kind, MERGED)
    expected = [nats_one_by_one(model, document, clear) for document in documents]
    assert list(map(len, expected)) == [0, *(len(MERGED.encode("the baa\n" * n + "é")) - 1 for n in (6, 1, 0, 8, 5)), 0]
    for lanes in (1, 2, 3, 8):
        for actual, losses in zip(token_nats(model, documents, lanes, clear), expected, strict=True):
            np.testing.assert_allclose(actual, losses, rtol=1e-9)


def test_scores_have_no_dropout_the_mode_is_restored_and_clearing_matters():
    model = BlockRecurrent(dataclasses.replace(CONFIG, vocabulary=256, dropout=0.5)).train()
    documents = [document_from("the theatre " * 4, BYTES)]
    first, again, cleared = (token_nats(model, documents, 1, clear)[0] for clear in (False, False, True))
    assert (first == again).all() and model.training and all(p.grad is None for p in model.parameters())
    carried, once_more, without = (evaluate(model, documents, BYTES, 1, clear) for clear in (False, False, True))
    assert carried == once_more and not math.isclose(carried.nats, without.nats, rel_tol=1e-6) and (first != cleared).any()


def joined_by_hand(documents):
    """The documents' text as one Document; the first token of each is not predicted."""
    documents = [document for document in documents if len(document.inputs)]
    tokens = [int(token) for document in documents for token in (*document.inputs, document.targets[-1])]
    scored = [flag for document in documents for flag in (*document.scored, False)]
    return Document("all", np.array(tokens[:-1]), np.array(tokens[1:]), np.array(scored[:-1]))


@pytest.mark.parametrize("clear", [False, True])
@pytest.mark.parametrize("paper,name", [*ONE_OF_EACH, ("pretrained_recurrence", "plain")])
def test_memory_that_is_carried_over_documents_is_that_of_their_joined_text(paper, name, clear):
    """In one lane, and in three lanes that each start at a third of the text; every token is scored once."""
    model = PAPERS[paper].model(dataclasses.replace(variant(paper, name), vocabulary=256)).eval()
    documents = documents_of([30, 1, 9, 0, 2, 41])
    text = joined_by_hand(documents)
    thirds = [Document(str(at), *(field[at : at + 27] for field in text[1:4])) for at in (0, 27, 54)]
    assert len(text.inputs) == 81 and text.scored.sum() == 78 == sum(len(document.inputs) for document in documents)
    for lanes, parts in ((1, [text]), (3, thirds)):
        joined = joined_for_lanes(lanes, documents)
        expected = [nats_one_by_one(model, part, clear) for part in parts]
        for actual, losses in zip(token_nats(model, joined, lanes, clear), expected, strict=True):
            np.testing.assert_allclose(actual, losses, rtol=1e-9)
        score = evaluate(model, joined, BYTES, lanes, clear)
        assert score.tokens == 78 and score.nats == pytest.approx(sum(np.nansum(losses) for losses in expected), rel=1e-12)
    apart = evaluate(model, documents, BYTES, 3, clear)
    assert apart.tokens == 78 and abs(apart.nats / score.nats - 1) > 1e-9, "which is not that of each document alone"
    by_document = Joined(documents).by_document(token_nats(model, joined, 3, clear))
    assert [np.isfinite(losses).sum() for losses in by_document] == [len(document.inputs) for document in documents]
