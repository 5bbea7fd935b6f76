"""Gated DeltaNet: its rule by the paper's equation and by chunks; its memory."""

import numpy as np
import pytest
import torch

from accelerated import gated_deltanet as fast
from reference import gated_deltanet as ref
from tests.helpers.comparison import LADDER, assert_agree

NAMES = ("query", "key", "value", "strength", "decay", "matrix")


def random_inputs(tokens, seed=0):
    """{name: array} of what the rule takes; keys and queries have unit length."""
    rng = np.random.default_rng(seed)
    query, key = rng.standard_normal((2, 2, 3, tokens, 5))
    query /= np.linalg.norm(query, axis=-1, keepdims=True)
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    value = rng.standard_normal((2, 3, tokens, 7))
    strength, decay = rng.uniform(0.2, 1, (2, 2, 3, tokens, 1))
    matrix = rng.standard_normal((2, 3, 5, 7))
    return dict(zip(NAMES, (query, key, value, strength, decay, matrix), strict=True))


def by_tokens(inputs, arriving):
    """{name: array} of what is read, the next matrix, and all gradients, by the reference."""
    read, matrix, cache = ref.delta_rule_forward(**inputs)
    grads = ref.delta_rule_backward(*arriving, cache)
    return {"read": read, "next": matrix} | {f"d{n}": g for n, g in zip(NAMES, grads, strict=True)}


def by_rule(rule, inputs, arriving):
    """The same by a function of tensors in the order of NAMES."""
    tensors = {n: torch.tensor(x, requires_grad=True) for n, x in inputs.items()}
    read, matrix = rule(**tensors)
    objective = (read * torch.tensor(arriving[0])).sum() + (
        matrix * torch.tensor(arriving[1])
    ).sum()
    grads = torch.autograd.grad(objective, [*tensors.values()])
    return {"read": read, "next": matrix} | {f"d{n}": g for n, g in zip(NAMES, grads, strict=True)}


def chunks(query, key, value, strength, decay, matrix):
    return fast.gated_delta_rule(matrix, query, key, value, strength, decay.log())


def test_a_token_changes_the_matrix_by_equation_10():
    """S_t = a (I - b k k^T) S_{t-1} + b k v^T, o_t = S_t^T q_t."""
    inputs = random_inputs(4)
    read, after, _ = ref.delta_rule_forward(**inputs)
    for lane, head in np.ndindex(2, 3):
        own = {name: array[lane, head] for name, array in inputs.items()}
        matrix = own["matrix"]
        for t in range(4):
            q, k, v, b, a = (own[name][t] for name in NAMES[:5])
            matrix = a * (np.eye(5) - b * np.outer(k, k)) @ matrix + b * np.outer(k, v)
            np.testing.assert_allclose(read[lane, head, t], matrix.T @ q, rtol=1e-12)
        np.testing.assert_allclose(after[lane, head], matrix, rtol=1e-12)


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 200])
def test_chunks_equal_the_recurrence(tokens):
    """What is read, the matrix and every gradient, that of the first matrix included."""
    inputs = random_inputs(tokens)
    rng = np.random.default_rng(1)
    arriving = rng.standard_normal((2, 3, tokens, 7)), rng.standard_normal((2, 3, 5, 7))
    assert_agree(by_tokens(inputs, arriving), by_rule(chunks, inputs, arriving), LADDER)


def test_a_fast_decay_overflows_nothing():
    """In 64 tokens exp(-16) each: exp(G_j - G_i) would be exp(1008) if it were not masked first."""
    tensors = {n: torch.tensor(x).float() for n, x in random_inputs(64).items()}
    tensors["decay"] = torch.full_like(tensors["decay"], np.exp(-16)).requires_grad_()
    read, matrix = chunks(**tensors)
    (read.sum() + matrix.sum()).backward()
    for found in (read, matrix, tensors["decay"].grad):
        assert found.isfinite().all()
