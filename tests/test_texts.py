"""Files, folders and archives as texts and splits."""

import gzip
import io
import json
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelerated.data import sources as texts
from accelerated.data.sources import Span, Text, part_of, read_bytes, source_of_path, split_of
from accelerated.data.windows import SPLITS
from accelerated.errors import InputError


def content(text):
    return b"".join(read_bytes(text, 7))


def read(path, workspace):
    """{split: [(name, bytes)]} of a source."""
    workspace.mkdir(exist_ok=True)
    found = {split: [] for split in SPLITS}
    for split, text in source_of_path(path).texts(workspace):
        assert text.size == len(content(text))
        found[split].append((text.name, content(text)))
    return found


def as_zip(members):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in members.items():
            archive.writestr(name, text)
    return file.getvalue()


def test_splits_are_a_fixed_function_of_the_name():
    assert [split_of(name) for name in ("json", "re", "pprint", "lzma")] == ["train", "valid", "valid", "valid"]
    counts = [[split_of(f"document {i}") for i in range(4000)].count(split) for split in SPLITS]
    assert abs(counts[0] - 3600) < 100 and abs(counts[1] - 200) < 60 and abs(counts[2] - 200) < 60


def test_standard_library_is_one_document_per_package(tmp_path):
    for name, text in {
        "b.py": "bee", "a/z.py": "zed", "a/__init__.py": "init", "a/sub/y.py": "why", "test/t.py": "no",
        "site-packages/p.py": "no", "_sysconfigdata_x.py": "no", "c.txt": "no",
    }.items():  # fmt: skip
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = texts.standard_library_texts(tmp_path)
    assert [(text.name, content(text)) for text in found] == [("a", b"initwhyzed"), ("b", b"bee")]


@given(sizes=st.lists(st.integers(0, 9), max_size=4), start=st.integers(0, 30), length=st.integers(0, 30))
def test_a_part_of_a_text_is_that_of_its_bytes(sizes, start, length, tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "file"
    path.write_bytes(bytes(range(100)))
    spans = tuple(Span(path, 10 * i, 10 * i + size) for i, size in enumerate(sizes))
    whole = Text("x", spans, must_be_utf8=False)
    part = part_of(whole, "y", start, start + length)
    assert content(part) == content(whole)[start : start + length] and part.size == len(content(part))
    assert part[0] == "y" and part.must_be_utf8 is False


def test_a_file_is_split_90_5_5_by_position(tmp_path):
    text = bytes(range(97, 117)) * 10
    (tmp_path / "book.txt").write_bytes(text)
    found = read(tmp_path / "book.txt", tmp_path / "w")
    assert found == {
        "train": [("book.txt:train", text[:180])], "valid": [("book.txt:valid", text[180:190])],
        "test": [("book.txt:test", text[190:])],
    }  # fmt: skip


def test_a_folder_is_split_by_name_or_if_small_by_position(tmp_path):
    folder = tmp_path / "folder"
    (folder / "deep").mkdir(parents=True)
    names = [f"{i}.txt" for i in range(79)] + ["deep/README"]
    for i, name in enumerate(names):
        (folder / name).write_text(f"some words {i} " * 9)
    (folder / "picture.png").write_bytes(b"\x89PNG")
    found = read(folder, tmp_path / "w")
    assert {name: split for split in found for name, _ in found[split]} == {name: split_of(name) for name in names}
    for name in names[2:]:
        (folder / name).unlink()
    found = read(folder, tmp_path / "w")
    assert [name for name, _ in found["test"]] == ["0.txt:test", "1.txt:test"] and all(len(found[s]) == 2 for s in SPLITS)


def test_no_character_is_cut_in_two(tmp_path):
    for count in range(60, 80):
        text = ("x" + "中é😀" * count).encode()
        (tmp_path / "book.txt").write_bytes(text)
        parts = [found[0][1] for found in read(tmp_path / "book.txt", tmp_path / "w").values()]
        assert b"".join(parts) == text and all(part.decode() for part in parts)
        assert 0 <= len(parts[0]) - len(text) * 90 // 100 <= 3


def test_hidden_files_and_what_is_no_text_are_left_out(tmp_path):
    folder = tmp_path / "folder"
    (folder / ".git").mkdir(parents=True)
    for name in (".DS_Store", ".git/index", "a.tar.gz", "a.png.gz", "b.png"):
        (folder / name).write_bytes(b"\xff\xfe")
    (folder / "a.txt").write_text("words " * 50)
    (folder / "b.zip").write_bytes(as_zip({"__MACOSX/._b.txt": b"\xff", ".hidden.txt": b"\xff", "b.txt": b"more words " * 9}))
    found = read(folder, tmp_path / "w")
    assert {name.partition(".txt")[0] for names in found.values() for name, _ in names} == {"a", "b.zip:b"}
    with pytest.raises(InputError, match=r"a\.tar\.gz holds a \.tar file; give text, \.jsonl or \.zip in a \.gz"):
        read(folder / "a.tar.gz", tmp_path / "w")


def test_json_lines_are_documents(tmp_path):
    lines = [{"text": f"document {i} \u00e9\n" * (i % 3), "other": i} for i in range(70)]
    (tmp_path / "a.jsonl").write_text("\n\n".join(json.dumps(line) for line in lines))
    found = read(tmp_path / "a.jsonl", tmp_path / "w")
    expected = {f"a.jsonl:{i}": line["text"].encode() for i, line in enumerate(lines, start=1)}
    assert {name: text for split in SPLITS for name, text in found[split]} == expected
    assert all(split_of(name) == split for split in SPLITS for name, _ in found[split]) and all(found.values())


def test_archives_hold_what_their_names_say(tmp_path, monkeypatch):
    """A .txt.gz is a text, a .jsonl.gz lines, a .zip any of them; all in one folder, and each unpacked once."""
    opened, open_gzip = [], gzip.open
    monkeypatch.setattr(gzip, "open", lambda path: opened.append(str(path)) or open_gzip(path))
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.txt.gz").write_bytes(gzip.compress(b"a text " * 20))
    line = json.dumps({"text": "a line"}).encode()
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(line + b"\n" + line))
    members = {"in/c.txt": b"member c", "in/d.jsonl": line, "in/e.txt.gz": gzip.compress(b"member e"), "in/f.png": b"\x89"}
    (folder / "g.ZIP").write_bytes(as_zip(members))
    found = read(folder, tmp_path / "w")
    joined = {}
    for split in SPLITS:
        for name, text in found[split]:
            base = name.removesuffix(f":{split}")
            joined[base] = joined.get(base, b"") + text
    assert joined == {
        "a.txt.gz": b"a text " * 20, "b.jsonl.gz:1": b"a line", "b.jsonl.gz:2": b"a line", "g.ZIP:in/c.txt": b"member c",
        "g.ZIP:in/d.jsonl:1": b"a line", "g.ZIP:in/e.txt.gz": b"member e",
    }  # fmt: skip
    assert len(opened) == len(set(opened)) == 3


@pytest.mark.parametrize(
    "case,words",
    [
        ("missing", "no such file"), ("empty folder", "no text files in this folder"),
        ("gz cut off", "is corrupt or no archive"), ("gz of something else", "is corrupt or no archive"),
        ("zip cut off", "is corrupt or no archive"), ("zip damaged", "is corrupt or no archive"),
        ("no json", r"a.jsonl, line 2: not a JSON object"), ("no text", r"a.jsonl, line 2: .* field `text`"),
        ("text no string", r"a.jsonl, line 2: .* field `text`"),
    ],
)  # fmt: skip
def test_bad_data_is_refused_in_one_line(case, words, tmp_path):
    path = tmp_path / {"g": "a.gz", "z": "a.zip"}.get(case[0], "a.jsonl")
    packed = as_zip({"a.txt": bytes(range(97, 123)) * 999})
    good = b'{"text": "x"}\n'
    contents = {
        "gz cut off": gzip.compress(b"abc" * 9999)[:-20], "gz of something else": b"<html>", "zip cut off": packed[:-30],
        "zip damaged": packed[:60] + b"\xff\xff\xff" + packed[63:], "no json": good + b"{", "no text": good + b'{"txt": 1}',
        "text no string": good + b'{"text": 3}',
    }  # fmt: skip
    if case in contents:
        path.write_bytes(contents[case])
    elif case == "empty folder":
        path.mkdir()
    with pytest.raises(InputError, match=words) as caught:
        read(path, tmp_path / "w")
    assert "\n" not in str(caught.value)


def test_a_full_disk_is_said(tmp_path, monkeypatch):
    def full(path, mode="r", *others, **named):
        if "w" in mode and Path(path).parent.name == "w":
            raise OSError(28, "No space left on device")
        return open(path, mode, *others, **named)

    (tmp_path / "a.gz").write_bytes(gzip.compress(b"abc"))
    (tmp_path / "a.jsonl").write_text('{"text": "x"}')
    monkeypatch.setattr(texts, "open", full, raising=False)
    for name in ("a.gz", "a.jsonl"):
        with pytest.raises(InputError, match="No space left on device; free some space, or give another --data-dir"):
            read(tmp_path / name, tmp_path / "w")
