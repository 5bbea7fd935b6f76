"""The papers' sets from a server on the loopback address: fetched, cut, refused when they are not what they say."""

import hashlib

import pytest
from loopback import serving
from test_texts import as_zip, content

from accelerated.data import named_sets as datasets
from accelerated.data import named_sets as download
from accelerated.data.named_sets import Archive, article_starts, named_source
from accelerated.data.windows import SPLITS
from accelerated.errors import InputError

ENWIK8 = bytes(i % 256 for i in range(1000))
ARTICLES = {
    "train": b" \n = One = \n \n words of one \n = = Part = = \n \n more \n \n = Two = \n \n x \n",
    "valid": b" \n = Three = \n \n = not a heading = \n words = \n",
    "test": b" \n = Four = \n \n",
}
BOOKS = {
    f"/{folder}/{i}.txt": f"{folder} {i}".encode()
    for folder, n in (("train", 5), ("validation", 3), ("test", 2))
    for i in range(n)
}
BOOKS |= {"/train/notes.md": b"no book"}


@pytest.fixture
def server(monkeypatch):
    """Serves small sets of the same shape; the module's addresses, checksums and counts are theirs."""
    archives = {"/enwik8.zip": as_zip({"enwik8": ENWIK8})}
    archives["/wikitext-103-v1.zip"] = as_zip({f"wikitext-103/wiki.{split}.tokens": text for split, text in ARTICLES.items()})
    with serving(archives | BOOKS) as server:
        for name, file in (("ENWIK8", "/enwik8.zip"), ("WIKITEXT_103", "/wikitext-103-v1.zip")):
            monkeypatch.setattr(datasets, name, Archive(server.address + file, hashlib.sha256(archives[file]).hexdigest()))
        monkeypatch.setattr(datasets, "ENWIK8_ENDS", (0, 900, 950, 1000))
        monkeypatch.setattr(datasets, "PG19_LIST", server.address + "/list")
        monkeypatch.setattr(datasets, "PG19_BOOKS", server.address + "/")
        monkeypatch.setattr(datasets, "PG19_COUNTS", {"train": 5, "valid": 3, "test": 2})
        monkeypatch.setattr(download, "PAUSE", 0.0)
        yield server


def read(name, tmp_path):
    """{split: [bytes]} of a named set, in their order."""
    workspace = tmp_path / "workspace"
    workspace.mkdir(exist_ok=True)
    found = {split: [] for split in SPLITS}
    for split, text in named_source(name, tmp_path / "data").texts(workspace):
        found[split].append(content(text))
    return found


def test_enwik8_is_cut_by_bytes(server, tmp_path):
    assert read("enwik8", tmp_path) == {"train": [ENWIK8[:900]], "valid": [ENWIK8[900:950]], "test": [ENWIK8[950:]]}
    server.asked.clear()
    assert read("enwik8", tmp_path)["test"] == [ENWIK8[950:]] and not server.asked, "it is fetched once"


def test_enwik8_may_lie_there_unpacked(server, tmp_path):
    (tmp_path / "data" / "enwik8").mkdir(parents=True)
    (tmp_path / "data" / "enwik8" / "enwik8").write_bytes(ENWIK8)
    assert read("enwik8", tmp_path)["valid"] == [ENWIK8[900:950]] and not server.asked
    (tmp_path / "data" / "enwik8" / "enwik8").write_bytes(ENWIK8[:-1])
    with pytest.raises(InputError, match="has 999 bytes, enwik8 has 1000"):
        read("enwik8", tmp_path)


def test_wikitexts_articles_are_documents(server, tmp_path):
    second = ARTICLES["train"].index(b" = Two")
    assert read("wikitext-103", tmp_path) == {
        "train": [ARTICLES["train"][:second], ARTICLES["train"][second:]], "valid": [ARTICLES["valid"]],
        "test": [ARTICLES["test"]],
    }  # fmt: skip


def test_an_article_begins_between_blank_lines(tmp_path):
    path = tmp_path / "file"
    for text, starts in (
        (b"", []), (b"words \n", [0]), (b" = A = \n \n", [0]), (b"x \n = A = \n \n", [0]), (b"x \n \n = A = \n \n", [0]),
        (b" = A = \n \n = B = \n \n", [0, 10]), (b" = A = \n \n x \n = B = \n \n", [0]),
        (b" \n = A = \n words \n", [0]), (b" \n = = A = = \n \n", [0]),
    ):  # fmt: skip
        path.write_bytes(text)
        assert article_starts(path) == (starts, len(text)), text


def test_wikitext_may_lie_there_unpacked(server, tmp_path):
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
    assert [path for path, _ in server.asked if path.endswith(".txt")] == ["/train/3.txt"], "what is there is not fetched again"


def test_a_book_of_another_checksum_is_refused(server, tmp_path, monkeypatch):
    listing = server.listing
    monkeypatch.setattr(server, "listing", lambda query: listing(query).replace(b'"md5Hash": "', b'"md5Hash": "AAAA'))
    with pytest.raises(InputError, match=r"has md5 .*, expected"):
        read("pg19", tmp_path)
    assert not list((tmp_path / "data").rglob("*.txt"))


def test_a_book_too_many_is_refused(server, tmp_path):
    read("pg19", tmp_path)
    (tmp_path / "data" / "pg19" / "test" / "9.txt").write_text("one more")
    with pytest.raises(InputError, match="test has 3 books, PG-19 2"):
        read("pg19", tmp_path)


def test_offline_one_line_says_what_to_put_where(server, tmp_path, monkeypatch):
    for name in ("ENWIK8", "WIKITEXT_103"):
        archive = getattr(datasets, name)
        monkeypatch.setattr(datasets, name, archive._replace(address="http://127.0.0.1:9/" + archive.file))
    monkeypatch.setattr(datasets, "PG19_LIST", "http://127.0.0.1:9/list")
    for name, place in (
        ("enwik8", "enwik8/enwik8.zip"),
        ("wikitext-103", "wikitext-103/wikitext-103-v1.zip"),
        ("pg19", "pg19/train"),
    ):
        with pytest.raises(InputError, match=r"refused.*try again later, or put") as caught:
            read(name, tmp_path)
        assert str(tmp_path / "data" / place) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name,file", [("enwik8", "enwik8.zip"), ("wikitext-103", "wikitext-103-v1.zip")])
def test_an_archive_with_another_checksum_is_refused(server, tmp_path, name, file):
    read(name, tmp_path)
    path = tmp_path / "data" / name / file
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(InputError, match=r"expected .*; remove it to fetch it again"):
        read(name, tmp_path)


def test_official_sizes_and_addresses():
    """The papers' figures, so that no slip of a key changes them."""
    assert datasets.ENWIK8_ENDS == (0, 90_000_000, 95_000_000, 100_000_000)
    assert datasets.PG19_COUNTS == {"train": 28_602, "valid": 50, "test": 100}
    assert datasets.OFFICIAL_WORDS["pg19", "test"] == 6_966_499 and datasets.OFFICIAL_WORDS["pg19", "valid"] == 3_007_061
    assert datasets.OFFICIAL_WORDS["wikitext-103", "test"] == 245_569
    assert all(len(archive.sha256) == 64 for archive in (datasets.ENWIK8, datasets.WIKITEXT_103))
