"""Perplexity by frequency: words stand between white space, sums are those word by word."""

import math
import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelerated.data.corpus import count_words
from accelerated.lab.reports.frequency import by_frequency, word_counts, words_of
from tests.conftest import examples
from tests.helpers.texts import (
    BYTES,
    document_from,
    document_of_ids,
    documents_and_tokenizer,
    either,
    random_nats,
    texts,
)


def words_and_owners(text, tokens):
    """(words, index of each token's word) of a text.

    A token is of the first word that ends after the token begins, or of the last one.
    """
    whole = text.decode(errors="surrogateescape")
    words = [*re.finditer(r"\S+", whole)]
    ends = [len(as_bytes(whole[: word.end()])) for word in words]
    owners = []
    at = 0
    for token in tokens:
        later = [number for number, end in enumerate(ends) if end > at]
        last = max(len(words) - 1, 0)
        owners.append(later[0] if later else last)
        at += len(token)
    return [as_bytes(word.group()) for word in words] or [b""], owners


def as_bytes(text):
    """The bytes of a text that was decoded by surrogateescape."""
    return text.encode(errors="surrogateescape")


SPACES = "".join(letter for letter in map(chr, range(0x10000)) if letter.isspace())


@examples(200)
@given(st.text(f"aé\u200b{SPACES}", max_size=40))
def test_words_are_cut_as_they_are_counted(text):
    """At Unicode's white space, too; what is no UTF-8 is part of a word."""
    content = text.encode() + b"b \xe2\x80\xff\x85 \xc2"
    words, _ = words_of(document_of_ids("", np.frombuffer(content, np.uint8)), BYTES)
    whole = content.decode(errors="surrogateescape")
    assert words == [as_bytes(word) for word in whole.split()]
    assert len(words) == count_words(content)


@examples(40)
@given(
    some=st.lists(texts, max_size=3),
    tokenizer=either,
    wanted=st.sets(st.text("theabé", min_size=1, max_size=4), max_size=9),
)
def test_words_are_those_between_white_space(some, tokenizer, wanted):
    documents = [document_from(text, tokenizer) for text in some]
    asked = document_from(" ".join(sorted(wanted)), tokenizer)
    expected = Counter()
    for document in documents:
        if len(document.inputs) and len(asked.inputs):
            words = map(str.encode, document.name.split())
            expected.update(word for word in words if word in asked.name.encode().split())
    assert word_counts(documents, [asked], tokenizer) == expected


NAMES = ["more than 10,000", "1,000 to 10,000", "100 to 999", "fewer than 100", "all"]
# times in the training split, of a word in these rows but the last (Table 7)
LEAST = (10_001, 1000, 100, 0)
AMOUNTS = st.sampled_from([0, 99, 100, 999, 1000, 9999, 10_000, 10_001, 10**9])


def row_of(count):
    """The name of the row of a word that occurs so many times."""
    rows = zip(NAMES, LEAST, strict=False)
    return next(name for name, least in rows if count >= least)


@examples(80)
@given(corpus=documents_and_tokenizer(), seed=st.integers(0, 5), data=st.data())
def test_rows_by_frequency_are_those_of_counting_word_by_word(corpus, seed, data):
    documents, tokenizer = corpus
    nats = random_nats(documents, seed)
    counts = Counter()
    expected = {name: [0.0, 0, 0] for name in NAMES}  # nats, words, tokens
    for losses, document in zip(nats, documents, strict=True):
        ids = tokenizer.encode(document.name) if len(document.inputs) else []
        tokens = [tokenizer.decode([token]) for token in ids]
        words, owners = words_and_owners(tokenizer.decode(ids), tokens)
        found, places = words_of(document, tokenizer)
        assert (found, places.tolist()) == (words, owners)
        for number, word in enumerate(words):
            if word not in counts:
                counts[word] = data.draw(AMOUNTS)
            predicted = np.array(owners[1:], int) == number
            own = losses[predicted & document.scored]
            if len(own):
                for name in (row_of(counts[word]), "all"):
                    expected[name][0] += sum(own)
                    expected[name][1] += 1
                    expected[name][2] += len(own)
    rows = by_frequency(nats, documents, counts, tokenizer)
    assert [row["name"] for row in rows] == NAMES
    for row in rows:
        total, words, tokens = expected[row["name"]]
        assert (row["words"], row["tokens"]) == (words, tokens)
        assert row["nats"] == pytest.approx(total, rel=1e-12)
        perplexity = math.exp(total / words) if words else math.nan
        assert row["perplexity"] == pytest.approx(perplexity, nan_ok=True)
