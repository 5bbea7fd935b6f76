"""RoBERTa with recurrence for question answering (Adding Recurrence, 5.4) in PyTorch.

An encoder reads at most 512 tokens. A question and what it asks about may have more: each window
begins with the question and goes on with the next part of the text. The final layer's outputs over
a window are averaged, a small network makes one vector of the average, and layer 2 of the next
window attends to that vector beside its own tokens. The answer is a span of the text, yes, or no.
Every token has a logit to be the span's start and one to be its end. Which of the three it is, is
read from the [CLS] token's outputs, of which the maximum over all windows is taken.

The package transformers computes the encoder; reader.py trains it. Decisions Q1 to Q9:
docs/decisions/pretrained_recurrence.md.
B lanes, N tokens in a window, K windows, D width.
"""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from accelerated.program.errors import InputError
from accelerated.training.folder import read_settings

KINDS = ("span", "yes", "no")
INSERTION_LAYER = 2  # counted from 1
DEVIATION = 0.02  # of all that RoBERTa begins with
UNREAD = 2  # rows of positions: RoBERTa counts from the padding's id on
EXPECTED = "expected a RoBERTa as the hub has it, such as FacebookAI/roberta-base"


class State(NamedTuple):
    """What a window passes to the next one; axis 0 of every field is the lane."""

    pooled: Tensor  # (B, D)
    first: Tensor  # (B, D), the largest outputs of [CLS]
    present: Tensor  # (B,) bool, false before an example's first window


class Window(NamedTuple):
    """A window of examples, (B, N) each."""

    tokens: Tensor
    readable: Tensor  # bool, false on padding; everywhere if a lane's example has ended
    text: Tensor  # bool, true on tokens that an answer may have


class Roberta(nn.Module):
    """The model: a RobertaModel of transformers, the answer's head, the vector's network.

    The seed draws the last two. Without recurrence windows are disjoint.
    """

    def __init__(self, roberta: Any, recurrent: bool, seed: int):
        super().__init__()
        self.roberta = roberta
        self.recurrent = recurrent
        d = roberta.config.hidden_size
        generator = torch.Generator().manual_seed(seed)
        self.span = drawn(d, 2, DEVIATION, generator)  # softmax cancels its bias
        self.kind = drawn(d, len(KINDS), DEVIATION, generator)
        first, second, last = (drawn(d, d, d**-0.5, generator) for _ in range(3))
        self.module = nn.Sequential(first, nn.GELU(), second, nn.GELU(), last)  # decision Q3

    def initial_state(self, batch: int) -> State:
        """The state at an example's start."""
        pooled = self.kind.weight.new_zeros(batch, self.kind.in_features)
        return State(pooled, pooled - math.inf, pooled[:, 0] > 0)

    def forward(self, tokens: Tensor, readable: Tensor, state: State) -> tuple[Tensor, State]:
        """Read a window (B, N), as in Window.

        Returns the final layer's outputs (B, N, D) and the next state.
        """
        x = self.roberta.embeddings(tokens)
        seen = readable.clone()
        seen[:, 0] = True  # everybody sees [CLS]
        for number, layer in enumerate(self.roberta.encoder.layer, start=1):
            if self.recurrent and number == INSERTION_LAYER:
                inserted = self.module(state.pooled)[:, None]  # h_prev (B, 1, D)
                with_inserted = torch.cat([state.present[:, None], seen], 1)
                x = run(layer, torch.cat([inserted, x], 1), with_inserted)[:, 1:]
            else:
                x = run(layer, x, seen)
        return x, self.next_state(state, x, readable)

    def next_state(self, state: State, x: Tensor, readable: Tensor) -> State:
        """The State after outputs x (B, N, D) of a window.

        A lane whose example has ended keeps its own.
        """
        shares = readable / readable.sum(1, keepdim=True).clamp(min=1)  # (B, N)
        pooled = (x * shares[..., None].to(x.dtype)).sum(1)
        first = torch.maximum(state.first, x[:, 0])
        reads = readable[:, :1]
        return State(
            torch.where(reads, pooled, state.pooled),
            torch.where(reads, first, state.first),
            state.present | reads[:, 0],
        )

    def read(self, windows: list[Window]) -> tuple[Tensor, Tensor]:
        """spans (B, 2, K N), -inf outside of the text, and kinds (B, 3), of examples in K windows.

        spans are the logits of the span's start and end, kinds those of span, yes and no.
        """
        state = self.initial_state(len(windows[0].tokens))
        outputs = []
        for window in windows:
            x, state = self(window.tokens, window.readable, state)
            outputs.append(x)
        spans = self.span(torch.cat(outputs, 1)).transpose(1, 2)
        text = torch.cat([window.text for window in windows], 1)  # (B, K N)
        spans = spans.masked_fill(~text[:, None], -torch.inf)
        return spans, self.kind(state.first)

    def answer_loss(self, windows: list[Window], kind: Tensor, places: Tensor) -> Tensor:
        """Mean over examples of the cross-entropy of kind (B,) and, for spans, of places (B, 2).

        A span adds the mean of the cross-entropies of its start and its end, over all tokens of the
        text. places index the windows' tokens one after another, 0 .. K N - 1; for the other kinds
        they are 0 and ignored.
        """
        spans, kinds = self.read(windows)
        of_kind = functional.cross_entropy(kinds, kind, reduction="sum")
        of_places = functional.cross_entropy(
            spans.flatten(0, 1), places.flatten(), reduction="none"
        )
        of_places = of_places.view(-1, 2).sum(1)
        return (of_kind + of_places[kind == 0].sum() / 2) / len(kinds)


def drawn(fan_in: int, fan_out: int, deviation: float, generator: torch.Generator) -> nn.Linear:
    """A linear layer whose matrix is drawn from a normal distribution, and whose bias is zero."""
    layer = nn.Linear(fan_in, fan_out)
    nn.init.normal_(layer.weight, std=deviation, generator=generator)
    nn.init.zeros_(layer.bias)
    return layer


def run(layer: Any, x: Tensor, seen: Tensor) -> Tensor:
    """A layer of transformers, of x (B, n, D) and the keys (B, n) that everybody sees."""
    added = x.new_zeros(seen.shape).masked_fill(~seen, -math.inf)
    out = layer(x, added[:, None, None])  # (B, 1, 1, n)
    return out[0] if isinstance(out, tuple) else out  # in some versions


def load_roberta(folder: Path, recurrent: bool, seed: int) -> Roberta:
    """The model of a RoBERTa's folder, as the hub lays it; raises InputError if it is none."""
    from accelerated import any_decoder  # here: it imports transformers

    try:
        own = any_decoder.package_config(json.dumps(read_settings(folder)))
        if own.model_type != "roberta":
            raise ValueError(f"its model_type is {own.model_type!r}")
        masked = any_decoder.read_folder("AutoModelForMaskedLM", folder, own)
    except Exception as error:  # of the package: any
        reason = any_decoder.reason_of(error)
        raise InputError(f"{folder} cannot be used ({reason}); {EXPECTED}") from None
    return Roberta(masked.roberta, recurrent, seed)
