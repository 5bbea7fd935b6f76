"""The papers' sets and those of the package datasets: fetched, split, and refused if they are wrong, without a network."""

import gzip
import hashlib
import importlib.util
import json
import logging
import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from filelock import FileLock

from accelerated.data import named_sets
from accelerated.data.config import DataConfig, check_data
from accelerated.data.corpus import cache_folder, open_source
from accelerated.data.named_sets import table_source
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
NAMES = {"train": "train", "valid": "validation", "test": "test"}
COUNTS = {"train": 5, "validation": 3, "test": 2}
BOOKS = {
    f"/{folder}/{i}.txt": f"{folder} {i}".encode()
    for folder, count in COUNTS.items()
    for i in range(count)
}
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
def test_processes_that_fetch_the_same_set_take_turns(server, tmp_path, capsys, name):
    """Two wait while another holds the lock; the second finds what the first has fetched."""
    (folder := tmp_path / "data" / name).mkdir(parents=True)
    with ThreadPoolExecutor() as pool:
        with FileLock(folder / ".lock"):
            reading = [pool.submit(read, name, tmp_path) for _ in range(2)]
            time.sleep(0.2)
            assert not server.asked
        first, second = (one.result() for one in reading)
    assert first == second and "another process is fetching " in capsys.readouterr().err
    paths = [path for path in server.asked if path != "/list"]
    assert len(paths) == len({*paths}), "nothing is asked for twice"


def test_enwik8_is_cut_by_bytes_and_pg19s_books_are_documents(server, tmp_path):
    """Servers refuse urllib's own name."""
    server.respond = lambda request, respond=server.respond: (
        request.send_error(403)
        if request.headers["User-Agent"].startswith("Python-urllib")
        else respond(request)
    )
    assert read("enwik8", tmp_path) == {
        "train": [ENWIK8[:900]],
        "valid": [ENWIK8[900:950]],
        "test": [ENWIK8[950:]],
    }
    assert {path.name for path in (tmp_path / "data" / "enwik8").iterdir()} <= {
        "enwik8.zip",
        ".lock",
    }
    by_split = read("pg19", tmp_path)
    assert by_split == {
        split: [f"{name} {i}".encode() for i in range(COUNTS[name])]
        for split, name in NAMES.items()
    }
    (tmp_path / "data" / "pg19" / "train" / "3.txt").unlink()
    server.asked.clear()
    assert read("pg19", tmp_path) == by_split
    assert [path for path in server.asked if path.endswith(".txt")] == ["/train/3.txt"], (
        "existing books are not fetched again"
    )


def test_what_is_wrong_with_pg19_is_one_line(server, tmp_path, monkeypatch):
    """A network that asks for a password answers every address with a page of its own."""
    listing, folder = server.listing, tmp_path / "data" / "pg19"
    for answer, words in (
        (lambda query: b"<html>", f"cannot fetch .*/list.*; give --data hf:.*, or put .* {folder}"),
        (
            lambda query: listing(query).replace(b'"md5Hash": "', b'"md5Hash": "AAAA'),
            "has another md5 than",
        ),
    ):
        monkeypatch.setattr(server, "listing", answer)
        assert re.search(words, refusal(read, "pg19", tmp_path)) and not list(
            folder.glob("*/*.txt")
        )


def test_what_is_wrong_with_enwik8_is_one_line(server, tmp_path, monkeypatch):
    folder = tmp_path / "data" / "enwik8"
    server.break_after = 10
    with monkeypatch.context() as patch:
        for address in (
            named_sets.ENWIK8,
            "http://127.0.0.1:9/enwik8.zip",
        ):  # breaks off; is refused
            patch.setattr(named_sets, "ENWIK8", address)
            words = f"cannot fetch {address} .*; put a copy .sha256 {named_sets.ENWIK8_SHA256}. at {folder}/enwik8.zip$"
            assert re.search(words, refusal(read, "enwik8", tmp_path))
    assert [path.name for path in folder.iterdir()] == [".lock"] and len(server.asked) == 1, (
        "it is asked for once"
    )
    (folder / "enwik8.zip").write_bytes(b"another")
    assert re.search(
        "does not have sha256 .*; remove it to fetch it again", refusal(read, "enwik8", tmp_path)
    )


def test_official_sizes():
    """The papers' numbers: a typing error would change them unnoticed."""
    assert (
        named_sets.ENWIK8_ENDS == (0, 90_000_000, 95_000_000, 100_000_000)
        and len(named_sets.ENWIK8_SHA256) == 64
    )
    assert named_sets.PG19_COUNTS == {"train": 28_602, "validation": 50, "test": 100}
    assert score.OFFICIAL_WORDS["pg19"] == {
        "train": 1_973_136_207,
        "valid": 3_007_061,
        "test": 6_966_499,
    }
    wikitext = {"train": 103_227_021, "valid": 217_646, "test": 245_569}
    assert [score.OFFICIAL_WORDS[f"wikitext-103{form}"] for form in ("", "-raw")] == [wikitext] * 2


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A function that writes {file: rows} as a set in a folder, for hf:FOLDER; nothing uses the network."""
    library = pytest.importorskip("datasets", reason="hf: needs the extra datasets")
    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path / "hub")
    monkeypatch.setattr(library.config, "HF_HUB_OFFLINE", True)

    def write(files, name="set"):
        (tmp_path / name).mkdir()
        for file, rows in files.items():
            table = library.Dataset.from_list(
                [row if isinstance(row, dict) else {"text": row} for row in rows]
            )
            path = tmp_path / name / file
            table.to_parquet(path) if path.suffix == ".parquet" else table.to_json(path)
        return f"hf:{tmp_path / name}"

    return write


def test_a_row_of_a_hub_set_is_a_document(hub, tmp_path):
    """The set's own splits are used, under each usual name; an empty or null text is a document too. A change is seen."""
    train = ["one é", "", {"text": None}, "two\n"]
    data = hub(
        {"train.jsonl": train, "validation.jsonl": ["three"], "test.jsonl": ["four", "five"]}
    )
    names = [text.name for split, text in table_source(data).texts() if split == "train"]
    assert names == [f"train:{number}" for number in range(1, 5)]
    expected = {
        "train": ["one é".encode(), b"", b"", b"two\n"],
        "valid": [b"three"],
        "test": [b"four", b"five"],
    }
    assert texts_of(table_source(data)) == expected
    before = cache_folder(table_source(data), ByteTokenizer(), tmp_path)
    (tmp_path / "set" / "train.jsonl").write_text(json.dumps({"text": "other"}))
    assert cache_folder(table_source(data), ByteTokenizer(), tmp_path) != before


def test_wikitexts_articles_are_documents(hub, tmp_path, monkeypatch):
    """The hub's rows are the lines of the set's files, but a blank line's row is empty."""
    described = "---\nconfigs:\n- config_name: wikitext-103-raw-v1\n  data_files:\n"
    files, second = {}, ARTICLES["train"].index(b" = Two")
    for split, name in NAMES.items():
        lines = ARTICLES[split].decode().splitlines(keepends=True)
        files[f"{name}.parquet"] = ["" if line == " \n" else line for line in lines]
        described += f"  - split: {name}\n    path: {name}.parquet\n"
    data = hub(files, "wikitext")
    (tmp_path / "wikitext" / "README.md").write_text(described + "---\n")
    monkeypatch.setattr(named_sets, "WIKITEXT", data.removeprefix("hf:"))
    expected = {split: [text] for split, text in ARTICLES.items()}
    expected["train"] = [ARTICLES["train"][:second], ARTICLES["train"][second:]]
    assert read("wikitext-103-raw", tmp_path) == expected


def test_a_hub_set_that_cannot_be_opened_is_refused(hub, tmp_path, monkeypatch):
    """WikiText's line says where else it is."""
    assert "has no split train, only test" in refusal(
        table_source, hub({"test.jsonl": ["x"]}, "no train")
    )
    data = hub({"train.jsonl": ["x"]})
    monkeypatch.setattr(named_sets, "WIKITEXT", "nobody/nothing-at-all")
    for name in (
        f"{data}:other",
        "hf:nobody/nothing-at-all",
        f"hf:{tmp_path / 'nowhere'}",
        "wikitext-103",
    ):
        message = refusal(table_source, name)
        assert re.search(
            f"--data {name}: datasets cannot open it .*; check name, files and network", message
        )
        assert ("; HF_ENDPOINT may name a mirror of the hub" in message) == (name == "wikitext-103")
    assert not logging.getLogger("datasets").isEnabledFor(logging.ERROR), (
        "the library adds no lines of its own"
    )


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet", "a.jsonl.gz", "A [1*].JSONL"])
def test_a_row_of_a_table_is_a_document(hub, tmp_path, name):
    """Its documents are dealt to the splits by the table's name and their numbers."""
    texts = ["None", "NA", "", *(f"row {number} é" for number in range(67))]
    table = importlib.import_module("datasets").Dataset.from_dict(
        {"text": texts, "other": [3] * 70}
    )
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
    text, members = (
        "a line, é\n\n" * 40,
        {f"in/{number}.txt": f"text {number}" for number in range(80)},
    )
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(text.encode()))
    parts = [*texts_of(table_source(str(tmp_path / "a.txt.gz"))).values()]
    assert [len(texts) for texts in parts] == [1, 1, 1] and b"".join(
        part for [part] in parts
    ) == text.encode()
    (tmp_path / "b.zip").write_bytes(as_zip(members))
    by_split = texts_of(open_source(DataConfig(str(tmp_path / "b.zip")), tmp_path))
    assert {text for texts in by_split.values() for text in texts} == {
        text.encode() for text in members.values()
    }
    assert all(by_split.values())


UNREADABLE = [
    ("b.jsonl", b'{"txt": "x"}', "needs a string column `text`, has txt; use another set"),
    ("c.csv", b"text\n3\n", "needs a string column `text`, has text"),
    ("d.txt.gz", gzip.compress(b"caf\xe9", mtime=0), "datasets cannot open it .*utf-8"),
]


def test_a_table_that_cannot_be_read_is_refused_in_one_line(hub, tmp_path):
    for name, written, words in UNREADABLE:
        (tmp_path / name).write_bytes(written)
        assert re.match(
            f"--data {tmp_path / name} ?.*{words}", refusal(table_source, str(tmp_path / name))
        )


def test_what_the_package_opens_is_refused_without_it(monkeypatch, tmp_path):
    (tmp_path / "a.jsonl").write_text("")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for data in ("hf:a/b", "wikitext-103", str(tmp_path / "a.jsonl")):
        with pytest.raises(
            InputError,
            match=f"--data {data} needs the package datasets; install the extra: .*datasets",
        ):
            check_data(DataConfig(data))
