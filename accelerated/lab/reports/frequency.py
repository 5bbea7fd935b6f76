"""eval.py frequency: perplexity of words by how often they occur in the training split (Compressive Transformers, Table 7)."""

import argparse
import re
from collections import Counter, namedtuple
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from accelerated.data.corpus import load_corpus
from accelerated.data.tokenizers import Tokenizer
from accelerated.data.windows import Document, lengths_of
from accelerated.evaluation.score import Score, TrainedRun, as_cell, token_nats
from accelerated.program.errors import InputError
from accelerated.program.progress import Progress

# The least number of occurrences for each column of Table 7; the paper does not say in which 1,000 and 10,000 belong
FREQUENCIES = {
    "more than 10,000": 10_001,
    "1,000 to 10,000": 1_000,
    "100 to 999": 100,
    "fewer than 100": 0,
}

# Of the words in one of FREQUENCIES: summed -log p; how many have a scored token; scored tokens; perplexity per word, or NaN
FrequencyRow = namedtuple("FrequencyRow", ("name", "nats", "words", "tokens", "perplexity"))


def ids_of(document: Document) -> np.ndarray:
    """All tokens of a document, (n,); empty if there is nothing to predict."""
    return np.concatenate([document.inputs[:1], document.targets])


def words_of(document: Document, tokenizer: Tokenizer) -> tuple[list[bytes], np.ndarray]:
    """Return (the document's words, the index of the word that each of its n tokens belongs to, (n,) int64).

    A word is a run of bytes that are not white space. A token belongs to the word of its first such byte; if it has none, to the
    next word, or at the end to the last. So a word may have no token. A text of only white space is one empty word.
    """
    ids = ids_of(document)
    text, lengths = tokenizer.decode(ids), tokenizer.token_bytes[ids]
    written = ~np.isin(np.frombuffer(text, np.uint8), np.frombuffer(b" \t\n\r\x0b\x0c", np.uint8))
    ends = np.flatnonzero(written[:-1] & ~written[1:]) + 1  # ends of words that white space follows
    words = text.split() or [b""]
    owners = np.searchsorted(
        ends, np.cumsum(lengths) - lengths, side="right"
    )  # the first word to end after the token begins
    return words, np.minimum(owners, len(words) - 1)


def word_counts(
    documents: Sequence[Document], asked: Sequence[Document], tokenizer: Tokenizer
) -> Counter:
    """How often the words of the documents `asked` occur in documents."""
    counts, words = (
        Counter(),
        {word for document in asked for word in tokenizer.decode(ids_of(document)).split()},
    )
    with Progress("counting words of the training split", int(lengths_of(documents).sum())) as bar:
        for document in documents:
            occurring = (
                match.group() for match in re.finditer(rb"\S+", tokenizer.decode(ids_of(document)))
            )
            counts.update(filter(words.__contains__, occurring))
            bar.update(len(document.targets))
    return counts


def by_frequency(
    nats: list[np.ndarray],
    documents: Sequence[Document],
    counts: dict[bytes, int],
    tokenizer: Tokenizer,
) -> list[FrequencyRow]:
    """A row for each of FREQUENCIES and one for all words (Table 7), from token_nats and the training split's word_counts."""
    sums, sizes = (
        np.zeros(len(FREQUENCIES)),
        np.zeros((len(FREQUENCIES), 2), np.int64),
    )  # words, tokens
    edges = sorted(FREQUENCIES.values())[1:]
    for losses, document in zip(nats, documents, strict=True):
        words, owners = words_of(document, tokenizer)
        owners = owners[1:][document.scored]
        tokens = np.bincount(owners, minlength=len(words))
        occurrences = np.array([counts.get(word, 0) for word in words])
        buckets = len(edges) - np.searchsorted(edges, occurrences, side="right")  # (words,)
        np.add.at(sums, buckets[owners], losses[document.scored])
        np.add.at(sizes, buckets, np.stack([tokens > 0, tokens], 1))
    rows = [
        *zip(FREQUENCIES, sums.tolist(), sizes.tolist(), strict=True),
        ("all", sum(sums.tolist()), sizes.sum(0).tolist()),
    ]
    return [
        FrequencyRow(name, total, *size, Score(total).perplexity(size[0]))
        for name, total, size in rows
    ]


def frequency_lines(rows: list[FrequencyRow]) -> list[str]:
    """The table of by_frequency's rows."""
    lines = [f"{'times in training':<18} {'words':>11} {'tokens':>13}   perplexity per word"]
    return lines + [
        f"{row.name:<18} {row.words:11,d} {row.tokens:13,d}   {as_cell(row.perplexity, ',.5g'):>19}"
        for row in rows
    ]


def training_split(run: TrainedRun, options: argparse.Namespace) -> Sequence:
    """The documents that a run was trained on; of a published GPT-2, which names none, those of --data."""
    data = (
        run.settings.data if run.settings.data.data else replace(run.settings.data, data=run.data)
    )
    return load_corpus(data, run.tokenizer, run.settings.recall, options.data_dir).splits["train"]


def report(run: TrainedRun, options: argparse.Namespace) -> tuple[dict, list[str]]:
    """Perplexity per word by how often the word occurs in the training split."""
    if not run.words()[0]:
        raise InputError(f"frequency: {run.data} has no words; give other --data")
    documents = run.splits[run.split]
    counts = word_counts(training_split(run, options), documents, run.tokenizer)
    nats = run.by_document(token_nats(run.model, run.documents, run.lane_count))
    rows = by_frequency(nats, documents, counts, run.tokenizer)
    return {"by_frequency": [row._asdict() for row in rows]}, frequency_lines(rows)
