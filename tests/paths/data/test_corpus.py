"""The cache of tokens is exact, made once, made again when anything changes, never half-written, and refused if it is damaged."""

import io
import os
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock
from hypothesis import given
from hypothesis import strategies as st

from accelerated.data import corpus as token_cache
from accelerated.data.config import DataConfig
from accelerated.data.corpus import DOCUMENTS, MANIFEST, TOKENS, cache_folder, check_length, load_corpus, pieces_of, tokenised
from accelerated.data.recall import RecallConfig
from accelerated.data.sources import Text, source_of_path
from accelerated.data.tokenizers import BpeTokenizer, ByteTokenizer, tokenizer_of_ranks
from accelerated.data.windows import SPLITS, count_words, lengths_of
from accelerated.program.errors import InputError
from tests.helpers.texts import documents_of, small_encoding, text_document

BYTES, SMALL = ByteTokenizer(), BpeTokenizer("small", small_encoding())
WORDS = "the anthem thé an hour 中文。字 42 don't;\n\n  the end\n"


def made(path, tokenizer=BYTES):
    """(the Corpus of a path, with a cache beside it; the folder of that cache)."""
    source, data_dir = source_of_path(DataConfig(str(path))), path.parent / "cache"
    return tokenised(source, tokenizer, data_dir), cache_folder(source, tokenizer, data_dir)


def files_of(cache):
    """The names in a cache's folder, except its lock."""
    return {path.name for path in cache.iterdir()} - {".lock"}


def tokens_of(documents):
    return [[*document.inputs[:1].tolist(), *document.targets.tolist()] for document in documents]


@pytest.fixture
def folder(tmp_path):
    """60 texts, and one empty, one of one byte and one longer than a piece."""
    path = tmp_path / "texts"
    path.mkdir()
    texts = {str(i): WORDS[i % 7 :] * (i % 5 + 1) for i in range(60)} | {"empty": "", "byte": "x", "long": WORDS * 9_000}
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
        assert documents.words.tolist() == [document.words for document in expected]
        assert documents.lengths.tolist() == lengths_of(expected).tolist() == lengths_of(list(documents)).tolist()
        assert count_words(documents) == count_words(list(documents)) > 0
        assert isinstance(documents.tokens, np.memmap) and documents.tokens.dtype == tokenizer.dtype
        for document, other in zip(documents, expected, strict=True):
            assert [field.tolist() for field in document[1:4]] == [field.tolist() for field in other[1:4]]
            assert document.scored.strides == (0,), "it takes no memory"


def test_a_change_makes_another_cache(folder, tmp_path):
    """Also another way to cut the folder, and another tokenizer of the same name, as every learned one is called bpe."""
    file, before = folder / "7.txt", []
    other = tokenizer_of_ranks(SMALL.name, {bytes([byte]): byte for byte in range(256)})

    def folder_now(tokenizer=BYTES, **options):
        before.append(cache_folder(source_of_path(DataConfig(str(folder), **options)), tokenizer, tmp_path))

    stat = file.stat()
    for change in (
        lambda: None,
        lambda: os.utime(file, ns=(1, time.time_ns() + 1)),
        lambda: (file.write_bytes(b"longer" * 9999), os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))),
        file.unlink,
        lambda: (folder / "byte.txt").rename(folder / "renamed.txt"),
        lambda: (folder / "new.txt").write_text("new"),
    ):
        change()
        folder_now()
    folder_now(SMALL)
    folder_now(other)
    folder_now(documents="folders")
    assert len({*before}) == len(before) == 9


def test_the_digest_depends_on_every_split_and_is_that_of_old_checkpoints(tmp_path):
    digests = set()
    for changed in (None, *SPLITS):
        for split in SPLITS:
            (tmp_path / "in" / split).mkdir(parents=True, exist_ok=True)
            (tmp_path / "in" / split / "a.txt").write_text("another" if split == changed else "a text")
        digests.add(made(tmp_path / "in")[0].digest)
    assert len(digests) == 4 and "7ef3d2f6d5b5cf06" in digests


def test_an_unfinished_cache_is_made_again(folder):
    """Also of a killed process, whose file was half-written."""
    (whole, digest), cache = made(folder)
    (cache / MANIFEST).unlink()
    (cache / "other.writing").write_bytes(b"half")
    (again, same), _ = made(folder)
    assert same == digest and tokens_of(again["valid"]) == tokens_of(whole["valid"])
    assert files_of(cache) == {TOKENS, DOCUMENTS, MANIFEST}


def test_a_failure_leaves_nothing(folder, tmp_path, monkeypatch):
    """Neither a text that cannot be read nor a full disk; a folder that cannot be made is one line too."""
    source = source_of_path(DataConfig(str(folder)))
    cache = cache_folder(source, BYTES, tmp_path / "cache")

    class Full(io.FileIO):
        def write(self, piece):
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(InputError, match=r"No space left on device; .*--data-dir"):
        patch.setattr(Path, "open", lambda path, mode, **_: Full(path, mode.replace("b", "")))
        made(folder)
    assert files_of(cache) == set()
    (folder / "long.txt").write_bytes(b"abc" * 500_000 + b"\xff")
    with pytest.raises(InputError, match=r"^long\.txt is not UTF-8 text \(byte 1500000\); convert it"):
        tokenised(source, BYTES, tmp_path / "other")
    assert [path.name for path in (tmp_path / "other").rglob("*") if path.is_file()] == [".lock"]
    with pytest.raises(InputError, match=r"cannot write .*; give another --data-dir"):
        tokenised(source, BYTES, folder / "1.txt")


def test_two_runs_that_begin_together_make_it_once(folder, tmp_path, monkeypatch):
    """While one holds the lock the other waits; then it reads the first one's cache."""
    times, cache = [], cache_folder(source_of_path(DataConfig(str(folder))), BYTES, tmp_path / "cache")
    write = token_cache.write_tokens
    monkeypatch.setattr(token_cache, "write_tokens", lambda *arguments: times.append(1) or write(*arguments))
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
    (tmp_path / "book.txt").write_text("some words of a book. " * 50)
    _, folder = made(tmp_path / "book.txt")
    path, rng = folder / name, random.Random(name)
    right, stat = path.read_bytes(), path.stat()
    bits = {0, 8 * len(right) - 1, *(rng.randrange(8 * len(right)) for _ in range(12))}
    flipped = [right[: bit // 8] + bytes([right[bit // 8] ^ 1 << bit % 8]) + right[bit // 8 + 1 :] for bit in bits]
    words = f"^{re.escape(str(folder))} is damaged .*; remove that folder .*--data-dir"
    for content in (*flipped, right[:-1], right[:-40], right + right[-40:], b""):
        path.write_bytes(content)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        with pytest.raises(InputError, match=words):
            made(tmp_path / "book.txt")
    path.unlink()
    if name != MANIFEST:  # without it the cache is unfinished
        with pytest.raises(InputError, match=words):
            made(tmp_path / "book.txt")


@given(text=st.text(alphabet="aé字 \n.,'3\t\x0b\u00a0", max_size=80), limit=st.integers(1, 40))
def test_pieces_have_the_tokens_and_words_of_the_whole(text, limit):
    """The text is cut wherever a tokenizer allows it, and arrives a few bytes at a time."""
    content = text.encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_cache, "read_bytes", lambda _: (content[i : i + limit] for i in range(0, len(content), limit)))
        pieces = [*pieces_of(Text("x", ()))]
        assert [*pieces_of(Text("x", ()), whole=True)] == [content]
    assert b"".join(pieces) == content and sum(len(piece.split()) for piece in pieces) == len(content.split())
    assert [token for piece in pieces for token in SMALL.encode(piece)] == SMALL.encode(content).tolist()


def test_splits_too_short_for_the_lanes_are_refused():
    splits = {"train": documents_of([14, 8]), "valid": documents_of([6, 1])}  # 20 and 5 tokens to predict
    check_length("book.txt", splits, 5, lanes=4)
    for segment, lanes, words in (
        (21, 1, "the train split has 20 tokens to predict, 1 lane of a segment of 21 need 21; give more text or a smaller --seg"),
        (6, 1, "the valid split has 5 tokens to predict, 1 lane of a segment of 6 need 6"),
        (5, 1000, "1,000 lanes of a segment of 5 need 5,000; give at most --batch 4"),
    ):
        with pytest.raises(InputError, match=words):
            check_length("book.txt", splits, segment, lanes)


def test_the_first_documents_and_tokens_alone_are_read(folder, tmp_path):
    """The same ones as of the whole; the words are those that begin in the tokens; other splits stay as they are."""
    whole, few = (
        load_corpus(DataConfig(str(folder), **part), SMALL, RecallConfig(), tmp_path / "cache")
        for part in ({}, {"training_documents": 30, "validation_tokens": 40})
    )
    tokens, first = ({split: tokens_of(documents) for split, documents in each.splits.items()} for each in (whole, few))
    valid = few.splits["valid"]
    assert few.digest != whole.digest and first["train"] == tokens["train"][:30] != tokens["train"]
    assert first["test"] == tokens["test"]
    assert first["valid"] == [document[:40] for document in tokens["valid"]] != tokens["valid"]
    assert valid.lengths.tolist() == lengths_of(list(valid)).tolist()
    assert valid.words.tolist() == [len(SMALL.decode(document).split()) for document in first["valid"]]
    assert {split: documents.whole for split, documents in few.splits.items()} == {"train": False, "valid": False, "test": True}
    recall, digest = load_corpus(DataConfig("recall"), BYTES, RecallConfig(), tmp_path)
    assert digest == "" and lengths_of(recall["valid"]).tolist() == [len(d.inputs) for d in recall["valid"]]
