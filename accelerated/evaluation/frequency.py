"""Perplexity by frequency of the word (Compressive Transformers, Table 7)."""

import math
from collections import Counter
from typing import NamedTuple

import numpy as np

from accelerated.data.windows import WHITE_SPACE
from accelerated.evaluation.score import as_cell, ratio
from accelerated.training.log import new_figure, save_figure

PIECE = 1 << 20  # tokens of a document that are text at a time
FREQUENCIES = ((10_001, math.inf), (1_000, 10_000), (100, 999), (0, 99))  # occurrences, from .. to, of Table 7's columns


class FrequencyRow(NamedTuple):
    """Words that stand in the training split a number of times that the name gives."""

    name: str
    nats: float  # summed -log p of the words' scored tokens
    words: int  # that a scored token belongs to, each as often as it stands there
    tokens: int  # scored tokens

    RATES = ("perplexity",)

    @property
    def perplexity(self):
        """Per word; infinite where that is beyond a double, NaN where there is no word."""
        nats = ratio(self.nats, self.words)
        return math.inf if nats > 700 else math.exp(nats)


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


def frequency_lines(rows):
    """Lines of a table of by_frequency's rows."""
    lines = [f"{'times in training':<18} {'words':>11} {'tokens':>13}   perplexity per word"]
    return lines + [f"{row.name:<18} {row.words:11,d} {row.tokens:13,d}   {as_cell(row.perplexity, '.5g'):>19}" for row in rows]


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
