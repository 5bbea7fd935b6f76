"""Reads a text token by token with any model."""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from accelerated.attention.heads import with_fast_path
from accelerated.protocol import Model, State, check_tokens, logits_of, overlap_of


class Stream(NamedTuple):
    """A state in the middle of a segment. Only a Stepper returns and takes it.

    Continue only the latest stream. You may go back to an earlier one of the same segment, but not
    from it to a later one: what was kept of the later one's tokens is overwritten by then, and its
    logits would be wrong.
    """

    state: State  # at the segment's start; never changed
    position: int  # of the next token in the segment, from 0
    tokens: Tensor  # (B, N), the segment's tokens before position; later columns are arbitrary
    rows: tuple  # what the Stepper has cached for these tokens


class Stepper(ABC):
    """Reads a text token by token; its caller sets the model to evaluation mode.

    A token takes the same time, however long the text before it is.
    """

    def __init__(self, model: Model):
        self.model = model

    @torch.no_grad()
    def start(self, state: State) -> Stream:
        """The Stream at a segment's start; raises ValueError if the state is another model's."""
        lanes = len(state[0])
        self.model.check_state(state, lanes)
        tokens = torch.zeros(lanes, self.length, dtype=torch.long, device=state[0].device)
        return Stream(state, 0, tokens, self.rows_at(state))

    @torch.no_grad()
    def step(self, token: Tensor, stream: Stream) -> tuple[Tensor, Stream]:
        """Read one token (B,): logits (B, V) of the next one, and the Stream to read it with.

        Raises ValueError if it is not one integer for each lane. The host counts a segment's
        tokens, so no step waits for the device, unless the model does.
        """
        check_tokens(token, 1)
        self.model.check_state(stream.state, len(token))
        stream.tokens[:, stream.position] = token
        logits, rows = self.read_token(token, stream)
        position = stream.position + 1
        if position < self.length:
            return logits, stream._replace(position=position, rows=rows)

        state = self.close(stream.state, stream.tokens, rows)
        overlap = overlap_of(self.model.config)
        if overlap == 0:
            return logits, self.start(state)
        _, following = self.read(stream.tokens[:, self.length - overlap :], state)
        return logits, following

    def read(self, tokens: Tensor, state: State) -> tuple[Tensor, Stream]:
        """Read tokens (B, n), n >= 1, of one segment from its start.

        Returns the logits (B, V) after the last one, and the Stream to continue with.
        """
        first, *others = tokens.unbind(1)
        logits, stream = self.step(first, self.start(state))
        for token in others:
            logits, stream = self.step(token, stream)
        return logits, stream

    @property
    def length(self) -> int:
        """N: the state is updated after every N tokens, a segment or a block."""
        return self.model.config.segment

    @abstractmethod
    def rows_at(self, state: State) -> tuple:
        """The rows at a segment's start."""

    @abstractmethod
    def read_token(self, token: Tensor, stream: Stream) -> tuple[Tensor, tuple]:
        """Logits (B, V) after token (B,), which is in stream.tokens, and the rows that hold it."""

    @abstractmethod
    def close(self, state: State, tokens: Tensor, rows: tuple) -> State:
        """The State after a segment's tokens (B, N), from the State at its start and the rows."""


class AnyModel(Stepper):
    """Reads the segment again with each new token.

    Later tokens are padding, until they are known. They change nothing: no prediction sees them.
    """

    def rows_at(self, state: State) -> tuple:
        return ()

    def read_token(self, token: Tensor, stream: Stream) -> tuple[Tensor, tuple]:
        reading = self.model.read(stream.tokens, stream.state)
        return logits_of(self.model, reading.hidden[:, stream.position]), ()

    def close(self, state: State, tokens: Tensor, rows: tuple) -> State:
        return self.model.advance(tokens, state)

    def read(self, tokens: Tensor, state: State) -> tuple[Tensor, Stream]:
        """Only the last token's logits are needed, so the segment is read once."""
        last = tokens.shape[1] - 1
        stream = self.start(state)
        stream.tokens[:, :last] = tokens[:, :last]
        return self.step(tokens[:, last], stream._replace(position=last))


@with_fast_path
def stepper_of(model: Model, capture: bool = True) -> Stepper:
    """The fastest Stepper of a model; with `capture` a GPU may replay captured CUDA graphs."""
    return AnyModel(model)
