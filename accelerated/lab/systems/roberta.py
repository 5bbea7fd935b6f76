"""RoBERTa with recurrence for question answering (Adding Recurrence, 5.4) in PyTorch: reference/roberta.py on any device.

Config, parameter names, shapes and initial values are the reference's. `load_published` reads RoBERTa's own weights.
B lanes, N tokens in a window, K windows, D width, H heads, F feed-forward width, V vocabulary.
"""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from accelerated.attention.content import content_attention
from accelerated.attention.heads import LayerNorm, look_up, merge_heads, parameter, split_heads
from accelerated.program.errors import InputError
from accelerated.protocol import check_lanes, check_state, initialise
from accelerated.training.gpt2_weights import safetensors_package
from reference.roberta import NORM_EPSILON, Config, init_params

OFFSET = 2  # rows of RoBERTa's position embedding before position 0: it counts from its padding's id on
NAMES = {  # {ours: RoBERTa's} of a layer
    "query": "attention.self.query", "key": "attention.self.key", "value": "attention.self.value",
    "output": "attention.output.dense", "norm": "attention.output.LayerNorm", "mlp_hidden": "intermediate.dense",
    "mlp_output": "output.dense", "mlp_norm": "output.LayerNorm",
}  # fmt: skip
SIZES = {  # {field of Config: RoBERTa's in config.json}
    "vocabulary": "vocab_size", "width": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads",
    "feed_forward": "intermediate_size", "dropout": "hidden_dropout_prob",
}  # fmt: skip
HEAD = {"hidden": "lm_head.dense", "norm": "lm_head.layer_norm"}


class State(NamedTuple):
    """What a window passes to the next one; axis 0 of every field is the lane."""

    pooled: torch.Tensor  # (B, D)
    first: torch.Tensor  # (B, D)
    present: torch.Tensor  # (B,) bool, false before an example's first window


class Answer(NamedTuple):
    """What is asked for; start and end count the tokens of all windows one after another, and are read only of spans."""

    kind: torch.Tensor  # (B,), an index of KINDS
    start: torch.Tensor  # (B,)
    end: torch.Tensor  # (B,)


class Layer(nn.Module):
    """A layer of RoBERTa: attention to the window's readable tokens and to the inserted vector, if any; then the MLP."""

    def __init__(self, config: Config):
        super().__init__()
        d, f = config.width, config.feed_forward
        self.heads, self.dropout = config.heads, config.dropout
        for name, (rows, columns) in {
            "query": (d, d), "key": (d, d), "value": (d, d), "output": (d, d), "mlp_hidden": (f, d), "mlp_output": (d, f),
        }.items():  # fmt: skip
            self.register_parameter(name, parameter(rows, columns))
            self.register_parameter(f"{name}_bias", parameter(rows))
        self.norm, self.mlp_norm = LayerNorm(d, NORM_EPSILON), LayerNorm(d, NORM_EPSILON)

    def project(self, x: torch.Tensor, names: tuple[str, ...]) -> list[torch.Tensor]:
        """The projections of x (B, n, D) of these names, by one product: (B, H, n, D / H) each; none for the key's bias."""
        weight = torch.cat([getattr(self, name) for name in names])
        biases = [getattr(self, f"{name}_bias") for name in names]
        bias = torch.cat([b.detach() if name == "key" else b for name, b in zip(names, biases, strict=True)])
        return split_heads(functional.linear(x, weight, bias), self.heads, len(names))

    def forward(self, x: torch.Tensor, hidden_keys: torch.Tensor, inserted: torch.Tensor | None) -> torch.Tensor:
        """(B, N, D) from x (B, N, D); inserted (B, 1, D); hidden_keys (B, 1, 1, 1 + N or N) is true if nobody sees the key."""
        query, key, value = self.project(x, ("query", "key", "value"))
        if inserted is not None:
            slots = self.project(inserted, ("key", "value"))
            key, value = (torch.cat(pair, 2) for pair in zip(slots, (key, value), strict=True))
        mask = hidden_keys.expand(-1, 1, x.shape[1], -1)
        out = content_attention(query, key, value, mask, self.dropout if self.training else 0.0)
        x = self.norm(x + self.dropped(functional.linear(merge_heads(out), self.output, self.output_bias)))
        hidden = functional.gelu(functional.linear(x, self.mlp_hidden, self.mlp_hidden_bias))  # (B, N, F)
        return self.mlp_norm(x + self.dropped(functional.linear(hidden, self.mlp_output, self.mlp_output_bias)))

    def dropped(self, x: torch.Tensor) -> torch.Tensor:
        """x with entries dropped in training."""
        return functional.dropout(x, self.dropout, self.training)


class Recurrence(nn.Module):
    """The network that makes the inserted vector of the pooled one."""

    def __init__(self, config: Config):
        super().__init__()
        self.layers, fan_in = config.module_layers, config.width
        for layer in range(1, config.module_layers + 1):
            self.register_parameter(f"hidden_{layer}", parameter(config.module_width, fan_in))
            self.register_parameter(f"hidden_{layer}_bias", parameter(config.module_width))
            fan_in = config.module_width
        self.inserted, self.inserted_bias = parameter(config.width, fan_in), parameter(config.width)

    def forward(self, pooled: torch.Tensor) -> torch.Tensor:
        """h_prev (B, 1, D) from z (B, D)."""
        x = pooled
        for layer in range(1, self.layers + 1):
            x = functional.gelu(functional.linear(x, getattr(self, f"hidden_{layer}"), getattr(self, f"hidden_{layer}_bias")))
        return functional.linear(x, self.inserted, self.inserted_bias)[:, None]


class MaskedHead(nn.Module):
    """What says which tokens were masked, in the pretraining; its output matrix is the embedding."""

    def __init__(self, config: Config):
        super().__init__()
        self.hidden, self.hidden_bias = parameter(config.width, config.width), parameter(config.width)
        self.norm, self.bias = LayerNorm(config.width, NORM_EPSILON), parameter(config.vocabulary)

    def forward(self, x: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        """Logits (..., V) of outputs x (..., D)."""
        hidden = functional.gelu(functional.linear(x, self.hidden, self.hidden_bias))
        return functional.linear(self.norm(hidden), embedding, self.bias)


class AnswerHead(nn.Module):
    """Logits of the span's start and end, and of span, yes and no."""

    def __init__(self, config: Config):
        super().__init__()
        self.span = parameter(2, config.width)
        self.kind, self.kind_bias = parameter(3, config.width), parameter(3)

    def forward(self, outputs: list, texts: list, first: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """spans (B, 2, K N), -inf outside of the text, and kinds (B, 3), from K windows' outputs and masks of the text."""
        spans = functional.linear(torch.cat(outputs, 1), self.span).transpose(1, 2)
        spans = spans.masked_fill(~torch.cat(texts, 1)[:, None], -torch.inf)
        return spans, functional.linear(first, self.kind, self.kind_bias)


class Roberta(nn.Module):
    """The model. `config` is the reference's; the initial weights are those that the reference draws from `seed`."""

    Config = Config

    def __init__(self, config: Config, seed: int = 0):
        super().__init__()
        self.config = config
        self.embedding = parameter(config.vocabulary, config.width)  # (V, D)
        self.positions = parameter(config.segment, config.width)  # (N, D)
        self.embedding_norm = LayerNorm(config.width, NORM_EPSILON)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.masked, self.answer = MaskedHead(config), AnswerHead(config)
        self.module = Recurrence(config) if config.recurrent else None
        initialise(self, init_params(config, np.random.default_rng(seed)))

    def initial_state(self, batch: int) -> State:
        """The state at an example's start; raises ValueError if batch is below 1."""
        zeros = self.embedding.new_zeros(check_lanes(batch), self.config.width)
        return State(zeros, zeros, torch.zeros(batch, dtype=torch.bool, device=zeros.device))

    def forward(self, tokens: torch.Tensor, readable: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """Read a window: the final layer's outputs (B, N, D) and the next state.

        tokens and readable (B, N); readable is false on padding, everywhere if a lane's example has ended. Raises ValueError if N
        is not 1 to config.segment, or if the state does not fit this model and B lanes.
        """
        batch, length, c = *tokens.shape, self.config
        if not 1 <= length <= c.segment:
            raise ValueError(f"a window of {length} tokens; it must have 1 to {c.segment}, the segment")
        check_state(state, State((batch, c.width), (batch, c.width), (batch,)))
        inserted = None if self.module is None else self.module(state.pooled)
        x = self.embedding_norm(look_up(tokens, self.embedding) + self.positions[:length])
        x = functional.dropout(x, c.dropout, self.training)
        hidden = ~readable
        hidden = torch.cat([torch.zeros_like(hidden[:, :1]), hidden[:, 1:]], 1)[:, None, None]  # everybody sees [CLS]
        for number, layer in enumerate(self.layers, start=1):
            if inserted is not None and number == c.insertion_layer:
                x = layer(x, torch.cat([~state.present[:, None, None, None], hidden], -1), inserted)
            else:
                x = layer(x, hidden, None)
        return x, self.next_state(state, x, readable)

    def next_state(self, state: State, x: torch.Tensor, readable: torch.Tensor) -> State:
        """The State after outputs x (B, N, D) of a window; a lane whose example has ended keeps its own."""
        reads = readable[:, 0]
        shares = readable / readable.sum(1, keepdim=True).clamp(min=1)  # (B, N)
        pooled = (x * shares[..., None].to(x.dtype)).sum(1)
        cls = x[:, 0]
        first = torch.where(state.present[:, None], torch.where(state.first >= cls, state.first, cls), cls)
        kept = reads[:, None]
        return State(torch.where(kept, pooled, state.pooled), torch.where(kept, first, state.first), state.present | reads)

    def read(self, windows: list) -> tuple[torch.Tensor, torch.Tensor]:
        """spans (B, 2, K N) and kinds (B, 3) of examples cut into K windows [(tokens, readable, text)]."""
        state, outputs = self.initial_state(len(windows[0][0])), []
        for tokens, readable, _ in windows:
            x, state = self(tokens, readable, state)
            outputs.append(x)
        return self.answer(outputs, [text for _, _, text in windows], state.first)

    def answer_loss(self, windows: list, answer: Answer) -> torch.Tensor:
        """The mean over examples of -log p of the kind and, of spans, half of those of start and end among all of the text."""
        spans, kinds = self.read(windows)
        of_kind = functional.cross_entropy(kinds, answer.kind, reduction="sum")
        places = torch.stack([answer.start, answer.end], 1)  # without a span they point at [CLS], a loss that is not taken
        of_places = functional.cross_entropy(spans.flatten(0, 1), places.flatten(), reduction="none").view(-1, 2).sum(1)
        return (of_kind + of_places[answer.kind == 0].sum() / 2) / len(kinds)

    def masked_loss(self, tokens: torch.Tensor, targets: torch.Tensor, scored: torch.Tensor) -> torch.Tensor:
        """The mean loss of the masked tokens that are scored (B, N), of windows that begin anew: the pretraining."""
        x, _ = self(tokens, torch.ones_like(scored), self.initial_state(len(tokens)))
        return functional.cross_entropy(self.masked(x[scored], self.embedding), targets[scored])


def renamed(config: Config) -> dict[str, str]:
    """Return {our name: RoBERTa's} of the parameters that are taken as they are."""
    pairs = {"embedding": "embeddings.word_embeddings.weight", "masked.bias": "lm_head.bias"}
    places = {"embedding_norm": "embeddings.LayerNorm"} | {f"masked.{name}": theirs for name, theirs in HEAD.items()}
    places |= {
        f"layers.{i}.{name}": f"encoder.layer.{i}.{theirs}" for i in range(config.layers) for name, theirs in NAMES.items()
    }
    for ours, theirs in places.items():
        weight, bias = (".scale", ".bias") if ours.endswith("norm") else ("", "_bias")
        pairs |= {ours + weight: f"{theirs}.weight", ours + bias: f"{theirs}.bias"}
    return pairs


def load_published(model: Roberta, path: str | Path) -> None:
    """Load RoBERTa's model.safetensors into the model; the recurrence and the answer's head keep their initial weights.

    Its token types are added to its positions, which computes the same, because there is one type. A file of the encoder alone
    leaves the masked head as it is. Raises InputError if the file is not a RoBERTa of the config's sizes.
    """
    safetensors = safetensors_package("RoBERTa's weights")
    try:
        with safetensors.safe_open(path, "pt") as reader:
            found = {name.removeprefix("roberta."): reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118
    except (OSError, safetensors.SafetensorError) as error:
        raise InputError(f"{path} cannot be read as a safetensors file: {error}; give RoBERTa's model.safetensors") from None
    own, pairs = model.state_dict(), renamed(model.config)
    if "lm_head.bias" not in found:
        pairs = {ours: theirs for ours, theirs in pairs.items() if not ours.startswith("masked.")}
    positions, types = "embeddings.position_embeddings.weight", "embeddings.token_type_embeddings.weight"
    for name in (*pairs.values(), positions, types):
        if name not in found:
            raise InputError(f"{path} is not a RoBERTa: it has no {name}; give RoBERTa's model.safetensors")
    found[positions] = found[positions][OFFSET : OFFSET + model.config.segment] + found[types][0]
    for ours, theirs in (pairs | {"positions": positions}).items():
        if found[theirs].shape != own[ours].shape:
            sizes = f"{tuple(found[theirs].shape)}, expected {tuple(own[ours].shape)}"
            raise InputError(f"{path}: {theirs} is {sizes}; give weights of the model's sizes")
        own[ours] = found[theirs]
    model.load_state_dict(own)


def published_config(folder: Path) -> Config:
    """The Config of a folder with RoBERTa's config.json; raises InputError if it does not describe a RoBERTa."""
    path = Path(folder) / "config.json"
    advice = "give a folder with RoBERTa's model.safetensors, config.json, vocab.json and merges.txt"
    try:
        found = json.loads(path.read_bytes())
        if found["model_type"] != "roberta":
            raise InputError(f"{path} is of a {found['model_type']}; {advice}")
        sizes = {ours: found[theirs] for ours, theirs in SIZES.items()}
        return Config(**sizes, segment=found["max_position_embeddings"] - OFFSET, module_width=sizes["width"])
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; {advice}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} does not describe a RoBERTa ({error!r}); {advice}") from None
