"""Attention by age and compression loss by layer are averages over segments with full memories."""

import dataclasses

import numpy as np
import pytest
import torch

from accelerated.compressive import Compressive
from accelerated.lab.reports import memories
from reference import compressive as reference
from tests.helpers.comparison import assert_agree
from tests.helpers.programs import refusal
from tests.helpers.reading import read_alone
from tests.helpers.texts import documents_of
from tests.helpers.variants import PAPERS, variant

SMALL = PAPERS["compressive"].small  # N 8, M 12, C 5, c 4: full after five segments


def counting_documents(lengths):
    """Documents of random ids below 11, all different."""
    rng = np.random.default_rng(0)
    documents = documents_of(lengths)
    drawn = [rng.integers(11, size=len(document.inputs)) for document in documents]
    pairs = zip(documents, drawn, strict=True)
    return [document._replace(inputs=ids.astype(np.uint8)) for document, ids in pairs]


@pytest.mark.parametrize("lengths", [[30, 40], [49, 30]])
def test_fewer_than_two_segments_are_refused(lengths):
    model = Compressive(SMALL).eval()
    documents = counting_documents(lengths)
    error = refusal(memories.attention_by_bucket, model, documents, 2, 10)
    assert error.startswith("fewer than two segments have full memories, ")
    assert "more than 6 segments" in error


def test_memories_are_full_if_no_row_is_a_zero_of_the_start():
    """A rate of 5 makes one row of a segment of 8, so 3 rows take three segments."""
    sizes = {"segment": 8, "memory": 8, "compressed_memory": 3, "compression_rate": 5}
    model = Compressive(dataclasses.replace(SMALL, **sizes)).eval()
    taken = memories.full_memories(model, counting_documents([60, 60]), 2, 10)
    for _, state in taken:
        assert (state.compressed != 0).any(-1).all(), "a compressed row is a zero of the start"


@pytest.mark.parametrize("name", ["conv-attention_reconstruction", "transformer-xl"])
def test_attention_by_bucket_equals_summing_the_weights(name, monkeypatch):
    """Of the reference's layers, for documents that are read alone.

    Buckets are equal, if need be parts of keys.
    """
    model = Compressive(variant("compressive", name)).eval()
    params = {key: value.detach().numpy() for key, value in model.named_parameters()}
    weights = []
    layer = reference.layer_forward

    def noted(*given):
        out = layer(*given)
        weights.append(out[1])
        return out

    monkeypatch.setattr(reference, "layer_forward", noted)
    documents = counting_documents([8 * 8 + 1, 8 * 7 + 1])
    parts = (model.config.compressed_memory, 12, 8)  # keys, oldest first
    rows = {}  # {(place, document): its buckets}: lanes stand side by side
    for number, document in enumerate(documents):
        state = reference.initial_state(params, model.config, 1)
        for at in range(0, len(document.inputs) - 7, 8):
            weights.clear()
            tokens = document.inputs[None, at : at + 8]
            _, state, _ = reference.forward(params, model.config, tokens, state)
            of_keys = np.split(np.mean(weights, (0, 1, 2, 3)), np.cumsum(parts)[:-1])
            if at >= (40 if model.config.compressed_memory else 16):
                buckets = [(own.repeat(6) / 6).reshape(6, -1).sum(1) for own in of_keys]
                rows[at, number] = np.concatenate(buckets)
    found = memories.attention_by_bucket(model, documents, 2, 100)
    assert not found.requires_grad
    expected = np.array([rows[place] for place in sorted(rows)])
    assert_agree({"weights": expected}, {"weights": found}, 1e-9)


@pytest.mark.parametrize("segments", [[6, 6], [8, 6], [7, 7, 3.75, 6.5, 6], [9, 6, 6]])
def test_compression_by_layer_weighs_segments_equally(segments):
    """As if each document were read alone, though of two lanes one begins in the other's middle."""
    model = Compressive(SMALL).eval()
    documents = counting_documents([int(8 * n) + 1 for n in segments])
    alone = []  # the losses (L,) of segments that are scored whole, with full memories
    for document in documents:
        for window, logits, auxiliary in read_alone(model, document.inputs[None]):
            if window.start >= 40 and logits.shape[1] == 8:
                alone.append(torch.stack([*auxiliary.values()]))
    losses = memories.compression_by_layer(model, documents, 2, 100)
    assert not losses.requires_grad
    assert_agree({"losses": torch.stack(alone).mean(0)}, {"losses": losses}, 1e-12)
    taken = memories.full_memories(model, documents, 2, 3)
    assert sum(len(tokens) for tokens, _ in taken) == min(len(alone), 3)


def test_the_table_has_means_and_their_standard_errors():
    weights = torch.tensor([0.1, 0.2, 0.6])[:, None].expand(3, 18)
    record, lines = memories.bucket_table(weights)
    for part in memories.PARTS:
        row = record["attention"][part]
        assert row["mean"] == pytest.approx([0.3] * 6)
        assert row["standard_error"] == pytest.approx([(0.07 / 3) ** 0.5] * 6)
    assert "30.00 (15.28)" in lines[-1]
