"""RoBERTa with recurrence for question answering (Adding Recurrence, 5.4) in PyTorch.

An encoder reads at most 512 tokens. A question and what it asks about may have more: each window
begins with the question and goes on with the next part of the text. The final layer's outputs over
a window are averaged, a small network makes one vector of the average, and layer 2 of the next
window attends to that vector beside its own tokens. The answer is a span of the text, yes, or no.
Every token has a logit to be the span's start and one to be its end. Which of the three it is, is
read from the [CLS] token's outputs, of which the maximum over all windows is taken.

The package transformers judges it (tests/lab/systems/test_roberta.py); reader.py trains it.
Decisions Q1 to Q9: docs/decisions/pretrained_recurrence.md.
B lanes, N tokens in a window, K windows, D width, H heads, F feed-forward width, V vocabulary.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from accelerated import pretrained_recurrence
from accelerated.attention.heads import LayerNorm, look_up, parameter, project_heads
from reference.pretrained_recurrence import (
    DEVIATION,
    NORM_EPSILON,
    init_affine,
    init_gpt2,
    init_norm,
    prefixed,
)

KINDS = ("span", "yes", "no")


@dataclass(frozen=True)
class Config:
    """Sizes of the encoder; impossible combinations raise ValueError naming the field.

    Fields:
        vocabulary: V, number of token ids
        width: D, model width, a multiple of heads
        layers: L, number of layers
        heads: H, attention heads
        feed_forward: F, width of the feed-forward hidden layer
        segment: N, tokens in a window, and rows of the position embedding
        recurrent: carry a vector from window to window; without it windows are disjoint
        insertion_layer: the layer at which the vector is inserted, counted from 1
        module_layers: hidden layers of the network that makes the vector
        module_width: width of that network's hidden layers
        dropout: dropout rate in training, 0 to below 1
    """

    vocabulary: int = 50265
    width: int = 768
    layers: int = 12
    heads: int = 12
    feed_forward: int = 3072
    segment: int = 512
    recurrent: bool = True
    insertion_layer: int = 2
    module_layers: int = 2
    module_width: int = 768
    dropout: float = 0.1

    def __post_init__(self):
        if self.width % self.heads:
            nearest = max(1, round(self.width / self.heads)) * self.heads
            raise ValueError(
                f"width {self.width} is not a multiple of heads {self.heads}; "
                f"the nearest is {nearest}"
            )
        if not 1 <= self.insertion_layer <= self.layers:
            raise ValueError(
                f"insertion_layer is {self.insertion_layer}; it must lie in 1..{self.layers}"
            )
        if self.module_layers < 0:
            raise ValueError(f"module_layers is {self.module_layers}; it must be at least 0")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}; it must be at least 0 and below 1")


class State(NamedTuple):
    """What a window passes to the next one; axis 0 of every field is the lane."""

    pooled: Tensor  # (B, D)
    first: Tensor  # (B, D)
    present: Tensor  # (B,) bool, false before an example's first window


class Window(NamedTuple):
    """A window of examples, (B, N) each."""

    tokens: Tensor
    readable: Tensor  # bool, false on padding; everywhere if a lane's example has ended
    text: Tensor  # bool, true on tokens that an answer may have


class Layer(pretrained_recurrence.Layer):
    """A layer of RoBERTa: GPT-2's parameters and attention, but norms after the sums.

    The GELU is exact, and there is no causal mask.
    """

    def projections(self, x: Tensor, count: int) -> tuple[Tensor, ...]:
        """The last `count` of query, key and value (B, H, n, D / H) of x (B, n, D).

        They are made by one product.
        """
        weights = [self.query, self.key, self.value]
        biases = [self.query_bias, self.key_bias.detach(), self.value_bias]
        return project_heads(x, self.heads, weights[-count:], biases[-count:])

    def forward(self, x: Tensor, hidden_keys: Tensor, inserted: Tensor | None) -> Tensor:
        """(B, N, D) from x (B, N, D) and inserted (B, 1, D).

        hidden_keys (B, 1, 1, 1 + N, or N if nothing is inserted) is true if nobody sees the key.
        """
        query, key, value = self.projections(x, 3)
        if inserted is not None:
            inserted_key, inserted_value = self.projections(inserted, 2)
            key = torch.cat([inserted_key, key], 2)
            value = torch.cat([inserted_value, value], 2)
        hidden_keys = hidden_keys.expand(-1, 1, x.shape[1], -1)
        x = self.norm(x + self.attend(query, key, value, hidden_keys))

        hidden = functional.linear(x, self.mlp_hidden, self.mlp_hidden_bias)  # (B, N, F)
        out = functional.linear(functional.gelu(hidden), self.mlp_output, self.mlp_output_bias)
        return self.mlp_norm(x + functional.dropout(out, self.dropout_rate, self.training))


class MaskedHead(nn.Module):
    """What says which tokens were masked, in the pretraining, by the embedding as output matrix."""

    def __init__(self, config: Config):
        super().__init__()
        self.hidden = parameter(config.width, config.width)
        self.hidden_bias = parameter(config.width)
        self.norm = LayerNorm(config.width, NORM_EPSILON)
        self.bias = parameter(config.vocabulary)

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        """Logits (..., V) of outputs x (..., D)."""
        hidden = functional.gelu(functional.linear(x, self.hidden, self.hidden_bias))
        return functional.linear(self.norm(hidden), embedding, self.bias)


class Roberta(nn.Module):
    """The model.

    The initial weights are those that `init_params` draws from `seed`.
    """

    def __init__(self, config: Config, seed: int = 0):
        super().__init__()
        self.config = config
        d = config.width
        self.embedding = parameter(config.vocabulary, d)  # (V, D)
        self.positions = parameter(config.segment, d)  # (N, D)
        self.embedding_norm = LayerNorm(d, NORM_EPSILON)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))  # pyright: ignore
        self.masked = MaskedHead(config)
        self.answer = nn.ParameterDict()
        self.module = nn.ParameterDict()  # empty if not recurrent
        params = init_params(config, np.random.default_rng(seed))
        for name, value in params.items():
            part, _, own = name.partition(".")
            if part in ("answer", "module"):
                getattr(self, part)[own] = parameter(*value.shape)
        self.load_state_dict({name: torch.tensor(value) for name, value in params.items()})

    def initial_state(self, batch: int) -> State:
        """The state at an example's start."""
        zeros = self.embedding.new_zeros(batch, self.config.width)
        return State(zeros, zeros, torch.zeros(batch, dtype=torch.bool, device=zeros.device))

    def vector(self, pooled: Tensor) -> Tensor:
        """h_prev (B, 1, D) from z (B, D), by a small network."""
        x = pooled
        for layer in range(1, self.config.module_layers + 1):
            weight = self.module[f"hidden_{layer}"]
            bias = self.module[f"hidden_{layer}_bias"]
            x = functional.gelu(functional.linear(x, weight, bias))
        return functional.linear(x, self.module["inserted"], self.module["inserted_bias"])[:, None]

    def forward(self, tokens: Tensor, readable: Tensor, state: State) -> tuple[Tensor, State]:
        """Read a window (B, N), N <= config.segment, as in Window.

        Returns the final layer's outputs (B, N, D) and the next state.
        """
        x = self.embedding_norm(look_up(tokens, self.embedding) + self.positions[: tokens.shape[1]])
        x = functional.dropout(x, self.config.dropout, self.training)
        hidden_keys = ~readable
        hidden_keys[:, 0] = False  # everybody sees [CLS]
        hidden_keys = hidden_keys[:, None, None]  # (B, 1, 1, N)
        absent = ~state.present[:, None, None, None]
        for number, layer in enumerate(self.layers, start=1):
            if self.config.recurrent and number == self.config.insertion_layer:
                x = layer(x, torch.cat([absent, hidden_keys], -1), self.vector(state.pooled))
            else:
                x = layer(x, hidden_keys, None)
        return x, self.next_state(state, x, readable)

    def next_state(self, state: State, x: Tensor, readable: Tensor) -> State:
        """The State after outputs x (B, N, D) of a window.

        A lane whose example has ended keeps its own.
        """
        shares = readable / readable.sum(1, keepdim=True).clamp(min=1)  # (B, N)
        pooled = (x * shares[..., None].to(x.dtype)).sum(1)
        cls = x[:, 0]
        largest = torch.where(state.first >= cls, state.first, cls)
        first = torch.where(state.present[:, None], largest, cls)
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
        spans = functional.linear(torch.cat(outputs, 1), self.answer["span"]).transpose(1, 2)
        text = torch.cat([window.text for window in windows], 1)  # (B, K N)
        spans = spans.masked_fill(~text[:, None], -torch.inf)
        return spans, functional.linear(state.first, self.answer["kind"], self.answer["kind_bias"])

    def answer_loss(self, windows: list[Window], kind: Tensor, places: Tensor) -> Tensor:
        """The mean over examples of -log p of the kind (B,), and of spans of their places (B, 2).

        Of a span, half of the -log p of start and end among all of the text is added. places count
        the tokens of all windows one after another. Without a span they are 0, a loss that is not
        taken.
        """
        spans, kinds = self.read(windows)
        of_kind = functional.cross_entropy(kinds, kind, reduction="sum")
        of_places = functional.cross_entropy(
            spans.flatten(0, 1), places.flatten(), reduction="none"
        )
        of_places = of_places.view(-1, 2).sum(1)
        return (of_kind + of_places[kind == 0].sum() / 2) / len(kinds)

    def masked_loss(self, tokens: Tensor, targets: Tensor, scored: Tensor) -> Tensor:
        """The mean loss of the masked tokens that are scored (B, N): the pretraining.

        Each window begins anew.
        """
        x, _ = self(tokens, torch.ones_like(scored), self.initial_state(len(tokens)))
        return functional.cross_entropy(self.masked(x[scored], self.embedding), targets[scored])


def init_params(config: Config, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """All parameters as {dotted name: float64 array}, drawn as in the references."""
    d = config.width
    params = {
        "embedding": rng.normal(0, DEVIATION, (config.vocabulary, d)),
        "positions": rng.normal(0, DEVIATION, (config.segment, d)),
    }
    params |= init_norm("embedding_norm", d)
    for layer in range(config.layers):
        params |= prefixed(f"layers.{layer}.", init_layer(config, rng))
    params |= prefixed("masked.", init_gpt2(rng, "hidden", d, d))
    params |= init_norm("masked.norm", d)
    params["masked.bias"] = np.zeros(config.vocabulary)
    params["answer.span"] = rng.normal(0, DEVIATION, (2, d))  # softmax would cancel a bias
    params |= prefixed("answer.", init_gpt2(rng, "kind", len(KINDS), d))
    if config.recurrent:
        params |= prefixed("module.", init_module(config, rng))
    return params


def init_layer(config: Config, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """A layer's; every matrix begins at N(0, 0.02^2), every bias at zero."""
    d = config.width
    p = init_norm("norm", d) | init_norm("mlp_norm", d)
    for name in ("query", "key", "value", "output"):
        p |= init_gpt2(rng, name, d, d)
    p |= init_gpt2(rng, "mlp_hidden", config.feed_forward, d)
    return p | init_gpt2(rng, "mlp_output", d, config.feed_forward)


def init_module(config: Config, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Those of the network that makes the vector (decision Q3: two hidden layers)."""
    p = {}
    fan_in = config.width
    for layer in range(1, config.module_layers + 1):
        p |= init_affine(rng, f"hidden_{layer}", config.module_width, fan_in)
        fan_in = config.module_width
    return p | init_affine(rng, "inserted", config.width, fan_in)
