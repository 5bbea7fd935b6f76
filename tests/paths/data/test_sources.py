"""Files, folders, recordings and odd files give the right texts and splits, or one line; nothing is written."""

import os
import socket
from pathlib import Path

import numpy as np
import pytest

from accelerated.data import sources
from accelerated.data.config import DataConfig, check_data
from accelerated.data.corpus import tokenised
from accelerated.data.sources import read_bytes, source_of_path, split_of, standard_library, with_missing_splits
from accelerated.data.tokenizers import ByteTokenizer, train_bpe, train_words
from accelerated.data.windows import SPLITS
from accelerated.program.errors import InputError
from tests.helpers.texts import content

TEN = "abcdefghij"


def source(path, **options):
    """The Source of a path, with these fields of DataConfig."""
    return source_of_path(DataConfig(str(path), **options))


def read(path, **options):
    """Return {split: [(name, bytes)]} of a path."""
    texts = [(split, (text.name, content(text))) for split, text in source(path, **options).texts()]
    return {split: [text for other, text in texts if other == split] for split in SPLITS}


def write(folder, texts):
    """Write {name: text or bytes} into a folder, and return it."""
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def tokens_of(path):
    """Tokenise a path in a folder beside it, and return the bytes of all documents."""
    splits, _ = tokenised(source(path), ByteTokenizer(), Path(path).parent / "cache")
    return bytes(splits["train"].tokens)


def refusal(call, *arguments):
    """The message of the InputError that a call raises."""
    with pytest.raises(InputError) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_splits_are_a_fixed_function_of_the_name():
    assert [split_of(name) for name in ("json", "re", "pprint", "lzma")] == ["train", "valid", "valid", "valid"]
    counts = [[split_of(f"document {i}") for i in range(4000)].count(split) for split in SPLITS]
    assert abs(counts[0] - 3600) < 100 and abs(counts[1] - 200) < 60 and abs(counts[2] - 200) < 60


def test_standard_library_is_one_document_per_package(tmp_path):
    names = ("b.py", "a/z.py", "a/__init__.py", "a/sub/y.py", "test/t.py", "site-packages/p.py", "_sysconfigdata_x.py", "c.txt")
    library = standard_library(write(tmp_path, {name: name for name in names}))
    documents = [("a", b"a/__init__.pya/sub/y.pya/z.py"), ("b", b"b.py")]
    assert [(split, text.name, content(text)) for split, text in library.texts()] == [(split_of(n), n, t) for n, t in documents]
    assert [path.name for path in library.files] == ["__init__.py", "y.py", "z.py", "b.py"]


def test_a_file_is_split_90_5_5_by_position_and_no_character_is_cut_in_two(tmp_path):
    write(tmp_path, {"book.txt": TEN * 20})
    parts = [("train", 0, 180), ("valid", 180, 190), ("test", 190, 200)]
    assert read(tmp_path / "book.txt") == {s: [(f"book.txt:{s}", (TEN * 20).encode()[a:b])] for s, a, b in parts}
    for count in range(60, 80):
        text = ("x" + "中é😀" * count).encode()
        write(tmp_path, {"book.txt": text})
        parts = [part for [(_, part)] in read(tmp_path / "book.txt").values()]
        assert b"".join(parts) == text and all(part.decode() for part in parts)
        assert 0 <= len(parts[0]) - len(text) * 90 // 100 <= 3


def test_a_folder_is_split_by_names_or_if_small_by_position(tmp_path):
    names = [f"{i}.txt" for i in range(78)] + ["deep/README", "wiki.tokens", "wiki.raw"]
    write(tmp_path, {name: f"some words {i} " * 9 for i, name in enumerate(names)} | {"picture.png": b"\x89PNG"})
    by_split = read(tmp_path)
    assert {name: split for split in by_split for name, _ in by_split[split]} == {name: split_of(name) for name in names}
    for name in names[2:]:
        (tmp_path / name).unlink()
    assert {s: [name for name, _ in texts] for s, texts in read(tmp_path).items()} == {
        s: [f"0.txt:{s}", f"1.txt:{s}"] for s in SPLITS
    }


OWN = {"train/a.txt": "a", "train/deep/b.txt": "b", "test/d.txt": "d", "README.md": "e"}
OWN_READ = {"train": [("train/a.txt", b"a"), ("train/deep/b.txt", b"b")], "test": [("test/d.txt", b"d")]}
BY_POSITION = [("train/a.txt:train", TEN.encode() * 9), ("train/a.txt:valid", b"abcde"), ("train/a.txt:test", b"fghij")]
ROWS = [*zip(SPLITS, BY_POSITION, strict=True)]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        *(
            ({**OWN, f"{valid}/c.txt": "c"}, {**OWN_READ, "valid": [(f"{valid}/c.txt", b"c")]})
            for valid in ("valid", "validation", "val", "dev")
        ),
        (
            {**OWN, "val/c.txt": "c", "dev/f.txt": "f"},
            {**OWN_READ, "valid": [("dev/f.txt", b"f"), ("val/c.txt", b"c")]},
        ),
        (
            {"train/a.txt": TEN * 10, "val/b.txt": "own"},
            {"train": BY_POSITION[:2], "valid": [("val/b.txt", b"own")], "test": BY_POSITION[2:]},
        ),
        (
            {"train/a.txt": TEN * 10, "src/test/b.txt": TEN * 10},
            {split: [(name.replace("train/a", "src/test/b"), text), (name, text)] for split, (name, text) in ROWS},
        ),
    ],
    ids=["valid", "validation", "val", "dev", "both", "a missing split by position", "train alone is none"],
)
def test_a_folder_with_its_own_splits_keeps_them(tmp_path, files, expected):
    assert read(write(tmp_path, files)) == expected


def test_a_missing_split_is_taken_from_train_by_names(tmp_path):
    names = [f"train/{i}.txt" for i in range(80)]
    by_split = read(write(tmp_path, {name: f"text of {name}" for name in names} | {"test/0.txt": "its own"}))
    assert by_split["test"] == [("test/0.txt", b"its own")]
    assert [name for name, _ in by_split["valid"]] == [name for name in sorted(names) if split_of(name) == "valid"] != []
    assert sorted(name for split in ("train", "valid") for name, _ in by_split[split]) == sorted(names)
    given = {split: lambda split=split: [sources.Text(f"{split}{i}", ()) for i in range(60)] for split in SPLITS}
    texts = list(with_missing_splits(given))
    assert all(text.name.startswith(split) for split, text in texts) and len(texts) == 180, "whatever their hashes say"


@pytest.mark.parametrize("splits", [False, True])
def test_a_folder_of_repositories_has_a_document_for_each(tmp_path, splits):
    """It joins the files in sorted order, in any encoding; a file beside the repositories is a document."""
    files = {"b/src/z.py": "z", "b/a.md": "a", "b/latin.txt": b"\xe9", "a/1.txt": "1", "c.txt": "c", "a-b/2.txt": "2"}
    expected = {"a": b"1", "a-b": b"2", "b": b"a\xe9z", "c.txt": b"c"}
    write(tmp_path / ("train" if splits else ""), files)
    if splits:
        write(tmp_path, {"valid/d/e.txt": "e", "valid/d/f.txt": "f", "test/g/h.txt": "h"})
        assert read(tmp_path, documents="folders") == {
            "train": [(f"train/{name}", text) for name, text in expected.items()],
            "valid": [("valid/d", b"ef")],
            "test": [("test/g", b"h")],
        }
    else:
        parts = [part for texts in read(tmp_path, documents="folders").values() for part in texts]
        names = [name.partition(":")[0] for name, _ in parts]
        assert {n: b"".join(text for name, text in parts if name.partition(":")[0] == n) for n in names} == expected


# Odd files


def test_what_is_no_text_file_is_left_out_of_a_folder(tmp_path, monkeypatch):
    """Hidden files, other suffixes, and what is no file: a pipe would be waited for without end."""
    others = (".DS_Store", ".git/index", ".git/a.txt", "a.tar.gz", "b.png", "c.zip", "d.jsonl", "e.csv", ".hidden.txt")
    folder = write(tmp_path / "in", dict.fromkeys(others, b"\xff\xfe") | {"a.txt": "words " * 99, "sub/b.py": "x"})
    os.mkfifo(folder / "pipe.txt")
    (folder / "broken.txt").symlink_to(folder / "nowhere")
    (folder / "self.txt").symlink_to(folder / "self.txt")
    (folder / "sub" / "loop").symlink_to(folder)
    monkeypatch.chdir(folder)  # a socket's path must be short
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("socket.txt")
        assert source(folder).files == (folder / "a.txt", folder / "sub" / "b.py")
    (folder / "a.txt").unlink()
    (folder / "sub" / "b.py").unlink()
    assert "ends in one of .txt .text .raw " in refusal(source, folder) and "hf:" in refusal(source, folder)
    assert "no file in this folder" in refusal(source, folder / "pipe.txt")


def test_names_may_be_any_bytes_and_nul_bytes_are_text(tmp_path):
    folder = write(tmp_path / "in", {os.fsdecode(name): "words " * 40 for name in (b"caf\xe9.txt", b"two\nlines.txt", b" .txt")})
    assert len(tokens_of(folder)) == 3 * 240
    name = os.fsdecode(b"\xff\n.txt")
    assert tokens_of(write(tmp_path, {name: bytes(4000)}) / name) == bytes(4000)


def test_a_byte_order_mark_is_dropped_and_said_once(tmp_path, capsys):
    """Of a single file, wherever it is cut, and of the files of a folder; elsewhere in a text it stays."""
    mark, text = b"\xef\xbb\xbf", "wörds ".encode() * 300
    write(tmp_path, dict.fromkeys(("in/a.txt", "in/b.txt", "c.txt"), mark + text + mark))
    sources.say_once.cache_clear()
    assert tokens_of(tmp_path / "c.txt") == text + mark
    assert len(tokens_of(tmp_path / "in")) == 2 * len(text + mark)
    assert capsys.readouterr().err.splitlines() == ["files begin with a byte-order mark, which is no text and is dropped"]


def test_a_file_that_vanishes_is_named(tmp_path):
    """While it is opened or, as the system names it, while the files are looked at; a program makes one line of that too."""
    folder = write(tmp_path / "in", {f"{name}.txt": "words " * 99 for name in "abc"})
    found = source(folder)
    (folder / "b.txt").unlink()
    message = f"cannot read {folder}/b.txt: No such file or directory; give another --data"
    assert refusal(lambda: [content(text) for _, text in found.texts()]) == message
    with pytest.raises(FileNotFoundError) as caught:
        tokenised(found, ByteTokenizer(), tmp_path / "cache")
    assert caught.value.filename == str(folder / "b.txt")


@pytest.mark.parametrize(
    ("text", "place"),
    [(b"caf\xe9 au lait", 3), ("née ".encode() + b"\xff", 5), ("née".encode()[:2], 1), (b"ab" * 40 + b"\xc3", 80)],
)
def test_a_file_that_is_not_utf_8_is_refused_with_its_place(tmp_path, text, place):
    """Where it is tokenised, and where tokens are learned from it."""
    folder = write(tmp_path / "in", {"train/a.txt": text, "valid/a.txt": "x", "test/a.txt": "y"})
    wrong = f"train/a.txt is not UTF-8 text (byte {place}); convert it, or move it out of --data"
    assert refusal(tokens_of, folder) == refusal(train_bpe, source(folder), 257) == wrong
    assert refusal(train_words, source(folder), 3) == wrong


def test_pieces_are_of_one_size_in_each_part():
    text = sources.Text("x", (lambda: b"abcdefg", lambda: b"", lambda: b"hi"))
    assert [*read_bytes(text, 3)] == [b"abc", b"def", b"g", b"hi"] and [*read_bytes(text)] == [b"abcdefg", b"hi"]


# Recordings


def test_recordings_are_read_as_samples_and_nothing_else(tmp_path):
    """Whole, and cut by position: a recording has no byte-order mark and no characters."""
    names = ("train/a.ulaw", "train/b/c.ULAW", "valid/d.ulaw", "test/e.ulaw")
    values = {name: bytes(range(number + 100, number + 150)) for number, name in enumerate(names)}
    write(tmp_path / "in", values | {"train/a.txt": "what is said"})
    assert [text for texts in read(tmp_path / "in", tokenizer="mu-law").values() for text in texts] == [*values.items()]
    assert b"".join(text for texts in read(tmp_path / "in").values() for _, text in texts) == b"what is said"
    long = b"\xef\xbb\xbf" + np.random.default_rng(0).integers(0, 256, 3997).astype(np.uint8).tobytes()
    write(tmp_path, {"a.ulaw": long})
    parts = [text for texts in read(tmp_path / "a.ulaw", tokenizer="mu-law").values() for _, text in texts]
    assert b"".join(parts) == long and [len(part) // 20 for part in parts] == [180, 10, 10]


def test_what_cannot_be_data_is_refused(tmp_path):
    names = ("train/a.txt", "test/d.txt", "other/x.txt", "empty/x.png", "e.jsonl", "r.wav")
    write(tmp_path, dict.fromkeys(names, b"\xff"))
    assert "has the splits test, train and also other; move them into a split, or out" in refusal(source, tmp_path)
    assert "no file in this folder ends in one of .ulaw; " in refusal(lambda: source(tmp_path / "empty", tokenizer="mu-law"))
    for data in ("stdlib", f"{tmp_path}/e.jsonl", f"{tmp_path}/r.wav"):
        words = f"mu-law reads recordings, and --data {data} is text; give a .ulaw or a folder of them"
        assert words in refusal(check_data, DataConfig(data, tokenizer="mu-law"))
    for data in ("stdlib", "recall", f"{tmp_path}/train/a.txt"):
        words = "--documents folders needs a folder of folders as --data"
        assert words in refusal(check_data, DataConfig(data, documents="folders"))
    check_data(DataConfig(str(tmp_path), tokenizer="mu-law", documents="folders"))
    assert "did you mean stdlib" in refusal(check_data, DataConfig("stdlb"))
    words = "a folder, or one of stdlib, recall, enwik8, wikitext-103, wikitext-103-raw, pg19"
    assert words in refusal(check_data, DataConfig(str(tmp_path / "x.txt")))
