"""Where a model looked, for eval.py view. Each model NAME that can show it has a function NAME_shares.

The function takes the model and the calls of its modules in one segment, {module: [(arguments, what it returned)]}. It returns
a list of Shares, computed by the layers' own parts.
"""

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, functional

from accelerated.attention.content import content_attention, content_attention_plain
from accelerated.attention.heads import at_least_float32, merge_heads
from accelerated.attention.sliding_window import score_offset, sliding_attention
from accelerated.protocol import Reading

TO_TOKENS = ("attention to tokens, mean of all layers and heads", ("previous segment", "this segment"))


class Shares(NamedTuple):
    """How each prediction of a segment was made up: shares of several parts, which sum to 1."""

    title: str
    parts: tuple[str, ...]
    values: Tensor  # (B, N, P)


@torch.no_grad()
def read_watched(model: Module, name: str, tokens: Tensor, state: tuple) -> tuple[Reading, list[Shares]]:
    """The Reading of a segment of tokens (B, N), and the Shares of its predictions; [] for a model without a function."""
    calls = defaultdict(list)
    with contextlib.ExitStack() as hooks:
        for module in model.modules():
            keep = module.register_forward_hook(lambda module, given, out: calls[module].append((given, out)))
            hooks.enter_context(keep)
        reading = model.read(tokens, state)
    shares = globals().get(f"{name}_shares")
    return reading, shares(model, calls) if shares else []


def mean_shares(title: str, parts: Iterable[str], values: list[Tensor]) -> list[Shares]:
    """The mean of several layers' (B, N, P) as Shares; [] if there are none."""
    return [Shares(title, tuple(parts), torch.stack(values).mean(0))] if values else []


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


def by_length(*added: Tensor) -> Tensor:
    """The shares (B, N, P) of vectors (B, N, D) that are added up, by their lengths; the last has all if every one is zero.

    It is for parts with softmaxes of their own, which always sum to 1 and so say nothing of how much was taken.
    """
    lengths = torch.stack([at_least_float32(vectors).norm(dim=-1) for vectors in added], -1)
    lengths[..., -1] += lengths.sum(-1) == 0
    return lengths / lengths.sum(-1, keepdim=True)


def compressive_shares(model: Module, calls: dict) -> list[Shares]:
    """Attention to the rows of both memories and of the segment."""
    c = model.config
    sizes = {"compressed memory": c.compressed_memory, "memory": c.memory, "this segment": c.segment}
    sizes = {part: size for part, size in sizes.items() if size}

    def of_layer(layer, h, memory, compressed, sinusoids, *_):
        query, key, _ = layer.project(h, torch.cat([compressed, memory], 1))
        distance_key = layer.project_distances(sinusoids)
        return attention_to(sizes.values(), lambda values: layer.attend(query, key, values, distance_key, False)[0], key)

    values = [of_layer(layer, *calls[layer][0][0]) for layer in model.layers]
    return mean_shares("attention, mean of all layers and heads", sizes, values)


def pretrained_recurrence_shares(model: Module, calls: dict) -> list[Shares]:
    """Attention to the inserted vectors and to the window, in the layers that they are inserted into."""
    layers, vectors, values = model.config.insertion_layers, model.config.vectors, []
    for layer in (model.layers[number - 1] for number in layers):
        [((x, mask, inserted), _)] = calls[layer]
        query, key, _ = layer.query_key_value(x)
        key = torch.cat([layer.key_value(inserted)[0], key], 2)
        attend = functools.partial(content_attention, query, key, mask=mask)
        values.append(attention_to((inserted.shape[1], x.shape[1]), attend, key))
    title = f"attention in layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))}, mean of heads"
    return mean_shares(title, (f"inserted vector{'s' * (vectors > 1)}", "this window"), values)


def sliding(layer: Module, query: Tensor, previous: tuple, new: tuple, tile: tuple) -> tuple[Tensor, Tensor, Callable]:
    """A layer's keys and values (B, H, W + N, E), and its attention as a function of the values; tile is (bucket, mask)."""
    keys, values = (torch.cat(pair, 2) for pair in zip(previous, new, strict=True))
    offset = score_offset(layer.position_bias, layer.scale, *tile)
    return keys, values, functools.partial(sliding_attention, query * layer.scale[:, None, None], keys, offset=offset)


def block_recurrent_shares(model: Module, calls: dict) -> list[Shares]:
    """Attention to the previous segment's last keys and to the segment; and what states and tokens add where states are read."""
    from accelerated.block_recurrent import cross_attend  # here: no other model needs it

    looked, added = [], []
    for layer in model.layers:
        blocks = []  # a call for each block under feedback, else one
        for number, ((x, previous, states, shared, tile, *_), _) in enumerate(calls[layer]):
            key, query, cross_query, value = layer.project(x)
            keys, values, attend = sliding(layer, query, previous, (key, value), tile)
            old = layer.config.window if number == 0 else 0
            blocks.append([attention_to((old, keys.shape[2] - old), attend, keys)])
            if layer.state is not None:
                *shared, _ = layer.state(keys, values, states)
            if shared is not None:
                attended = attend(values), cross_attend(cross_query, *shared, layer.cross_scale)
                halves = zip(attended, layer.output.chunk(2, dim=1), strict=True)
                of_tokens, of_states = (functional.linear(merge_heads(rows), matrix) for rows, matrix in halves)
                blocks[-1].append(by_length(of_states, of_tokens))
        attention, *lengths = (torch.cat(part, 1) for part in zip(*blocks, strict=True))
        looked.append(attention)
        added += lengths
    states = mean_shares("what layers that read states add, by its length", ("states", "tokens"), added)
    return mean_shares(*TO_TOKENS, looked) + states


def memorizing_shares(model: Module, calls: dict) -> list[Shares]:
    """Attention to the previous segment and this one; and what the memory layer adds of what it retrieved and what was near."""
    looked, added = [], []
    for layer in model.layers:
        [((x, previous, memory, tile, *_), _)] = calls[layer]
        key, query, value = layer.project(x)
        keys, values, attend = sliding(layer, query, previous, (key, value), tile)
        looked.append(attention_to((x.shape[1], x.shape[1]), attend, keys))
        if layer.memory_gate is not None:
            near = attend(values)
            mixed, nothing = (layer.retrieve(query, part, memory) for part in (near, torch.zeros_like(near)))
            parts = (functional.linear(merge_heads(rows), layer.output) for rows in (nothing, mixed - nothing))
            added.append(by_length(*parts))
    retrieved = mean_shares("what the layer that looks up adds, by its length", ("memory", "tokens"), added)
    return mean_shares(*TO_TOKENS, looked) + retrieved


def memformer_shares(model: Module, calls: dict) -> list[Shares]:
    """Decoder-only: attention to slots and segment. Else what the decoder adds, and what the encoder added where it looks."""
    if model.encoder is None:
        values = [slot_shares(layer.attention, *calls[layer.attention][0][0]) for layer in model.decoder.layers]
        return mean_shares("attention, mean of all layers and heads", ("memory slots", "this segment"), values)

    def out(attention):
        return calls[attention][0][1]

    encoded = [by_length(out(layer.read), out(layer.attention)) for layer in model.encoder.layers]
    encoded, added, looked = torch.stack(encoded).mean(0), [], []  # (B, N, 2)
    for layer in model.decoder.layers:
        (x, source, *_), _ = calls[layer.cross][0]
        query, (key, _) = layer.cross.project_query(layer.cross.norm(x)), layer.cross.source_key_value(source)
        added.append(by_length(out(layer.cross), out(layer.attention))[:, 1:])  # without the task's token
        weighted = content_attention_plain(query, key, encoded[:, None].to(query.dtype))
        looked.append(at_least_float32(weighted).mean(1)[:, 1:])
    title = "what the encoder's layers added where the decoder looks"
    decoder = mean_shares("what the decoder's layers add, by its length", ("previous segment, encoded", "this segment"), added)
    return decoder + mean_shares(title, ("memory slots", "previous segment"), looked)


def slot_shares(attention: Module, x: Tensor, distances: Module, memory: Tensor) -> Tensor:
    """Attention (B, N, 2) of the decoder-only model to slots and segment, from what its self-attention is called with."""
    normal, slots = attention.norm(x), attention.memory_norm(memory)
    query, key = attention.project_query(normal), torch.cat([attention.key_value(rows)[0] for rows in (slots, normal)], 2)
    placed = {"index": distances.index, "mask": distances.mask}
    placed["distance_key"] = attention.project_distances(distances.sinusoids)
    return attention_to((memory.shape[1], x.shape[1]), functools.partial(attention.attend, query, key, **placed), key)
