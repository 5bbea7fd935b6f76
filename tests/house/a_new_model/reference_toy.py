"""A toy model of the protocol for test_new_model.py: its memory is a running mean of embeddings, added to every token's."""

import runpy
import sys
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from reference.pretrained_recurrence import add_into, cross_entropy_backward, cross_entropy_forward  # noqa: F401  for rollout.py


@dataclass(frozen=True)
class Config:
    """Sizes of the model.

    Fields:
        vocabulary: V, number of token ids
        width: D, model width
        segment: N, tokens in a segment
        dropout: dropout rate in training; the toy has none
    """

    vocabulary: int = 256
    width: int = 16
    segment: int = 16
    dropout: float = 0.0


class State(NamedTuple):
    """What a segment passes to the next one."""

    memory: np.ndarray  # (B, D)


def init_params(config, rng):
    """Starting values."""
    return {"embedding": rng.normal(0, 0.1, (config.vocabulary, config.width)), "initial": rng.normal(0, 0.1, config.width)}


def initial_state(params, config, batch):
    """The learned memory in every lane."""
    return State(np.tile(params["initial"], (batch, 1)))


def initial_state_backward(config, dstate):
    """The gradient of the learned memory."""
    return {"initial": dstate.memory.sum(0)}


def forward(params, config, tokens, state):
    """Logits (B, N, V), next state, cache."""
    h = params["embedding"][tokens]  # (B, N, D)
    x = h + state.memory[:, None]
    return x @ params["embedding"].T, State((state.memory + h.mean(1)) / 2), (tokens, x)


def backward(params, config, cache, dlogits, dnext_state=None):
    """Gradients of parameters and of the incoming state."""
    tokens, x = cache
    dx = dlogits @ params["embedding"]
    dembedding = np.einsum("bnv,bnd->vd", dlogits, x)
    dnext = np.zeros_like(dx[:, 0]) if dnext_state is None else dnext_state.memory
    np.add.at(dembedding, tokens, dx + dnext[:, None] / (2 * tokens.shape[1]))
    return {"embedding": dembedding}, State(dx.sum(1) + dnext / 2)


if __name__ == "__main__":
    sys.argv.insert(1, "toy")
    runpy.run_module("reference.gradients", run_name="__main__")
