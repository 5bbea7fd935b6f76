"""eval.py view: a page that shows for each token of a document what the carried memory changed and where attention went.

view.html is the page without its data; it loads nothing from elsewhere.
"""

import argparse
import codecs
import contextlib
import functools
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import Module, functional

from accelerated import block_recurrent, compressive, memformer, memorizing, pretrained_recurrence
from accelerated.attention.content import content_attention, content_attention_plain
from accelerated.attention.heads import at_least_float32, merge_heads, split_heads
from accelerated.attention.signed_distance import simplified_attention, transformer_xl_attention
from accelerated.attention.sliding_window import score_offset, sliding_attention
from accelerated.data.windows import Document, Window, cut, lengths_of, overlap_of
from accelerated.evaluation.score import Score, TrainedRun, carries_nothing, check_score, read, token_nats
from accelerated.program.errors import InputError, counted
from accelerated.program.files import written_whole
from accelerated.program.progress import Progress
from accelerated.protocol import Reading, logits_of

TOKENS = 1 << 14  # on a page, unless --segments asks for more: about 2 MB
LIKELIEST = 5  # tokens that are listed at a prediction
BARS = 400  # at most, in the strip along the document
PLACE = "DATA_OF_THE_PAGE"  # where view.html takes its data


# Where attention went


class Shares(NamedTuple):
    """How each prediction of a segment was made up: shares of several parts, which sum to 1."""

    title: str
    parts: tuple[str, ...]
    values: torch.Tensor  # (B, N, P)


def attention_to(sizes: Iterable[int], attend: Callable, key: torch.Tensor) -> torch.Tensor:
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


def by_length(*added: torch.Tensor) -> torch.Tensor:
    """The shares (B, N, P) of vectors (B, N, D) that are added up, by their lengths; all of nothing is the last one's."""
    lengths = torch.stack([at_least_float32(vectors).norm(dim=-1) for vectors in added], -1)
    lengths[..., -1] += lengths.sum(-1) == 0
    return lengths / lengths.sum(-1, keepdim=True)


def mean(values: list[torch.Tensor]) -> torch.Tensor:
    """The mean of several layers' (B, N, P)."""
    return torch.stack(values).mean(0)


def compressive_shares(model: Module, calls: dict) -> list[Shares]:
    """Attention to the rows of both memories and of the segment."""
    c = model.config
    sizes = {"compressed memory": c.compressed_memory, "memory": c.memory, "this segment": c.segment}
    sizes = {part: size for part, size in sizes.items() if size}

    def of_layer(layer, h, memory, compressed, sinusoids, *_):
        query, key, _ = layer.project(h, torch.cat([compressed, memory], 1))
        distance_key = layer.project_distances(sinusoids)
        return attention_to(sizes.values(), lambda values: layer.attend(query, key, values, distance_key, False)[0], key)

    values = [of_layer(layer, *given) for layer, [(given, _)] in calls.items()]
    return [Shares("attention, mean of all layers and heads", tuple(sizes), mean(values))]


def pretrained_recurrence_shares(model: Module, calls: dict) -> list[Shares]:
    """Attention to the inserted vectors and to the window, in the layers that they are inserted into."""

    def of_layer(layer, x, mask, inserted):
        query, key, _ = layer.query_key_value(x)
        key = torch.cat([layer.key_value(inserted)[0], key], 2)
        sizes = (inserted.shape[1], x.shape[1])
        return attention_to(sizes, lambda values: content_attention(query, key, values, mask), key)

    values = [of_layer(layer, *given) for layer, [(given, _)] in calls.items() if given[2] is not None]
    layers, vectors = model.config.insertion_layers, model.config.vectors
    title = f"attention in layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))}, mean of heads"
    return [Shares(title, (f"inserted vector{'s' * (vectors > 1)}", "this window"), mean(values))]


def block_recurrent_shares(model: Module, calls: dict) -> list[Shares]:
    """Attention to the previous segment's last keys and to the segment; and what states and tokens add where states are read.

    Attention to the states has a softmax of its own and always sums to 1: it is the lengths of what is added that compare.
    """
    looked, added = [], []
    for layer, blocks in calls.items():  # a call for each block under feedback, else one
        pairs = [block_shares(layer, number == 0, *given) for number, (given, _) in enumerate(blocks)]
        looked.append(torch.cat([pair[0] for pair in pairs], 1))
        if pairs[0][1] is not None:
            added.append(torch.cat([pair[1] for pair in pairs], 1))
    shares = [Shares("attention to tokens, mean of all layers and heads", ("previous segment", "this segment"), mean(looked))]
    if added:
        shares.append(Shares("what layers that read states add, by its length", ("states", "tokens"), mean(added)))
    return shares


def sliding(layer: Module, query: torch.Tensor, keys: torch.Tensor, tile: tuple) -> Callable:
    """A layer's sliding attention as a function of the values (B, H, W + N, E); tile is (bucket, mask)."""
    offset = score_offset(layer.position_bias, layer.scale, *tile)
    return functools.partial(sliding_attention, query * layer.scale[:, None, None], keys, offset=offset)


def block_shares(layer: Module, first: bool, *given: object) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A layer's two shares (B, N, 2) each, from what it is called with; `first` is true for the first block of a segment."""
    x, previous, states, shared, tile, *_ = given
    key, query, cross_query, value = layer.project(x)
    keys, values = (torch.cat(pair, 2) for pair in zip(previous, (key, value), strict=True))
    attend = sliding(layer, query, keys, tile)
    old = layer.config.window if first else 0
    looked = attention_to((old, keys.shape[2] - old), attend, keys)
    if layer.state is not None:
        *shared, _ = layer.state(keys, values, states)
    if shared is None:
        return looked, None
    attended = attend(values), block_recurrent.cross_attend(cross_query, *shared, layer.cross_scale)
    halves = zip(attended, layer.output.chunk(2, dim=1), strict=True)
    tokens, states = (functional.linear(merge_heads(rows), matrix) for rows, matrix in halves)
    return looked, by_length(states, tokens)


def memorizing_shares(model: Module, calls: dict) -> list[Shares]:
    """Attention to the previous segment and this one; and what the memory layer adds of what it found and what was near."""
    looked, added = [], []
    for layer, [((x, previous, memory, tile, *_), _)] in calls.items():
        key, query, value = layer.project(x)
        keys, values = (torch.cat(pair, 2) for pair in zip(previous, (key, value), strict=True))
        attend = sliding(layer, query, keys, tile)
        looked.append(attention_to((x.shape[1], x.shape[1]), attend, keys))
        if layer.memory_gate is not None:
            near = attend(values)
            mixed, nothing = (layer.recall(query, part, memory) for part in (near, torch.zeros_like(near)))
            parts = (functional.linear(merge_heads(rows), layer.output) for rows in (nothing, mixed - nothing))
            added.append(by_length(*parts))
    shares = [Shares("attention to tokens, mean of all layers and heads", ("previous segment", "this segment"), mean(looked))]
    if added:
        shares.append(Shares("what the layer that looks up adds, by its length", ("memory", "tokens"), mean(added)))
    return shares


def memformer_shares(model: Module, calls: dict) -> list[Shares]:
    """Decoder-only: attention to slots and segment. Else what the decoder adds, and what the encoder added where it looks.

    In the latter the parts have softmaxes of their own, which always sum to 1: it is the lengths of what is added that compare.
    """
    if model.encoder is None:
        values = [slot_shares(layer.attention, *calls[layer.attention][0][0]) for layer in model.decoder.layers]
        return [Shares("attention, mean of all layers and heads", ("memory slots", "this segment"), mean(values))]

    def out(attention):
        return calls[attention][0][1]

    encoded = mean([by_length(out(layer.read), out(layer.attention)) for layer in model.encoder.layers])  # (B, N, 2)
    added, looked = [], []
    for layer in model.decoder.layers:
        (x, source, *_), _ = calls[layer.cross][0]
        query = memformer.project(layer.cross.norm(x), layer.cross.heads, layer.cross.query, layer.cross.query_bias)
        key, _ = layer.cross.key_value(source)
        added.append(by_length(out(layer.cross), out(layer.attention)))
        looked.append(at_least_float32(content_attention_plain(query, key, encoded[:, None].to(query.dtype))).mean(1))
    added, looked = mean(added)[:, 1:], mean(looked)[:, 1:]  # without the task's token
    return [
        Shares("what the decoder's layers add, by its length", ("previous segment, encoded", "this segment"), added),
        Shares("what the encoder's layers added where the decoder looks", ("memory slots", "previous segment"), looked),
    ]


def slot_shares(attention: Module, x: torch.Tensor, distances: Module, memory: torch.Tensor) -> torch.Tensor:
    """Attention (B, N, 2) of the decoder-only model to slots and segment, from what its self-attention is called with."""
    normal, slots = attention.norm(x), attention.memory_norm(memory)
    query = attention.project_query(normal)
    key = torch.cat([attention.key_value(slots)[0], attention.key_value(normal)[0]], 2)
    if distances.sinusoids is None:

        def attend(values):
            return simplified_attention(query, key, values, attention.positions, distances.index, distances.mask)
    else:
        [distance_key] = split_heads(functional.linear(distances.sinusoids, attention.distance_key)[None], attention.heads, 1)
        biases = (attention.content_bias, attention.distance_bias)

        def attend(values):
            return transformer_xl_attention(query, key, values, distance_key[0], *biases, distances.index, distances.mask)

    return attention_to((memory.shape[1], x.shape[1]), attend, key)


SHARES = {
    "compressive": compressive_shares,
    "block_recurrent": block_recurrent_shares,
    "memformer": memformer_shares,
    "memorizing": memorizing_shares,
    "pretrained_recurrence": pretrained_recurrence_shares,
}
WATCHED = (
    *(block_recurrent.Layer, compressive.Layer, memorizing.Layer, pretrained_recurrence.Layer),
    *(memformer.SelfAttention, memformer.CrossAttention),
)


@torch.no_grad()
def read_watched(model: Module, name: str, tokens: torch.Tensor, state: tuple) -> tuple[Reading, list[Shares]]:
    """The Reading of a segment of tokens (B, N), and the Shares of its predictions; name is the model's in MODELS.

    Hooks keep what each layer is called with. The shares are computed from that, by the layer's own parts.
    """
    calls = {}

    def keep(module, given, out):
        calls.setdefault(module, []).append((given, out))

    with contextlib.ExitStack() as hooks:
        for module in (module for module in model.modules() if isinstance(module, WATCHED)):
            hooks.enter_context(module.register_forward_hook(keep))
        reading = model.read(tokens, state)
    return reading, SHARES[name](model, calls)


# The page


def spelled(pieces: list[bytes]) -> list[str]:
    r"""The text that each token shows: a character of several tokens stands at its last one; \xNN is a byte that is not UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
    return [decoder.decode(piece, final) for final, piece in ((at + 1 == len(pieces), piece) for at, piece in enumerate(pieces))]


def in_bits(nats: np.ndarray) -> list[float | None]:
    """Losses in bits, to four digits; None if they are not scored."""
    return [None if math.isnan(value) else round(value, 4) for value in (nats / math.log(2)).tolist()]


def likeliest(model: Module, hidden: torch.Tensor) -> tuple[list, list]:
    """The ids of the LIKELIEST tokens after each of the rows (n, D), and their probabilities in hundredths of a percent."""
    probabilities, ids = at_least_float32(logits_of(model, hidden)).softmax(-1).topk(min(LIKELIEST, model.config.vocabulary))
    return ids.tolist(), (probabilities * 10_000).round().long().tolist()


@torch.no_grad()
def segment_record(run: TrainedRun, tokens: torch.Tensor, state: tuple, window: Window) -> tuple[dict, list[Shares]]:
    """What the page says of a window's predictions except their losses, from its tokens (1, N) and the carried state."""
    model, rows = run.model, slice(window.first - 1 - window.start, window.stop - window.start)
    carried, groups = read_watched(model, run.settings.model, tokens, state)
    cleared = model.read(tokens, model.initial_state(1))
    shares = [(group.values[0, rows] * 1000).round().long().tolist() for group in groups]
    return {"likely": [likeliest(model, reading.hidden[0, rows]) for reading in (carried, cleared)], "shares": shares}, groups


def segment_records(run: TrainedRun, document: Document, windows: list[Window], first: int) -> tuple[list[dict], list[Shares]]:
    """The segment_record of each of the document's windows from number `first` on, and the last one's Shares."""
    records, device = [], next(run.model.parameters()).device
    with Progress("segments of the page", len(windows), "segment") as bar:
        reading = read(run.model, [document], 1, predict=False, show=False)
        for window, (segment, [number], state, _) in zip(windows, reading, strict=False):
            if number >= first:
                record, groups = segment_record(run, segment.tokens.to(device), state, window)
                records.append(record)
            bar.update(1)
    return records, groups


def overview(windows: list[Window], nats: list[np.ndarray], text_bytes: np.ndarray) -> dict:
    """The strip along the document: of every `segments` segments the bits with memory carried and cleared, and the bytes."""
    segments = -(-len(windows) // BARS)
    starts = [window.first - 1 for window in windows[::segments]]
    carried, cleared = (np.add.reduceat(np.nan_to_num(values) / math.log(2), starts) for values in nats)
    bars = np.stack([carried, cleared, np.add.reduceat(text_bytes, starts)], 1)
    return {"segments": segments, "bars": bars.round(4).tolist()}


def shading_scale(gains: np.ndarray) -> float:
    """The gain in bits that has the strongest shade: 99 of 100 tokens have a smaller one. At least 0.1."""
    gains = np.abs(gains[~np.isnan(gains)]) / math.log(2)
    return float(f"{max(0.1, np.quantile(gains, 0.99) if len(gains) else 0):.1g}")


def document_data(run: TrainedRun, document: Document, windows: list[Window], nats: list[np.ndarray], shown: range) -> dict:
    """The losses of a document, and of its windows in `shown` all that the page says token by token.

    The text is what was read; but an answer of recall, which is never read, stands where it is asked for.
    """
    tokenizer, targets, scored = run.tokenizer, np.asarray(document.targets), np.asarray(document.scored)
    text_bytes = tokenizer.token_bytes[targets] * scored
    targets = np.where(scored, targets, np.append(np.asarray(document.inputs)[1:], targets[-1:]))
    records, groups = segment_records(run, document, windows[: shown.stop], shown.start)
    start, stop = windows[shown.start].first - 1, windows[shown.stop - 1].stop
    before = np.asarray(document.inputs[start : start + 1])
    texts = spelled([tokenizer.decode([token]) for token in np.concatenate([before, targets[start:stop]])])
    for window, record in zip(windows[shown.start : shown.stop], records, strict=True):
        own = slice(window.first - 1, window.stop)
        record |= {"at": window.first, "tokens": targets[own].tolist(), "bytes": int(text_bytes[own].sum())}
        record |= {"texts": texts[window.first - start : window.stop + 1 - start]}
        record |= {"losses": [in_bits(values[own]) for values in nats]}
        record |= {"bits": [round(float(np.nansum(values[own])) / math.log(2), 4) for values in nats]}
    used = {token for record in records for ids, _ in record["likely"] for row in [*ids, record["tokens"]] for token in row}
    vocabulary = {token: tokenizer.decode([token]).decode(errors="backslashreplace") for token in sorted(used)}
    scale, strip = shading_scale((nats[1] - nats[0])[start:stop]), overview(windows, nats, text_bytes)
    about = {"count": len(windows), "first": shown.start + 1, "before": texts[0], "scale": scale, "overview": strip}
    groups = [{"title": group.title, "parts": group.parts} for group in groups]
    return about | {"groups": groups, "segments": records, "vocabulary": vocabulary}


def write_page(path: Path, data: dict) -> int:
    """Write the page and return its size in bytes. In its JSON no < stands, so that no text can end the script."""
    script = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    page = Path(__file__).with_name("view.html").read_text(encoding="utf-8").replace(PLACE, script).encode()
    with written_whole(path, "give another --out", new=True) as temporary:
        temporary.write_bytes(page)
    return len(page)


def chosen_document(lengths: np.ndarray, asked: int | None) -> int:
    """The index of document number `asked`, or of the longest; raises InputError if it has nothing to predict."""
    if asked is None:
        return int(lengths.argmax())
    if asked > len(lengths) or not lengths[asked - 1]:
        there = "it has nothing to predict" if asked <= len(lengths) else f"there are {len(lengths):,}"
        raise InputError(f"--document {asked}: {there}; give another number, or leave it out for the longest document")
    return asked - 1


def chosen_segments(count: int, size: int, first: int, asked: int | None) -> range:
    """Which of `count` segments to show: `asked` from number `first` on, which counts from 1, or those of TOKENS predictions.

    size is how many tokens a segment predicts. Raises InputError if there is no segment `first`.
    """
    if first > count:
        raise InputError(f"--from {first}: the document has {counted(count, 'segment')}; give a smaller number")
    return range(first - 1, min(count, first - 1 + (asked or max(1, TOKENS // size))))


def report(run: TrainedRun, options: argparse.Namespace) -> tuple[dict, list[str]]:
    """Write the page; the record has its path and the document's sums."""
    if carries_nothing(model := run.model):
        raise InputError("view: this model carries no memory that could be cleared; give another run")
    documents = run.documents
    number = chosen_document(lengths_of(documents), options.document)
    document = documents[number]
    size, overlap = model.config.segment, overlap_of(model.config)
    windows = cut(len(document.inputs) + 1, size, overlap)
    shown = chosen_segments(len(windows), size - overlap, options.first, options.segments)
    nats = [token_nats(model, [document], run.lane_count, clear_memory=clear)[0] for clear in (False, True)]
    scored = np.asarray(document.scored)
    text_bytes = int(run.tokenizer.token_bytes[np.asarray(document.targets)[scored]].sum())
    scores = [check_score(Score(float(values[scored].sum()), int(scored.sum()), text_bytes=text_bytes)) for values in nats]
    about = {"model": run.settings.model, "describe": model.describe(), "run": run.path, "step": run.checkpoint["step"]}
    about |= {"data": run.data, "split": run.split, "joined": run.carry_over, "document": number + 1}
    about |= {"documents": len(documents), "scored": scores[0].tokens, "bytes": text_bytes}
    about |= {"bits": [score.nats / math.log(2) for score in scores]}
    written = write_page(Path(options.out), about | document_data(run, document, windows, nats, shown))
    lines = [f"document {number + 1:,} of {len(documents):,}, {counted(len(windows), 'segment')}"]
    record = {"page": options.out, "bytes": written, "document": number + 1, "segments": [shown.start + 1, shown.stop]}
    for name, score in zip(("memory carried", "cleared"), scores, strict=True):
        lines.append(f"bits per byte       {score.bits_per_byte:.4f}, {name}")
        record[name.replace(" ", "_")] = {"nats": score.nats, "bits_per_byte": score.bits_per_byte}
    record |= {"tokens": scores[0].tokens, "text_bytes": text_bytes}
    return record, [*lines, f"segments {shown.start + 1:,} to {shown.stop:,} are in {options.out}, {written / 1e6:.1f} MB"]
