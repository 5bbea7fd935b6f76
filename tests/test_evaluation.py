"""Scores are sums: independent of lanes and order, equal to a document read whole."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_block_recurrent import SMALL
from test_corpus import documents_of

from accelerated.block_recurrent import BlockRecurrent
from accelerated.evaluation import Score, evaluate, temporal_range
from accelerated.tokenizer import ByteTokenizer

BYTES = ByteTokenizer()
CONFIG = SMALL.__class__(**{**SMALL.__dict__, "vocabulary": 256})


def nats_of_whole_documents(model, documents, clear=False):
    """Each document alone, padded to whole segments, its state carried by hand."""
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


@settings(max_examples=12)
@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=4).filter(lambda ns: max(ns) > 1), lanes=st.integers(1, 4),
       clear=st.booleans())  # fmt: skip
def test_scores_equal_documents_read_one_by_one(lengths, lanes, clear):
    documents, model = documents_of(lengths), BlockRecurrent(CONFIG).eval()
    score = evaluate(model, documents, BYTES, lanes, clear_memory=clear)
    nats, right = nats_of_whole_documents(model, documents, clear)
    assert math.isclose(score.nats, nats, rel_tol=1e-10)
    assert score.tokens == score.text_bytes == sum(max(n - 1, 0) for n in lengths) and score.right == right


def test_order_of_documents_does_not_matter():
    documents, model = documents_of([30, 7, 19, 2]), BlockRecurrent(CONFIG)
    a, b = (evaluate(model, ds, BYTES, 2) for ds in (documents, documents[::-1]))
    assert math.isclose(a.nats, b.nats, rel_tol=1e-12) and a[1:] == b[1:]


def test_clearing_the_memory_matters_and_dropout_is_off():
    model = BlockRecurrent(CONFIG.__class__(**{**CONFIG.__dict__, "dropout": 0.5})).train()
    documents = documents_of([60])
    carried, again, cleared = (evaluate(model, documents, BYTES, 1, clear_memory=c) for c in (False, False, True))
    assert carried == again and not math.isclose(carried.nats, cleared.nats, rel_tol=1e-6)
    assert model.training, "the mode is put back"


def test_a_limit_of_segments_scores_what_was_read():
    score = evaluate(BlockRecurrent(CONFIG), documents_of([60, 60]), BYTES, 2, segments=2)
    assert score.tokens == 2 * 2 * CONFIG.segment


class Uniform(torch.nn.Module):
    """Equal logits for 256 tokens."""

    config = CONFIG

    def __init__(self):
        super().__init__()
        self.logit = torch.nn.Parameter(torch.zeros(1))

    def initial_state(self, batch):
        return (torch.zeros(batch, 1),)

    def forward(self, tokens, state):
        return self.logit.expand(*tokens.shape, 256), state, {}


class OneField(tuple):
    def __new__(cls, *fields):
        return super().__new__(cls, fields)


def test_a_constant_model_has_eight_bits_per_byte(monkeypatch):
    model = Uniform()
    monkeypatch.setattr(model, "initial_state", lambda batch: OneField(torch.zeros(batch, 1)))
    score = evaluate(model, documents_of([33, 5]), BYTES, 3)
    assert math.isclose(score.bits_per_byte, 8) and math.isclose(score.bits_per_token, 8)
    assert math.isclose(math.exp(score.nats / score.tokens), 256)


def test_measures():
    score = Score(nats=6 * math.log(2), tokens=3, right=2, text_bytes=12)
    assert math.isclose(score.bits_per_token, 2) and math.isclose(score.bits_per_byte, 0.5)
    assert score.accuracy == pytest.approx(2 / 3)
    assert np.isfinite(score.nats)


@pytest.mark.parametrize("reach", [2, 3])
def test_temporal_range_scores_each_segment_by_what_the_state_has_carried(reach):
    """Against each document read alone: before segment i of it the state is cleared where reach divides i."""
    documents, model, n = documents_of([70, 9, 45, 88]), BlockRecurrent(CONFIG).eval(), CONFIG.segment
    expected, counts = [0.0] * reach, [0] * reach
    for document in documents:
        state = model.initial_state(1)
        for index, at in enumerate(range(0, len(document.inputs), n)):
            piece = torch.tensor(document.inputs[at : at + n].astype(int))
            if index % reach == 0:
                state = model.initial_state(1)
            logits, state, _ = model(torch.nn.functional.pad(piece, (0, n - len(piece)))[None], state)
            if index >= reach:
                targets = torch.tensor(document.targets[at : at + n].astype(int))
                expected[index % reach] -= logits[0, : len(piece)].log_softmax(-1).gather(1, targets[:, None]).sum().item()
                counts[index % reach] += len(piece)
    for lanes in (1, 3):
        scores = temporal_range(model, documents, BYTES, lanes, reach)
        assert [score.tokens for score in scores] == counts
        assert [score.nats for score in scores] == pytest.approx(expected, rel=1e-10)
