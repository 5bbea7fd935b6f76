"""The cache of tokens is exact, made once, made again when anything changes, never half-written, and refused if it is damaged."""

import io
import json
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
from accelerated.data.config import DataConfig, check_data
from accelerated.data.corpus import FILES, cache_folder, check_length, load_corpus, pieces_of, tokenised, truncated
from accelerated.data.recall import RecallConfig
from accelerated.data.sources import Text, source_of_path
from accelerated.data.tokenizers import BpeTokenizer, ByteTokenizer, tokenizer_of_ranks
from accelerated.data.windows import SPLITS, count_words, lengths_of
from accelerated.program.errors import InputError
from tests.helpers.texts import documents_of, small_encoding, text_document

BYTES, SMALL = ByteTokenizer(), BpeTokenizer("small", small_encoding())
WORDS = "the anthem thé an hour 中文。字 42 don't;\n\n  the end\n"


def caches(tmp_path):
    """The folders of caches that are whole."""
    return [path.parent for path in (tmp_path / "cache" / "tokens").glob("*/manifest.json")]


def files_of(cache):
    """The names in a cache's folder, except its lock."""
    return {path.name for path in cache.iterdir()} - {".lock"}


def texts_in(path):
    """The Source of a file or folder."""
    return source_of_path(DataConfig(str(path)))


def tokens_of(document):
    return [*document.inputs[:1].tolist(), *document.targets.tolist()]


@pytest.fixture
def folder(tmp_path):
    """60 texts, and one empty, one of one byte and one longer than a piece."""
    path = tmp_path / "texts"
    path.mkdir()
    for i in range(60):
        (path / f"{i}.txt").write_text(WORDS[i % 7 :] * (i % 5 + 1))
    (path / "empty.txt").write_bytes(b"")
    (path / "byte.txt").write_bytes(b"x")
    (path / "long.txt").write_text(WORDS * 50_000)
    return path


@pytest.mark.parametrize("tokenizer", [BYTES, SMALL], ids=["bytes", "bpe"])
def test_every_document_has_its_tokens_and_words(folder, tmp_path, tokenizer):
    splits, _ = tokenised(texts_in(folder), tokenizer, tmp_path / "cache")
    expected = {split: [] for split in SPLITS}
    for split, text in texts_in(folder).texts():
        expected[split].append((folder / text.name).read_bytes())
    for split, documents in splits.items():
        texts = expected[split]
        assert len(documents) == len(texts)
        assert documents.lengths.tolist() == [max(len(tokenizer.encode(text)) - 1, 0) for text in texts]
        assert documents.words.tolist() == [len(text.split()) for text in texts]
        assert count_words(documents) == sum(document.words for document in documents) and count_words(list(documents)) > 0
        for document, text in zip(documents, texts, strict=True):
            tokens = tokenizer.encode(text).tolist()
            assert (document.inputs.tolist(), document.targets.tolist()) == (tokens[:-1], tokens[1:])
            assert document.scored.shape == document.inputs.shape and document.scored.all()
        assert lengths_of(list(documents)).tolist() == documents.lengths.tolist()
        with pytest.raises(IndexError):
            documents[len(texts)]


def test_tokens_stay_on_the_disk(folder, tmp_path):
    splits, _ = tokenised(texts_in(folder), SMALL, tmp_path / "cache")
    train = splits["train"]
    assert isinstance(train.tokens, np.memmap) and train.tokens.dtype == np.uint16
    longest = train[int(np.argmax(train.lengths))]
    assert np.shares_memory(longest.inputs, train.tokens) and longest.scored.strides == (0,)


def test_the_cache_is_made_once(folder, tmp_path, monkeypatch):
    first, digest = tokenised(texts_in(folder), BYTES, tmp_path / "cache")
    monkeypatch.setattr(token_cache, "write_tokens", lambda *_: pytest.fail("made again"))
    again, same = tokenised(texts_in(folder), BYTES, tmp_path / "cache")
    assert digest == same and tokens_of(first["train"][3]) == tokens_of(again["train"][3])


@pytest.mark.parametrize("change", ["content", "length", "new file", "file gone", "name", "tokenizer"])
def test_a_change_makes_it_again(folder, tmp_path, change):
    _, digest = tokenised(texts_in(folder), BYTES, tmp_path / "cache")
    tokenizer, path = BYTES, folder / "7.txt"
    if change == "content":
        path.write_bytes(path.read_bytes().upper())
        os.utime(path, ns=(1, time.time_ns() + 1))
    elif change == "length":
        before = path.stat()
        path.write_bytes(path.read_bytes() + b"x")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    elif change == "new file":
        (folder / "new.txt").write_text("new")
    elif change == "file gone":
        path.unlink()
    elif change == "name":
        (folder / "byte.txt").rename(folder / "longer.txt")
    else:
        tokenizer = SMALL
    splits, other = tokenised(texts_in(folder), tokenizer, tmp_path / "cache")
    assert other != digest
    texts = {text.name for _, text in texts_in(folder).texts()}
    assert sum(map(len, splits.values())) == len(texts)
    assert len(caches(tmp_path)) == 2, "another state has another cache"


@pytest.mark.parametrize("split", SPLITS)
def test_the_digest_depends_on_every_split(tmp_path, split):
    """A changed validation split must be noticed too."""
    digests, folder = [], tmp_path / "texts"
    for name in SPLITS:
        (folder / name).mkdir(parents=True)
        (folder / name / "a.txt").write_text("a text")
    for content in ("a text", "another"):
        (folder / split / "a.txt").write_text(content)
        digests.append(tokenised(texts_in(folder), BYTES, tmp_path / "cache").digest)
    assert digests[0] != digests[1]


def test_tokenizers_with_the_same_name_have_different_caches(folder, tmp_path):
    """Every learned tokenizer is called bpe."""
    other = tokenizer_of_ranks(SMALL.name, {bytes([byte]): byte for byte in range(256)})
    folders = {cache_folder(texts_in(folder), tokenizer, tmp_path) for tokenizer in (SMALL, other)}
    assert len(folders) == 2


def test_an_unfinished_cache_is_made_again(folder, tmp_path):
    source = texts_in(folder)
    whole, digest = tokenised(source, BYTES, tmp_path / "cache")
    (cache_folder(source, BYTES, tmp_path / "cache") / "manifest.json").unlink()
    again, same = tokenised(source, BYTES, tmp_path / "cache")
    assert same == digest and tokens_of(again["train"][1]) == tokens_of(whole["train"][1])


def test_a_failure_leaves_nothing(folder, tmp_path):
    (folder / "9.txt").write_bytes(b"abc" * 500_000 + b"\xff" + b"abc" * 500_000)
    source = texts_in(folder)
    with pytest.raises(InputError, match=r"^9\.txt is not UTF-8 text \(byte 1500000\); convert it, or move it out of --data$"):
        tokenised(source, BYTES, tmp_path / "cache")
    assert files_of(cache_folder(source, BYTES, tmp_path / "cache")) == set()


def test_a_full_disk_and_a_folder_that_cannot_be_written_to(folder, tmp_path, monkeypatch):
    class Full(io.FileIO):
        def write(self, piece):
            raise OSError(28, "No space left on device")

    with (
        monkeypatch.context() as patch,
        pytest.raises(InputError, match="No space left on device; free some space, or give another --data-dir"),
    ):
        patch.setattr(Path, "open", lambda path, mode, **_: Full(path, mode.replace("b", "")))
        tokenised(texts_in(folder), BYTES, tmp_path / "cache")
    assert files_of(cache_folder(texts_in(folder), BYTES, tmp_path / "cache")) == set()
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot write .*; give another --data-dir"):
        tokenised(texts_in(folder), BYTES, tmp_path / "file")


def test_the_files_of_a_killed_process_are_removed(folder, tmp_path):
    source = texts_in(folder)
    cache = cache_folder(source, BYTES, tmp_path / "cache")
    cache.mkdir(parents=True)
    (cache / "train.tokens.writing").write_bytes(b"half")
    tokenised(source, BYTES, tmp_path / "cache")
    assert caches(tmp_path) == [cache] and files_of(cache) == {*FILES, "manifest.json"}


def test_two_runs_that_begin_together_make_it_once(folder, tmp_path, monkeypatch):
    """While one holds the lock the other waits; then it reads the first one's cache."""
    source, made = texts_in(folder), []
    cache = cache_folder(source, BYTES, tmp_path / "cache")
    write = token_cache.write_tokens
    monkeypatch.setattr(token_cache, "write_tokens", lambda *arguments: made.append(1) or write(*arguments))
    cache.mkdir(parents=True)
    with ThreadPoolExecutor() as pool:
        with FileLock(cache / ".lock"):
            runs = [pool.submit(tokenised, source, BYTES, tmp_path / "cache") for _ in range(2)]
            time.sleep(0.2)
            assert not made and files_of(cache) == set()
        digests = {run.result().digest for run in runs}
    assert len(made) == len(digests) == 1


def flip(path, bit):
    """Flip a bit of a file and keep its time of modification; returns its content before."""
    before, stat = path.read_bytes(), path.stat()
    content = bytearray(before)
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    return before


@pytest.fixture
def cached(tmp_path):
    """(a source, the folder of its cache, a function that opens it)."""
    (tmp_path / "book.txt").write_text("some words of a book. " * 50)
    source = texts_in(tmp_path / "book.txt")
    tokenised(source, BYTES, tmp_path / "cache")
    return source, cache_folder(source, BYTES, tmp_path / "cache"), lambda: tokenised(source, BYTES, tmp_path / "cache")


@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
def test_a_flipped_bit_is_refused(cached, name):
    _, folder, read = cached
    size, rng = 8 * (folder / name).stat().st_size, random.Random(name)
    for bit in {0, size - 1, *(rng.randrange(size) for _ in range(8))}:
        before = flip(folder / name, bit)
        with pytest.raises(InputError) as caught:
            read()
        assert str(caught.value).startswith(f"{folder} is damaged (the checksum of {name} is wrong); remove that folder and it")
        (folder / name).write_bytes(before)
    read()


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_missing_or_cut_off_is_refused(cached, name):
    _, folder, read = cached
    os.truncate(folder / name, (folder / name).stat().st_size - 1)
    for change in (lambda: None, (folder / name).unlink):
        change()
        with pytest.raises(InputError, match=r"is damaged \(the checksum of .* is wrong\)"):
            read()


def test_a_damaged_manifest_of_any_form_is_refused(cached):
    _, folder, read = cached
    path = folder / "manifest.json"
    right = json.loads(path.read_text())
    for text in ("", "[1]", "{}", "[" * 100_000, json.dumps(right | {"dtype": "int8"}), json.dumps(right, indent=1)):
        path.write_text(text)
        with pytest.raises(InputError, match=r"the checksum of manifest.json is wrong"):
            read()


def test_a_whole_cache_is_read_where_nothing_can_be_written(cached, monkeypatch):
    _, _, read = cached
    monkeypatch.setattr(token_cache, "only_worker", lambda *_: pytest.fail("the folder is changed"))
    assert read().digest


@given(text=st.text(alphabet="aé字 \n.,'3\t\x0b\u00a0", max_size=80), limit=st.integers(1, 20))
def test_pieces_have_the_tokens_and_words_of_the_whole(text, limit):
    """The text is cut wherever a tokenizer allows it, and arrives a few bytes at a time."""
    content = text.encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_cache, "read_bytes", lambda _: (content[i : i + limit] for i in range(0, len(content), limit)))
        for tokenizer in (BYTES, SMALL):
            words, pieces = zip(*pieces_of(Text("x", ()), tokenizer), strict=True)
            assert b"".join(pieces) == content and sum(words) == len(content.split())
            assert [token for piece in pieces for token in tokenizer.encode(piece)] == tokenizer.encode(content).tolist()


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


def test_data_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(InputError, match="did you mean stdlib"):
        load_corpus(DataConfig("stdlb"), BYTES, RecallConfig(), tmp_path)
    with pytest.raises(InputError, match="a folder, or one of stdlib, recall, enwik8, wikitext-103, wikitext-103-raw, pg19"):
        load_corpus(DataConfig(str(tmp_path / "x.txt")), BYTES, RecallConfig(), tmp_path)


@pytest.mark.parametrize("tokenizer", [BYTES, SMALL], ids=["bytes", "bpe"])
def test_the_first_documents_and_tokens_alone_are_read(folder, tmp_path, tokenizer):
    """The same ones as of the whole; the words are those that begin in the tokens; other splits stay as they are."""
    whole, few = (
        load_corpus(DataConfig(str(folder), **part), tokenizer, RecallConfig(), tmp_path / "cache")
        for part in ({}, {"training_documents": 30, "validation_tokens": 40})
    )
    assert few.digest != whole.digest and len(caches(tmp_path)) == 2
    assert len(few.splits["train"]) == 30 < len(whole.splits["train"])
    assert [tokens_of(d) for d in few.splits["train"]] == [tokens_of(whole.splits["train"][i]) for i in range(30)]
    assert [tokens_of(d) for d in few.splits["test"]] == [tokens_of(d) for d in whole.splits["test"]]
    expected = [tokens_of(document)[:40] for document in whole.splits["valid"]]
    assert [tokens_of(d) for d in few.splits["valid"]] == expected != [tokens_of(d) for d in whole.splits["valid"]]
    assert few.splits["valid"].lengths.tolist() == [len(d.inputs) for d in few.splits["valid"]]
    assert few.splits["valid"].words.tolist() == [len(tokenizer.decode(tokens).split()) for tokens in expected]
    assert {split: documents.whole for split, documents in few.splits.items()} == {"train": False, "valid": False, "test": True}
    assert truncated([text_document("a", b"x yz", BYTES)], 3, BYTES).words.tolist() == [2]


def test_documents_folders_makes_each_subfolder_a_document(tmp_path):
    """It has a cache of its own; data without folders is refused."""
    for i in range(60):
        (tmp_path / "in" / str(i)).mkdir(parents=True)
        for name in ("b.txt", "a.txt"):
            (tmp_path / "in" / str(i) / name).write_text(f"{name} of {i}")
    both = [DataConfig(str(tmp_path / "in"), documents=kind) for kind in ("files", "folders")]
    read = {data.documents: load_corpus(data, BYTES, RecallConfig(), tmp_path / "cache") for data in both}
    assert [sum(map(len, corpus.splits.values())) for corpus in read.values()] == [120, 60] and len(caches(tmp_path)) == 2
    first = bytes(tokens_of(read["folders"].splits["train"][0])).decode()
    assert re.fullmatch(r"a\.txt of (\d+)b\.txt of \1", first)
    for data in ("stdlib", "recall", str(tmp_path / "in" / "1" / "a.txt")):
        with pytest.raises(InputError, match="--documents folders needs a folder of folders as --data"):
            check_data(DataConfig(data, documents="folders"))
