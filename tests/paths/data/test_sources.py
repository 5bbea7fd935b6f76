"""Files, folders and odd files give the right texts and splits, or one line; nothing is written."""

import os
from pathlib import Path

import pytest

from accelerated.data.sources import (
    source_of_path,
    split_of,
    standard_library,
)
from accelerated.data.tokenizers import train_bpe, train_words
from accelerated.data.windows import SPLITS
from tests.helpers.programs import refusal
from tests.helpers.texts import write

TEN = "abcdefghij"
MARK = b"\xef\xbb\xbf"  # a byte-order mark in UTF-8


def read(path):
    """Return {split: {name: bytes}} of a path."""
    by_split = {split: {} for split in SPLITS}
    for split, text in source_of_path(str(path)).texts():
        by_split[split][text.name] = text.read()
    return by_split


def joined(by_split):
    """All texts of what `read` returns, one after another."""
    parts = []
    for texts in by_split.values():
        parts += texts.values()
    return b"".join(parts)


def test_nine_of_ten_names_are_for_training_always_the_same_ones():
    splits = [split_of(f"document {i}") for i in range(4000)]
    assert abs(splits.count("train") - 3600) < 100
    assert abs(splits.count("valid") - 200) < 60
    assert abs(splits.count("test") - 200) < 60
    assert [split_of(name) for name in ("json", "re", "lzma")] == ["train", "valid", "valid"]


def test_standard_library_is_one_document_per_package(tmp_path):
    names = ["b.py", "a/z.py", "a/__init__.py", "a/sub/y.py", "c.txt"]
    left_out = ["test/t.py", "site-packages/p.py", "_sysconfigdata_x.py"]
    library = standard_library(write(tmp_path, {name: name for name in names + left_out}))
    found = [(split, text.name, text.read()) for split, text in library.texts()]
    assert found == [
        (split_of("a"), "a", b"a/__init__.pya/sub/y.pya/z.py"),
        (split_of("b"), "b", b"b.py"),
    ]
    assert [path.name for path in library.files] == ["__init__.py", "y.py", "z.py", "b.py"]


def test_the_standard_library_fills_every_split():
    assert {split for split, _ in standard_library().texts()} == set(SPLITS)


@pytest.mark.parametrize("count", [0, *range(60, 80)])
def test_a_file_is_split_90_5_5_by_position_and_no_character_is_cut_in_two(tmp_path, count):
    text = TEN * 20 + "中é😀" * count
    by_split = read(write(tmp_path, {"book.txt": text}) / "book.txt")
    assert [*map(list, by_split.values())] == [[f"book.txt:{split}"] for split in SPLITS]
    train, valid, test = (texts[f"book.txt:{split}"] for split, texts in by_split.items())
    assert train.decode() + valid.decode() + test.decode() == text
    size = len(text.encode())
    assert 0 <= len(train) - size * 90 // 100 <= 3
    assert 0 <= len(train + valid) - size * 95 // 100 <= 3, "validation is not 5% of the text"


def test_a_folder_is_split_by_names(tmp_path):
    names = [*(f"{i}.txt" for i in range(78)), "deep/README", "wiki.tokens", "wiki.raw"]
    write(tmp_path, {name: f"some words {i} " * 9 for i, name in enumerate(names)})
    write(tmp_path, {"picture.png": b"\x89PNG"})
    found = {name: split for split, texts in read(tmp_path).items() for name in texts}
    assert found == {name: split_of(name) for name in names}


PARTS = {"": TEN.encode() * 10, "train": TEN.encode() * 9, "valid": b"abcde", "test": b"fghij"}
LISTED = Path(__file__).with_name("layouts.txt").read_text()
LAYOUTS = [line.split(" => ") for line in LISTED.splitlines() if line[0] != "#"]


@pytest.mark.parametrize("names, expected", LAYOUTS)
def test_a_folder_with_splits_keeps_them_and_a_small_one_is_split_by_position(
    tmp_path, names, expected
):
    """Each is a row of layouts.txt. A split that is missing is taken from train."""
    write(tmp_path, dict.fromkeys(names.split(), TEN * 10))
    by_split = read(tmp_path)
    found = [" ".join(texts) for texts in by_split.values()]
    assert " | ".join(found) == expected
    for texts in by_split.values():
        for name, text in texts.items():
            assert text == PARTS[name.partition(":")[2]], name


def test_what_is_no_text_file_is_left_out_of_a_folder(tmp_path):
    """Hidden files, other suffixes, and what is no file: a pipe would be waited for without end.

    Names may be any bytes.
    """
    others = (".git/a.txt", "a.tar.gz", "d.jsonl", ".hidden.txt")
    texts = ("a.txt", "sub/b.py", os.fsdecode(b"sub/caf\xe9\n.txt"))
    folder = write(tmp_path / "in", dict.fromkeys(others, b"\xff\xfe"))
    write(folder, dict.fromkeys(texts, bytes(4000)))
    os.mkfifo(folder / "pipe.txt")
    (folder / "sub" / "loop").symlink_to(folder)
    assert source_of_path(str(folder)).files == tuple(folder / name for name in texts)
    assert joined(read(folder)) == bytes(12_000)


@pytest.mark.parametrize("path, count", [("c.txt", 1), ("in", 2)])
def test_a_byte_order_mark_is_dropped(tmp_path, path, count):
    """Of a single file, wherever it is cut, and of the files of a folder; elsewhere it stays."""
    text = "wörds ".encode() * 300
    write(tmp_path, dict.fromkeys(("in/a.txt", "in/b.txt", "c.txt"), MARK + text + MARK))
    found = joined(read(tmp_path / path))
    assert found.count(b"w") == 300 * count
    assert found.count(MARK) == count
    assert not found.startswith(MARK)


def test_a_file_that_is_not_utf_8_is_refused_with_its_place(tmp_path):
    """Where it is read, and where tokens are learned from it; a file that vanishes is named."""
    texts = {"train/a.txt": b"caf\xe9 au lait", "valid/a.txt": "x", "test/a.txt": "y"}
    folder = write(tmp_path, texts)
    found = source_of_path(str(folder))
    words = "train/a.txt is not UTF-8 text (byte 3); convert it, or move it out of"
    assert refusal(read, folder).startswith(words)
    assert refusal(train_bpe, found, 257).startswith(words)
    assert refusal(train_words, found, 3).startswith(words)
    (folder / "train" / "a.txt").unlink()
    words = f"cannot read {folder}/train/a.txt: No such file or directory; give another --data"
    assert refusal(train_words, found, 3) == words
