"""The papers' sets and those of the package datasets are split, and refused if they are wrong."""

import hashlib
import json
import logging

import pytest

from accelerated.data import named_sets
from accelerated.data.config import DataConfig
from accelerated.data.corpus import cache_folder, open_source
from accelerated.data.named_sets import table_source
from accelerated.data.sources import split_of
from accelerated.data.tokenizers import ByteTokenizer
from accelerated.data.windows import SPLITS
from accelerated.evaluation import score
from tests.helpers.programs import refusal
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


def texts_of(source):
    """Return {split: [bytes]} of a source, in order."""
    by_split = {split: [] for split in SPLITS}
    for split, text in source.texts():
        by_split[split].append(text.read())
    return by_split


def read(name, tmp_path):
    """Return {split: [bytes]} of a named set, in order."""
    return texts_of(open_source(DataConfig(name), tmp_path / "data"))


def test_enwik8_is_cut_by_bytes(tmp_path, monkeypatch):
    """A missing file or another one in its place is refused, with the address of the right one."""
    path = tmp_path / "data" / "enwik8" / "enwik8.zip"
    path.parent.mkdir(parents=True)
    words = f"put {named_sets.ENWIK8} (sha256 {named_sets.ENWIK8_SHA256}) at {path}"
    assert refusal(read, "enwik8", tmp_path) == words
    archive = as_zip({"enwik8": ENWIK8})
    path.write_bytes(archive)
    assert refusal(read, "enwik8", tmp_path) == words
    monkeypatch.setattr(named_sets, "ENWIK8_SHA256", hashlib.sha256(archive).hexdigest())
    monkeypatch.setattr(named_sets, "ENWIK8_ENDS", (0, 900, 950, 1000))
    parts = {"train": [ENWIK8[:900]], "valid": [ENWIK8[900:950]], "test": [ENWIK8[950:]]}
    assert read("enwik8", tmp_path) == parts


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

    def write(files):
        folder = tmp_path / "set"
        folder.mkdir()
        for file, rows in files.items():
            lines = [json.dumps({"text": row}) for row in rows]
            (folder / file).write_text("\n".join(lines))
        return f"hf:{folder}"

    return write


def test_pg19s_books_are_documents(hub, tmp_path, monkeypatch):
    """As each row of a hub's set is. The set's own splits are used, under each usual name.

    An empty or null text is a document too.
    """
    train = ["one é", "", None, "two\u2003five\n\xa0six\n"]
    data = hub({"train.jsonl": train, "validation.jsonl": ["three"], "test.jsonl": ["four"]})
    names = [text.name for split, text in table_source(data).texts() if split == "train"]
    assert names == ["train:1", "train:2", "train:3", "train:4"]
    train_texts = [(text or "").encode() for text in train]
    expected = {"train": train_texts, "valid": [b"three"], "test": [b"four"]}
    assert texts_of(table_source(data)) == expected
    monkeypatch.setitem(named_sets.ON_THE_HUB, "pg19", data.removeprefix("hf:"))
    assert read("pg19", tmp_path) == expected
    assert not logging.getLogger("datasets").isEnabledFor(logging.ERROR), "it adds lines of its own"


def test_the_column_of_the_text_can_be_named(hub, tmp_path):
    """--text-column. Each column has a cache of its own."""
    data = hub({})
    row = json.dumps({"text": "a text", "content": "what it holds"})
    for name in ("train", "test"):
        (tmp_path / "set" / f"{name}.jsonl").write_text(row)
    usual = table_source(data)
    named = table_source(data, "content")
    assert texts_of(usual)["test"] == [b"a text"]
    assert texts_of(named)["test"] == [b"what it holds"]
    folders = [cache_folder(source, ByteTokenizer(), tmp_path) for source in (usual, named)]
    assert folders[0] != folders[1]


def test_rows_of_one_table_are_dealt_to_the_splits_by_their_numbers(hub):
    texts = [f"row {number} é" for number in range(70)]
    expected = {split: [] for split in SPLITS}
    for number, text in enumerate(texts, start=1):
        expected[split_of(f"train:{number}")].append(text.encode())
    assert all(expected.values())
    assert texts_of(table_source(hub({"a.jsonl": texts}))) == expected


def test_wikitexts_articles_are_documents(hub, tmp_path, monkeypatch):
    """The hub's rows are the lines of the set's files, but a blank line's row is empty."""
    files = {}
    described = "---\nconfigs:\n- config_name: wikitext-103-raw-v1\n  data_files:\n"
    for split, name in NAMES.items():
        lines = b"".join(ARTICLES[split]).decode().splitlines(keepends=True)
        files[f"{name}.jsonl"] = ["" if line == " \n" else line for line in lines]
        described += f"  - split: {name}\n    path: {name}.jsonl\n"
    place = hub(files).removeprefix("hf:")
    (tmp_path / "set" / "README.md").write_text(described + "---\n")
    configured = f"{place}:wikitext-103-raw-v1"
    monkeypatch.setitem(named_sets.ON_THE_HUB, "wikitext-103-raw", configured)
    assert read("wikitext-103-raw", tmp_path) == ARTICLES
