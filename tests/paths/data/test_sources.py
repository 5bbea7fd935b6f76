"""Files, folders and recordings give the right texts and splits."""

import functools
import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelerated.data.config import DataConfig, check_data
from accelerated.data.sources import Text, source_of_path, split_of, standard_library, with_missing_splits
from accelerated.data.windows import SPLITS
from accelerated.program.errors import InputError
from tests.helpers.texts import content


def source(path, **options):
    """The Source of a path, with these fields of DataConfig."""
    return source_of_path(DataConfig(str(path), **options))


def read(path, **options):
    """Return {split: [(name, bytes)]} of a source."""
    by_split = {split: [] for split in SPLITS}
    for split, text in source(path, **options).texts():
        by_split[split].append((text.name, content(text)))
    return by_split


def write(folder, texts):
    """Write {name: text} into a folder."""
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_splits_are_a_fixed_function_of_the_name():
    assert [split_of(name) for name in ("json", "re", "pprint", "lzma")] == ["train", "valid", "valid", "valid"]
    counts = [[split_of(f"document {i}") for i in range(4000)].count(split) for split in SPLITS]
    assert abs(counts[0] - 3600) < 100 and abs(counts[1] - 200) < 60 and abs(counts[2] - 200) < 60


def test_standard_library_is_one_document_per_package(tmp_path):
    texts = {
        "b.py": "bee",
        "a/z.py": "zed",
        "a/__init__.py": "init",
        "a/sub/y.py": "why",
        "test/t.py": "no",
        "site-packages/p.py": "no",
        "_sysconfigdata_x.py": "no",
        "c.txt": "no",
    }
    write(tmp_path, texts)
    library = standard_library(tmp_path)
    assert [(split, text.name, content(text)) for split, text in library.texts()] == [
        (split_of("a"), "a", b"initwhyzed"),
        (split_of("b"), "b", b"bee"),
    ]
    assert [path.name for path in library.files] == ["__init__.py", "y.py", "z.py", "b.py"]


@given(sizes=st.lists(st.integers(0, 9), max_size=4), start=st.integers(0, 30), length=st.integers(0, 30))
def test_start_and_stop_count_the_joined_files_bytes(sizes, start, length):
    files = [bytes(range(10 * i, 10 * i + size)) for i, size in enumerate(sizes)]
    part = Text("x", tuple(functools.partial(io.BytesIO, file) for file in files), start=start, stop=start + length)
    assert content(part) == b"".join(files)[start : start + length]


def test_a_file_is_split_90_5_5_by_position(tmp_path):
    text = bytes(range(97, 117)) * 10
    (tmp_path / "book.txt").write_bytes(text)
    by_split = read(tmp_path / "book.txt")
    assert by_split == {
        "train": [("book.txt:train", text[:180])],
        "valid": [("book.txt:valid", text[180:190])],
        "test": [("book.txt:test", text[190:])],
    }


def test_a_folder_is_split_by_names_or_if_small_by_position(tmp_path):
    folder = tmp_path / "folder"
    (folder / "deep").mkdir(parents=True)
    names = [f"{i}.txt" for i in range(79)] + ["deep/README"]
    for i, name in enumerate(names):
        (folder / name).write_text(f"some words {i} " * 9)
    (folder / "picture.png").write_bytes(b"\x89PNG")
    by_split = read(folder)
    assert {name: split for split in by_split for name, _ in by_split[split]} == {name: split_of(name) for name in names}
    for name in names[2:]:
        (folder / name).unlink()
    by_split = read(folder)
    assert [name for name, _ in by_split["test"]] == ["0.txt:test", "1.txt:test"] and all(len(by_split[s]) == 2 for s in SPLITS)


def test_no_character_is_cut_in_two(tmp_path):
    for count in range(60, 80):
        text = ("x" + "中é😀" * count).encode()
        (tmp_path / "book.txt").write_bytes(text)
        parts = [text for [(_, text)] in read(tmp_path / "book.txt").values()]
        assert b"".join(parts) == text and all(part.decode() for part in parts)
        assert 0 <= len(parts[0]) - len(text) * 90 // 100 <= 3


def test_hidden_files_and_files_without_text_are_skipped(tmp_path):
    folder = tmp_path / "folder"
    (folder / ".git").mkdir(parents=True)
    for name in (".DS_Store", ".git/index", ".git/a.txt", "a.tar.gz", "b.png", "c.zip", "d.jsonl", "e.csv", ".hidden.txt"):
        (folder / name).write_bytes(b"\xff\xfe")
    (folder / "a.txt").write_text("words " * 50)
    assert source(folder).files == (folder / "a.txt",)
    (folder / "a.txt").unlink()
    with pytest.raises(InputError, match=r"no file in this folder ends in one of \.txt .* or have no dot; .*hf:.* opens .*\.gz"):
        source(folder)


def test_raw_and_tokens_files_are_text(tmp_path):
    write(tmp_path / "in", {"wiki.train.tokens": "one " * 20, "wiki.test.raw": "two " * 20, "wiki.bin": "no"})
    assert {name.partition(":")[0] for parts in read(tmp_path / "in").values() for name, _ in parts} == {
        "wiki.train.tokens",
        "wiki.test.raw",
    }


@pytest.mark.parametrize("valid", ["valid", "validation", "val", "dev"])
def test_a_folder_with_its_own_splits_keeps_them(tmp_path, valid):
    write(
        tmp_path / "in", {"train/a.txt": "a", "train/deep/b.txt": "b", f"{valid}/c.txt": "c", "test/d.txt": "d", "README.md": "e"}
    )
    assert read(tmp_path / "in") == {
        "train": [("train/a.txt", b"a"), ("train/deep/b.txt", b"b")],
        "valid": [(f"{valid}/c.txt", b"c")],
        "test": [("test/d.txt", b"d")],
    }


def test_a_missing_split_is_taken_from_train(tmp_path):
    """By names if that gives it a text, otherwise the last part of every text; the other splits do not change."""
    names = [f"train/{i}.txt" for i in range(80)]
    write(tmp_path / "in", {name: f"text of {name}" for name in names} | {"test/0.txt": "its own"})
    by_split = read(tmp_path / "in")
    assert by_split["test"] == [("test/0.txt", b"its own")]
    assert [name for name, _ in by_split["valid"]] == [name for name in sorted(names) if split_of(name) == "valid"] != []
    assert sorted(name for split in ("train", "valid") for name, _ in by_split[split]) == sorted(names)
    write(tmp_path / "few", {"train/a.txt": "abcdefghij" * 10, "val/b.txt": "its own"})
    assert read(tmp_path / "few") == {
        "train": [("train/a.txt:train", b"abcdefghij" * 9), ("train/a.txt:valid", b"abcde")],
        "valid": [("val/b.txt", b"its own")],
        "test": [("train/a.txt:test", b"fghij")],
    }


def test_a_folder_train_without_other_splits_is_not_a_split(tmp_path):
    write(tmp_path / "in", {"train/a.txt": "abcdefghij" * 2, "src/test/b.txt": "abcdefghij" * 2})
    assert [name for name, _ in read(tmp_path / "in")["train"]] == ["src/test/b.txt:train", "train/a.txt:train"]


@pytest.mark.parametrize(
    "others,words",
    [
        ({"other/x.txt": "x"}, "has the splits test, train and also the folders other; move them into a split, or out"),
        ({"val/x.txt": "x", "dev/x.txt": "x"}, "has the splits .* and also the folders dev; move them into a split, or out"),
    ],
)
def test_ambiguous_splits_are_refused(tmp_path, others, words):
    write(tmp_path / "in", {"train/a.txt": "a", "test/d.txt": "d"} | others)
    with pytest.raises(InputError, match=words) as caught:
        source(tmp_path / "in")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("splits", [False, True])
def test_a_folder_of_repositories_has_a_document_for_each(tmp_path, splits):
    """It joins the files in sorted order, in any encoding; a file beside the repositories is a document."""
    top = tmp_path / "in" / ("train" if splits else "")
    write(top, {"b/src/z.py": "z", "b/a.md": "a", "a/1.txt": "1", "c.txt": "c", "a-b/2.txt": "2"})
    (top / "b" / "latin.txt").write_bytes(b"\xe9")
    expected = {"a": b"1", "a-b": b"2", "b": b"a\xe9z", "c.txt": b"c"}
    if splits:
        write(tmp_path / "in", {"valid/d/e.txt": "e", "valid/d/f.txt": "f", "test/g/h.txt": "h"})
        assert read(tmp_path / "in", documents="folders") == {
            "train": [(f"train/{name}", text) for name, text in expected.items()],
            "valid": [("valid/d", b"ef")],
            "test": [("test/g", b"h")],
        }
    else:
        texts = {}
        for parts in read(tmp_path / "in", documents="folders").values():
            for name, text in parts:
                texts[name.partition(":")[0]] = texts.get(name.partition(":")[0], b"") + text
        assert texts == expected
    assert not any(text.must_be_utf8 for _, text in source(tmp_path / "in", documents="folders").texts())


def test_given_splits_keep_their_texts():
    """Whatever split the hashes of their 60 names stand for."""
    given = {split: lambda split=split: [Text(f"{split}{i}", ()) for i in range(60)] for split in SPLITS}
    assert all(text.name.startswith(split) for split, text in with_missing_splits(given))
    assert len(list(with_missing_splits(given))) == 180


# Recordings


@pytest.fixture
def recordings(tmp_path):
    """A folder of recordings in splits, with a text beside them."""
    for number, name in enumerate(("train/a.ulaw", "train/b/c.ULAW", "valid/d.ulaw", "test/e.ulaw")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(bytes(range(number + 100, number + 150)))
    (tmp_path / "train/a.txt").write_text("what is said")
    return tmp_path


def test_a_folder_of_recordings_is_read_as_samples_and_nothing_else(recordings):
    values = [bytes(range(number + 100, number + 150)) for number in range(4)]
    assert read(recordings, tokenizer="mu-law") == {
        "train": [("train/a.ulaw", values[0]), ("train/b/c.ULAW", values[1])],
        "valid": [("valid/d.ulaw", values[2])],
        "test": [("test/e.ulaw", values[3])],
    }
    assert b"".join(text for texts in read(recordings).values() for _, text in texts) == b"what is said"
    assert source(recordings, tokenizer="mu-law").name != source(recordings).name, "other tokens need another cache"


def test_one_recording_is_split_by_position(tmp_path):
    """A recording has no byte-order mark and no characters."""
    values = b"\xef\xbb\xbf" + np.random.default_rng(0).integers(0, 256, 3997).astype(np.uint8).tobytes()
    (tmp_path / "a.ulaw").write_bytes(values)
    by_split = read(tmp_path / "a.ulaw", tokenizer="mu-law")
    assert b"".join(text for split in SPLITS for _, text in by_split[split]) == values
    assert [len(text) // 20 for split in SPLITS for _, text in by_split[split]] == [180, 10, 10]


def test_recordings_and_text_are_not_mixed_up(recordings, tmp_path):
    (recordings / "train/a.wav").write_bytes(b"RIFF")
    for name, tokenizer in (("a.ulaw", "bytes"), ("a.wav", "bytes"), ("a.wav", "mu-law"), ("a.txt", "mu-law")):
        with pytest.raises(
            InputError, match=r"\.ulaw is for --tokenizer mu-law, and that reads nothing else .* makes it of .wav"
        ):
            source(recordings / "train" / name, tokenizer=tokenizer)
    (recordings / "train/a.jsonl").write_text("{}")
    for data in ("stdlib", str(recordings / "train/a.jsonl")):
        with pytest.raises(InputError, match=r"mu-law reads recordings, and --data .* is text; give a .ulaw or a folder of them"):
            check_data(DataConfig(data, tokenizer="mu-law"))
    with pytest.raises(InputError, match=r"no file in this folder .*; --tokenizer mu-law reads recordings"):
        source(recordings / "test")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"no file in this folder ends in one of .ulaw; "):
        source(tmp_path / "empty", tokenizer="mu-law")
