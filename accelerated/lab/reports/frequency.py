"""eval.py frequency: perplexity of words by how often they occur in the training split.

This is Table 7 of Compressive Transformers.
"""

import argparse
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from accelerated.data.corpus import load_corpus, plainly_spaced
from accelerated.data.tokenizers import Tokenizer
from accelerated.data.windows import Document, lengths_of
from accelerated.evaluation.score import Answer, Score, TrainedRun, as_cell, token_nats
from accelerated.program.errors import InputError
from accelerated.program.progress import Progress

# The least occurrences for each column; the paper does not say in which 1,000 and 10,000 belong
FREQUENCIES = {
    "more than 10,000": 10_001,
    "1,000 to 10,000": 1_000,
    "100 to 999": 100,
    "fewer than 100": 0,
}
WHITE_SPACE = np.frombuffer(b" \t\n\r\x0b\x0c", np.uint8)


def ids_of(document: Document) -> np.ndarray:
    """All tokens of a document, (n,); empty if there is nothing to predict."""
    return np.concatenate([document.inputs[:1], document.targets])


def words_of(document: Document, tokenizer: Tokenizer) -> tuple[list[bytes], np.ndarray]:
    """(the document's words, the index of the word that each of its n tokens belongs to, (n,)).

    Words are those of count_words. A token belongs to the word of its first byte that is not white
    space; if it has none, to the next word, or at the end to the last. So a word may have no token.
    A text of only white space is one empty word.
    """
    ids = ids_of(document)
    text = plainly_spaced(tokenizer.decode(ids))
    written = ~np.isin(np.frombuffer(text, np.uint8), WHITE_SPACE)
    ends = np.flatnonzero(written[:-1] & ~written[1:]) + 1  # of words that white space follows
    lengths = tokenizer.token_bytes[ids]
    begins = np.cumsum(lengths) - lengths  # of tokens
    words = text.split() or [b""]
    owners = np.searchsorted(ends, begins, side="right")  # the first word to end after that
    return words, np.minimum(owners, len(words) - 1)


def word_counts(
    documents: Sequence[Document], asked: Sequence[Document], tokenizer: Tokenizer
) -> Counter:
    """How often the words of the documents `asked` occur in documents."""
    words = set()
    for document in asked:
        words.update(plainly_spaced(tokenizer.decode(ids_of(document))).split())
    counts = Counter()
    with Progress("counting words of the training split", int(lengths_of(documents).sum())) as bar:
        for document in documents:
            # one word at a time: a list of all takes eight times the text's memory
            matches = re.finditer(rb"\S+", plainly_spaced(tokenizer.decode(ids_of(document))))
            counts.update(match[0] for match in matches if match[0] in words)
            bar.update(len(document.targets))
    return counts


def by_frequency(
    nats: list[np.ndarray],
    documents: Sequence[Document],
    counts: dict[bytes, int],
    tokenizer: Tokenizer,
) -> list[dict]:
    """A row for each of FREQUENCIES and one for all words (Table 7).

    nats are token_nats, and counts the training split's word_counts. A row has its summed -log p,
    its words that have a scored token, these tokens, and the perplexity per word, NaN without any.
    """
    sums = np.zeros(len(FREQUENCIES))
    sizes = np.zeros((len(FREQUENCIES), 2), np.int64)  # words, tokens
    *edges, _ = FREQUENCIES.values()
    for losses, document in zip(nats, documents, strict=True):
        words, owners = words_of(document, tokenizer)
        owners = owners[1:][document.scored]
        tokens = np.bincount(owners, minlength=len(words))
        occurrences = np.array([counts.get(word, 0) for word in words])
        buckets = np.digitize(occurrences, edges)  # (words,)
        np.add.at(sums, buckets[owners], losses[document.scored])
        np.add.at(sizes, buckets, np.stack([tokens > 0, tokens], 1))

    names = [*FREQUENCIES, "all"]
    sums = np.append(sums, sums.sum()).tolist()
    sizes = np.vstack([sizes, sizes.sum(0)]).tolist()
    rows = []
    for name, total, (words, tokens) in zip(names, sums, sizes, strict=True):
        row = {"name": name, "nats": total, "words": words, "tokens": tokens}
        rows.append(row | {"perplexity": Score(total).perplexity(words)})
    return rows


def training_split(run: TrainedRun, options: argparse.Namespace) -> Sequence[Document]:
    """The documents that a run was trained on; of a published GPT-2, which names none, --data's."""
    data = run.settings.data
    if not data.data:
        data = replace(data, data=run.data)
    return load_corpus(data, run.tokenizer, run.settings.recall, options.data_dir).splits["train"]


def report(run: TrainedRun, options: argparse.Namespace) -> Answer:
    """Perplexity per word by how often the word occurs in the training split."""
    if not run.words()[0]:
        raise InputError(f"frequency: {run.data} has no words; give other --data")
    documents = run.splits[run.split]
    counts = word_counts(training_split(run, options), documents, run.tokenizer)
    nats = run.by_document(token_nats(run.model, run.documents, run.lane_count))
    rows = by_frequency(nats, documents, counts, run.tokenizer)
    lines = [f"{'times in training':<18} {'words':>11} {'tokens':>13}   perplexity per word"]
    for row in rows:
        perplexity = as_cell(row["perplexity"], ",.5g")
        counted = f"{row['name']:<18} {row['words']:11,d} {row['tokens']:13,d}"
        lines.append(f"{counted}   {perplexity:>19}")
    return {"by_frequency": rows}, lines
