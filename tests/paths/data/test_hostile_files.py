"""Odd and hostile files below --data: each is read or refused in a line, and nothing is written."""

import functools
import os
import socket
from pathlib import Path

import pytest

from accelerated.data import sources
from accelerated.data.config import DataConfig
from accelerated.data.corpus import tokenised
from accelerated.data.sources import Text, read_bytes, source_of_path
from accelerated.data.tokenizers import ByteTokenizer, train_bpe, train_words
from accelerated.program.errors import InputError
from tests.helpers.texts import content

BYTES = ByteTokenizer()


def tokens_of(path, **options):
    """Tokenise a path in a folder beside it, and return the bytes of all documents."""
    path = Path(path)
    splits, _ = tokenised(source_of_path(DataConfig(str(path), **options)), BYTES, path.parent / "cache")
    return b"".join(bytes(documents.tokens) for documents in splits.values())


def refusal(call, *arguments, **options):
    """The message of the InputError that a call raises."""
    with pytest.raises(InputError) as caught:
        call(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_nul_bytes_are_text(tmp_path):
    (tmp_path / "nul.txt").write_bytes(bytes(4000))
    assert tokens_of(tmp_path / "nul.txt") == bytes(4000)


def test_a_byte_order_mark_is_dropped_and_said_once(tmp_path, capsys):
    """Of a single file, wherever it is cut, and of the files of a folder; elsewhere in a text it stays."""
    mark, text = b"\xef\xbb\xbf", "wörds ".encode() * 300
    (tmp_path / "in").mkdir()
    for name in ("in/a.txt", "in/b.txt", "c.txt"):
        (tmp_path / name).write_bytes(mark + text + mark)
    sources.say_once.cache_clear()
    assert tokens_of(tmp_path / "c.txt") == text + mark
    assert len(tokens_of(tmp_path / "in")) == 2 * len(text + mark)
    assert capsys.readouterr().err.splitlines() == ["files begin with a byte-order mark, which is no text and is dropped"]


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
        assert source_of_path(DataConfig(str(folder))).files == (folder / "a.txt",)
    assert "no file in this folder" in refusal(source_of_path, DataConfig(str(folder / "pipe.txt")))


def test_names_may_be_any_bytes(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    for name in (b"caf\xe9.txt", b"two\nlines.txt", b" .txt", b"-rf.txt", b"\x1b[31m.txt"):
        (folder / os.fsdecode(name)).write_bytes(b"words " * 40)
    assert len(tokens_of(folder)) == 5 * 240
    (tmp_path / os.fsdecode(b"\xff\n.txt")).write_bytes(b"words " * 40)
    assert len(tokens_of(tmp_path / os.fsdecode(b"\xff\n.txt"))) == 240


def test_a_file_that_vanishes_is_refused(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    for name in "abc":
        (folder / f"{name}.txt").write_text("words " * 99)
    source = source_of_path(DataConfig(str(folder)))
    (folder / "b.txt").unlink()
    message = f"cannot read {folder}/b.txt: No such file or directory; give another --data"
    assert refusal(tokenised, source, BYTES, tmp_path / "cache") == message
    assert refusal(lambda: [content(text) for _, text in source.texts()]) == message


@pytest.mark.parametrize("size", [1, 3, 1 << 20])
@pytest.mark.parametrize(
    ("text", "place"),
    [(b"caf\xe9 au lait", 3), ("née ".encode() + b"\xff", 5), ("née".encode()[:2], 1), (b"ab" * 40 + b"\xc3", 80)],
)
def test_a_file_that_is_not_utf_8_is_refused_with_its_place(tmp_path, size, text, place):
    """In pieces of any size: a character that a piece cuts off is whole in the text."""
    (tmp_path / "a.txt").write_bytes(text)
    read = Text("a.txt", (functools.partial(open, tmp_path / "a.txt", "rb"),))
    wrong = f"a.txt is not UTF-8 text (byte {place}); convert it, or move it out of --data"
    assert refusal(lambda: list(read_bytes(read, size))) == wrong
    assert b"".join(read_bytes(read._replace(must_be_utf8=False), size)) == text


def test_learning_tokens_refuses_what_is_not_utf_8(tmp_path):
    for split, text in (("train", b"words " * 90 + b"\xe9"), ("valid", b"x"), ("test", b"y")):
        (tmp_path / "in" / split).mkdir(parents=True)
        (tmp_path / "in" / split / "a.txt").write_bytes(text)
    source = source_of_path(DataConfig(str(tmp_path / "in")))
    for learn, vocabulary in ((train_bpe, 257), (train_words, 3)):
        assert refusal(learn, source, vocabulary).startswith("train/a.txt is not UTF-8 text (byte 540); convert it")
    assert refusal(tokens_of, tmp_path / "in").startswith("train/a.txt is not UTF-8 text (byte 540); convert it")
