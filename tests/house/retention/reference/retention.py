"""Retention: a memory whose numbers decay at a fixed rate, in NumPy.

A model for tests/house/test_new_model.py, written as a contributor would write one. Each token adds
its value to a vector, and reads what the vector then is.

Glossary: code symbol, meaning, symbol, shape
    state.memory      the vector                                   m_t    (B, D)
    decay             what is left of it after a token             g

B batch, N tokens in a segment, D width, V vocabulary.
"""

import importlib
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


# ----------------------------------------------------------------------------
# configuration: sizes, and what a segment hands to the next one
@dataclass(frozen=True)
class Config:
    """Sizes of the model; impossible ones raise ValueError naming the field.

    Fields:
        vocabulary: V, number of token ids
        width: D, model width
        segment: N, tokens in a segment
        decay: g, what is left of the memory after a token, above 0 to 1
        dropout: dropout rate in training, 0 to below 1
    """

    vocabulary: int = 256
    width: int = 64
    segment: int = 32
    decay: float = 0.9
    dropout: float = 0.0

    def __post_init__(self):
        check_config(self)


class State(NamedTuple):
    """What a segment hands to the next one."""

    memory: np.ndarray  # (B, D)


# ----------------------------------------------------------------------------
# the method: m_t = g m_{t-1} + v_t, for all tokens of a segment at once
def retention_forward(value, memory, decay):
    """What tokens read, (B, N, D): the memory after each."""
    n = value.shape[1]
    distance = np.arange(n)[:, None] - np.arange(n)  # i - j
    seen = np.where(distance >= 0, decay ** np.maximum(distance, 0), 0.0)  # (N, N)
    left = decay ** np.arange(1, n + 1)[:, None]  # of the memory when token i reads it, (N, 1)
    return seen @ value + left * memory[:, None], (seen, left)


# y = d v + l m: the product rule, term by term
def retention_backward(dread, cache):
    """Gradients of the values and of the memory."""
    seen, left = cache
    return seen.T @ dread, (left * dread).sum(1)


# ----------------------------------------------------------------------------
# the model: one layer
def forward(params, config, tokens, state, rng=None):
    """Read one segment (B, N): logits (B, N, V), the next state, the cache for `backward`."""
    if tokens.shape[1] != config.segment:
        raise ValueError(f"a segment of {tokens.shape[1]} tokens is not one of {config.segment}")
    x = params["embedding"][tokens]  # (B, N, D)
    value, value_cache = linear_forward(x, params["value"])
    read, retention_cache = retention_forward(value, state.memory, config.decay)
    dropped, dropout_mask = dropout(read, config.dropout, rng)
    out, output_cache = linear_forward(x + dropped, params["embedding"])
    cache = (tokens, value_cache, retention_cache, dropout_mask, output_cache)
    return out * config.width**-0.5, State(read[:, -1]), cache


def backward(params, config, cache, dlogits, dnext_state=None):
    """Gradients of the parameters and of the incoming state."""
    tokens, value_cache, retention_cache, dropout_mask, output_cache = cache
    if dnext_state is None:
        dnext_state = initial_state(params, config, len(tokens))
    dsum, dembedding = linear_backward(dlogits * config.width**-0.5, output_cache)
    dread = dsum * dropout_mask
    dread[:, -1] += dnext_state.memory
    dvalue, dmemory = retention_backward(dread, retention_cache)
    dx, dweight = linear_backward(dvalue, value_cache)
    np.add.at(dembedding, tokens, dsum + dx)
    return {"embedding": dembedding, "value": dweight}, State(dmemory)


def initial_state(params, config, batch):
    """What a document starts with: zeros."""
    return State(np.zeros((batch, config.width)))


# ----------------------------------------------------------------------------
# through segments: nothing of its own; reference/rollout.py reads them


# ----------------------------------------------------------------------------
# what every Transformer has
def linear_forward(x, weight):
    """y = x W^T (..., out) for x (..., in) and weight (out, in)."""
    y = x @ weight.T
    return y, (x, weight)


# y = x W^T: dx = dy W, dW = dy^T x over all rows
def linear_backward(dy, cache):
    """Gradients of x (..., in) and of the weight (out, in)."""
    x, weight = cache
    dx = dy @ weight
    rows = tuple(range(dy.ndim - 1))  # all axes but the last
    dweight = np.tensordot(dy, x, (rows, rows))
    return dx, dweight


def dropout(x, rate, rng):
    """(x with random entries dropped and the others enlarged, what each is multiplied by).

    The gradient of x is multiplied by the same. rng None (evaluation) or rate 0 passes x through.
    """
    if rng is None or rate == 0:
        return x, 1.0
    kept = rng.random(x.shape) >= rate
    dropout_mask = kept / (1 - rate)
    return x * dropout_mask, dropout_mask


def cross_entropy_forward(logits, targets, scored):
    """Summed -log p of targets (B, N) at the scored (B, N) positions, in nats."""
    shifted = logits - logits.max(-1, keepdims=True)
    log_probabilities = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))  # (B, N, V)
    one_hot = np.eye(logits.shape[-1], dtype=bool)[targets]  # (B, N, V)
    loss = -log_probabilities[one_hot & scored[..., None]].sum()
    return loss, (log_probabilities, one_hot, scored)


# loss = -log p_target, p = softmax(logits): dlogits = p - onehot(target)
def cross_entropy_backward(dloss, cache):
    log_probabilities, one_hot, scored = cache
    dlogits = dloss * (np.exp(log_probabilities) - one_hot)
    return dlogits * scored[..., None]


def add_into(total, part):
    """Add the gradients in part to those in total, in place."""
    for name, array in part.items():
        total[name] = total.get(name, 0.0) + array


# ----------------------------------------------------------------------------
# starting values
def init_params(config, rng):
    """All parameters as {name: float64 array}; matrices are (out, in)."""
    embedding = rng.normal(0, 1, (config.vocabulary, config.width))
    value = rng.normal(0, config.width**-0.5, (config.width, config.width))
    return {"embedding": embedding, "value": value}


# ----------------------------------------------------------------------------
# checks
def check_config(config):
    """Raise ValueError, naming the field, for a config that cannot work."""
    for name in ("vocabulary", "width", "segment"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name} is {getattr(config, name)}; it must be at least 1")
    if not 0 < config.decay <= 1:
        raise ValueError(f"decay is {config.decay}; it must be above 0 and at most 1")
    if not 0 <= config.dropout < 1:
        raise ValueError(f"dropout is {config.dropout}; it must be at least 0 and below 1")


if __name__ == "__main__":  # a demonstration, or --check [--case NAME]
    raise SystemExit(importlib.import_module("reference.gradients").main("retention"))
