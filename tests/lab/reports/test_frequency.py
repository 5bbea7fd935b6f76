"""Perplexity by frequency: words equal a byte-by-byte search, and sums equal counting word by word."""

import json
import math
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelerated.data.windows import Document
from accelerated.lab.reports.frequency import (
    FrequencyRow,
    by_frequency,
    distinct_words,
    frequency_lines,
    word_counts,
    words_of,
)
from tests.conftest import examples
from tests.helpers.texts import BYTES, MERGED, document_from, documents_and_tokenizer, either, random_nats, texts


def owners_byte_by_byte(text, tokens):
    """Return (words, index of each token's word) of a text and its tokens, all bytes."""
    words, word_at = [], []  # index of each byte's word, None for white space
    for at, byte in enumerate(text):
        if chr(byte) in " \t\n\r\x0b\x0c":
            word_at.append(None)
            continue
        if at and word_at[-1] is not None:
            words[-1] += bytes([byte])
        else:
            words.append(bytes([byte]))
        word_at.append(len(words) - 1)
    owners, at = [], 0
    for token in tokens:
        following = [word for word in word_at[at:] if word is not None]
        owners.append(following[0] if following else max(len(words) - 1, 0))
        at += len(token)
    return words or [b""], owners


@examples(150)
@given(text=texts, tokenizer=either)
def test_words_equal_a_byte_by_byte_search(text, tokenizer):
    document = document_from(text, tokenizer)
    words, owners = words_of(document, tokenizer)
    ids = tokenizer.encode(text) if len(document.inputs) else []
    assert (words, owners.tolist()) == owners_byte_by_byte(tokenizer.decode(ids), [tokenizer.decode([token]) for token in ids])


def owners_of(*tokens):
    """Return (words, the word of each token) for tokens given as bytes."""
    ids = np.array([MERGED.ranks.index(token) for token in tokens], np.uint16)
    words, owners = words_of(Document("", ids[:-1], ids[1:], np.ones(len(ids) - 1, bool)), MERGED)
    return words, [words[owner] for owner in owners]


def test_a_token_belongs_to_the_word_of_its_first_byte_that_is_not_white():
    assert owners_of(b"a", b" the", b"a", b"\n\n", b"b") == ([b"a", b"thea", b"b"], [b"a", b"thea", b"thea", b"b", b"b"])
    assert owners_of(b"\n", b"a b", b"a b", b"the") == ([b"a", b"ba", b"bthe"], [b"a", b"a", b"ba", b"bthe"])
    assert owners_of(b"b", b" ", b"\n\n") == ([b"b"], [b"b", b"b", b"b"]), "white space at the end belongs to the last word"
    assert owners_of(b" ", b"\t") == ([b""], [b"", b""]), "a text of white space alone is one empty word"
    assert owners_of(b"\xc2", b"\xa0", b"\x1c", b"\0") == ([b"\xc2\xa0\x1c\0"], [b"\xc2\xa0\x1c\0"] * 4), (
        "white space is ASCII's six"
    )


@examples(100)
@given(some=st.lists(texts, max_size=3), tokenizer=either, wanted=st.sets(st.text("theabé", min_size=1, max_size=4), max_size=9))
def test_words_are_those_between_white_space(some, tokenizer, wanted):
    documents, wanted = [document_from(text, tokenizer) for text in some], {word.encode() for word in wanted}
    words = [word for document in documents if len(document.inputs) for word in document.name.encode().split()]
    assert word_counts(documents, wanted, tokenizer) == Counter(word for word in words if word in wanted)
    every = distinct_words(documents, tokenizer)
    assert every == set(words) and sum(word_counts(documents, every, tokenizer).values()) == len(words)


@pytest.mark.parametrize("text", ["abcd", "abcd abcd"])
def test_a_longer_word_is_not_counted_as_its_beginning(text):
    assert not word_counts([document_from(text, BYTES)], {b"abc"}, BYTES)


def test_counting_holds_no_list_of_a_documents_words():
    documents = [document_from(text, BYTES) for text in ("x" * 400_000, "ab the " * 50_000)]
    tracemalloc.start()
    counts = word_counts(documents, {b"the", b"xx"}, BYTES)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert counts == {b"the": 50_000} and peak < 2_500_000, "a list of the words would take 4 MB"


def bucket_of(count):
    """Table 7: > 10K, 1K-10K, 100-1K, < 100."""
    if count > 10_000:
        return 0
    if count >= 1000:
        return 1
    return 2 if count >= 100 else 3


NAMES = ["more than 10,000", "1,000 to 10,000", "100 to 999", "fewer than 100", "all"]


@pytest.mark.parametrize("count", [0, 1, 99, 100, 999, 1000, 9999, 10_000, 10_001, 10**9])
def test_the_edges_of_the_buckets(count):
    documents = [document_from("x the", BYTES)]
    rows = by_frequency([np.array([1.0, 2, 3, 4])], documents, {b"the": count}, BYTES)
    assert [row.name for row in rows] == NAMES
    assert [(row.nats, row.words, row.tokens) for row in rows] == [
        (10.0, 1, 4) if index in (4, bucket_of(count)) else (0.0, 0, 0) for index in range(5)
    ], "the first token is not predicted, so its word does not count"


@examples(100)
@given(corpus=documents_and_tokenizer(), seed=st.integers(0, 5), data=st.data())
def test_rows_by_frequency_are_those_of_counting_word_by_word(corpus, seed, data):
    documents, tokenizer = corpus
    nats, amounts = random_nats(documents, seed), st.sampled_from([0, 99, 100, 999, 1000, 10_000, 10_001])
    counts = Counter({word: data.draw(amounts) for word in sorted(distinct_words(documents, tokenizer))})
    expected = [[0.0, 0, 0] for _ in range(5)]
    for losses, document in zip(nats, documents, strict=True):
        ids = tokenizer.encode(document.name) if len(document.inputs) else []
        words, owners = owners_byte_by_byte(tokenizer.decode(ids), [tokenizer.decode([token]) for token in ids])
        for number, word in enumerate(words):
            own = [place - 1 for place in range(1, len(ids)) if owners[place] == number and document.scored[place - 1]]
            for row in (expected[bucket_of(counts[word])], expected[4]) if own else ():
                row[:] = row[0] + sum(losses[own]), row[1] + 1, row[2] + len(own)
    rows = by_frequency(nats, documents, counts, tokenizer)
    assert [row.name for row in rows] == NAMES
    for row, (total, words, tokens) in zip(rows, expected, strict=True):
        assert (row.words, row.tokens) == (words, tokens) and row.nats == pytest.approx(total, rel=1e-12)
        assert row.perplexity == pytest.approx(math.exp(total / words) if words else math.nan, nan_ok=True)
    assert rows[-1].nats == pytest.approx(sum(np.nansum(own) for own in nats), rel=1e-12)
    assert rows[-1].tokens == sum(int(document.scored.sum()) for document in documents)


def test_a_scored_nan_stays_visible():
    """NaN marks unscored tokens; the NaN of a scored token is not ignored."""
    documents = [document_from("the the", BYTES, [True, False])]
    nats = [np.array([1.0, math.nan, math.nan, math.nan, 1.0, math.nan])]
    assert math.isnan(by_frequency(nats, documents, Counter(), BYTES)[-1].nats)
    whole = [np.array([1.0, math.nan, 1.0, math.nan, 1.0, math.nan])]
    assert by_frequency(whole, documents, Counter(), BYTES)[-1].nats == 3.0


@pytest.mark.parametrize("nats,expected", [(3.0, math.exp(3)), (1e6, math.inf), (math.nan, math.nan)])
def test_perplexity_is_per_word_and_infinite_beyond_a_double(nats, expected):
    rows = by_frequency([np.array([nats])], [document_from("ab", BYTES)], Counter(), BYTES)
    for row in (rows[3], rows[4]):
        assert row.perplexity == pytest.approx(expected, nan_ok=True)
    assert math.isnan(rows[0].perplexity), "no words"


ROWS = [FrequencyRow("more than 10,000", 1000 * math.log(4), 1000, 1500, 4.0), FrequencyRow("all", 1e9, 2, 9, math.inf)]
NONE = FrequencyRow("100 to 999", 0.0, 0, 0, math.nan)


def test_rows_hold_plain_numbers():
    """Rows made from arrays can be written as JSON."""
    rows = by_frequency([np.array([math.log(2)])], [document_from("ab", BYTES)], {}, BYTES)
    record = json.loads(json.dumps(rows[4]._asdict()))
    assert record == {"name": "all", "nats": math.log(2), "words": 1, "tokens": 1, "perplexity": pytest.approx(2)}
    assert isinstance(rows[0], FrequencyRow) and rows[0][:4] == (NAMES[0], 0.0, 0, 0)


def test_the_table():
    assert frequency_lines([*ROWS, NONE]) == [
        "times in training        words        tokens   perplexity per word",
        "more than 10,000         1,000         1,500                     4",
        "all                          2             9                   inf",
        "100 to 999                   0             0                     -",
    ]
