"""Memorizing Transformer: its lookup and memory by definition, and what is its memory's alone."""

import dataclasses

import numpy as np
import pytest
import torch

from accelerated.memorizing import Memorizing
from reference import block_recurrent
from reference import memorizing as ref
from tests.helpers.comparison import assert_agree
from tests.helpers.variants import PAPERS

PAPER = PAPERS["memorizing"]
SMALL = PAPER.small
V = SMALL.vocabulary
N = SMALL.segment


def test_empty_rows_are_found_last_and_add_nothing():
    """Decision 6: of two keys one points away from the query; empty rows come after even that one.

    An empty row takes part of the softmax.
    """
    query = np.array([1.0, 0.0])[None, None, None]
    keys = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 0.0], [-1.0, 0.0]])[None, None]
    values = np.array([[0.0, 0.0], [5.0, 1.0], [0.0, 0.0], [7.0, 7.0]])[None, None]
    assert set(ref.nearest_keys(query, keys, 2).flat) == {1, 3}
    found, _ = ref.retrieval_forward(query, keys, values, np.array([np.log(3)]), 3)
    expected = (3 * values[0, 0, 1] + values[0, 0, 3] / 3) / (3 + 1 + 1 / 3)
    np.testing.assert_allclose(found.ravel(), expected)


def newest(rows, parts):
    """The last rows of parts (B, H, n, E) put after one another."""
    joined = np.concatenate(parts, axis=2)
    return joined[:, :, joined.shape[2] - rows :]


@pytest.mark.parametrize("name", PAPER.variants)
def test_the_memory_holds_what_the_memory_layer_saw_before_the_segment(name):
    """Decision 5: from a document's start, a segment reads what earlier ones left."""
    config = PAPER.variant(name)
    rng = np.random.default_rng(5)
    params = PAPER.random_params(config, rng)
    state = ref.initial_state(params, config, 2)
    assert not any(field.any() for field in state), "decision 6"
    keys = [state.memory_keys]
    values = [state.memory_values]
    for _ in range(4):
        tokens = rng.integers(V, size=(2, config.segment))
        _, state, _ = ref.forward(params, config, tokens, state)
        keys.append(state.keys[:, config.memory_layer - 1])
        values.append(state.values[:, config.memory_layer - 1])
        np.testing.assert_array_equal(state.memory_keys, newest(config.memory, keys))
        np.testing.assert_array_equal(state.memory_values, newest(config.memory, values))


@pytest.mark.parametrize("memory", [0, 13])
def test_without_a_memory_it_is_the_xl_of_the_block_recurrent_paper(memory):
    """Equal logits and gradients by equal weights (4.6).

    Without memory, or with its gate at sigmoid(-60); open, they differ.
    """
    config = dataclasses.replace(SMALL, memory=memory)
    rng = np.random.default_rng(6)
    params = PAPER.random_params(config, rng)
    state = PAPER.random_state(config, rng, 2)
    tokens = rng.integers(V, size=(2, N))
    of_xl = dict(params)
    closed = params
    if memory:
        gate = f"layers.{config.memory_layer - 1}.memory_gate"
        closed = params | {gate: np.full(config.heads, -60.0)}
        del of_xl[gate]

    names = {field.name for field in dataclasses.fields(block_recurrent.Config)}
    same = {name: value for name, value in vars(config).items() if name in names}
    xl = block_recurrent.Config(**same, window=N, recurrent_layers=())
    no_states = np.zeros((2, 0, xl.states, xl.width))
    before = block_recurrent.State(no_states, state.keys, state.values)
    expected, _, xl_cache = block_recurrent.forward(of_xl, xl, tokens, before)
    dlogits = rng.standard_normal(expected.shape)
    grads, _ = block_recurrent.backward(of_xl, xl, xl_cache, dlogits)

    logits, _, cache = ref.forward(closed, config, tokens, state)
    found, _ = ref.backward(closed, config, cache, dlogits)
    found = {name: found[name] for name in grads}
    assert_agree({"logits": expected} | grads, {"logits": logits} | found, 1e-12)
    if memory:
        logits, _, _ = ref.forward(params, config, tokens, state)
        assert np.abs(logits - expected).max() > 1e-3, "an open gate lets nothing through"


def test_the_memory_is_no_part_of_the_graph():
    model = Memorizing(SMALL)
    state = model.initial_state(2)
    for _ in range(2):
        _, state, _ = model(torch.randint(V, (2, N)), state)
        in_graph = [name for name, field in state._asdict().items() if field.requires_grad]
        assert in_graph == ["keys", "values"]
