"""Where a model looked, for eval.py view. Each model NAME whose memory and tokens share a softmax has a function NAME_shares.

The function takes the model and the calls of its modules in one segment, {module: [(arguments, what it returned)]}. It returns
Shares, computed by the layers' own parts. A softmax over the memory alone always sums to 1, so it does not show how much memory
was used: for such a model the page has no shares.
"""

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from accelerated.attention.content import content_attention
from accelerated.attention.heads import at_least_float32
from accelerated.protocol import Reading

EVERYWHERE = "attention, mean of all layers and heads"


class Shares(NamedTuple):
    """The attention of each prediction of a segment to several parts, which sums to 1."""

    title: str
    parts: tuple[str, ...]
    values: Tensor  # (B, N, P)


@torch.no_grad()
def read_watched(
    model: Module, name: str, tokens: Tensor, state: tuple
) -> tuple[Reading, Shares | None]:
    """The Reading of a segment of tokens (B, N), and the Shares of its predictions, None if the model has none."""
    calls = defaultdict(list)
    with contextlib.ExitStack() as hooks:
        for module in model.modules():
            keep = module.register_forward_hook(
                lambda module, given, out: calls[module].append((given, out))
            )
            hooks.enter_context(keep)
        reading = model.read(tokens, state)
    shares = globals().get(f"{name}_shares")
    return reading, shares(model, calls) if shares else None


def attention_to(sizes: Iterable[int], attend: Callable, key: Tensor) -> Tensor:
    """Each query's attention to consecutive parts of the keys, which have these sizes: (B, N, P), averaged over heads.

    attend is the model's own attention, from values (B, H, K, E) like key to (B, H, N, E). It is affine in the values: values of
    1 in a part's rows and 0 elsewhere add the sum of that part's weights to every column.
    """
    nothing, sums, at = attend(torch.zeros_like(key)), [], 0
    for size in sizes:
        values = torch.zeros_like(key)
        values[:, :, at : at + size] = 1
        sums.append((attend(values) - nothing)[..., 0])
        at += size
    return at_least_float32(torch.stack(sums, -1)).mean(1)


def compressive_shares(model: Module, calls: dict) -> Shares:
    """Attention to the rows of both memories and of the segment."""
    c = model.config
    sizes = {
        "compressed memory": c.compressed_memory,
        "memory": c.memory,
        "this segment": c.segment,
    }
    sizes = {part: size for part, size in sizes.items() if size}

    def of_layer(layer, h, memory, compressed, sinusoids, *_):
        query, key, _ = layer.project(h, torch.cat([compressed, memory], 1))
        distance_key = layer.project_distances(sinusoids)
        return attention_to(
            sizes.values(),
            lambda values: layer.attend(query, key, values, distance_key, False)[0],
            key,
        )

    values = [of_layer(layer, *calls[layer][0][0]) for layer in model.layers]
    return Shares(EVERYWHERE, tuple(sizes), torch.stack(values).mean(0))


def pretrained_recurrence_shares(model: Module, calls: dict) -> Shares:
    """Attention to the inserted vectors and to the window, in the layers that they are inserted into."""
    layers, vectors, values = model.config.insertion_layers, model.config.vectors, []
    for layer in (model.layers[number - 1] for number in layers):
        [((x, mask, inserted), _)] = calls[layer]
        query, key, _ = layer.query_key_value(x)
        key = torch.cat([layer.key_value(inserted)[0], key], 2)
        attend = functools.partial(content_attention, query, key, mask=mask)
        values.append(attention_to((inserted.shape[1], x.shape[1]), attend, key))
    title = (
        f"attention in layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))}, mean of heads"
    )
    return Shares(
        title, (f"inserted vector{'s' * (vectors > 1)}", "this window"), torch.stack(values).mean(0)
    )


def memformer_shares(model: Module, calls: dict) -> Shares | None:
    """Attention of the decoder-only model to slots and segment; with an encoder, no softmax is over both."""
    if model.encoder is not None:
        return None

    def of_layer(attention, x, distances, memory):
        query, key = attention.project(attention.norm(x), "query", "key")
        key = torch.cat([*attention.project(attention.memory_norm(memory), "key"), key], 2)
        placed = {
            "rows": attention.far_to_near(distances),
            "count": distances.length,
            "mask": distances.mask,
        }
        return attention_to(
            (memory.shape[1], x.shape[1]),
            functools.partial(attention.attend, query, key, **placed),
            key,
        )

    values = [
        of_layer(layer.attention, *calls[layer.attention][0][0]) for layer in model.decoder.layers
    ]
    return Shares(EVERYWHERE, ("memory slots", "this segment"), torch.stack(values).mean(0))
