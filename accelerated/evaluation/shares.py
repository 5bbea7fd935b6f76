"""Where a model looked, for eval.py view.

Each model NAME whose memory and tokens share a softmax has a function NAME_shares. It takes the
model and the calls of its modules in one segment. It returns Shares, computed by the layers' own
parts. A softmax over the memory alone always sums to 1, so it does not show how much memory was
used: for such a model the page has no shares.
"""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from accelerated.attention.content import content_attention
from accelerated.attention.heads import at_least_float32
from accelerated.protocol import Model, Reading, State

if TYPE_CHECKING:  # of the models, only that whose run is shown is loaded
    from accelerated import compressive, memformer, pretrained_recurrence

EVERYWHERE = "attention, mean of all layers and heads"
Calls = dict[Module, list[tuple]]  # {module: the arguments of each of its calls}


class Shares(NamedTuple):
    """The attention of each prediction of a segment to several parts, which sums to 1."""

    title: str
    parts: tuple[str, ...]
    values: Tensor  # (B, N, P)


@torch.no_grad()
def read_watched(model: Model, tokens: Tensor, state: State) -> tuple[Reading, Shares | None]:
    """The Reading of a segment of tokens (B, N), and the Shares of its predictions.

    They are None if the model has no function here.
    """
    calls: Calls = defaultdict(list)

    def keep(module: Module, given: tuple, _) -> None:
        calls[module].append(given)

    with contextlib.ExitStack() as hooks:
        for module in model.modules():
            hooks.enter_context(module.register_forward_hook(keep))
        reading = model.read(tokens, state)
    name = type(model).__module__.rpartition(".")[2]
    shares = globals().get(f"{name}_shares")
    return reading, shares(model, calls) if shares else None


def attention_to(sizes: Iterable[int], attend: Callable[[Tensor], Tensor], key: Tensor) -> Tensor:
    """Each query's attention to consecutive parts of the keys, of these sizes, averaged over heads.

    attend is the model's own attention, from values (B, H, K, E) like key to (B, H, N, E). It is
    affine in the values: values of 1 in a part's rows and 0 elsewhere add the sum of that part's
    weights to every column. Returns (B, N, P).
    """
    nothing = attend(torch.zeros_like(key))
    sums = []
    start = 0
    for size in sizes:
        values = torch.zeros_like(key)
        values[:, :, start : start + size] = 1
        added = attend(values) - nothing
        sums.append(added[..., 0])  # (B, H, N)
        start += size
    return at_least_float32(torch.stack(sums, -1)).mean(1)


def compressive_shares(model: compressive.Compressive, calls: Calls) -> Shares:
    """Attention to the rows of both memories and of the segment."""
    c = model.config
    sizes = {
        "compressed memory": c.compressed_memory,
        "memory": c.memory,
        "this segment": c.segment,
    }
    parts = [part for part, size in sizes.items() if size]
    held = [size > 0 for size in sizes.values()]

    def of_layer(layer: compressive.Layer) -> Tensor:
        h, memory, compressed, sinusoids = calls[layer][0][:4]
        query, key, _ = layer.project(h, torch.cat([compressed, memory], 1))
        distances = layer.project_distances(sinusoids)
        rows = (compressed.shape[1], memory.shape[1], c.segment)  # of this layer

        def attend(value: Tensor) -> Tensor:
            return layer.attend(query, key, value, distances, False)[0]

        return attention_to(rows, attend, key)

    values = torch.stack([of_layer(layer) for layer in model.layers])
    return Shares(EVERYWHERE, tuple(parts), values.mean(0)[..., held])


def pretrained_recurrence_shares(
    model: pretrained_recurrence.PretrainedRecurrence, calls: Calls
) -> Shares:
    """Attention to the inserted vectors and to the window, in the layers with inserted vectors."""
    numbers = model.config.insertion_layers
    values = []
    for number in numbers:
        layer = model.layers[number - 1]
        [(x, hidden_keys, inserted)] = calls[layer]
        query, key, _ = layer.query_key_value(x)
        inserted_key, _ = layer.key_value(inserted)
        key = torch.cat([inserted_key, key], 2)
        attend = functools.partial(content_attention, query, key, hidden_keys=hidden_keys)
        values.append(attention_to((inserted.shape[1], x.shape[1]), attend, key))

    layers = f"layer{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
    vectors = "inserted vectors" if model.config.vectors > 1 else "inserted vector"
    title = f"attention in {layers}, mean of heads"
    return Shares(title, (vectors, "this window"), torch.stack(values).mean(0))


def memformer_shares(model: memformer.Memformer, calls: Calls) -> Shares | None:
    """Attention of the decoder-only model to slots and segment.

    With an encoder, no softmax is over both.
    """
    if not model.decoder_only:
        return None
    values = []
    for layer in model.decoder.layers:
        attention = layer.attention
        x, memory = calls[attention][0]
        query, key, _ = attention.query_key_value(attention.norm(x))
        memory_key, _ = attention.key_value_of_memory(memory)
        key = torch.cat([memory_key, key], 2)
        attend = functools.partial(
            attention.attend,
            query,
            key,
            rows=attention.position_rows(),
            hidden_keys=attention.distances.hidden_keys,
        )
        values.append(attention_to((memory.shape[1], x.shape[1]), attend, key))
    return Shares(EVERYWHERE, ("memory slots", "this segment"), torch.stack(values).mean(0))
