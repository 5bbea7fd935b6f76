"""The papers' sets and those of the package datasets, without a network.

They are fetched, split, and refused if they are wrong.
"""

import hashlib
import importlib.util
import json
import logging
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from filelock import FileLock

from accelerated.data import named_sets
from accelerated.data.config import DataConfig, check_data
from accelerated.data.corpus import cache_folder, load_corpus, open_source
from accelerated.data.named_sets import table_source
from accelerated.data.sources import split_of
from accelerated.data.tokenizers import ByteTokenizer
from accelerated.data.windows import SPLITS
from accelerated.evaluation import score
from accelerated.program.errors import InputError
from tests.helpers.programs import refusal, serving
from tests.helpers.texts import as_zip

ENWIK8 = bytes(i % 256 for i in range(1000))
FIRST = b" \n = One = \n \n words of one \n \n = = Part = = \n \n = 5 = \n \n more \n \n"
SECOND = b" = Two = 2 = \n \n x \n"
ARTICLES = {  # of WikiText, as its files have them
    "train": [FIRST, SECOND],
    "valid": [b" \n = Three = \n \n = not a heading = \n words = \n = Nor this = \n \n"],
    "test": [b" \n = Four = \n \n"],
}
NAMES = {"train": "train", "valid": "validation", "test": "test"}


@pytest.fixture
def server(monkeypatch):
    """Serves a small set of the same form; replaces the module's address, checksum and sizes."""
    archive = as_zip({"enwik8": ENWIK8})
    with serving({"/enwik8.zip": archive}) as server:
        monkeypatch.setattr(named_sets, "ENWIK8", server.address + "/enwik8.zip")
        monkeypatch.setattr(named_sets, "ENWIK8_SHA256", hashlib.sha256(archive).hexdigest())
        monkeypatch.setattr(named_sets, "ENWIK8_ENDS", (0, 900, 950, 1000))
        yield server


def texts_of(source):
    """Return {split: [bytes]} of a source, in order."""
    by_split = {split: [] for split in SPLITS}
    for split, text in source.texts():
        by_split[split].append(text.read())
    return by_split


def read(name, tmp_path):
    """Return {split: [bytes]} of a named set, in order."""
    return texts_of(open_source(DataConfig(name), tmp_path / "data"))


def test_processes_that_fetch_the_same_set_take_turns(server, tmp_path, capsys):
    """Two wait while another holds the lock; the second finds what the first has fetched."""
    folder = tmp_path / "data" / "enwik8"
    folder.mkdir(parents=True)
    with ThreadPoolExecutor() as pool:
        with FileLock(folder / ".lock"):
            reading = [pool.submit(read, "enwik8", tmp_path) for _ in range(2)]
            time.sleep(0.2)
            assert not server.asked
        first, second = (one.result() for one in reading)
    assert first == second
    assert "another process is fetching " in capsys.readouterr().err
    assert server.asked == ["/enwik8.zip"], "it is asked for once"


def refusing_urllib(respond):
    """A server's answer that refuses urllib's own name, as some servers do."""

    def answer(request):
        if request.headers["User-Agent"].startswith("Python-urllib"):
            request.send_error(403)
        else:
            respond(request)

    return answer


def test_enwik8_is_cut_by_bytes(server, tmp_path):
    server.respond = refusing_urllib(server.respond)
    assert read("enwik8", tmp_path) == {
        "train": [ENWIK8[:900]],
        "valid": [ENWIK8[900:950]],
        "test": [ENWIK8[950:]],
    }
    left = {path.name for path in (tmp_path / "data" / "enwik8").iterdir()}
    assert left <= {"enwik8.zip", ".lock"}


def test_enwik8_that_cannot_be_fetched_is_one_line(server, tmp_path, monkeypatch):
    """The connection breaks off, or is refused; nothing is asked for twice."""
    folder = tmp_path / "data" / "enwik8"
    server.break_after = 10
    for address in (named_sets.ENWIK8, "http://127.0.0.1:9/enwik8.zip"):
        monkeypatch.setattr(named_sets, "ENWIK8", address)
        by_hand = f"put a copy .sha256 {named_sets.ENWIK8_SHA256}. at {folder}/enwik8.zip$"
        words = f"cannot fetch {address} .*; {by_hand}"
        assert re.search(words, refusal(read, "enwik8", tmp_path))
    assert [path.name for path in folder.iterdir()] == [".lock"]
    assert len(server.asked) == 1


def test_another_enwik8_is_one_line(server, tmp_path):
    (tmp_path / "data" / "enwik8").mkdir(parents=True)
    (tmp_path / "data" / "enwik8" / "enwik8.zip").write_bytes(b"another")
    words = "does not have sha256 .*; remove it to fetch it again"
    assert re.search(words, refusal(read, "enwik8", tmp_path))


def test_official_sizes():
    """The papers' numbers: a typing error would change them unnoticed."""
    assert named_sets.ENWIK8_ENDS == (0, 90_000_000, 95_000_000, 100_000_000)
    assert len(named_sets.ENWIK8_SHA256) == 64
    pg19 = {"train": 1_973_136_207, "valid": 3_007_061, "test": 6_966_499}
    wikitext = {"train": 103_227_021, "valid": 217_646, "test": 245_569}
    assert score.OFFICIAL_WORDS["pg19"] == pg19
    assert score.OFFICIAL_WORDS["wikitext-103"] == wikitext
    assert score.OFFICIAL_WORDS["wikitext-103-raw"] == wikitext


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A function that writes {file: rows} as a set in a folder, for hf:FOLDER, without network."""
    library = pytest.importorskip("datasets", reason="hf: needs the extra datasets")
    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path / "hub")
    monkeypatch.setattr(library.config, "HF_HUB_OFFLINE", True)

    def write(files, name="set"):
        (tmp_path / name).mkdir()
        for file, rows in files.items():
            table = library.Dataset.from_list([{"text": row} for row in rows])
            path = tmp_path / name / file
            table.to_parquet(path) if path.suffix == ".parquet" else table.to_json(path)
        return f"hf:{tmp_path / name}"

    return write


def test_a_row_of_a_hub_set_is_a_document(hub):
    """The set's own splits are used, under each usual name.

    An empty or null text is a document too.
    """
    train = ["one é", "", None, "two\n"]
    tests = ["four", "five"]
    data = hub({"train.jsonl": train, "validation.jsonl": ["three"], "test.jsonl": tests})
    names = [text.name for split, text in table_source(data).texts() if split == "train"]
    assert names == ["train:1", "train:2", "train:3", "train:4"]
    assert texts_of(table_source(data)) == {
        "train": ["one é".encode(), b"", b"", b"two\n"],
        "valid": [b"three"],
        "test": [b"four", b"five"],
    }


def test_a_set_that_has_changed_is_seen(hub, tmp_path):
    """By its contents: size and time of writing are the same."""
    data = hub({"train.jsonl": ["one", "two"]})
    before = cache_folder(table_source(data), ByteTokenizer(), tmp_path)
    file = tmp_path / "set" / "train.jsonl"
    stat = file.stat()
    file.write_text(file.read_text().replace("two", "too"))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert cache_folder(table_source(data), ByteTokenizer(), tmp_path) != before


def test_the_column_of_the_text_can_be_named(hub, tmp_path):
    """--text-column. Each column has a cache of its own."""
    data = hub({"train.jsonl": ["one"], "test.jsonl": ["two"]})
    for name in ("train", "test"):
        row = {"text": f"a text of {name}", "content": f"what {name} holds"}
        (tmp_path / "set" / f"{name}.jsonl").write_text(json.dumps(row))
    usual = table_source(data)
    named = table_source(data, "content")
    assert texts_of(usual)["test"] == [b"a text of test"]
    assert texts_of(named)["test"] == [b"what test holds"]
    folders = {cache_folder(source, ByteTokenizer(), tmp_path) for source in (usual, named)}
    assert len(folders) == 2


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_rows_of_one_table_are_dealt_to_the_splits_by_their_numbers(hub, name):
    texts = [f"row {number} é" for number in range(70)]
    expected = {split: [] for split in SPLITS}
    for number, text in enumerate(texts, start=1):
        expected[split_of(f"train:{number}")].append(text.encode())
    assert all(expected.values())
    assert texts_of(table_source(hub({name: texts}))) == expected


def test_wikitexts_articles_are_documents(hub, tmp_path, monkeypatch):
    """The hub's rows are the lines of the set's files, but a blank line's row is empty."""
    files = {}
    described = "---\nconfigs:\n- config_name: wikitext-103-raw-v1\n  data_files:\n"
    for split, name in NAMES.items():
        lines = b"".join(ARTICLES[split]).decode().splitlines(keepends=True)
        files[f"{name}.parquet"] = ["" if line == " \n" else line for line in lines]
        described += f"  - split: {name}\n    path: {name}.parquet\n"
    data = hub(files, "wikitext")
    (tmp_path / "wikitext" / "README.md").write_text(described + "---\n")
    place = data.removeprefix("hf:") + ":wikitext-103-raw-v1"
    monkeypatch.setitem(named_sets.ON_THE_HUB, "wikitext-103-raw", place)
    assert read("wikitext-103-raw", tmp_path) == ARTICLES


def test_pg19s_books_are_documents(hub, tmp_path, monkeypatch):
    """Each row of the hub's copy is a book, in the set's own splits.

    Its words are counted as the paper's are: this archive has five in its test split, between
    spaces of Unicode too.
    """
    books = {
        "train": ["one", "two"],
        "valid": ["three"],
        "test": ["four\u2003five\n\xa0six", "7 8"],
    }
    files = {f"{NAMES[split]}.parquet": texts for split, texts in books.items()}
    place = hub(files, "pg19").removeprefix("hf:")
    monkeypatch.setitem(named_sets.ON_THE_HUB, "pg19", place)
    expected = {split: [text.encode() for text in texts] for split, texts in books.items()}
    assert read("pg19", tmp_path) == expected
    monkeypatch.setitem(score.OFFICIAL_WORDS, "pg19", {"test": 5})
    corpus = load_corpus(DataConfig("pg19"), ByteTokenizer(), None, tmp_path / "cache")
    run = score.TrainedRun("", None, None, {}, None, 1, "pg19", {"test": corpus.splits["test"]})
    assert run.words() == (5, "official count")


def test_a_hub_set_without_training_texts_is_refused(hub):
    words = "has no split train, only test"
    assert words in refusal(table_source, hub({"test.jsonl": ["x"]}))


def test_a_hub_set_that_cannot_be_opened_is_refused(hub, tmp_path, monkeypatch):
    """WikiText's line says where else it is. The library adds no lines of its own."""
    data = hub({"train.jsonl": ["x"]})
    monkeypatch.setitem(named_sets.ON_THE_HUB, "wikitext-103", "nobody/nothing-at-all")
    nowhere = f"hf:{tmp_path / 'nowhere'}"
    for name in (f"{data}:other", "hf:nobody/nothing-at-all", nowhere, "wikitext-103"):
        message = refusal(table_source, name)
        words = f"--data {name}: datasets cannot open it .*; check name, files and network"
        assert re.search(words, message)
        names_mirror = "; HF_ENDPOINT may name a mirror of the hub" in message
        assert names_mirror == (name == "wikitext-103")
    assert not logging.getLogger("datasets").isEnabledFor(logging.ERROR)


UNREADABLE = [
    ("b.jsonl", b'{"txt": "x"}', "needs a string column `text`, has txt; name the one"),
    ("c.csv", b"text\n3\n", "needs a string column `text`, has text"),
    ("d.jsonl", b'{"text": "x"', ": datasets cannot open it "),
]


@pytest.mark.parametrize("name, written, words", UNREADABLE, ids=[row[0] for row in UNREADABLE])
def test_a_table_that_cannot_be_read_is_refused_in_one_line(hub, tmp_path, name, written, words):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(written)
    message = refusal(table_source, f"hf:{tmp_path / 'in'}")
    assert re.match(f"--data hf:{tmp_path / 'in'} ?{words}", message)


def test_what_the_package_opens_is_refused_without_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for data in ("hf:a/b", "wikitext-103"):
        words = f"--data {data} needs the package datasets; install the extra: .*datasets"
        with pytest.raises(InputError, match=words):
            check_data(DataConfig(data))
