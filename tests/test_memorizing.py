"""What the accelerated Memorizing Transformer promises: how far it looks back, and what is its memory's alone."""

import dataclasses

import numpy as np
import pytest
import torch

from accelerated.memorizing import Memorizing, remember
from tests.helpers.variants import PAPERS

PAPER = PAPERS["memorizing"]


def model_of(**changes):
    """(model with random weights in evaluation mode, its config)."""
    config = dataclasses.replace(PAPER.small, **changes)
    return PAPER.model_with(PAPER.random_params(config, np.random.default_rng(0)), config).eval(), config


def read(model, tokens):
    """The logits of a document (1, K N)."""
    state, found = model.initial_state(1), []
    for segment in tokens.split(model.config.segment, 1):
        logits, state, _ = model(segment, state)
        found.append(logits)
    return torch.cat(found, 1)


@pytest.mark.parametrize("memory,last", [(0, 1), (4, 1), (20, 5)])
def test_how_many_segments_later_a_token_still_counts(memory, last):
    """In one layer: one segment by the cache, M / N by the memory; after that to the bit nothing."""
    model, config = model_of(layers=1, memory_layer=1, memory=memory, retrieved=max(1, memory), segment=4)
    rng = np.random.default_rng(1)
    tokens = torch.tensor(rng.integers(config.vocabulary, size=(1, 9 * 4)))
    changed = tokens.clone()
    changed[0, 3] = (changed[0, 3] + 1) % config.vocabulary
    with torch.no_grad():
        difference = (read(model, tokens) - read(model, changed))[0].abs().amax(-1).view(9, 4).amax(-1)
    assert [bool(segment) for segment in difference] == [True] * (last + 1) + [False] * (8 - last)


def test_the_memory_is_no_part_of_the_graph():
    model, config = model_of()
    model.train()
    state = model.initial_state(2)
    for _ in range(2):
        _, state, _ = model(torch.randint(config.vocabulary, (2, config.segment)), state)
        assert state.keys.requires_grad and state.values.requires_grad
        assert not state.memory_keys.requires_grad and not state.memory_values.requires_grad


def test_a_long_memory_is_kept_without_the_rows_that_left_it():
    """Its tensor has M rows and no more: a view of M + N would keep all of them."""
    memory = remember(torch.zeros(2, 3, 7, 5), torch.ones(2, 3, 4, 5))
    assert memory.untyped_storage().nbytes() == memory.numel() * memory.element_size() and memory.is_contiguous()
    assert memory[:, :, -4:].all() and not memory[:, :, :-4].any()


def test_it_describes_itself():
    assert Memorizing(PAPER.small).describe() == (
        "attention reaches 3 layers x 4 = 12 tokens back; layer 2 looks up 10 of the last 13 tokens"
    )
    assert Memorizing(dataclasses.replace(PAPER.small, memory=0)).describe() == "attention reaches 3 layers x 4 = 12 tokens back"
    assert Memorizing(PAPER.small).attention_reach == 12
