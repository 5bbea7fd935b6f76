"""Perplexity by frequency: words are runs between white space, and sums equal counting word by word."""

import math
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelerated.lab.reports.frequency import by_frequency, word_counts, words_of
from tests.conftest import examples
from tests.helpers.texts import document_from, documents_and_tokenizer, either, random_nats, texts


def words_and_owners(text, tokens):
    """(words, index of each token's word): the first word that ends after the token begins, or the last one."""
    words, owners, at = [*re.finditer(rb"[^ \t\n\r\x0b\x0c]+", text)], [], 0
    for token in tokens:
        owners.append(
            next(
                (number for number, word in enumerate(words) if word.end() > at),
                max(len(words) - 1, 0),
            )
        )
        at += len(token)
    return [word.group() for word in words] or [b""], owners


@examples(40)
@given(
    some=st.lists(texts, max_size=3),
    tokenizer=either,
    wanted=st.sets(st.text("theabé", min_size=1, max_size=4), max_size=9),
)
def test_words_are_those_between_white_space(some, tokenizer, wanted):
    documents, asked = (
        [document_from(text, tokenizer) for text in some],
        document_from(" ".join(sorted(wanted)), tokenizer),
    )
    wanted = asked.name.encode().split() if len(asked.inputs) else []
    words = [
        word
        for document in documents
        if len(document.inputs)
        for word in document.name.encode().split()
    ]
    assert word_counts(documents, [asked], tokenizer) == Counter(
        word for word in words if word in wanted
    )


NAMES = ["more than 10,000", "1,000 to 10,000", "100 to 999", "fewer than 100", "all"]
LEAST = (
    10_001,
    1000,
    100,
    0,
)  # times in the training split, of a word in these rows but the last (Table 7)


@examples(80)
@given(corpus=documents_and_tokenizer(), seed=st.integers(0, 5), data=st.data())
def test_rows_by_frequency_are_those_of_counting_word_by_word(corpus, seed, data):
    documents, tokenizer = corpus
    nats, amounts = (
        random_nats(documents, seed),
        st.sampled_from([0, 99, 100, 999, 1000, 9999, 10_000, 10_001, 10**9]),
    )
    every = {word for document in documents for word in words_of(document, tokenizer)[0]}
    counts = Counter({word: data.draw(amounts) for word in sorted(every)})
    expected = {name: [0.0, 0, 0] for name in NAMES}
    for losses, document in zip(nats, documents, strict=True):
        ids = tokenizer.encode(document.name) if len(document.inputs) else []
        words, owners = words_and_owners(
            tokenizer.decode(ids), [tokenizer.decode([token]) for token in ids]
        )
        found, places = words_of(document, tokenizer)
        assert (found, places.tolist()) == (words, owners)
        for number, word in enumerate(words):
            own = [
                place - 1
                for place in range(1, len(ids))
                if owners[place] == number and document.scored[place - 1]
            ]
            row = next(
                name for name, least in zip(NAMES, LEAST, strict=False) if counts[word] >= least
            )
            for name in (row, "all") if own else ():
                total, of_words, of_tokens = expected[name]
                expected[name] = [total + sum(losses[own]), of_words + 1, of_tokens + len(own)]
    rows = by_frequency(nats, documents, counts, tokenizer)
    assert [row.name for row in rows] == NAMES
    for row in rows:
        total, words, tokens = expected[row.name]
        assert (row.words, row.tokens) == (words, tokens) and row.nats == pytest.approx(
            total, rel=1e-12
        )
        assert row.perplexity == pytest.approx(
            math.exp(total / words) if words else math.nan, nan_ok=True
        )
