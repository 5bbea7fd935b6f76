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
OF_BOTH = pytest.mark.parametrize("tokenizer", [BYTES, SMALL], ids=["bytes", "bpe"])


def texts_in(path):
    """The Source of a file or folder."""
    return source_of_path(DataConfig(str(path)))


def made(path, tokenizer=BYTES):
    """(the Corpus of a path, with a cache beside it; the folder of that cache)."""
    source, data_dir = texts_in(path), path.parent / "cache"
    return tokenised(source, tokenizer, data_dir), cache_folder(source, tokenizer, data_dir)


def files_of(cache):
    """The names in a cache's folder, except its lock."""
    return {path.name for path in cache.iterdir()} - {".lock"}


def tokens_of(document):
    return [*document.inputs[:1].tolist(), *document.targets.tolist()]


@pytest.fixture
def folder(tmp_path):
    """60 texts, and one empty, one of one byte and one longer than a piece."""
    path = tmp_path / "texts"
    path.mkdir()
    for i in range(60):
        (path / f"{i}.txt").write_text(WORDS[i % 7 :] * (i % 5 + 1))
    for name, text in {"empty": "", "byte": "x", "long": WORDS * 50_000}.items():
        (path / f"{name}.txt").write_text(text)
    return path


@OF_BOTH
def test_every_document_has_its_tokens_and_words(folder, tokenizer):
    """They stay on the disk."""
    (splits, _), _ = made(folder, tokenizer)
    expected = {split: [] for split in SPLITS}
    for split, text in texts_in(folder).texts():
        expected[split].append((folder / text.name).read_bytes())
    for split, documents in splits.items():
        texts = expected[split]
        assert len(documents) == len(texts) and documents.words.tolist() == [len(text.split()) for text in texts]
        assert documents.lengths.tolist() == [max(len(tokenizer.encode(text)) - 1, 0) for text in texts]
        assert lengths_of(list(documents)).tolist() == documents.lengths.tolist()
        assert count_words(documents) == sum(document.words for document in documents) and count_words(list(documents)) > 0
        assert isinstance(documents.tokens, np.memmap) and documents.tokens.dtype == tokenizer.dtype
        for document, text in zip(documents, texts, strict=True):
            tokens = tokenizer.encode(text).tolist()
            assert (document.inputs.tolist(), document.targets.tolist()) == (tokens[:-1], tokens[1:])
            assert document.scored.shape == document.inputs.shape and document.scored.all()
            assert not len(document.inputs) or np.shares_memory(document.inputs, documents.tokens)
            assert document.scored.strides == (0,)
        with pytest.raises(IndexError):
            documents[len(texts)]


def test_the_cache_is_made_once_and_read_where_nothing_can_be_written(folder, monkeypatch):
    first, cache = made(folder)
    for name in ("write_tokens", "only_worker"):
        monkeypatch.setattr(token_cache, name, lambda *_: pytest.fail("made again"))
    again, _ = made(folder)
    assert first.digest == again.digest and tokens_of(first.splits["train"][3]) == tokens_of(again.splits["train"][3])
    assert files_of(cache) == {TOKENS, DOCUMENTS, MANIFEST}


def upper(path):
    """Other letters, written at another time."""
    path.write_bytes(path.read_bytes().upper())
    os.utime(path, ns=(1, time.time_ns() + 1))


def longer(path):
    """Another size at the same time of writing."""
    before = path.stat()
    path.write_bytes(path.read_bytes() + b"x")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


CHANGES = {
    "content": lambda folder: upper(folder / "7.txt"),
    "length": lambda folder: longer(folder / "7.txt"),
    "new file": lambda folder: (folder / "new.txt").write_text("new"),
    "file gone": lambda folder: (folder / "7.txt").unlink(),
    "name": lambda folder: (folder / "byte.txt").rename(folder / "longer.txt"),
    "tokenizer": lambda folder: SMALL,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_makes_another_cache(folder, change):
    before, cache = made(folder)
    given = CHANGES[change](folder)
    after, other = made(folder, SMALL if given is SMALL else BYTES)
    assert after.digest != before.digest and cache != other and files_of(cache) == files_of(other)
    assert sum(map(len, after.splits.values())) == len(list(texts_in(folder).texts()))


def test_tokenizers_with_the_same_name_have_different_caches(folder, tmp_path):
    """Every learned tokenizer is called bpe."""
    other = tokenizer_of_ranks(SMALL.name, {bytes([byte]): byte for byte in range(256)})
    assert cache_folder(texts_in(folder), SMALL, tmp_path) != cache_folder(texts_in(folder), other, tmp_path)


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
    (cache / "tokens.writing").write_bytes(b"half")
    (again, same), _ = made(folder)
    assert same == digest and tokens_of(again["train"][1]) == tokens_of(whole["train"][1])
    assert files_of(cache) == {TOKENS, DOCUMENTS, MANIFEST}


def test_a_failure_leaves_nothing(folder, tmp_path, monkeypatch):
    """Neither a text that cannot be read nor a full disk; a folder that cannot be made is one line too."""

    class Full(io.FileIO):
        def write(self, piece):
            raise OSError(28, "No space left on device")

    with (
        monkeypatch.context() as patch,
        pytest.raises(InputError, match="No space left on device; free some space, or give another --data-dir"),
    ):
        patch.setattr(Path, "open", lambda path, mode, **_: Full(path, mode.replace("b", "")))
        made(folder)
    assert files_of(cache_folder(texts_in(folder), BYTES, tmp_path / "cache")) == set()
    (folder / "9.txt").write_bytes(b"abc" * 500_000 + b"\xff" + b"abc" * 500_000)
    with pytest.raises(InputError, match=r"^9\.txt is not UTF-8 text \(byte 1500000\); convert it, or move it out of --data$"):
        made(folder)
    assert files_of(cache_folder(texts_in(folder), BYTES, tmp_path / "cache")) == set()
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot write .*; give another --data-dir"):
        tokenised(texts_in(folder), BYTES, tmp_path / "file")


def test_two_runs_that_begin_together_make_it_once(folder, tmp_path, monkeypatch):
    """While one holds the lock the other waits; then it reads the first one's cache."""
    times, cache = [], cache_folder(texts_in(folder), BYTES, tmp_path / "cache")
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
    words = f"^{re.escape(str(folder))} is damaged .a checksum is wrong.; remove that folder and it will be made again, or give"
    for content in (*flipped, right[:-1], right[:-40], right + right[-40:], b"", None):
        path.write_bytes(content) if content is not None else path.unlink()
        if content is not None:
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        elif name == MANIFEST:
            continue  # it is made again
        with pytest.raises(InputError, match=words):
            made(tmp_path / "book.txt")
    path.write_bytes(right)
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


def test_a_text_is_cut_after_a_word_of_letters():
    for text, cut in (("1234 " * 7, 0), ("é1" * 20, 0), ("ab cd ef", 5), ("中文 字1", 6), ("ab cdé\ne", 7), ("a\xa0b", 0)):
        pieces = [*pieces_of(Text("x", (text.encode,)))]
        assert pieces == [part for part in (text.encode()[:cut], text.encode()[cut:]) if part], text
    assert [*pieces_of(Text("x", (lambda: b"a \xff\xff b c\xff",)))] == [b"a \xff\xff b", b" c\xff"]


def test_load_corpus_gives_real_splits(data_dir):
    splits, digest = load_corpus(DataConfig("stdlib"), BYTES, RecallConfig(), data_dir)
    assert digest and all(len(splits[split]) for split in SPLITS) and splits["train"].lengths.sum() > 3_000_000
    recall, none = load_corpus(DataConfig("recall"), BYTES, RecallConfig(), data_dir)
    assert none == "" and lengths_of(recall["valid"]).tolist() == [len(d.inputs) for d in recall["valid"]]


def test_splits_too_short_for_the_lanes_are_refused():
    splits = {"train": documents_of([14, 8]), "valid": documents_of([6, 1])}  # 20 and 5 tokens to predict
    check_length("book.txt", splits, 5, lanes=4)
    for segment, lanes, words in (
        (21, 1, "the train split has 20 tokens to predict, 1 lane of a segment of 21 need 21; give more text or a smaller --seg"),
        (6, 1, "the valid split has 5 tokens to predict, 1 lane of a segment of 6 need 6"),
        (5, 1000, "the train split has 20 tokens to predict, 1,000 lanes of a segment of 5 need 5,000; give at most --batch 4"),
    ):
        with pytest.raises(InputError, match=words):
            check_length("book.txt", splits, segment, lanes)


@OF_BOTH
def test_the_first_documents_and_tokens_alone_are_read(folder, tmp_path, tokenizer):
    """The same ones as of the whole; the words are those that begin in the tokens; other splits stay as they are."""
    whole, few = (
        load_corpus(DataConfig(str(folder), **part), tokenizer, RecallConfig(), tmp_path / "cache")
        for part in ({}, {"training_documents": 30, "validation_tokens": 40})
    )
    tokens, first = ({split: [tokens_of(d) for d in ds] for split, ds in each.splits.items()} for each in (whole, few))
    expected = [document[:40] for document in tokens["valid"]]
    assert few.digest != whole.digest and first["train"] == tokens["train"][:30] != tokens["train"]
    assert first["test"] == tokens["test"] and first["valid"] == expected != tokens["valid"]
    assert few.splits["valid"].lengths.tolist() == [len(d.inputs) for d in few.splits["valid"]]
    assert few.splits["valid"].words.tolist() == [len(tokenizer.decode(document).split()) for document in expected]
    assert {split: documents.whole for split, documents in few.splits.items()} == {"train": False, "valid": False, "test": True}
    assert token_cache.truncated([text_document("a", b"x yz", BYTES)], 3, BYTES).words.tolist() == [2]


def test_documents_that_are_folders_have_a_cache_of_their_own(tmp_path):
    for name in ("a/b.txt", "a/a.txt", "b/a.txt"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(name)
    both = [source_of_path(DataConfig(str(tmp_path / "in"), documents=kind)) for kind in ("files", "folders")]
    assert len({cache_folder(source, BYTES, tmp_path) for source in both}) == 2
