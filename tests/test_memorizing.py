"""Memorizing Transformer: its lookup and memory by definition, and what is its memory's alone."""

import dataclasses

import numpy as np
import pytest

from reference import block_recurrent
from reference import memorizing as ref
from tests.helpers.comparison import assert_agree
from tests.helpers.rollouts import both_sides
from tests.helpers.variants import PAPERS

PAPER = PAPERS["memorizing"]
SMALL = PAPER.small
V = SMALL.vocabulary
N = SMALL.segment


def newest(rows, parts):
    """The last rows of parts (B, H, n, E) put after one another."""
    joined = np.concatenate(parts, axis=2)
    return joined[:, :, joined.shape[2] - rows :]


@pytest.mark.parametrize("name", PAPER.variants)
def test_the_memory_holds_what_the_memory_layer_saw_before_the_segment(name):
    """Decision 5: from a document's start, a segment reads what earlier ones left."""
    config, rng, params, *_ = both_sides("memorizing", name)
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
    config, rng, params, state, *_ = both_sides("memorizing", "ten-of-thirteen", memory=memory)
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
