"""Attention by age and compression loss by layer are averaged only over segments with full memories."""

import dataclasses
import itertools
import re

import numpy as np
import pytest
import torch

from accelerated.compressive import Compressive
from accelerated.lab.reports import memories
from accelerated.program.errors import InputError
from tests.helpers.comparison import assert_agree
from tests.helpers.texts import BYTES, documents_of, text_document
from tests.helpers.variants import PAPERS, variant

SMALL = PAPERS["compressive"].small


def counting_documents(lengths):
    """Documents of random ids below 11, all different."""
    rng = np.random.default_rng(0)
    documents = documents_of(lengths)
    return [d._replace(inputs=rng.integers(11, size=len(d.inputs)).astype(np.uint8)) for d in documents]


@pytest.mark.parametrize("compression", ["mean_pooling", "most_used"])
@pytest.mark.parametrize(
    "change,expected",
    [
        ({}, 2 + 3),
        ({"memory": 16}, 2 + 3),
        ({"memory": 0}, 3),
        ({"compressed_memory": 0}, 2),
        ({"compressed_memory": 4}, 4),
        ({"memory": 0, "compressed_memory": 0}, 0),
    ],
)
def test_segments_to_fill(change, expected, compression):
    """N 8, M 12, C 5, c 4: two segments fill memory; the five compressed rows come from three evicted segments."""
    config = dataclasses.replace(SMALL, compression=compression, **change)
    assert memories.segments_to_fill(config) == expected
    for seed in range(8):
        model, rng = Compressive(config, seed=seed).eval(), np.random.default_rng(seed)
        state = model.initial_state(1)
        for _ in range(expected):
            state = model.advance(torch.tensor(rng.integers(11, size=(1, 8))), state)
        rows = torch.cat([state.memory, state.compressed], 2)
        assert (rows.abs().sum(-1) > 0).all()


def test_fewer_segments_leave_zeros():
    model = Compressive(dataclasses.replace(SMALL, memory=16, compression="mean_pooling")).eval()
    state = model.initial_state(1)
    for _ in range(4):
        state = model.advance(torch.randint(11, (1, 8)), state)
    assert not state.compressed[0, 0, 0].any() and state.memory.abs().sum(-1).all()


def test_only_lanes_with_full_memories_are_read():
    """In each lane (row of the batch), documents follow each other; each state is that of reading its document alone."""
    model, lengths = Compressive(SMALL).eval(), [8 * 7 + 1, 8 * 7 + 1, 30, 8 * 6 + 4, 8 * 6 + 1]
    documents = counting_documents(lengths)
    found = list(memories.full_memories(model, documents, 2, 100))
    # segments 5 and 6 of the first two documents; segment 5 of the two that follow in their lanes
    assert [len(tokens) for tokens, _ in found] == [2, 2, 2]
    places = [(0, 40), (1, 40), (0, 48), (1, 48), (3, 40), (4, 40)]
    lanes = [(tokens[k], [field[k] for field in state]) for tokens, state in found for k in range(2)]
    for (document, place), (tokens, held) in zip(places, lanes, strict=True):
        assert (tokens.numpy() == documents[document].inputs[place : place + 8]).all()
        state = model.initial_state(1)
        for at in range(0, place, 8):
            state = model.advance(torch.tensor(documents[document].inputs[at : at + 8].astype(int))[None], state)
        assert_agree({"m": state.memory[0], "c": state.compressed[0]}, {"m": held[0], "c": held[1]}, 1e-12)
    assert sum(len(tokens) for tokens, _ in memories.full_memories(model, documents, 2, 3)) == 3


def test_lanes_that_restart_at_different_times_keep_their_own_states():
    """One lane begins a new document while the other is inside one."""
    model, documents = Compressive(SMALL).eval(), counting_documents([8 * 9 + 1, 8 * 6 + 1, 8 * 6 + 1])
    found = list(memories.full_memories(model, documents, 2, 100))
    assert [len(tokens) for tokens, _ in found] == [2, 1, 1, 1, 1]
    state = model.initial_state(1)
    for at in range(0, 40, 8):
        state = model.advance(torch.tensor(documents[2].inputs[at : at + 8].astype(int))[None], state)
    last = found[-1]
    assert (last[0][0].numpy() == documents[2].inputs[40:48]).all()
    assert_agree({"m": state.memory, "c": state.compressed}, {"m": last[1].memory, "c": last[1].compressed}, 1e-12)


def test_short_documents_are_refused():
    for lengths, found in (([30, 40], "0 segments have"), ([8 * 6 + 1, 30], "1 segment has")):
        with pytest.raises(InputError, match=f"{found} full memories, .* more than 6 segments of 8 scored tokens"):
            list(memories.full_memories(Compressive(SMALL).eval(), counting_documents(lengths), 2, 10))
    two = counting_documents([8 * 6 + 1, 8 * 6 + 1])
    assert sum(len(tokens) for tokens, _ in memories.full_memories(Compressive(SMALL).eval(), two, 2, 10)) == 2


def test_buckets_cover_every_key_once():
    assert memories.bucket_edges(12) == [0, 2, 4, 6, 8, 10, 12]
    assert memories.bucket_edges(4) == [0, 0, 1, 2, 2, 3, 4] and memories.bucket_edges(0) == [0] * 7


@pytest.mark.parametrize("name", ["conv-attention_reconstruction", "transformer-xl"])
def test_attention_by_bucket_equals_summing_the_weights(name):
    model = Compressive(variant("compressive", name)).eval()
    documents = counting_documents([8 * 8 + 1, 8 * 7 + 1])
    weights = memories.attention_by_bucket(model, documents, 2, 100)
    assert not weights.requires_grad
    rows = []
    for tokens, state in memories.full_memories(model, documents, 2, 100):
        for lane, usage in enumerate(model.usage(tokens, state)):
            assert usage.shape[0] == 3 and lane < 2
            row, at = [], 0
            for size in (model.config.compressed_memory, 12, 8):
                edges = memories.bucket_edges(size)
                row += [float(sum(usage[:, at + j].mean() for j in range(a, b))) for a, b in itertools.pairwise(edges)]
                at += size
            rows.append(row)
    assert_agree({"weights": np.array(rows)}, {"weights": weights}, 1e-12)
    assert torch.allclose(weights.sum(1), torch.ones(len(weights)))


def test_bucket_table_shows_mean_and_standard_error():
    weights = torch.tensor([[0.1] * 6 + [0.0] * 12, [0.3] * 6 + [0.0] * 12])
    record, lines = memories.bucket_table(weights)
    record = record["attention"]
    assert "2 segments" in lines[0] and len(lines) == 5
    assert lines[2].count("20.00 (10.00)") == 6 and lines[2].endswith("sum 120.0") and lines[3].endswith("none")
    assert record["compressed memory"]["mean"] == pytest.approx([0.2] * 6)
    heads = re.split(r"  +", lines[1])
    assert heads[1:] == ["1 (oldest)", "2", "3", "4", "5", "6 (newest)"], "bucket_edges go from the oldest row to the newest"
    ends = [match.end() for match in re.finditer(r"\)", lines[2])]
    assert [lines[1].index(head) + len(head) for head in heads[1:]] == ends, "each head stands over its column"
    assert record["compressed memory"]["standard_error"] == pytest.approx([0.1] * 6) and record["segment"]["mean"] == [0.0] * 6


def test_compression_by_layer_weighs_segments_equally():
    model, documents = Compressive(SMALL).eval(), counting_documents([8 * 8 + 1, 8 * 6 + 1])
    losses = []
    for tokens, state in memories.full_memories(model, documents, 2, 100):
        for lane in range(len(tokens)):
            one = type(state)(*(field[lane : lane + 1] for field in state))
            losses.append(torch.stack(list(model(tokens[lane : lane + 1], one).auxiliary.values())))
    expected = torch.stack(losses).mean(0)
    assert len(losses) == 4
    found = memories.compression_by_layer(model, documents, 2, 100)
    assert not found.requires_grad
    assert_agree({"losses": expected}, {"losses": found}, 1e-12)


def test_text_documents_are_read():
    """The documents of eval.py are text documents."""
    config = dataclasses.replace(SMALL, vocabulary=256)
    document = text_document("a", bytes(range(1, 120)), BYTES)
    (tokens, _), *_ = memories.full_memories(Compressive(config).eval(), [document], 1, 2)
    assert tokens[0].tolist() == list(range(41, 49))
