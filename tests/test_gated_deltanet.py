"""Gated DeltaNet: its rule by the paper's equation and by chunks; its memory."""

import numpy as np
import pytest
import torch

from accelerated import gated_deltanet as fast
from reference import gated_deltanet as ref
from tests.helpers.comparison import LADDER, assert_agree

NAMES = ("query", "key", "value", "strength", "decay", "matrix")


def random_inputs(tokens):
    """{name: array} of what the rule takes; keys and queries have unit length."""
    rng = np.random.default_rng(0)
    query, key = rng.standard_normal((2, 2, 3, tokens, 5))
    query /= np.linalg.norm(query, axis=-1, keepdims=True)
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    value = rng.standard_normal((2, 3, tokens, 7))
    strength, decay = rng.uniform(0.2, 1, (2, 2, 3, tokens, 1))
    matrix = rng.standard_normal((2, 3, 5, 7))
    return dict(zip(NAMES, (query, key, value, strength, decay, matrix), strict=True))


def chunks(query, key, value, strength, decay, matrix):
    return fast.gated_delta_rule(matrix, query, key, value, strength, decay.log())


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 200])
def test_a_token_changes_the_matrix_by_equation_10(tokens):
    """S_t = a (I - b k k^T) S_{t-1} + b k v^T, o_t = S_t^T q_t: in NumPy, and by PyTorch's chunks.

    The contract has the gradients, over two chunks too.
    """
    inputs = random_inputs(tokens)
    expected = {"read": np.empty((2, 3, tokens, 7)), "next": np.empty((2, 3, 5, 7))}
    for lane, head in np.ndindex(2, 3):
        own = {name: array[lane, head] for name, array in inputs.items()}
        matrix = own["matrix"]
        for t in range(tokens):
            q, k, v, b, a = (own[name][t] for name in NAMES[:5])
            matrix = a * (np.eye(5) - b * np.outer(k, k)) @ matrix + b * np.outer(k, v)
            expected["read"][lane, head, t] = matrix.T @ q
        expected["next"][lane, head] = matrix
    read, after, _ = ref.delta_rule_forward(**inputs)
    assert_agree(expected, {"read": read, "next": after}, 1e-12, "NumPy")
    read, after = chunks(**{name: torch.tensor(array) for name, array in inputs.items()})
    assert_agree(expected, {"read": read, "next": after}, LADDER, "PyTorch")


def test_a_fast_decay_overflows_nothing():
    """In 64 tokens exp(-16) each: exp(G_j - G_i) would be exp(1008) if it were not masked first."""
    tensors = {n: torch.tensor(x).float() for n, x in random_inputs(64).items()}
    tensors["decay"] = torch.full_like(tensors["decay"], np.exp(-16)).requires_grad_()
    read, matrix = chunks(**tensors)
    (read.sum() + matrix.sum()).backward()
    for found in (read, matrix, tensors["decay"].grad):
        assert found.isfinite().all()
