"""What the accelerated Memorizing Transformer promises: how far it looks back, and what is its memory's alone."""

import dataclasses

import torch

from accelerated.memorizing import Memorizing, remember
from tests.helpers.variants import PAPERS

PAPER = PAPERS["memorizing"]


def test_the_memory_is_no_part_of_the_graph():
    model = Memorizing(PAPER.small)
    state = model.initial_state(2)
    for _ in range(2):
        _, state, _ = model(torch.randint(PAPER.small.vocabulary, (2, PAPER.small.segment)), state)
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
