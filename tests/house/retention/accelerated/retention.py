"""Retention in PyTorch: the fast version of reference/retention.py."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from accelerated.attention.heads import embed, parameter
from accelerated.protocol import Model, Reading, check_lanes, initialise
from reference.retention import Config, init_params


class State(NamedTuple):
    """What a segment passes to the next one; axis 0 is the lane."""

    memory: Tensor  # (B, D)


class Retention(Model):
    """The model; `config` is the reference's, which draws the initial weights from `seed`."""

    state_type = State
    config: Config

    def __init__(self, config: Config, seed: int = 0):
        super().__init__(config)
        self.embedding = parameter(config.vocabulary, config.width)  # (V, D), the output's too
        self.value = parameter(config.width, config.width)  # (D, D)
        initialise(self, init_params, seed)

    def state_shapes(self, batch: int) -> dict[str, tuple[int, ...]]:
        """The shape of each field of a State; raises ValueError if batch is below 1."""
        check_lanes(batch)
        return {"memory": (batch, self.config.width)}

    def read(self, tokens: Tensor, state: State) -> Reading:
        """Read a segment of tokens (B, N); raises ValueError if N is not the segment length."""
        self.check_segment(tokens, state)
        x = embed(tokens, self.embedding)  # (B, N, D)
        value = functional.linear(x, self.value)
        places = torch.arange(tokens.shape[1], device=x.device)
        distance = places[:, None] - places  # i - j
        decay = self.config.decay
        seen = (decay ** distance.clamp(min=0)).tril().to(x)  # (N, N)
        left = (decay ** (places + 1))[:, None].to(x)  # (N, 1)
        read = seen @ value + left * state.memory[:, None]
        hidden = x + functional.dropout(read, self.config.dropout, self.training)
        return Reading(hidden * self.config.width**-0.5, State(read[:, -1]), {})

    @property
    def attention_reach(self) -> int:
        """Tokens back that a prediction can look at without memory."""
        return self.config.segment

    def describe(self) -> str:
        """One line on how far back the model can look."""
        return f"a vector of {self.config.width} numbers"
