"""Odd and hostile files below --data: each is read within a limit or refused in a line, and nothing is written."""

import gzip
import io
import json
import os
import socket
import struct
from pathlib import Path

import pytest
from documents import as_zip, content

from accelerated.data import sources
from accelerated.data.config import DataConfig, check_data
from accelerated.data.corpus import cache_folder, tokenised
from accelerated.data.sources import source_of_path, undecodable
from accelerated.data.tokenizers import ByteTokenizer, train_bpe
from accelerated.program import unpacking
from accelerated.program.errors import InputError

BYTES = ByteTokenizer()
MEGABYTE = 1e-3  # as --unpacked-limit


def texts_of(path, **options):
    """Return {name: bytes} of a path's texts, before they are cut into splits."""
    return {text.name: content(text) for text in source_of_path(DataConfig(str(path), **options)).whole()}


def tokens_of(path, **options):
    """Tokenise a path in a folder beside it, and return the bytes of all documents."""
    path = Path(path)
    splits, _ = tokenised(source_of_path(DataConfig(str(path), **options)), BYTES, path.parent / "cache")
    return b"".join(bytes(documents.tokens) for documents in splits.values())


def refusal(call, *arguments, **options):
    """The message of the InputError that a call raises."""
    with pytest.raises(InputError) as caught:
        call(*arguments, **options)
    return str(caught.value)


def lying_zip(members, claimed):
    """A zip whose headers claim another size for each member than it has."""
    packed = bytearray(as_zip(members))
    for start, place in ((b"PK\x03\x04", 22), (b"PK\x01\x02", 24)):
        at = packed.find(start)
        while at >= 0:
            packed[at + place : at + place + 4] = struct.pack("<I", claimed)
            at = packed.find(start, at + 4)
    return bytes(packed)


@pytest.mark.parametrize("kind", ["x.txt.gz", "x.zip", "in zip.zip", "in gz.zip.gz", "gz in zip.zip", "gz in gz.txt.gz.gz"])
def test_an_archive_that_unpacks_to_more_than_the_limit_is_refused(tmp_path, kind):
    zeros = bytes(1_100_000)
    packed = {
        "x.txt.gz": gzip.compress(zeros), "x.zip": as_zip({"a.txt": zeros[:600_000], "b.txt": zeros[:600_000]}),
        "in zip.zip": as_zip({"i.zip": as_zip({"a.txt": zeros})}), "in gz.zip.gz": gzip.compress(as_zip({"a.txt": zeros})),
        "gz in zip.zip": as_zip({f"{i}.txt.gz": gzip.compress(zeros[:400_000]) for i in range(3)}),
        "gz in gz.txt.gz.gz": gzip.compress(gzip.compress(zeros)),
    }  # fmt: skip
    (tmp_path / kind).write_bytes(packed[kind])
    message = refusal(tokens_of, tmp_path / kind, unpacked_limit=MEGABYTE)
    assert message == (f"{kind} unpacks to more than 0.001 GB; give a larger --unpacked-limit if that is right, or leave it out")
    assert set(tokens_of(tmp_path / kind, unpacked_limit=3 * MEGABYTE)) == {0}


def test_a_limit_counts_what_is_read_once_however_often_it_is_read(tmp_path):
    """A text is read several times to be cut by position."""
    (tmp_path / "x.txt.gz").write_bytes(gzip.compress(bytes(999_000)))
    assert len(tokens_of(tmp_path / "x.txt.gz", unpacked_limit=MEGABYTE)) == 999_000


def test_a_zips_declared_sizes_are_added_up_before_it_is_unpacked(tmp_path, monkeypatch):
    """Those of its texts, not of pictures beside them."""
    monkeypatch.setattr(sources, "open_member", lambda *_: pytest.fail("unpacked"))
    (tmp_path / "x.zip").write_bytes(as_zip({"a.txt": bytes(600_000), "b.txt": bytes(600_000), "c.png": bytes(5_000_000)}))
    assert "unpacks to more than 0.001 GB" in refusal(tokens_of, tmp_path / "x.zip", unpacked_limit=MEGABYTE)
    data = DataConfig(str(tmp_path / "x.zip"), unpacked_limit=2 * MEGABYTE)
    assert [text.name for text in source_of_path(data).whole()] == ["x.zip:a.txt", "x.zip:b.txt"]


def test_the_limit_is_seen_before_all_is_unpacked(tmp_path, monkeypatch):
    """A gzip of zeros is a thousandth of what it unpacks to."""
    (tmp_path / "x.txt.gz").write_bytes(gzip.compress(bytes(50_000_000)))
    read, plain = [0], unpacking.UnpackedFile.readinto
    monkeypatch.setattr(unpacking.UnpackedFile, "readinto", lambda file, buffer: read.append(plain(file, buffer)) or read[-1])
    assert "unpacks to more than" in refusal(tokens_of, tmp_path / "x.txt.gz", unpacked_limit=MEGABYTE)
    assert sum(read) <= 1_000_000
    file = unpacking.Unpacked("x", MEGABYTE).open(gzip.GzipFile(tmp_path / "x.txt.gz"), ())
    assert "unpacks to more than" in refusal(file.seek, 0, io.SEEK_END)
    assert file.raw.file.tell() < 1_100_000, "nor does a seek to the end go there unseen"


@pytest.mark.parametrize("claimed", [10, 4_000_000_000])
def test_a_zip_that_lies_about_sizes_is_refused(tmp_path, claimed):
    (tmp_path / "x.zip").write_bytes(lying_zip({"a.txt": bytes(2_000_000)}, claimed))
    message = refusal(tokens_of, tmp_path / "x.zip", unpacked_limit=MEGABYTE)
    assert ("is corrupt or not an archive" in message) if claimed == 10 else ("unpacks to more than 0.001 GB" in message)


def test_archives_are_unpacked_a_little_at_a_time():
    """zipfile's bzip2 and LZMA unpack all of the packed bytes that a read takes, to thousands of times as many."""
    asked = []

    class Packed(io.BytesIO):
        def read(self, size=-1):
            asked.append(size)
            return super().read(size)

    assert len(unpacking.Unpacked("x", 1.0).open(Packed(bytes(10**6)), ()).read(10**6)) == 10**6
    assert 0 < min(asked) <= max(asked) <= 4096


def test_members_outside_of_the_archive_are_not_written(tmp_path):
    before = os.getcwd(), sorted(Path().iterdir())
    path = tmp_path / "in" / "x.zip"
    path.parent.mkdir()
    path.write_bytes(as_zip({"/absolute.txt": b"one", "../above.txt": b"two", "deep/../../up.txt": b"three", "a.txt": b"four"}))
    assert set(texts_of(path)) >= {"x.zip:a.txt"}
    assert [p.name for p in tmp_path.iterdir()] == ["in"] and [p.name for p in path.parent.iterdir()] == ["x.zip"]
    assert (os.getcwd(), sorted(Path().iterdir())) == before and not Path("/absolute.txt").exists()


def test_archives_inside_archives_end_somewhere(tmp_path):
    packed = b"a text"
    for depth in range(12):
        packed = as_zip({f"{depth}.zip" if depth else "a.txt": packed})
        (tmp_path / f"{depth}.zip").write_bytes(packed)
    assert list(texts_of(tmp_path / "7.zip").values()) == [b"a text"]
    assert "holds more than 8 archives inside one another; unpack it" in refusal(texts_of, tmp_path / "8.zip")
    (tmp_path / ("a.txt" + 12 * ".gz")).write_bytes(b"")
    assert "archives inside one another" in refusal(texts_of, tmp_path / ("a.txt" + 12 * ".gz"))


@pytest.mark.parametrize("line", [b"[" * 200_000, b'{"text":' * 200_000, b"9" * 10_000, b'{"text": 9e999}', b"\xff\xfe{", b"\0"])
def test_a_hostile_json_line_is_refused(tmp_path, line):
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "good"}\n' + line + b"\n")
    assert "x.jsonl, line 2: not a JSON object with a string field `text`" in refusal(texts_of, tmp_path / "x.jsonl")


def test_half_a_surrogate_pair_and_a_byte_order_mark_in_json_are_read(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b"\xef\xbb\xbf" + json.dumps({"text": "a\ud800"}).encode() + b"\n")
    assert list(texts_of(tmp_path / "x.jsonl").values()) == [b"a?"]


def test_nul_bytes_and_a_byte_order_mark_are_text(tmp_path):
    (tmp_path / "nul.txt").write_bytes(bytes(4000))
    assert tokens_of(tmp_path / "nul.txt") == bytes(4000)
    (tmp_path / "mark.txt").write_bytes(b"\xef\xbb\xbfwords " * 9)
    assert tokens_of(tmp_path / "mark.txt").startswith(b"\xef\xbb\xbf")
    assert tokens_of(tmp_path / "mark.txt", encoding="utf-8-sig").startswith(b"words")


def test_what_is_no_file_is_left_out_of_a_folder(tmp_path, monkeypatch):
    """A pipe would be waited for without end."""
    folder = tmp_path / "in"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.txt").write_text("words " * 99)
    os.mkfifo(folder / "pipe.txt")
    (folder / "broken.txt").symlink_to(folder / "nowhere")
    (folder / "self.txt").symlink_to(folder / "self.txt")
    (folder / "sub" / "loop").symlink_to(folder)
    monkeypatch.chdir(folder)  # a socket's path must be short
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("socket.txt")
        assert list(texts_of(folder)) == ["a.txt"]
    assert "cannot read" in refusal(texts_of, folder / "pipe.txt")


def test_names_may_be_any_bytes(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    for name in (b"caf\xe9.txt", b"two\nlines.txt", b" .txt", b"-rf.txt", b"\x1b[31m.txt"):
        (folder / os.fsdecode(name)).write_bytes(b"words " * 40)
    assert len(texts_of(folder)) == 5 and len(tokens_of(folder)) == 5 * 240
    (tmp_path / os.fsdecode(b"\xff\n.txt")).write_bytes(b"words " * 40)
    assert len(tokens_of(tmp_path / os.fsdecode(b"\xff\n.txt"))) == 240


def test_a_file_that_vanishes_is_refused(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    for name in "abc":
        (folder / f"{name}.txt").write_text("words " * 99)
    found = source_of_path(DataConfig(str(folder)))
    (folder / "b.txt").unlink()
    assert f"cannot read {folder}/b.txt: No such file" in refusal(tokenised, found, BYTES, tmp_path / "cache")
    texts = found.texts()
    assert "cannot read b.txt: No such file" in refusal(lambda: [content(text) for _, text in texts])


def test_an_unreadable_folder_is_named(tmp_path, monkeypatch):
    folder, listing = tmp_path / "in", os.scandir
    (folder / "closed").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    (folder / "a.txt").write_text("words " * 99)

    def scandir(path):
        if os.path.basename(path) in ("closed", ".hidden"):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return listing(path)

    monkeypatch.setattr(os, "scandir", scandir)
    message = refusal(texts_of, folder)
    assert message == f"cannot read {folder}/closed: Permission denied; make it readable, or move it out of --data"


def test_all_files_that_are_not_utf_8_are_named_at_once(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    for i in range(40):
        (folder / f"{i:02}.txt").write_bytes(b"words " * i + (b"caf\xe9 au lait" if i % 3 == 0 else b"x"))
    message = refusal(tokens_of, folder)
    assert message.startswith("14 files are not UTF-8 text: 00.txt (byte 3), 03.txt (byte 21), 06.txt (byte 39), ")
    assert message.endswith(", 27.txt (byte 165) and 4 more; give --encoding NAME, or --skip-undecodable to leave such files out")
    assert refusal(train_bpe, source_of_path(DataConfig(str(folder))), 300) == message, "and before tokens are learned"
    for i in range(3, 40, 3):
        (folder / f"{i:02}.txt").unlink()
    assert "1 file is not UTF-8 text: 00.txt (byte 3); give" in refusal(tokens_of, folder)


def test_files_that_are_not_utf_8_can_be_left_out(tmp_path, capsys):
    folder = tmp_path / "in"
    folder.mkdir()
    for i in range(9):
        (folder / f"{i}.txt").write_bytes(b"words %d " % i * 9 + (b"\xe9" if i % 4 == 1 else b""))
    joined = tokens_of(folder, skip_undecodable=True)
    assert capsys.readouterr().err == "left out 2 files that are not UTF-8 text; the first is 1.txt\n"
    assert len(joined) == 7 * 72 and b"words 1" not in joined and b"words 5" not in joined


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16", "cp1252", "shift_jis", "utf-8-sig"])
def test_files_are_read_in_the_encoding_that_is_named(tmp_path, monkeypatch, encoding):
    """In pieces of any size, cut by position, and through archives."""
    written = "\N{KATAKANA LETTER A}\r\n line" if encoding == "shift_jis" else "caf\xe9\r\n au lait"
    text = written * 300
    (tmp_path / "a.txt").write_bytes(text.encode(encoding))
    (tmp_path / "a.zip").write_bytes(as_zip({"m.txt.gz": gzip.compress(text.encode(encoding))}))
    for size in (7, 1 << 20):
        monkeypatch.setattr(sources, "READ_SIZE", size)
        for name in ("a.txt", "a.zip"):
            assert tokens_of(tmp_path / name, encoding=encoding) == text.encode()
    data = DataConfig(str(tmp_path / "a.txt"), encoding=encoding)
    folder = cache_folder(source_of_path(data), BYTES, tmp_path)
    assert folder != cache_folder(source_of_path(DataConfig(data.data)), BYTES, tmp_path), "it has tokens of its own"


def test_a_json_line_is_utf_8_whatever_the_encoding(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.txt").write_bytes("caf\xe9".encode("latin-1"))
    (folder / "b.jsonl").write_bytes(json.dumps({"text": "caf\xe9"}, ensure_ascii=False).encode())
    assert set(texts_of(folder, encoding="latin-1").values()) == {"caf\xe9".encode()}


def test_files_in_another_encoding_than_the_named_one_are_refused(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    for name, text in (("a", "caf\xe9".encode("utf-16")), ("b", b"odd"), ("c", b"\xff\xfe\x00\xd8"), ("d", b"")):
        (folder / f"{name}.txt").write_bytes(text)
    assert "2 files are not UTF-16 text: b.txt, c.txt; give --encoding NAME" in refusal(tokens_of, folder, encoding="utf-16")
    joined = refusal(tokens_of, folder, encoding="ascii", documents="folders")
    assert "2 files are not ASCII text: a.txt, c.txt; give" in joined, "files are named, not the folders they are joined in"
    assert tokens_of(folder, encoding="utf-16", skip_undecodable=True) == "caf\xe9".encode()


def test_other_suffixes_are_read_if_they_are_asked_for(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    for name in ("a.rs", "b.GO", "c.txt", "d", ".e.rs"):
        (folder / name).write_text(f"text of {name}")
    (folder / "f.rs.gz").write_bytes(gzip.compress(b"text of f"))
    (folder / "g.zip").write_bytes(as_zip({"h.rs": b"text of h", "i.txt": b"text of i"}))
    assert list(texts_of(folder)) == ["c.txt", "d", "g.zip:i.txt"]
    assert list(texts_of(folder, suffixes=".rs,.go")) == ["a.rs", "b.GO", "f.rs.gz"]
    assert list(texts_of(folder, suffixes=".zip,.rs")) == ["a.rs", "f.rs.gz", "g.zip:h.rs"]
    assert list(texts_of(folder / "f.rs.gz", suffixes=".rs")) == ["f.rs.gz"]
    assert "holds a .rs file; give text, .jsonl or .zip in a .gz, or name it in --suffixes" in refusal(
        texts_of, folder / "f.rs.gz"
    )
    message = refusal(texts_of, folder, suffixes=".hs")
    assert "no text files in this folder; names should end in one of .hs; see --suffixes" in message
    chosen = [DataConfig(str(folder), suffixes=suffixes) for suffixes in ("", ".rs", ".rs,.go")]
    assert len({cache_folder(source_of_path(data), BYTES, tmp_path) for data in chosen}) == 3


@pytest.mark.parametrize(
    "field,values,words",
    [
        ("encoding", ["utf-9", "hex", "rot13", "", "a\0b", "undefined"], "it must be a text encoding of Python"),
        ("suffixes", ["rs", ".rs,", ".d.ts", ".rs, .go", "./a", ".a/b"], "it must be suffixes joined by commas, such as .rs,.go"),
        ("unpacked_limit", [0.0, -1.0, float("nan")], "it must be above 0 gigabytes"),
    ],
)
def test_impossible_values_are_refused_by_name(field, values, words):
    for value in values:
        with pytest.raises(ValueError, match=f"^{field} is .*{words}"):
            DataConfig(**{field: value})


def test_how_files_are_read_says_nothing_about_a_named_set():
    for option in ({"encoding": "latin-1"}, {"skip_undecodable": True}, {"suffixes": ".rs"}, {"unpacked_limit": 1.0}):
        name = next(iter(option)).replace("_", "-")
        message = refusal(check_data, DataConfig("stdlib", **option))
        assert message == f"--{name} says how files are read, and --data stdlib has its own way; leave it out"


def test_a_long_text_is_checked_and_recoded_in_pieces(tmp_path, monkeypatch):
    """No read takes more than a piece, so that memory stays bounded."""
    (tmp_path / "a.txt").write_bytes("caf\xe9 ".encode("latin-1") * 400_000)
    asked, plain = [], io.TextIOWrapper.read

    class Watched(io.TextIOWrapper):
        def read(self, size=-1):
            asked.append(size)
            return plain(self, size)

    monkeypatch.setattr(unpacking.io, "TextIOWrapper", Watched)
    whole = source_of_path(DataConfig(str(tmp_path / "a.txt"), encoding="latin-1")).whole
    assert not list(undecodable(whole())) and asked and max(asked) <= sources.READ_SIZE and min(asked) > 0
