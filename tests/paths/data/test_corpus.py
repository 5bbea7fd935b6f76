"""The cache of tokens is exact, made once, made again when anything changes, never half-written, and refused if it is damaged."""

import os
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from filelock import FileLock

from accelerated.data import corpus as token_cache
from accelerated.data.config import DataConfig
from accelerated.data.corpus import (
    DOCUMENTS,
    MANIFEST,
    TOKENS,
    cache_folder,
    load_corpus,
    tokenised,
)
from accelerated.data.recall import RecallConfig
from accelerated.data.sources import source_of_path
from accelerated.data.tokenizers import BpeTokenizer, ByteTokenizer, tokenizer_of_ranks
from accelerated.data.windows import SPLITS
from tests.helpers.programs import refusal
from tests.helpers.texts import small_encoding, text_document

BYTES, SMALL = ByteTokenizer(), BpeTokenizer("small", small_encoding())
WORDS = "the anthem thé an hour 中文。字 42 don't;\n\n  the end\n"


def made(path, tokenizer=BYTES):
    """(the Corpus of a path, with a cache beside it; the folder of that cache)."""
    source, data_dir = source_of_path(DataConfig(str(path))), path.parent / "cache"
    return tokenised(source, tokenizer, data_dir), cache_folder(source, tokenizer, data_dir)


def files_of(cache):
    """The names in a cache's folder, except its lock."""
    return {path.name for path in cache.iterdir()} - {".lock"}


@pytest.fixture
def folder(tmp_path):
    """60 texts, one of one byte and one that is empty."""
    path = tmp_path / "texts"
    path.mkdir()
    texts = {str(i): WORDS[i % 7 :] * (i % 5 + 1) for i in range(60)} | {"byte": "x", "empty": ""}
    for name, text in texts.items():
        (path / f"{name}.txt").write_text(text)
    return path


@pytest.mark.parametrize("tokenizer", [BYTES, SMALL], ids=["bytes", "bpe"])
def test_every_document_has_its_tokens_and_words(folder, monkeypatch, tokenizer):
    """They stay on the disk, from where a second run reads them."""
    (_, digest), cache = made(folder, tokenizer)
    monkeypatch.setattr(token_cache, "only_worker", lambda *_: pytest.fail("made again"))
    (splits, same), _ = made(folder, tokenizer)
    assert digest == same and files_of(cache) == {TOKENS, DOCUMENTS, MANIFEST}
    texts = {split: [] for split in SPLITS}
    for split, text in source_of_path(DataConfig(str(folder))).texts():
        texts[split].append((folder / text.name).read_bytes())
    for split, documents in splits.items():
        expected = [text_document("", text, tokenizer) for text in texts[split]]
        assert (
            documents.words.tolist() == [len(text.split()) for text in texts[split]]
            and documents.words.sum() > 0
        )
        assert documents.lengths.tolist() == [len(document.inputs) for document in expected]
        assert documents.line_ends.tolist() == [text.count(b"\n") for text in texts[split]]
        assert isinstance(documents.tokens, np.memmap) and documents.tokens.dtype == tokenizer.dtype
        for document, other in zip(documents, expected, strict=True):
            assert [field.tolist() for field in document[1:4]] == [
                field.tolist() for field in other[1:4]
            ]
            assert document.scored.strides == (0,), "it takes no memory"


def test_a_change_makes_another_cache(folder, tmp_path):
    """Also a longer file of the same time, and another tokenizer of the same name, as every learned one is called bpe."""
    file, other = (
        folder / "7.txt",
        tokenizer_of_ranks(SMALL.name, {bytes([byte]): byte for byte in range(256)}),
    )

    def place(tokenizer=BYTES):
        return cache_folder(source_of_path(DataConfig(str(folder))), tokenizer, tmp_path)

    stat, found = file.stat(), [place(), place(SMALL), place(other)]
    for change in (
        lambda: os.utime(file, ns=(1, time.time_ns() + 1)),
        lambda: (
            file.write_bytes(b"longer" * 9999),
            os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns)),
        ),
        lambda: (folder / "byte.txt").rename(folder / "renamed.txt"),
    ):
        change()
        found.append(place())
    assert len({*found}) == len(found)


def test_the_digest_depends_on_every_split_and_is_that_of_old_checkpoints(tmp_path):
    digests = set()
    for changed in (None, *SPLITS):
        for split in SPLITS:
            (tmp_path / "in" / split).mkdir(parents=True, exist_ok=True)
            (tmp_path / "in" / split / "a.txt").write_text(
                "another" if split == changed else "a text"
            )
        digests.add(made(tmp_path / "in")[0].digest)
    assert len(digests) == 4 and "7ef3d2f6d5b5cf06" in digests


def test_a_failure_leaves_nothing(folder, tmp_path):
    """Of a text that cannot be read; a folder that cannot be made is one line too."""
    source = source_of_path(DataConfig(str(folder)))
    (folder / "9.txt").write_bytes(b"abc\xff")
    assert refusal(tokenised, source, BYTES, tmp_path / "cache").startswith(
        "9.txt is not UTF-8 text (byte 3); convert it"
    )
    assert [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()] == [".lock"]
    assert re.search(
        "cannot write .*; give another --data-dir",
        refusal(tokenised, source, BYTES, folder / "1.txt"),
    )


def test_two_runs_that_begin_together_make_it_once(folder, tmp_path, monkeypatch):
    """While one holds the lock the other waits; then it reads the first one's cache."""
    times, cache = (
        [],
        cache_folder(source_of_path(DataConfig(str(folder))), BYTES, tmp_path / "cache"),
    )
    write = token_cache.write_tokens
    monkeypatch.setattr(
        token_cache, "write_tokens", lambda *arguments: times.append(1) or write(*arguments)
    )
    cache.mkdir(parents=True)
    with ThreadPoolExecutor() as pool:
        with FileLock(cache / ".lock"):
            runs = [pool.submit(made, folder) for _ in range(2)]
            time.sleep(0.2)
            assert not times and files_of(cache) == set()
        digests = {run.result()[0].digest for run in runs}
    assert len(times) == len(digests) == 1


@pytest.mark.parametrize("name", [TOKENS, DOCUMENTS, MANIFEST])
def test_a_flipped_bit_is_refused(tmp_path, name):
    """And a file that is too short, too long or missing; its time of writing says nothing."""
    book = tmp_path / "book.txt"
    book.write_text("some words of a book. " * 50)
    _, folder = made(book)
    path, rng = folder / name, random.Random(name)
    right, stat = path.read_bytes(), path.stat()
    bits = {0, 8 * len(right) - 1, *(rng.randrange(8 * len(right)) for _ in range(12))}
    flipped = [
        right[: bit // 8] + bytes([right[bit // 8] ^ 1 << bit % 8]) + right[bit // 8 + 1 :]
        for bit in bits
    ]
    words = f"{re.escape(str(folder))} is damaged .*; remove that folder .*--data-dir"
    for content in (*flipped, right[:-40], right + right[-40:], b""):
        path.write_bytes(content)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert re.match(words, refusal(made, book))
    path.unlink()
    assert name == MANIFEST or re.match(words, refusal(made, book)), (
        "without a manifest the cache is unfinished"
    )


def test_the_first_documents_alone_are_read(folder, tmp_path):
    """The same ones as of the whole; other splits stay as they are."""
    whole, few = (
        load_corpus(
            DataConfig(str(folder), training_documents=number),
            SMALL,
            RecallConfig(),
            tmp_path / "cache",
        )
        for number in (0, 30)
    )
    for split, documents in few.splits.items():
        first = [document.targets.tolist() for document in documents]
        tokens = [document.targets.tolist() for document in whole.splits[split]]
        assert first == (tokens[:30] if split == "train" else tokens)
    assert few.digest != whole.digest and len(few.splits["train"]) == 30 < len(
        whole.splits["train"]
    )
    assert {split: documents.whole for split, documents in few.splits.items()} == {
        "train": False,
        "valid": True,
        "test": True,
    }
    assert whole.splits["train"].whole
