"""eval.py frequency: perplexity of words by how often they stand in the training split (Compressive Transformers, Table 7)."""

import argparse
import math
from collections import Counter
from typing import NamedTuple

import numpy as np

from accelerated.data.corpus import load_corpus
from accelerated.data.windows import WHITE_SPACE, Document
from accelerated.errors import InputError
from accelerated.evaluation.score import Report, Run, as_cell, exponential, ratio, token_nats
from accelerated.training.log import new_figure, save_figure

PIECE = 1 << 20  # tokens of a document that are text at a time
# The least occurrences of a word in each of Table 7's columns; the paper leaves open where 1,000 and 10,000 belong
FREQUENCIES = {"more than 10,000": 10_001, "1,000 to 10,000": 1_000, "100 to 999": 100, "fewer than 100": 0}


class FrequencyRow(NamedTuple):
    """Words that stand in the training split a number of times that the name gives."""

    name: str
    nats: float  # summed -log p of the words' scored tokens
    words: int  # that a scored token belongs to, each as often as it stands there
    tokens: int  # scored tokens
    perplexity: float  # per word; NaN if there is none


def row_of(name: str, nats: float, words: int, tokens: int) -> FrequencyRow:
    return FrequencyRow(name, nats, words, tokens, exponential(ratio(nats, words)))


def ids_of(document: Document) -> np.ndarray:
    """All tokens of a document, (n,); none if there is nothing to predict."""
    return np.concatenate([document.inputs[:1], document.targets])


def words_of(document: Document, tokenizer) -> tuple[list[bytes], np.ndarray]:
    """(the document's words; the number of the word that each of its n tokens belongs to, (n,) int64).

    A word is a maximal run of bytes that are not white space. A token belongs to the word of its first such byte; one of white
    space alone to the next word, or to the last if none follows. So a token belongs to exactly one word, and a word that begins
    within the last token of another may have none. A text of white space alone is one empty word.
    """
    ids = ids_of(document)
    text, lengths = tokenizer.decode(ids), tokenizer.token_bytes[ids]
    written = ~np.isin(np.frombuffer(text, np.uint8), np.frombuffer(WHITE_SPACE, np.uint8))
    ends = np.flatnonzero(written[:-1] & ~written[1:]) + 1  # of the words that white space follows
    words = text.split() or [b""]
    owners = np.searchsorted(ends, np.cumsum(lengths) - lengths, side="right")  # the first word to end after the token begins
    return words, np.minimum(owners, len(words) - 1)


def distinct_words(documents, tokenizer) -> set[bytes]:
    """The words that stand in documents."""
    return {word for document in documents for word in tokenizer.decode(ids_of(document)).split()}


def word_counts(documents, words: set[bytes], tokenizer, size: int = PIECE) -> Counter:
    """How often each of `words` stands in documents, which are read `size` tokens at a time.

    A word that a piece ends in waits for the next piece; only so much of it is kept as shows that it is longer than all `words`,
    so that a text without white space fits in memory.
    """
    counts, longest = Counter(), max(map(len, words), default=0)
    for document in documents:
        rest = tokenizer.decode(document.inputs[:1])
        for at in range(0, len(document.targets), size):
            text = rest + tokenizer.decode(document.targets[at : at + size])
            found = text.split()
            rest = found.pop()[: longest + 1] if found and text[-1:] not in WHITE_SPACE else b""
            counts.update(filter(words.__contains__, found))
        counts.update(filter(words.__contains__, rest.split()))
    return counts


def by_frequency(nats: list[np.ndarray], documents, counts: dict[bytes, int], tokenizer) -> list[FrequencyRow]:
    """Perplexity per word by how often the word stands in the training split (Compressive Transformers, Table 7).

    nats are token_nats of the documents, counts the word_counts of their distinct_words in the training split. Returns a row for
    each of FREQUENCIES and one for all.
    """
    sums, sizes = np.zeros(len(FREQUENCIES)), np.zeros((len(FREQUENCIES), 2), np.int64)  # words, tokens
    edges = sorted(FREQUENCIES.values())[1:]
    for losses, document in zip(nats, documents, strict=True):
        words, owners = words_of(document, tokenizer)
        owners = owners[1:][document.scored]
        tokens = np.bincount(owners, minlength=len(words))
        found = np.array([counts.get(word, 0) for word in words])
        buckets = len(edges) - np.searchsorted(edges, found, side="right")  # (words,)
        np.add.at(sums, buckets[owners], losses[document.scored])
        np.add.at(sizes, buckets, np.stack([tokens > 0, tokens], 1))
    rows = [row_of(name, total, *size) for name, total, size in zip(FREQUENCIES, sums.tolist(), sizes.tolist(), strict=True)]
    return [*rows, row_of("all", sum(row.nats for row in rows), *sizes.sum(0).tolist())]


def frequency_lines(rows: list[FrequencyRow]) -> list[str]:
    """The table of by_frequency's rows."""
    lines = [f"{'times in training':<18} {'words':>11} {'tokens':>13}   perplexity per word"]
    return lines + [f"{row.name:<18} {row.words:11,d} {row.tokens:13,d}   {as_cell(row.perplexity, '.5g'):>19}" for row in rows]


def draw_frequency(path: str, rows: list[FrequencyRow]) -> None:
    """Draw by_frequency's rows, a bar each; a bucket that is empty or of infinite perplexity has none."""
    figure, axes = new_figure()
    heights = [row.perplexity if math.isfinite(row.perplexity) else 1.0 for row in rows]
    axes.bar(range(len(rows)), heights, width=0.6, color=["C0"] * (len(rows) - 1) + ["0.6"])
    for index, (row, height) in enumerate(zip(rows, heights, strict=True)):
        axes.annotate(as_cell(row.perplexity, ",.5g"), (index, height), (0, 3), textcoords="offset points", ha="center")
    axes.set_xticks(range(len(rows)), [f"{row.name}\n{row.words:,} words" for row in rows])
    axes.set_yscale("log")
    axes.set_ylim(1, 10 ** min(308, 1.12 * math.log10(max(10, *heights))))  # room for the numbers above the bars
    axes.set(title="Perplexity by frequency of the word", xlabel="times that the word stands in the training split")
    axes.set_ylabel("perplexity per word")
    save_figure(figure, path)


def report(run: Run, options: argparse.Namespace) -> tuple[dict, list[str]]:
    """Perplexity per word by how often the word stands in what the run was trained on."""
    settings, tokenizer = run.settings, run.tokenizer
    if not run.words()[0]:
        raise InputError(f"frequency: {run.data} has no words; give other --data")
    words = distinct_words(run.documents, tokenizer)
    trained = settings.data
    training = load_corpus(trained.data, tokenizer, settings.recall, options.data_dir, trained.documents).splits["train"]
    nats = token_nats(run.model, run.documents, run.lanes)
    rows = by_frequency(nats, run.documents, word_counts(training, words, tokenizer), tokenizer)
    if options.plot:
        draw_frequency(options.plot, rows)
    return {"by_frequency": [row._asdict() for row in rows]}, frequency_lines(rows)


REPORT = Report(
    "the perplexity of words by how often they stand in the training split", "RUN --plot frequency.png", report, plots=True
)
