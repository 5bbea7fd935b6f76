"""The cache of tokens is exact, made once and anew for any change, and refused if it is damaged."""

import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import numpy as np
import pytest
from filelock import FileLock
from hypothesis import given
from hypothesis import strategies as st

from accelerated.data import corpus as token_cache
from accelerated.data.config import DataConfig
from accelerated.data.corpus import (
    DOCUMENTS,
    MANIFEST,
    TOKENS,
    cache_folder,
    count_words,
    load_corpus,
    tokenised,
)
from accelerated.data.recall import RecallConfig
from accelerated.data.sources import source_of_path
from accelerated.data.tokenizers import BpeTokenizer, ByteTokenizer, tokenizer_of_ranks
from accelerated.data.windows import SPLITS
from tests.helpers.programs import refusal
from tests.helpers.texts import flipped_bits, rewrite, small_encoding, write

BYTES = ByteTokenizer()
SMALL = BpeTokenizer("small", small_encoding())
WORDS = "the anthem thé an hour 中文。字 42 don't;\n\n  the end\n"


def made(path, tokenizer=BYTES):
    """(the Corpus of a path, with a cache beside it; the folder of that cache)."""
    source = source_of_path(str(path))
    data_dir = path.parent / "cache"
    return tokenised(source, tokenizer, data_dir), cache_folder(source, tokenizer, data_dir)


def files_of(cache):
    """The names in a cache's folder, except its lock."""
    return {path.name for path in cache.iterdir()} - {".lock"}


@pytest.fixture
def folder(tmp_path):
    """60 texts, one of one byte and one that is empty."""
    path = tmp_path / "texts"
    path.mkdir()
    for number in range(60):
        text = WORDS[number % 7 :] * (number % 5 + 1)
        (path / f"{number}.txt").write_text(text)
    (path / "byte.txt").write_text("x")
    (path / "empty.txt").write_text("")
    return path


@pytest.mark.parametrize("tokenizer", [BYTES, SMALL], ids=["bytes", "bpe"])
def test_every_document_has_its_tokens_and_words(folder, tokenizer):
    (splits, _), _ = made(folder, tokenizer)
    texts = {split: [] for split in SPLITS}
    for split, text in source_of_path(str(folder)).texts():
        texts[split].append((folder / text.name).read_bytes())
    for split, documents in splits.items():
        assert documents.words.sum() > 0
        assert documents.words.tolist() == [len(text.split()) for text in texts[split]]
        assert documents.line_ends.tolist() == [text.count(b"\n") for text in texts[split]]
        tokens = [tokenizer.encode(text).tolist() for text in texts[split]]
        assert documents.lengths.tolist() == [max(len(ids) - 1, 0) for ids in tokens]
        for document, ids in zip(documents, tokens, strict=True):
            assert document.inputs.tolist() == ids[:-1]
            assert document.targets.tolist() == ids[1:]
            assert document.scored.all()
            assert len(document.scored) == len(document.inputs)


@pytest.mark.parametrize("tokenizer", [BYTES, SMALL], ids=["bytes", "bpe"])
def test_tokens_stay_on_the_disk_from_where_a_second_run_reads_them(folder, monkeypatch, tokenizer):
    (_, digest), cache = made(folder, tokenizer)
    assert files_of(cache) == {TOKENS, DOCUMENTS, MANIFEST}
    monkeypatch.setattr(token_cache, "only_worker", lambda *_: pytest.fail("made again"))
    (splits, same), _ = made(folder, tokenizer)
    assert digest == same
    for documents in splits.values():
        assert isinstance(documents.tokens, np.memmap)
        assert documents.tokens.dtype == tokenizer.dtype
        assert documents[0].scored.strides == (0,), "it takes no memory"


SPACES = (
    " \t\n\r\x0b\x0c\x1c\x85\xa0\u1680\u2003\u2028\u202f\u3000"  # of Unicode, some of each kind
)
NO_SPACES = "ab\0é\u200b\ufeff"


@given(st.text(st.sampled_from(SPACES + NO_SPACES), max_size=30))
def test_words_are_counted_as_split_has_them(text):
    assert count_words(text.encode()) == len(text.split())
    assert count_words(text.encode() + b" \xc3") == len(text.split()) + 1, "not UTF-8"


def test_a_change_makes_another_cache(folder, tmp_path):
    """Also a file of the same size and time, and another tokenizer of the same name."""

    def place(tokenizer=BYTES):
        return cache_folder(source_of_path(str(folder)), tokenizer, tmp_path)

    other = tokenizer_of_ranks(SMALL.name, {bytes([byte]): byte for byte in range(256)})
    places = {place(), place(SMALL), place(other)}
    file = folder / "7.txt"
    os.utime(file, ns=(1, time.time_ns() + 1))
    assert place() in places, "the contents decide"
    rewrite(file, bytes(file.stat().st_size))
    places.add(place())
    write(folder, {"deep/a.txt": ""})
    places.add(place())
    (folder / "byte.txt").rename(folder / "deep" / "byte.txt")
    places.add(place())
    assert len(places) == 6, "a moved file, as to another split, is another text"


def test_the_digest_depends_on_every_split(tmp_path):
    folder = tmp_path / "in"
    for split in SPLITS:
        (folder / split).mkdir(parents=True)
        (folder / split / "a.txt").write_text("a text")
    digests = {made(folder)[0].digest}
    for split in SPLITS:
        (folder / split / "a.txt").write_text("another")
        digests.add(made(folder)[0].digest)
    assert len(digests) == 4


def test_a_failure_leaves_nothing(folder, tmp_path):
    """Of a text that cannot be read; a folder that cannot be made is one line too."""
    source = source_of_path(str(folder))
    (folder / "9.txt").write_bytes(b"abc\xff")
    words = "9.txt is not UTF-8 text (byte 3); convert it"
    assert refusal(tokenised, source, BYTES, tmp_path / "cache").startswith(words)
    left = [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert left == [".lock"]
    words = "cannot write .*; give another --data-dir"
    assert re.search(words, refusal(tokenised, source, BYTES, folder / "1.txt"))


def test_two_runs_that_begin_together_make_it_once(folder, tmp_path, monkeypatch):
    """While one holds the lock the other waits; then it reads the first one's cache."""
    write = Mock(wraps=token_cache.write_tokens)
    monkeypatch.setattr(token_cache, "write_tokens", write)
    cache = cache_folder(source_of_path(str(folder)), BYTES, tmp_path / "cache")
    cache.mkdir(parents=True)
    with ThreadPoolExecutor() as pool:
        with FileLock(cache / ".lock"):
            runs = [pool.submit(made, folder) for _ in range(2)]
            time.sleep(0.2)
            assert files_of(cache) == set()
        first, second = (run.result()[0].digest for run in runs)
    assert first == second
    assert write.call_count == 1


@pytest.mark.parametrize("name", [TOKENS, DOCUMENTS, MANIFEST])
def test_a_flipped_bit_is_refused(tmp_path, name):
    """And a file that is too short, too long or missing; its time of writing says nothing."""
    book = tmp_path / "book.txt"
    book.write_text("some words of a book. " * 50)
    _, folder = made(book)
    path = folder / name
    right = path.read_bytes()
    words = f"{re.escape(str(folder))} is damaged .*; remove that folder .*--data-dir"
    for content in (right[:-40], right + right[-40:], b"", *flipped_bits(right, 12)):
        rewrite(path, content)
        assert re.match(words, refusal(made, book))
    path.unlink()
    if name != MANIFEST:  # without a manifest the cache is unfinished, and made again
        assert re.match(words, refusal(made, book))


def test_the_first_documents_alone_are_read(folder, tmp_path):
    """The same ones as of the whole; other splits stay as they are."""

    def corpus(training_documents):
        data = DataConfig(str(folder), training_documents=training_documents)
        return load_corpus(data, SMALL, RecallConfig(), tmp_path / "cache")

    whole = corpus(0)
    few = corpus(30)
    found = len(few.splits["train"])
    assert found == 30 < len(whole.splits["train"]), f"{found} of 30: look at first_documents"
    assert few.digest != whole.digest
    assert whole.splits["train"].whole
    for split, documents in few.splits.items():
        first = [document.targets.tolist() for document in documents]
        tokens = [document.targets.tolist() for document in whole.splits[split]]
        assert first == (tokens[:30] if split == "train" else tokens)
        assert documents.whole == (split != "train")
