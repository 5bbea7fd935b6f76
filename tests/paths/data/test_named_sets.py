"""The papers' sets and those of the package datasets: fetched, split, and refused if they are wrong, without a network."""

import gzip
import hashlib
import importlib.util
import json
import logging
import re
import threading
import time

import pytest

from accelerated.data import named_sets
from accelerated.data.config import DataConfig, check_data
from accelerated.data.corpus import load_corpus, open_source
from accelerated.data.named_sets import fetch, table_source
from accelerated.data.recall import RecallConfig
from accelerated.data.sources import split_of
from accelerated.data.tokenizers import ByteTokenizer
from accelerated.data.windows import SPLITS
from accelerated.evaluation import score
from accelerated.program.errors import InputError
from tests.helpers.programs import refusal, serving
from tests.helpers.texts import as_zip

ENWIK8 = bytes(i % 256 for i in range(1000))
ARTICLES = {
    "train": b" \n = One = \n \n words of one \n \n = = Part = = \n \n = 5 = \n \n more \n \n = Two = 2 = \n \n x \n",
    "valid": b" \n = Three = \n \n = not a heading = \n words = \n = Nor this = \n \n",
    "test": b" \n = Four = \n \n",
}
COUNTS = {"train": 5, "validation": 3, "test": 2}
BOOKS = {f"/{folder}/{i}.txt": f"{folder} {i}".encode() for folder, count in COUNTS.items() for i in range(count)}
BOOKS |= {"/train/notes.md": b"no book"}


@pytest.fixture
def server(monkeypatch):
    """Serves small sets of the same form; replaces the module's addresses, checksums and counts by theirs."""
    archive = as_zip({"enwik8": ENWIK8})
    with serving({"/enwik8.zip": archive} | BOOKS) as server:
        monkeypatch.setattr(named_sets, "ENWIK8", server.address + "/enwik8.zip")
        monkeypatch.setattr(named_sets, "ENWIK8_SHA256", hashlib.sha256(archive).hexdigest())
        monkeypatch.setattr(named_sets, "ENWIK8_ENDS", (0, 900, 950, 1000))
        monkeypatch.setattr(named_sets, "PG19_LIST", server.address + "/list")
        monkeypatch.setattr(named_sets, "PG19_BOOKS", server.address + "/")
        monkeypatch.setattr(named_sets, "PG19_COUNTS", COUNTS)
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


@pytest.mark.parametrize("name", ["enwik8", "pg19"])
def test_processes_that_fetch_the_same_set_take_turns(server, tmp_path, monkeypatch, capsys, name):
    """The second one waits, and finds what the first has fetched."""
    began, second = threading.Event(), threading.Thread(target=lambda: read(name, tmp_path))

    def slow(*given, **copy):
        if not began.is_set():
            began.set()
            second.start()
            time.sleep(0.3)
        fetch(*given, **copy)

    monkeypatch.setattr(named_sets, "fetch", slow)
    first = read(name, tmp_path)
    second.join(20)
    assert not second.is_alive() and read(name, tmp_path) == first
    assert "another process is fetching " in capsys.readouterr().err
    paths = [path for path in server.asked if path != "/list"]
    assert len(paths) == len({*paths}), "nothing is asked for twice"


def test_enwik8_is_cut_by_bytes_and_pg19s_books_are_documents(server, tmp_path):
    """Servers refuse urllib's own name."""
    server.respond = lambda request, respond=server.respond: (
        request.send_error(403) if request.headers["User-Agent"].startswith("Python-urllib") else respond(request)
    )
    assert read("enwik8", tmp_path) == {"train": [ENWIK8[:900]], "valid": [ENWIK8[900:950]], "test": [ENWIK8[950:]]}
    assert {path.name for path in (tmp_path / "data" / "enwik8").iterdir()} <= {"enwik8.zip", ".lock"}
    by_split = read("pg19", tmp_path)
    names = {"train": "train", "valid": "validation", "test": "test"}
    assert by_split == {split: [f"{name} {i}".encode() for i in range(COUNTS[name])] for split, name in names.items()}
    (tmp_path / "data" / "pg19" / "train" / "3.txt").unlink()
    server.asked.clear()
    assert read("pg19", tmp_path) == by_split
    assert [path for path in server.asked if path.endswith(".txt")] == ["/train/3.txt"], "existing books are not fetched again"


def test_what_is_wrong_with_pg19_is_one_line(server, tmp_path, monkeypatch):
    """A network that asks for a password answers every address with a page of its own."""
    listing, folder = server.listing, tmp_path / "data" / "pg19"
    for answer, words in (
        (lambda query: b"<html>", f"cannot fetch .*/list.*; give --data hf:.*, or put .* {folder}"),
        (lambda query: listing(query).replace(b'"md5Hash": "', b'"md5Hash": "AAAA'), "has another md5 than"),
    ):
        monkeypatch.setattr(server, "listing", answer)
        assert re.search(words, refusal(read, "pg19", tmp_path)) and not list(folder.glob("*/*.txt"))


def test_what_is_wrong_with_enwik8_is_one_line(server, tmp_path, monkeypatch):
    folder = tmp_path / "data" / "enwik8"
    with monkeypatch.context() as patch:
        patch.setattr(named_sets, "ENWIK8", "http://127.0.0.1:9/enwik8.zip")
        words = f"refused.*; put a copy .* at {folder}/enwik8.zip"
        assert re.search(words, refusal(read, "enwik8", tmp_path))
    (folder / "enwik8.zip").write_bytes(b"another")
    assert re.search("does not have sha256 .*; remove it to fetch it again", refusal(read, "enwik8", tmp_path))


def test_official_sizes():
    """The papers' numbers: a typing error would change them unnoticed."""
    assert named_sets.ENWIK8_ENDS == (0, 90_000_000, 95_000_000, 100_000_000) and len(named_sets.ENWIK8_SHA256) == 64
    assert named_sets.PG19_COUNTS == {"train": 28_602, "validation": 50, "test": 100}
    assert score.OFFICIAL_WORDS["pg19"] == {"train": 1_973_136_207, "valid": 3_007_061, "test": 6_966_499}
    wikitext = {"train": 103_227_021, "valid": 217_646, "test": 245_569}
    assert [score.OFFICIAL_WORDS[f"wikitext-103{form}"] for form in ("", "-raw")] == [wikitext] * 2


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("breaks off", "cannot fetch ADDRESS .*put a copy .sha256 CHECKSUM. at FOLDER/file$"),
        ("wrong checksum", "the file from ADDRESS has another sha256 than CHECKSUM; try again, or put a copy"),
        ("missing", "Not Found.; put a copy .sha256 CHECKSUM. at FOLDER/file$"),
        ("no folder", "cannot write FOLDER.*; give another --data-dir"),
    ],
)
def test_a_file_is_fetched_whole_or_not_at_all(tmp_path, case, words):
    content, folder = bytes(i % 251 for i in range(100_000)), tmp_path / "deep"
    checksum = "0" * 64 if case == "wrong checksum" else hashlib.sha256(content).hexdigest()
    if case == "no folder":
        folder.write_text("a file")
    with serving({"/file": content}) as server:
        server.break_after = 10_000 if case == "breaks off" else None
        address = server.address + "/file" + "s" * (case == "missing")
        for name, value in (("ADDRESS", address), ("CHECKSUM", checksum), ("FOLDER", str(folder))):
            words = words.replace(name, value)
        assert re.search(words, refusal(fetch, address, folder / "file", checksum))
        assert len(server.asked) <= 1, "what is refused is asked for once"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == ([folder] if case == "no folder" else [])


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


def test_a_row_of_a_hub_set_is_a_document(hub, tmp_path):
    """The set's own splits are used, under each usual name; an empty or null text is a document too. A change is seen."""
    train = ["one é", "", {"text": None}, "two\n"]
    data = hub({"train.jsonl": train, "validation.jsonl": ["three"], "test.jsonl": ["four", "five"]})
    names = [text.name for split, text in table_source(data).texts() if split == "train"]
    assert names == [f"train:{number}" for number in range(1, 5)]
    expected = {"train": ["one é".encode(), b"", b"", b"two\n"], "valid": [b"three"], "test": [b"four", b"five"]}
    assert rows_of(data, tmp_path) == expected
    (tmp_path / "set" / "train.jsonl").write_text(json.dumps({"text": "other"}))
    assert rows_of(data, tmp_path)["train"] == [b"other"]


def test_wikitexts_articles_are_documents(hub, tmp_path, monkeypatch):
    """The hub's rows are the lines of the set's files, but a blank line's row is empty."""
    names, files, described = {"train": "train", "valid": "validation", "test": "test"}, {}, "---\nconfigs:\n"
    raw = {split: text.replace(b"words", "wörter".encode()) for split, text in ARTICLES.items()}
    for config, texts in (("wikitext-103-v1", ARTICLES), ("wikitext-103-raw-v1", raw)):
        described += f"- config_name: {config}\n  data_files:\n"
        for split, name in names.items():
            lines = texts[split].decode().splitlines(keepends=True)
            files[f"{config}-{name}.parquet"] = ["" if line == " \n" else line for line in lines]
            described += f"  - split: {name}\n    path: {config}-{name}.parquet\n"
    data = hub(files, "wikitext")
    (tmp_path / "wikitext" / "README.md").write_text(described + "---\n")
    monkeypatch.setattr(named_sets, "WIKITEXT", data.removeprefix("hf:"))
    for name, texts in (("wikitext-103", ARTICLES), ("wikitext-103-raw", raw)):
        second = texts["train"].index(b" = Two")
        expected = {split: [text] for split, text in texts.items()}
        assert read(name, tmp_path) == expected | {"train": [texts["train"][:second], texts["train"][second:]]}
    monkeypatch.setitem(score.OFFICIAL_WORDS["wikitext-103"], "train", len(ARTICLES["train"].split()) + 14)
    splits = load_corpus(DataConfig("wikitext-103"), ByteTokenizer(), RecallConfig(), tmp_path / "data").splits
    run = score.TrainedRun("", None, None, {}, None, 1, "wikitext-103", splits)
    assert run.words("train")[1] == "official count"


def test_a_hub_set_that_cannot_be_opened_is_refused(hub, tmp_path, monkeypatch):
    """WikiText's line says where else it is."""
    assert "has no split train, only test" in refusal(table_source, hub({"test.jsonl": ["x"]}, "no train"))
    data = hub({"train.jsonl": ["x"]})
    monkeypatch.setattr(named_sets, "WIKITEXT", "nobody/nothing-at-all")
    for name in (f"{data}:other", "hf:nobody/nothing-at-all", f"hf:{tmp_path / 'nowhere'}", "wikitext-103"):
        message = refusal(table_source, name)
        assert re.search(f"--data {name}: datasets cannot open it .*; check name, files and network", message)
        assert ("; HF_ENDPOINT may name a mirror of the hub" in message) == (name == "wikitext-103")
    assert not logging.getLogger("datasets").isEnabledFor(logging.ERROR), "the library adds no lines of its own"


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet", "a.jsonl.gz", "A [1*].JSONL"])
def test_a_row_of_a_table_is_a_document(hub, tmp_path, name):
    """Its documents are dealt to the splits by the table's name and their numbers."""
    texts = ["None", "NA", "", *(f"row {number} é" for number in range(67))]
    table = importlib.import_module("datasets").Dataset.from_dict({"text": texts, "other": [3] * 70})
    path = tmp_path / name
    if path.suffix in (".csv", ".parquet"):
        {".csv": table.to_csv, ".parquet": table.to_parquet}[path.suffix](path)
    else:
        lines = "\n\n".join(map(json.dumps, table)).encode()
        path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)
    expected = {split: [] for split in SPLITS}
    for number, text in enumerate(texts, start=1):
        expected[split_of(f"{name}:{number}")].append(text.encode())
    assert texts_of(table_source(str(path))) == expected and all(expected.values())


def test_a_packed_text_is_a_document(hub, tmp_path):
    """One text is cut by position; of a .zip each member is a document."""
    text, members = "a line, é\n\n" * 40, {f"in/{number}.txt": f"text {number}" for number in range(80)}
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(text.encode()))
    parts = [*texts_of(table_source(str(tmp_path / "a.txt.gz"))).values()]
    assert [len(texts) for texts in parts] == [1, 1, 1] and b"".join(part for [part] in parts) == text.encode()
    (tmp_path / "b.zip").write_bytes(as_zip(members))
    by_split = texts_of(open_source(DataConfig(str(tmp_path / "b.zip")), tmp_path))
    assert {text for texts in by_split.values() for text in texts} == {text.encode() for text in members.values()}
    assert all(by_split.values())


@pytest.mark.parametrize(
    ("name", "written", "words"),
    [
        ("a.jsonl", b"{no json", "datasets cannot open it"),
        ("a.jsonl", b"", r"datasets cannot open it \(\w+\)"),
        ("a.jsonl", b'{"txt": "x"}', "needs a string column `text`, has txt; use another set"),
        ("a.csv", b"text\n3\n", "needs a string column `text`, has text"),
        ("a.zip", b"PK\x03\x04broken", "datasets cannot open it"),
        ("a.parquet", b"no", "datasets cannot open it"),
        ("a.txt.gz", gzip.compress(b"caf\xe9", mtime=0), "datasets cannot open it .*utf-8"),
        ("a.txt.gz", gzip.compress(b"a text " * 999, mtime=0)[:-40], "datasets cannot open it"),
    ],
)
def test_a_table_that_cannot_be_read_is_refused_in_one_line(hub, tmp_path, name, written, words):
    (tmp_path / name).write_bytes(written)
    message = refusal(table_source, str(tmp_path / name))
    assert message.startswith(f"--data {tmp_path / name}") and re.search(words, message)


def test_what_the_package_opens_is_refused_without_it(monkeypatch, tmp_path):
    (tmp_path / "a.jsonl").write_text("")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for data in ("hf:a/b", "wikitext-103", str(tmp_path / "a.jsonl")):
        with pytest.raises(InputError, match=f"--data {data} needs the package datasets; install the extra: .*datasets"):
            check_data(DataConfig(data))
