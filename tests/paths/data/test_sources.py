"""Files, folders, recordings and odd files give the right texts and splits, or one line; nothing is written."""

import os
import re

import pytest

from accelerated.data import sources
from accelerated.data.config import DataConfig, check_data
from accelerated.data.sources import source_of_path, split_of, standard_library, with_missing_splits
from accelerated.data.tokenizers import train_bpe, train_words
from accelerated.data.windows import SPLITS
from tests.helpers.programs import refusal

TEN = "abcdefghij"


def source(path, **options):
    """The Source of a path, with these fields of DataConfig."""
    return source_of_path(DataConfig(str(path), **options))


def read(path, **options):
    """Return {split: {name: bytes}} of a path."""
    by_split = {split: {} for split in SPLITS}
    for split, text in source(path, **options).texts():
        by_split[split][text.name] = text.read()
    return by_split


def write(folder, texts):
    """Write {name: text or bytes} into a folder, and return it."""
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def test_splits_are_a_fixed_function_of_the_name():
    assert [split_of(name) for name in ("json", "re", "pprint", "lzma")] == [
        "train",
        "valid",
        "valid",
        "valid",
    ]
    counts = [[split_of(f"document {i}") for i in range(4000)].count(split) for split in SPLITS]
    assert abs(counts[0] - 3600) < 100 and abs(counts[1] - 200) < 60 and abs(counts[2] - 200) < 60


def test_standard_library_is_one_document_per_package(tmp_path):
    names = (
        "b.py",
        "a/z.py",
        "a/__init__.py",
        "a/sub/y.py",
        "test/t.py",
        "site-packages/p.py",
        "_sysconfigdata_x.py",
        "c.txt",
    )
    library = standard_library(write(tmp_path, {name: name for name in names}))
    documents = [("a", b"a/__init__.pya/sub/y.pya/z.py"), ("b", b"b.py")]
    assert [(split, text.name, text.read()) for split, text in library.texts()] == [
        (split_of(n), n, t) for n, t in documents
    ]
    assert [path.name for path in library.files] == ["__init__.py", "y.py", "z.py", "b.py"]
    assert {split for split, _ in standard_library().texts()} == {*SPLITS}


def test_a_file_is_split_90_5_5_by_position_and_no_character_is_cut_in_two(tmp_path):
    for text in (TEN * 20, *("x" + "中é😀" * count for count in range(60, 80))):
        by_split = read(write(tmp_path, {"book.txt": text}) / "book.txt")
        assert {split: [*texts] for split, texts in by_split.items()} == {
            split: [f"book.txt:{split}"] for split in SPLITS
        }
        parts, size = (
            [part for texts in by_split.values() for part in texts.values()],
            len(text.encode()),
        )
        assert "".join(part.decode() for part in parts) == text
        assert (
            0 <= len(parts[0]) - size * 90 // 100 <= 3
            and 0 <= len(parts[0]) + len(parts[1]) - size * 95 // 100 <= 3
        )


def test_a_folder_is_split_by_names_or_if_small_by_position(tmp_path):
    names = [f"{i}.txt" for i in range(78)] + ["deep/README", "wiki.tokens", "wiki.raw"]
    write(
        tmp_path,
        {name: f"some words {i} " * 9 for i, name in enumerate(names)}
        | {"picture.png": b"\x89PNG"},
    )
    assert {name: split for split, texts in read(tmp_path).items() for name in texts} == {
        name: split_of(name) for name in names
    }
    for name in names[2:]:
        (tmp_path / name).unlink()
    assert {split: [*texts] for split, texts in read(tmp_path).items()} == {
        s: [f"0.txt:{s}", f"1.txt:{s}"] for s in SPLITS
    }


BY_POSITION = {"train": TEN.encode() * 9, "valid": b"abcde", "test": b"fghij"}
FOLDERS = {  # {what its splits are: (its files, the texts of train, those of valid)}
    "val and dev": (
        {
            "train/a.txt": "a",
            "train/deep/b.txt": "b",
            "test/d.txt": "d",
            "README.md": "e",
            "val/c.txt": "c",
            "dev/f.txt": "f",
        },
        {"train/a.txt": b"a", "train/deep/b.txt": b"b"},
        {"dev/f.txt": b"f", "val/c.txt": b"c"},
    ),
    "a missing split by position": (
        {"train/a.txt": TEN * 10, "val/b.txt": "own"},
        {f"train/a.txt:{s}": BY_POSITION[s] for s in ("train", "valid")},
        {"val/b.txt": b"own"},
    ),
    "train alone is none": (
        {"train/a.txt": TEN * 10, "src/test/b.txt": TEN * 10},
        *(
            {f"{name}:{s}": BY_POSITION[s] for name in ("src/test/b.txt", "train/a.txt")}
            for s in ("train", "valid")
        ),
    ),
}


@pytest.mark.parametrize("which", FOLDERS)
def test_a_folder_with_its_own_splits_keeps_them(tmp_path, which):
    files, *expected = FOLDERS[which]
    assert [*read(write(tmp_path, files)).values()][:2] == expected


def test_a_missing_split_is_taken_from_train_by_names(tmp_path):
    names = sorted(f"train/{i}.txt" for i in range(80))
    by_split = read(
        write(tmp_path, {name: f"text of {name}" for name in names} | {"test/0.txt": "its own"})
    )
    assert by_split["test"] == {"test/0.txt": b"its own"}
    assert [*by_split["valid"]] == [name for name in names if split_of(name) == "valid"] != []
    assert sorted({**by_split["train"], **by_split["valid"]}) == names
    given = {
        split: lambda split=split: [sources.Text(f"{split}{i}", ()) for i in range(60)]
        for split in SPLITS
    }
    texts = list(with_missing_splits(given))
    assert all(text.name.startswith(split) for split, text in texts) and len(texts) == 180, (
        "whatever their hashes say"
    )


def test_what_is_no_text_file_is_left_out_of_a_folder(tmp_path):
    """Hidden files, other suffixes, and what is no file: a pipe would be waited for without end. Names may be any bytes."""
    others = (".git/a.txt", "a.tar.gz", "d.jsonl", ".hidden.txt")
    texts = ("a.txt", "sub/b.py", os.fsdecode(b"sub/caf\xe9\n.txt"))
    folder = write(
        tmp_path / "in", dict.fromkeys(others, b"\xff\xfe") | dict.fromkeys(texts, bytes(4000))
    )
    os.mkfifo(folder / "pipe.txt")
    (folder / "sub" / "loop").symlink_to(folder)
    assert source(folder).files == tuple(folder / name for name in texts)
    assert b"".join(part for texts in read(folder).values() for part in texts.values()) == bytes(
        12_000
    )
    for name in texts:
        (folder / name).unlink()
    assert re.search(
        r"no file in it ends in one of .txt .text .raw .*; give another folder",
        refusal(source, folder),
    )


def test_a_byte_order_mark_is_dropped_and_said_once(tmp_path, capsys):
    """Of a single file, wherever it is cut, and of the files of a folder; elsewhere in a text it stays."""
    mark, text = b"\xef\xbb\xbf", "wörds ".encode() * 300
    write(tmp_path, dict.fromkeys(("in/a.txt", "in/b.txt", "c.txt"), mark + text + mark))
    sources.say_once.cache_clear()
    for path, count in (("c.txt", 1), ("in", 2)):
        parts = b"".join(
            part for texts in read(tmp_path / path).values() for part in texts.values()
        )
        assert (
            parts.count(b"w") == 300 * count
            and parts.count(mark) == count
            and not parts.startswith(mark)
        )
    assert capsys.readouterr().err.splitlines() == [
        "files begin with a byte-order mark, which is no text and is dropped"
    ]


def test_a_file_that_is_not_utf_8_is_refused_with_its_place(tmp_path):
    """Where it is read, and where tokens are learned from it; a file that vanishes is named."""
    folder = write(
        tmp_path, {"train/a.txt": b"caf\xe9 au lait", "valid/a.txt": "x", "test/a.txt": "y"}
    )
    found = source(folder)
    for call in (
        lambda: read(folder),
        lambda: train_bpe(found, 257),
        lambda: train_words(found, 3),
    ):
        assert refusal(call).startswith(
            "train/a.txt is not UTF-8 text (byte 3); convert it, or move it out of"
        )
    (folder / "train" / "a.txt").unlink()
    words = f"cannot read {folder}/train/a.txt: No such file or directory; give another --data"
    assert refusal(train_words, found, 3) == words


def test_recordings_are_read_as_samples_and_nothing_else(tmp_path):
    """Whole, and cut by position: a recording has no byte-order mark and no characters."""
    values = dict.fromkeys(("train/a.ulaw", "train/b/c.ULAW", "valid/d.ulaw"), bytes([65, 90, 200]))
    write(tmp_path / "in", values | {"train/a.txt": "what is said", "test/e.ulaw": b"\xff"})
    by_split = read(tmp_path / "in", tokenizer="mu-law")
    assert by_split["train"] | by_split["valid"] == values and by_split["test"] == {
        "test/e.ulaw": b"\xff"
    }
    assert {name[:11] for texts in read(tmp_path / "in").values() for name in texts} == {
        "train/a.txt"
    }
    long = b"\xef\xbb\xbf" + bytes(range(256)) * 15
    parts = [*read(write(tmp_path, {"a.ulaw": long}) / "a.ulaw", tokenizer="mu-law").values()]
    assert b"".join(part for texts in parts for part in texts.values()) == long


def test_what_cannot_be_data_is_refused(tmp_path):
    folder = write(
        tmp_path,
        dict.fromkeys(
            ("train/a.txt", "test/d.txt", "other/x.txt", "empty/x.png", "e.jsonl"), b"\xff"
        ),
    )
    assert "has the splits test, train and also other; move them" in refusal(source, folder)
    assert "no file in it ends in one of .ulaw; " in refusal(
        lambda: source(folder / "empty", tokenizer="mu-law")
    )
    words = "no such file or folder; give one, or one of stdlib, recall, enwik8, wikitext-103, wikitext-103-raw, pg19"
    assert words in refusal(check_data, DataConfig(f"{folder}/x.txt"))
    check_data(DataConfig(str(folder), tokenizer="mu-law"))
