"""The papers' sets, from a server on the loopback address: fetched, split, and refused if they are wrong."""

import hashlib
import importlib.util
import io
import json
import logging
import os
import re
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest
from documents import as_zip, content
from loopback import serving

from accelerated.data import named_sets
from accelerated.data.config import DataConfig, check_data
from accelerated.data.corpus import load_corpus
from accelerated.data.named_sets import OPENERS, Archive, articles, fetch, hub_set
from accelerated.data.recall import RecallConfig
from accelerated.data.tokenizers import ByteTokenizer
from accelerated.data.windows import SPLITS
from accelerated.program import progress
from accelerated.program.errors import InputError
from accelerated.program.files import file_checksum

ENWIK8 = bytes(i % 256 for i in range(1000))
ARTICLES = {
    "train": b" \n = One = \n \n words of one \n = = Part = = \n \n more \n \n = Two = \n \n x \n",
    "valid": b" \n = Three = \n \n = not a heading = \n words = \n",
    "test": b" \n = Four = \n \n",
}
RAW_ARTICLES = {split: text.replace(b"words", b"w\xc3\xb6rter") for split, text in ARTICLES.items()}
ADDRESSES = (
    ("ENWIK8", "/enwik8.zip"), ("WIKITEXT_103", "/wikitext-103-v1.zip"), ("WIKITEXT_103_RAW", "/wikitext-103-raw-v1.zip"),
)  # fmt: skip
BOOKS = {
    f"/{folder}/{i}.txt": f"{folder} {i}".encode()
    for folder, n in (("train", 5), ("validation", 3), ("test", 2))
    for i in range(n)
}
BOOKS |= {"/train/notes.md": b"no book"}


@pytest.fixture
def server(monkeypatch):
    """Serves small sets of the same form; replaces the module's addresses, checksums and counts by theirs."""
    archives = {"/enwik8.zip": as_zip({"enwik8": ENWIK8})}
    for kind, ending, texts in (("", "tokens", ARTICLES), ("-raw", "raw", RAW_ARTICLES)):
        members = {f"wikitext-103{kind}/wiki.{split}.{ending}": text for split, text in texts.items()}
        archives[f"/wikitext-103{kind}-v1.zip"] = as_zip(members)
    with serving(archives | BOOKS) as server:
        for name, file in ADDRESSES:
            monkeypatch.setattr(named_sets, name, Archive(server.address + file, hashlib.sha256(archives[file]).hexdigest()))
        monkeypatch.setattr(named_sets, "ENWIK8_ENDS", (0, 900, 950, 1000))
        monkeypatch.setattr(named_sets, "PG19_LIST", server.address + "/list")
        monkeypatch.setattr(named_sets, "PG19_BOOKS", server.address + "/")
        monkeypatch.setattr(named_sets, "PG19_COUNTS", {"train": 5, "valid": 3, "test": 2})
        yield server


def read(name, tmp_path):
    """Return {split: [bytes]} of a named set, in order."""
    found = {split: [] for split in SPLITS}
    for split, text in OPENERS[name](tmp_path / "data" / name).texts():
        found[split].append(content(text))
    return found


@pytest.mark.parametrize("name", ["enwik8", "pg19"])
def test_processes_that_fetch_the_same_set_take_turns(server, tmp_path, monkeypatch, capsys, name):
    """The second one waits, and finds what the first has fetched."""
    began, second = threading.Event(), threading.Thread(target=lambda: read(name, tmp_path))

    def slow(*given, **how):
        if not began.is_set():
            began.set()
            second.start()
            time.sleep(0.3)
        fetch(*given, **how)

    monkeypatch.setattr(named_sets, "fetch", slow)
    first = read(name, tmp_path)
    second.join(20)
    assert not second.is_alive() and read(name, tmp_path) == first
    assert "another process is fetching " in capsys.readouterr().err
    paths = [path for path, _ in server.asked if path != "/list"]
    assert len(paths) == len({*paths}), "nothing is asked for twice"


def test_enwik8_is_cut_by_bytes(server, tmp_path):
    assert read("enwik8", tmp_path) == {"train": [ENWIK8[:900]], "valid": [ENWIK8[900:950]], "test": [ENWIK8[950:]]}
    server.asked.clear()
    assert read("enwik8", tmp_path)["test"] == [ENWIK8[950:]] and not server.asked, "it is fetched once"


def test_an_unpacked_enwik8_is_used(server, tmp_path):
    (tmp_path / "data" / "enwik8").mkdir(parents=True)
    (tmp_path / "data" / "enwik8" / "enwik8").write_bytes(ENWIK8)
    assert read("enwik8", tmp_path)["valid"] == [ENWIK8[900:950]] and not server.asked
    (tmp_path / "data" / "enwik8" / "enwik8").write_bytes(ENWIK8[:-1])
    with pytest.raises(InputError, match="has 999 bytes, enwik8 has 1000"):
        read("enwik8", tmp_path)


@pytest.mark.parametrize("name,texts", [("wikitext-103", ARTICLES), ("wikitext-103-raw", RAW_ARTICLES)])
def test_wikitexts_articles_are_documents(server, tmp_path, name, texts):
    second = texts["train"].index(b" = Two")
    assert read(name, tmp_path) == {
        "train": [texts["train"][:second], texts["train"][second:]], "valid": [texts["valid"]], "test": [texts["test"]],
    }  # fmt: skip
    assert OPENERS[name](tmp_path / "data" / name).name == name, "each has a cache of its own"


def test_an_article_begins_between_blank_lines():
    for text, starts in (
        (b"", []), (b"words \n", [0]), (b" = A = \n \n", [0]), (b"x \n = A = \n \n", [0]), (b"x \n \n = A = \n \n", [0]),
        (b" = A = \n \n = B = \n \n", [0, 10]), (b" = A = \n \n x \n = B = \n \n", [0]),
        (b" \n = A = \n words \n", [0]), (b" \n = = A = = \n \n", [0]),
    ):  # fmt: skip
        found = list(articles(text.splitlines(keepends=True)))
        assert found == [text[start:stop] for start, stop in pairwise([*starts, len(text)])], text


def test_an_unpacked_wikitext_is_used(server, tmp_path):
    folder = tmp_path / "data" / "wikitext-103"
    folder.mkdir(parents=True)
    for split, text in ARTICLES.items():
        (folder / f"wiki.{split}.tokens").write_bytes(text)
    assert b"".join(read("wikitext-103", tmp_path)["train"]) == ARTICLES["train"] and not server.asked


def test_pg19s_books_are_documents(server, tmp_path):
    found = read("pg19", tmp_path)
    assert found == {
        "train": [f"train {i}".encode() for i in range(5)], "valid": [f"validation {i}".encode() for i in range(3)],
        "test": [b"test 0", b"test 1"],
    }  # fmt: skip
    (tmp_path / "data" / "pg19" / "train" / "3.txt").unlink()
    server.asked.clear()
    assert read("pg19", tmp_path) == found
    assert [path for path, _ in server.asked if path.endswith(".txt")] == ["/train/3.txt"], "existing books are not fetched again"


def test_the_first_books_and_the_beginnings_of_those_to_validate_on(server, tmp_path, monkeypatch):
    """Adding Recurrence to Pretrained Transformers, section 5: the first ones by name; the test split is whole."""
    monkeypatch.setattr(named_sets, "OFFICIAL_WORDS", {("pg19", split): 7 for split in SPLITS})
    data = DataConfig("pg19", training_documents=2, validation_tokens=8)
    splits = load_corpus(data, ByteTokenizer(), RecallConfig(), tmp_path / "data").splits
    texts = {split: [bytes([*d.inputs[:1], *d.targets]).decode() for d in documents] for split, documents in splits.items()}
    assert texts == {"train": ["train 0", "train 1"], "valid": ["validati"] * 3, "test": ["test 0", "test 1"]}
    words = {split: named_sets.words_of_split("pg19", split, documents) for split, documents in splits.items()}
    assert [words[split][0] for split in SPLITS] == [4, 3, 7], "official counts are those of whole splits"
    whole = load_corpus(DataConfig("pg19"), ByteTokenizer(), RecallConfig(), tmp_path / "data").splits
    assert [len(whole[split]) for split in SPLITS] == [5, 3, 2] and all(whole[split].whole for split in SPLITS)


def test_a_book_with_a_wrong_checksum_is_refused(server, tmp_path, monkeypatch):
    listing = server.listing
    monkeypatch.setattr(server, "listing", lambda query: listing(query).replace(b'"md5Hash": "', b'"md5Hash": "AAAA'))
    with pytest.raises(InputError, match=r"has md5 .*, expected"):
        read("pg19", tmp_path)
    assert not list((tmp_path / "data").rglob("*.txt"))


def test_too_many_books_are_refused(server, tmp_path):
    read("pg19", tmp_path)
    (tmp_path / "data" / "pg19" / "test" / "9.txt").write_text("one more")
    with pytest.raises(InputError, match="test has 3 books, PG-19 has 2; keep exactly those there"):
        read("pg19", tmp_path)


def test_offline_one_line_says_which_file_to_put_where(server, tmp_path, monkeypatch):
    for name, _ in ADDRESSES:
        archive = getattr(named_sets, name)
        monkeypatch.setattr(
            named_sets, name, archive._replace(address="http://127.0.0.1:9/" + archive.address.rpartition("/")[2])
        )
    monkeypatch.setattr(named_sets, "PG19_LIST", "http://127.0.0.1:9/list")
    for name, place in (
        ("enwik8", "enwik8/enwik8.zip"),
        ("wikitext-103", "wikitext-103/wikitext-103-v1.zip"),
        ("wikitext-103-raw", "wikitext-103-raw/wikitext-103-raw-v1.zip"),
        ("pg19", "pg19/train"),
    ):
        with pytest.raises(InputError, match=r"refused.*try again later, or put") as caught:
            read(name, tmp_path)
        assert str(tmp_path / "data" / place) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name,file", [("enwik8", "enwik8.zip"), ("wikitext-103", "wikitext-103-v1.zip")])
def test_an_archive_with_a_wrong_checksum_is_refused(server, tmp_path, name, file):
    read(name, tmp_path)
    path = tmp_path / "data" / name / file
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(InputError, match=r"expected .*; remove it to fetch it again"):
        read(name, tmp_path)


def test_official_sizes_and_addresses():
    """The papers' numbers: a typing error would change them unnoticed."""
    assert named_sets.ENWIK8_ENDS == (0, 90_000_000, 95_000_000, 100_000_000)
    assert named_sets.PG19_COUNTS == {"train": 28_602, "valid": 50, "test": 100}
    assert named_sets.OFFICIAL_WORDS["pg19", "test"] == 6_966_499 and named_sets.OFFICIAL_WORDS["pg19", "valid"] == 3_007_061
    assert named_sets.OFFICIAL_WORDS["wikitext-103", "test"] == 245_569
    assert named_sets.OFFICIAL_WORDS["wikitext-103-raw", "valid"] == 217_646
    assert all(len(getattr(named_sets, name).sha256) == 64 for name, _ in ADDRESSES)
    assert all(getattr(named_sets, name).address.endswith(file) for name, file in ADDRESSES)


CONTENT = bytes(i % 251 for i in range(100_000))
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def file_server():
    """Serves one file."""
    with serving({"/file": CONTENT}) as server:
        yield server


def test_a_file_is_fetched_whole(file_server, tmp_path):
    fetch(file_server.address + "/file", tmp_path / "deep" / "file", SHA256)
    assert (tmp_path / "deep" / "file").read_bytes() == CONTENT
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["file"]


def test_what_is_fetched_is_readable_by_the_group(file_server, tmp_path):
    before = os.umask(0o077)
    try:
        fetch(file_server.address + "/file", tmp_path / "deep" / "file", SHA256)
    finally:
        os.umask(before)
    modes = [path.stat().st_mode & 0o777 for path in (tmp_path / "deep", tmp_path / "deep" / "file")]
    assert modes == [0o750, 0o640]


def test_a_download_shows_its_progress(file_server, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    monkeypatch.setattr(named_sets, "DOWNLOAD_SIZE", 10_000)
    fetch(file_server.address + "/file", tmp_path / "file", SHA256)
    assert re.search(r"fetching file: \S+ of 100k B, 00:00 so far, 00:00 left\n", capsys.readouterr().err)


def test_an_interrupted_download_is_continued(file_server, tmp_path):
    """In the same call and in the next: every connection ends after 30,000 bytes."""
    file_server.break_after = 30_000
    fetch(file_server.address + "/file", tmp_path / "file", SHA256)
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert [part for _, part in file_server.asked] == [None, "bytes=30000-", "bytes=60000-", "bytes=90000-"]
    file_server.asked.clear()
    (tmp_path / "again.part").write_bytes(CONTENT[:99_000])
    fetch(file_server.address + "/file", tmp_path / "again", SHA256)
    assert [part for _, part in file_server.asked] == ["bytes=99000-"] and (tmp_path / "again").read_bytes() == CONTENT


def test_a_download_that_fails_too_often_keeps_its_part(file_server, tmp_path):
    file_server.break_after = 10_000
    with pytest.raises(InputError, match=f"cannot fetch file .40000 of 100000 bytes arrived.; try again later, .* {SHA256}. at "):
        fetch(file_server.address + "/file", tmp_path / "file", SHA256)
    assert (tmp_path / "file.part").read_bytes() == CONTENT[:40_000] and not (tmp_path / "file").exists()


def test_a_server_that_sends_no_parts_is_asked_from_the_start(file_server, tmp_path):
    file_server.ranges = False
    (tmp_path / "file.part").write_bytes(b"something else")
    fetch(file_server.address + "/file", tmp_path / "file", SHA256)
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_a_complete_part_is_used(file_server, tmp_path):
    (tmp_path / "file.part").write_bytes(CONTENT)
    fetch(file_server.address + "/file", tmp_path / "file", SHA256)
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_wrong_content_is_never_used(file_server, tmp_path):
    with pytest.raises(InputError, match=f"has sha256 {SHA256}, expected {'0' * 64}; try again") as caught:
        fetch(file_server.address + "/file", tmp_path / "file", "0" * 64)
    assert list(tmp_path.iterdir()) == [] and "\n" not in str(caught.value)


def test_a_missing_file_and_a_missing_server_are_refused(file_server, tmp_path):
    for address, words in ((file_server.address + "/none", "Not Found"), ("http://127.0.0.1:9/file", "refused")):
        with pytest.raises(InputError, match=words) as caught:
            fetch(address, tmp_path / "file", SHA256)
        assert f"put a copy of {address} (sha256 {SHA256}) at {tmp_path / 'file'}" in str(caught.value)


def test_a_folder_that_cannot_be_written_to(file_server, tmp_path):
    (tmp_path / "folder").write_text("a file")
    with pytest.raises(InputError, match=r"cannot write .*; give another --data-dir"):
        fetch(file_server.address + "/file", tmp_path / "folder" / "file", SHA256)


def test_a_disk_that_is_full(file_server, tmp_path, monkeypatch):
    class Full(io.FileIO):
        def write(self, piece):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "open", lambda path, mode, buffering: Full(path, mode))
    with pytest.raises(InputError, match="No space left on device; free some space, or give another --data-dir"):
        fetch(file_server.address + "/file", tmp_path / "file", SHA256)


def test_checksums(tmp_path):
    (tmp_path / "file").write_bytes(CONTENT)
    assert file_checksum(tmp_path / "file") == SHA256
    assert file_checksum(tmp_path / "file", "md5") == hashlib.md5(CONTENT).hexdigest()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A function that writes {file: rows} as a set in a folder, for hf:FOLDER; nothing uses the network."""
    library = pytest.importorskip("datasets", reason="hf: needs the extra datasets")
    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path / "hub")
    monkeypatch.setattr(library.config, "HF_HUB_OFFLINE", True)

    def write(files, name="set"):
        (tmp_path / name).mkdir()
        for file, rows in files.items():
            table = library.Dataset.from_list([row if isinstance(row, dict) else {"text": row} for row in rows])
            path = tmp_path / name / file
            table.to_parquet(path) if path.suffix == ".parquet" else table.to_json(path)
        return f"hf:{tmp_path / name}"

    return write


def rows_of(data, tmp_path):
    """Return {split: [bytes]} of a set, read back from the cache of tokens."""
    corpus = load_corpus(DataConfig(data), ByteTokenizer(), RecallConfig(), tmp_path / "data")
    return {
        split: [bytes([*document.inputs[:1], *document.targets]) for document in documents]
        for split, documents in corpus.splits.items()
    }


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_a_row_of_a_hub_set_is_a_document(hub, tmp_path, suffix):
    """The set's own splits are used, under each usual name; an empty or null text is a document too."""
    data = hub({
        f"train.{suffix}": ["one é", "", {"text": None}, "two\n"], f"validation.{suffix}": ["three"],
        f"test.{suffix}": ["four", "five"],
    })  # fmt: skip
    check_data(DataConfig(data))
    assert [(split, text.name, content(text)) for split, text in hub_set(data).texts() if split == "train"] == [
        ("train", f"train:{number}", text) for number, text in enumerate(["one é".encode(), b"", b"", b"two\n"], start=1)
    ]
    found = rows_of(data, tmp_path)
    assert found["valid"] == [b"three"] and found["test"] == [b"four", b"five"] and len(found["train"]) == 4


def test_a_hub_set_is_read_again_when_it_changes(hub, tmp_path):
    data = hub({"train.jsonl": ["one", "two"], "validation.jsonl": ["a"], "test.jsonl": ["b"]})
    assert rows_of(data, tmp_path)["train"] == [b"one", b"two"]
    (tmp_path / "set" / "train.jsonl").write_text(json.dumps({"text": "other"}))
    assert rows_of(data, tmp_path)["train"] == [b"other"]


def test_a_hub_set_with_train_alone_is_split(hub, tmp_path):
    rows = [{"text": f"row {i}", "other": i} for i in range(80)]
    found = rows_of(hub({"train.jsonl": rows}), tmp_path)
    assert sorted(row for split in found.values() for row in split) == sorted(row["text"].encode() for row in rows)
    assert all(found.values()) and len(found["train"]) > 60


@pytest.mark.parametrize(
    "files,words",
    [
        ({"train.jsonl": [{"content": "x"}]}, r"needs a string column `text`, has content; use another set"),
        ({"train.jsonl": [{"text": 3}]}, r"needs a string column `text`, has text; use another set"),
        ({"test.jsonl": ["x"]}, "has no split train, only test"),
    ],
)
def test_a_hub_set_without_text_is_refused(hub, tmp_path, files, words):
    with pytest.raises(InputError, match=words) as caught:
        hub_set(hub(files))
    assert "\n" not in str(caught.value)


def test_a_hub_set_that_cannot_be_opened_is_refused(hub, tmp_path):
    data = hub({"train.jsonl": ["x"]})
    for name in (f"{data}:other", "hf:nobody/nothing-at-all", f"hf:{tmp_path / 'nowhere'}"):
        with pytest.raises(InputError, match=f"--data {name}: datasets cannot open it .*; check name, files and network"):
            hub_set(name)
    (tmp_path / "set" / "train.jsonl").write_text("{not json")
    with pytest.raises(InputError, match=r"datasets cannot open it .*JSON"):
        hub_set(data)
    assert not logging.getLogger("datasets").isEnabledFor(logging.ERROR), "the library adds no lines of its own"


def test_hub_sets_without_their_package_are_refused(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"--data hf:a/b needs the package datasets; install the extra: .*datasets"):
        check_data(DataConfig("hf:a/b"))
