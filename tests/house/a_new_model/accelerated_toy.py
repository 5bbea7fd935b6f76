"""The toy model in PyTorch, for test_new_model.py."""

from typing import NamedTuple

import numpy as np
from reference.toy import Config, init_params
from torch import Tensor
from torch.nn import functional

from accelerated.attention.heads import look_up, parameter
from accelerated.protocol import Model, Reading, Stream, check_lanes, check_state, initialise, logits_of


class State(NamedTuple):
    """What a segment passes to the next one."""

    memory: Tensor  # (B, D)


class Toy(Model):
    """The model."""

    Config = Config
    attention_reach = 0

    def __init__(self, config: Config, seed: int = 0):
        super().__init__()
        self.config = config
        self.embedding = parameter(config.vocabulary, config.width)  # (V, D)
        self.initial = parameter(config.width)  # (D,)
        initialise(self, init_params(config, np.random.default_rng(seed)))

    def describe(self) -> str:
        """One line on how far back the model can look."""
        return "a running mean of all that was read"

    def state_shapes(self, batch: int) -> State:
        """The shape of each field."""
        return State((check_lanes(batch), self.config.width))

    def initial_state(self, batch: int) -> State:
        """The state at a document's start."""
        return State(self.initial.expand(self.state_shapes(batch).memory))

    def read(self, tokens: Tensor, state: State) -> Reading:
        """Read a segment of tokens (B, N)."""
        check_state(state, self.state_shapes(len(tokens)))
        h = look_up(tokens, self.embedding)  # (B, N, D)
        return Reading(h + state.memory[:, None], State((state.memory + h.mean(1)) / 2), {})

    def advance(self, tokens: Tensor, state: State) -> State:
        """The state after tokens (B, N)."""
        return self.read(tokens, state).state

    def stream(self, state: State) -> Stream:
        """The Stream at a segment's start."""
        rows = state.memory.new_zeros(len(state.memory), self.config.segment, self.config.width)
        return Stream(state, (state.memory.clone(), rows), 0)

    def read_token(self, token: Tensor, position: Tensor, rows: tuple) -> Tensor:
        """Logits (B, V) after token (B,)."""
        memory, hidden = rows
        h = functional.embedding(token, self.embedding)
        hidden.index_copy_(1, position, h[:, None])
        return logits_of(self, h + memory)

    def close(self, stream: Stream) -> State:
        """The State after a complete segment."""
        return State((stream.state.memory + stream.rows[1].mean(1)) / 2)
