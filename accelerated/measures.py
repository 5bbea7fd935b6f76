"""A split scored once, every token's loss kept, and then looked at by position in the document and by frequency of the word."""

import math
from collections import Counter
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional

from accelerated.documents import WHITE_SPACE
from accelerated.drawing import new_figure, save_figure
from accelerated.evaluation import evaluating, finite, segments_to_score
from accelerated.protocol import keep_lanes
from accelerated.replay import begin

PIECE = 1 << 20  # tokens of a document that are text at a time
FREQUENCIES = ((10_001, math.inf), (1_000, 10_000), (100, 999), (0, 99))  # occurrences, from .. to, of Table 7's columns


class PositionRow(NamedTuple):
    """Predictions of the tokens at positions start .. stop - 1 of their documents, the first token being position 0."""

    start: int
    stop: int
    documents: int  # that have a token to predict there
    nats: float  # summed -log p of the scored tokens
    tokens: int  # scored tokens
    text_bytes: int  # bytes of text that the scored tokens spell

    @property
    def bits_per_token(self):
        return ratio(self.nats / math.log(2), self.tokens)

    @property
    def bits_per_byte(self):
        return ratio(self.nats / math.log(2), self.text_bytes)


class FrequencyRow(NamedTuple):
    """Words that stand in the training split a number of times that the name gives."""

    name: str
    nats: float  # summed -log p of the words' scored tokens
    words: int  # that a scored token belongs to, each as often as it stands there
    tokens: int  # scored tokens

    @property
    def perplexity(self):
        """Per word; infinite where that is beyond a double, NaN where there is no word."""
        nats = ratio(self.nats, self.words)
        return math.inf if nats > 700 else math.exp(nats)


def ratio(total, count):
    return total / count if count else math.nan


def as_record(row):
    """A row as a plain dict for JSON, which has no number for NaN and infinity: they become None."""
    rates = ("perplexity",) if isinstance(row, FrequencyRow) else ("bits_per_token", "bits_per_byte")
    record = row._asdict() | {rate: getattr(row, rate) for rate in rates}
    return {name: value if isinstance(value, str) else finite(value) for name, value in record.items()}


def token_nats(model, documents, tokenizer, lanes, clear_memory=False):
    """-log p (nats) of every target: an array (n - 1,) float64 for each document, NaN where nothing is scored.

    Read in `lanes` lanes as evaluate does, whose Score the sums are of. clear_memory puts the initial state in place of the
    carried one before every segment.
    """
    nats = [np.full(len(document.inputs), np.nan) for document in documents]
    with evaluating(model, tokenizer) as (device, _):
        state = model.initial_state(lanes)
        for segment, kept in segments_to_score(model, documents, lanes, clear_memory, None):
            segment, state = segment.to(device), keep_lanes(state, kept)
            logits, state, _ = model(segment.tokens, begin(model, segment, state))  # all are starts where memory is cleared
            keep_nats(nats, logits, segment)
    return nats


def keep_nats(nats, logits, segment):
    """Put -log p of a segment's scored tokens under logits (B, N, V) where their documents have their place."""
    losses = torch.zeros(segment.scored.shape, dtype=torch.float64, device=logits.device)
    targets = segment.targets[segment.scored]
    losses[segment.scored] = functional.cross_entropy(logits[segment.scored].double(), targets, reduction="none")
    rows = zip(segment.place.tolist(), losses.cpu().numpy(), segment.scored.cpu().numpy(), strict=True)
    for (number, first), own, scored in rows:
        if number >= 0:
            nats[number][first + np.flatnonzero(scored)] = own[scored]


def doubling_ranges(first, length):
    """(start, stop) of [0, first), [first, 2 first), [2 first, 4 first) ... that together are [0, length)."""
    start, stop = 0, first
    while start < length:
        yield start, min(stop, length)
        start, stop = stop, 2 * stop


def by_position(nats, documents, tokenizer, first):
    """The loss by how far into its document the predicted token stands: a PositionRow for each of doubling_ranges(first, ...).

    nats are token_nats of the documents. Does the loss keep falling past what attention reaches? Later ranges hold longer
    documents alone, and those may be easier: compare with a second reading of the same documents, the memory cleared.
    """
    longest = max((len(document.inputs) for document in documents), default=0)
    ranges = list(doubling_ranges(first, longest + 1 if longest else 0))
    sums, counts = [0.0] * len(ranges), np.zeros((len(ranges), 3), np.int64)  # documents, tokens, bytes
    for losses, document in zip(nats, documents, strict=True):
        for index, (start, stop) in enumerate(ranges):
            span = slice(max(start - 1, 0), stop - 1)  # the target at i is the document's token i + 1
            scored = document.scored[span]
            targets = document.targets[span][scored]
            sums[index] += float(losses[span][scored].sum())
            counts[index] += len(scored) > 0, len(targets), tokenizer.token_bytes[targets].sum()
    return [
        PositionRow(start, stop, reached, total, tokens, text_bytes)
        for (start, stop), total, (reached, tokens, text_bytes) in zip(ranges, sums, counts.tolist(), strict=True)
    ]


def ids_of(document):
    """All tokens of a document, (n,); none where there is nothing to predict."""
    return np.concatenate([document.inputs[:1], document.targets])


def words_of(document, tokenizer):
    """(the document's words, a list of bytes; the number of the word that each of its n tokens belongs to, (n,) int64).

    A word is a maximal run of bytes that are not white space. A token belongs to the word of its first such byte; one of white
    space alone to the next word, or to the last where none follows. So a token belongs to one word exactly, and a word that
    begins within the last token of another may have none. A text of white space alone is one empty word.
    """
    ids = ids_of(document)
    text, lengths = tokenizer.decode(ids), tokenizer.token_bytes[ids]
    written = ~np.isin(np.frombuffer(text, np.uint8), np.frombuffer(WHITE_SPACE, np.uint8))
    ends = np.flatnonzero(written[:-1] & ~written[1:]) + 1  # of the words that white space follows
    words = text.split() or [b""]
    owners = np.searchsorted(ends, np.cumsum(lengths) - lengths, side="right")  # the first word to end after the token begins
    return words, np.minimum(owners, len(words) - 1)


def distinct_words(documents, tokenizer):
    """The set of the words, as bytes, that stand in documents."""
    return {word for document in documents for word in tokenizer.decode(ids_of(document)).split()}


def text_pieces(document, tokenizer, size):
    """A document's text as bytes, `size` tokens at a time."""
    yield tokenizer.decode(document.inputs[:1])
    for at in range(0, len(document.targets), size):
        yield tokenizer.decode(document.targets[at : at + size])


def words_in_pieces(pieces, longest):
    """Lists of the words of a text that comes in pieces of bytes, whole though a piece may end within.

    Of a word of more than `longest` bytes so much is kept as shows that, so that a text without white space fits in memory.
    """
    rest = b""
    for piece in pieces:
        text = rest + piece
        words = text.split()
        rest = words.pop()[: longest + 1] if words and text[-1:] not in WHITE_SPACE else b""
        yield words
    yield rest.split()


def word_counts(documents, words, tokenizer, size=PIECE):
    """A Counter of how often each of `words`, a set of bytes, stands in documents, read `size` tokens at a time."""
    counts, longest = Counter(), max(map(len, words), default=0)
    for document in documents:
        for found in words_in_pieces(text_pieces(document, tokenizer, size), longest):
            counts.update(filter(words.__contains__, found))
    return counts


def frequency_name(least, most):
    if most == math.inf:
        return f"more than {least - 1:,}"
    return f"{least:,} to {most:,}" if least else f"fewer than {most + 1:,}"


def by_frequency(nats, documents, counts, tokenizer):
    """Perplexity per word by how often the word stands in the training split (Compressive Transformers, Table 7).

    nats are token_nats of the documents, counts the word_counts of their distinct_words in the training split. Returns a
    FrequencyRow for each of FREQUENCIES (the paper's, which leaves open where 1,000 and 10,000 belong) and one for all.
    """
    sums, sizes = np.zeros(len(FREQUENCIES)), np.zeros((len(FREQUENCIES), 2), np.int64)  # words, tokens
    edges = [least for least, _ in reversed(FREQUENCIES[:-1])]
    for losses, document in zip(nats, documents, strict=True):
        words, owners = words_of(document, tokenizer)
        owners = owners[1:][document.scored]
        tokens = np.bincount(owners, minlength=len(words))
        found = np.array([counts.get(word, 0) for word in words])
        buckets = len(edges) - np.searchsorted(edges, found, side="right")  # (words,)
        np.add.at(sums, buckets[owners], losses[document.scored])
        np.add.at(sizes, buckets, np.stack([tokens > 0, tokens], 1))
    rows = [
        FrequencyRow(frequency_name(*frequency), total, *size)
        for frequency, total, size in zip(FREQUENCIES, sums.tolist(), sizes.tolist(), strict=True)
    ]
    return [*rows, FrequencyRow("all", sum(row.nats for row in rows), *sizes.sum(0).tolist())]


def as_cell(value, form):
    """A number as text, a dash where there is none."""
    return "-" if math.isnan(value) else f"{value:{form}}"


def position_lines(readings):
    """Lines of a table of readings {label: rows of by_position}, which are all of the same documents: bits per byte."""
    widths = [max(len(label), 9) for label in readings]
    labels = "".join(f"   {label:>{width}}" for label, width in zip(readings, widths, strict=True))
    lines = ["bits per byte by the position of the predicted token in its document", f"{'position':>21} {'documents':>10}"]
    lines[1] += f" {'tokens':>13}{labels}"
    for rows in zip(*readings.values(), strict=True):
        place = f"{rows[0].start:,} to {rows[0].stop - 1:,}"
        cells = "".join(f"   {as_cell(row.bits_per_byte, '.4f'):>{width}}" for row, width in zip(rows, widths, strict=True))
        lines.append(f"{place:>21} {rows[0].documents:10,d} {rows[0].tokens:13,d}{cells}")
    return lines


def frequency_lines(rows):
    """Lines of a table of by_frequency's rows."""
    lines = [f"{'times in training':<18} {'words':>11} {'tokens':>13}   perplexity per word"]
    return lines + [f"{row.name:<18} {row.words:11,d} {row.tokens:13,d}   {as_cell(row.perplexity, '.5g'):>19}" for row in rows]


def draw_positions(path, readings, reach=None):
    """Draw readings {label: rows of by_position}, a line each; reach is how many tokens back attention looks, if it ends."""
    figure, axes = new_figure()
    for label, rows in readings.items():
        shown = [row for row in rows if row.text_bytes]
        middles = [(row.start + row.stop) / 2 for row in shown]
        axes.plot(middles, [row.bits_per_byte for row in shown], marker="o", markersize=4, label=label)
    if reach is not None:
        axes.axvline(reach, color="0.4", linestyle="--", linewidth=1, label=f"reach of attention, {reach:,} tokens")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda position, _: f"{position:,.0f}")
    axes.set(title="Loss by position in the document", xlabel="position of the predicted token (tokens, middle of its range)")
    axes.set_ylabel("loss (bits per byte)")
    axes.legend(frameon=False)
    save_figure(figure, path)


def draw_frequency(path, rows):
    """Draw by_frequency's rows, a bar each; a bucket that is empty or of infinite perplexity has none."""
    figure, axes = new_figure()
    heights = [row.perplexity if math.isfinite(row.perplexity) else 1.0 for row in rows]
    axes.bar(range(len(rows)), heights, width=0.6, color=["C0"] * (len(rows) - 1) + ["0.6"])
    for index, (row, height) in enumerate(zip(rows, heights, strict=True)):
        axes.annotate(as_cell(row.perplexity, ",.5g"), (index, height), (0, 3), textcoords="offset points", ha="center")
    axes.set_xticks(range(len(rows)), [f"{row.name}\n{row.words:,} words" for row in rows])
    axes.set_yscale("log")
    axes.set_ylim(1, 2 * max(10, *heights))
    axes.set(title="Perplexity by frequency of the word", xlabel="times that the word stands in the training split")
    axes.set_ylabel("perplexity per word")
    save_figure(figure, path)
