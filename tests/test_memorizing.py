"""Memorizing Transformer: its lookup and its memory by definition, how far it looks back, and what is its memory's alone."""

import dataclasses

import numpy as np
import pytest
import torch

from accelerated.memorizing import Memorizing
from reference import block_recurrent
from reference import memorizing as ref
from tests.helpers.comparison import assert_agree
from tests.helpers.rollouts import random_rows, reference_gradients, starting
from tests.helpers.variants import PAPERS

PAPER = PAPERS["memorizing"]
SMALL, VARIANTS = PAPER.small, PAPER.variants


def test_empty_rows_are_found_last_and_add_nothing():
    """Decision 6: of two keys one points away from the query; the empty rows are behind it, and take part of the softmax."""
    query = np.array([1.0, 0.0])[None, None, None]
    keys = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 0.0], [-1.0, 0.0]])[None, None]
    values = np.array([[0.0, 0.0], [5.0, 1.0], [0.0, 0.0], [7.0, 7.0]])[None, None]
    assert set(ref.nearest_keys(query, keys, 2).flat) == {1, 3}
    found, _ = ref.retrieval_forward(query, keys, values, np.array([np.log(3)]), 3)
    np.testing.assert_allclose(
        found.ravel(), (3 * values[0, 0, 1] + values[0, 0, 3] / 3) / (3 + 1 + 1 / 3)
    )


def test_a_gate_is_one_number_for_a_head():
    local, found = np.zeros((2, 3, 4, 5)), np.ones((2, 3, 4, 5))
    out, _ = ref.memory_gate_forward(local, found, np.array([0.0, np.log(3), -np.log(3)]))
    np.testing.assert_allclose(
        out, np.broadcast_to(np.array([0.5, 0.75, 0.25])[:, None, None], out.shape)
    )


def newest(m, parts):
    """The last m rows of parts (B, H, n, E) put after one another."""
    rows = np.concatenate(parts, axis=2)
    return rows[:, :, rows.shape[2] - m :]


@pytest.mark.parametrize("name", VARIANTS)
def test_the_memory_holds_what_the_memory_layer_saw_before_the_segment(name):
    """From a document's start on, decision 5: a segment reads what earlier segments left, and joins it afterwards."""
    config, rng = PAPER.variant(name), np.random.default_rng(5)
    params = PAPER.random_params(config, rng)
    state = ref.initial_state(params, config, 2)
    assert not any(field.any() for field in state), "decision 6"
    keys, values = [state.memory_keys], [state.memory_values]
    for _ in range(4):
        _, state, _ = ref.forward(
            params, config, rng.integers(config.vocabulary, size=(2, config.segment)), state
        )
        keys.append(state.keys[:, config.memory_layer - 1])
        values.append(state.values[:, config.memory_layer - 1])
        np.testing.assert_array_equal(state.memory_keys, newest(config.memory, keys))
        np.testing.assert_array_equal(state.memory_values, newest(config.memory, values))


@pytest.mark.parametrize("memory", [0, 13])
def test_without_a_memory_it_is_the_xl_of_the_block_recurrent_paper(memory):
    """Equal logits and gradients from equal weights (4.6), without memory or with its gate at sigmoid(-60); open, they differ."""
    config, rng = dataclasses.replace(SMALL, memory=memory), np.random.default_rng(6)
    same = {
        f.name: getattr(config, f.name)
        for f in dataclasses.fields(config)
        if hasattr(block_recurrent.Config, f.name)
    }
    xl = block_recurrent.Config(**same, window=config.segment, recurrent_layers=())
    params, state = PAPER.random_params(config, rng), PAPER.random_state(config, rng, 2)
    tokens, gate = (
        rng.integers(config.vocabulary, size=(2, config.segment)),
        f"layers.{config.memory_layer - 1}.memory_gate",
    )
    cache = block_recurrent.State(np.zeros((2, 0, xl.states, xl.width)), state.keys, state.values)
    expected, _, own_cache = block_recurrent.forward(
        {n: v for n, v in params.items() if n != gate}, xl, tokens, cache
    )
    dlogits = rng.standard_normal(expected.shape)
    grads, _ = block_recurrent.backward(
        {n: v for n, v in params.items() if n != gate}, xl, own_cache, dlogits
    )
    closed = params | ({gate: np.full(config.heads, -60.0)} if memory else {})
    logits, _, cache = ref.forward(closed, config, tokens, state)
    found, _ = ref.backward(closed, config, cache, dlogits)
    assert_agree(
        {"logits": expected} | grads, {"logits": logits} | {n: found[n] for n in grads}, 1e-12
    )
    if memory:
        assert np.abs(ref.forward(params, config, tokens, state)[0] - expected).max() > 1e-3


def test_a_documents_loss_and_gradients_are_those_of_a_rollout():
    """The gradient passes from segment to segment through the cached keys and values (decision 10)."""
    rng = np.random.default_rng(8)
    params, segments = PAPER.random_params(SMALL, rng), random_rows(SMALL, rng)
    expected = reference_gradients("memorizing", params, SMALL, segments, starting(0))
    loss, grads, _ = ref.loss_and_gradients(params, SMALL, [rows[:2] for rows in segments])
    assert_agree(
        {"loss": expected["loss"]} | {name: expected[name] for name in grads},
        {"loss": np.array([loss])} | grads,
        1e-12,
    )


def test_the_memory_is_no_part_of_the_graph():
    model = Memorizing(PAPER.small)
    state = model.initial_state(2)
    for _ in range(2):
        _, state, _ = model(torch.randint(PAPER.small.vocabulary, (2, PAPER.small.segment)), state)
        assert state.keys.requires_grad and state.values.requires_grad
        assert not state.memory_keys.requires_grad and not state.memory_values.requires_grad
