"""A cache of tokens is refused if a bit of it changes, can be read by a group, and is replaced by nobody but its owner."""

import json
import os
import random
import shutil
import tempfile
import time
from pathlib import Path

import pytest
from filelock import FileLock

from accelerated.data import corpus as token_cache
from accelerated.data.config import DataConfig
from accelerated.data.corpus import FILES, cache_folder, tokenised
from accelerated.data.sources import source_of_path
from accelerated.data.tokenizers import ByteTokenizer
from accelerated.program import sharing
from accelerated.program.errors import InputError

BYTES = ByteTokenizer()


@pytest.fixture
def book(tmp_path):
    """The DataConfig of a text."""
    path = tmp_path / "book.txt"
    path.write_text("some words of a book. " * 50)
    return DataConfig(str(path))


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The folder for caches of this user's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "palimpsest"


def read(book, data_dir):
    return tokenised(source_of_path(book), BYTES, data_dir)


def folder_of(book, data_dir):
    return cache_folder(source_of_path(book), BYTES, data_dir)


def flip(path, bit):
    """Flip a bit of a file, which keeps its size and its time of modification; returns its content before."""
    before, stat = path.read_bytes(), path.stat()
    content = bytearray(before)
    content[bit // 8] ^= 1 << bit % 8
    time.sleep(0.02)  # a clock's tick
    with path.open("rb+") as file:
        file.write(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    return before


def contents_below(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
def test_a_flipped_bit_is_refused_although_the_cache_was_verified(book, tmp_path, monkeypatch, name):
    monkeypatch.setattr(sharing, "SETTLED", -1.0)
    digest, folder = read(book, tmp_path / "cache").digest, folder_of(book, tmp_path / "cache")
    size, rng = 8 * (folder / name).stat().st_size, random.Random(name)
    for bit in {0, size - 1, *(rng.randrange(size) for _ in range(8))}:
        assert read(book, tmp_path / "cache").digest == digest and (folder / "verified.json").exists()
        before = flip(folder / name, bit)
        with pytest.raises(InputError) as caught:
            read(book, tmp_path / "cache")
        assert str(caught.value).startswith(f"{folder} is damaged (the checksum of {name} is wrong); remove that folder and it")
        (folder / name).write_bytes(before)


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_missing_or_cut_off_is_refused(book, tmp_path, name):
    read(book, tmp_path / "cache")
    path = folder_of(book, tmp_path / "cache") / name
    os.truncate(path, path.stat().st_size - 1)
    for change in (lambda: None, path.unlink):
        change()
        with pytest.raises(InputError, match=f"the checksum of {name} is wrong"):
            read(book, tmp_path / "cache")


def test_a_damaged_manifest_of_any_form_is_refused(book, tmp_path):
    read(book, tmp_path / "cache")
    path = folder_of(book, tmp_path / "cache") / "manifest.json"
    right = json.loads(path.read_text())
    for text in ("", "[1]", "{}", "[" * 100_000, json.dumps(right | {"dtype": "int8"}), json.dumps(right, indent=1)):
        path.write_text(text)
        with pytest.raises(InputError, match=r"the checksum of manifest.json is wrong"):
            read(book, tmp_path / "cache")


def test_files_are_verified_once_and_again_when_they_are_touched(book, tmp_path, monkeypatch):
    found, checksum = [], sharing.file_checksum
    monkeypatch.setattr(sharing, "file_checksum", lambda path, **told: found.append(path.name) or checksum(path, **told))
    monkeypatch.setattr(sharing, "SETTLED", -1.0)
    read(book, tmp_path / "cache")
    assert sorted(found) == sorted(FILES)
    read(book, tmp_path / "cache")
    assert len(found) == len(FILES)
    folder = folder_of(book, tmp_path / "cache")
    os.utime(folder / "train.tokens")
    read(book, tmp_path / "cache")
    assert found[len(FILES) :] == ["train.tokens"]
    for damage in ("", "[3]", "{", '{"train.tokens": 3}', "[" * 100_000):
        (folder / "verified.json").write_text(damage)
        read(book, tmp_path / "cache")
    assert len(found) == 6 * len(FILES) + 1, "what was verified is not believed if it cannot be read"


def test_a_file_that_has_just_been_written_is_read_again(book, tmp_path, monkeypatch):
    """Its time of change would not show a second change in the same tick of the clock."""
    read(book, tmp_path / "cache")
    assert json.loads((folder_of(book, tmp_path / "cache") / "verified.json").read_text()) == {}


def test_caches_are_readable_by_the_group_whatever_the_umask(book, tmp_path, monkeypatch):
    monkeypatch.setattr(sharing, "SETTLED", -1.0)
    before = os.umask(0o077)
    try:
        read(book, tmp_path / "deep" / "cache")
    finally:
        os.umask(before)
    made = [path for path in (tmp_path / "deep", *(tmp_path / "deep").rglob("*")) if path.suffix != ".lock"]
    assert len(made) == 4 + len(FILES) + 2
    for path in made:
        wanted = 0o050 if path.is_dir() else 0o040
        assert path.stat().st_mode & 0o077 == wanted, path


def test_anothers_cache_is_used_if_it_is_current_and_never_replaced(book, tmp_path, home, monkeypatch, capsys):
    first = read(book, tmp_path / "cache").digest
    (folder_of(book, tmp_path / "cache") / "verified.json").unlink()
    before = contents_below(tmp_path / "cache")
    monkeypatch.setattr(sharing.os, "geteuid", lambda: os.getuid() + 1)
    assert read(book, tmp_path / "cache").digest == first and not home.exists()
    Path(book.data).write_text("another text " * 90)
    monkeypatch.setattr(sharing, "is_own", lambda path: home in path.parents)
    monkeypatch.setattr(token_cache, "is_own", sharing.is_own)
    second = read(book, tmp_path / "cache").digest
    assert second != first and contents_below(tmp_path / "cache") == before
    own = folder_of(book, home)
    assert f"may not write it; the tokens are kept in {own}\n" in capsys.readouterr().err
    monkeypatch.setattr(token_cache, "write_tokens", lambda *_: pytest.fail("made again"))
    assert read(book, tmp_path / "cache").digest == second and str(own) in capsys.readouterr().err


def test_where_no_folder_may_be_written_one_line_says_so(book, tmp_path, home, monkeypatch):
    read(book, home)
    monkeypatch.setattr(token_cache, "is_own", lambda path: False)
    Path(book.data).write_text("another text " * 90)
    with pytest.raises(InputError, match="is missing or outdated, and this user may not write it; give another --data-dir"):
        read(book, home)
    monkeypatch.setattr(sharing.os, "access", lambda path, mode: False)
    with pytest.raises(InputError, match="this user may not write it; give another --data-dir") as caught:
        read(book, tmp_path / "cache")
    assert "\n" not in str(caught.value) and not (tmp_path / "cache").exists()


def test_a_folder_that_may_not_be_written_is_replaced_by_the_users_own(book, tmp_path, home, monkeypatch):
    (tmp_path / "cache").mkdir()
    access = os.access
    refused = tmp_path / "cache"
    monkeypatch.setattr(sharing.os, "access", lambda path, mode: Path(path) != refused and access(path, mode))
    read(book, tmp_path / "cache")
    assert folder_of(book, home).is_dir() and not list(refused.iterdir())


@pytest.mark.skipif(not hasattr(os, "fork") or os.geteuid() != 0, reason="only root can become another user; run it as root")
def test_another_user_reads_a_cache_and_makes_his_own_when_it_is_outdated():
    """In a folder that all may enter, and that root has made; 65534 is nobody."""
    place = Path(tempfile.mkdtemp())
    try:
        book = DataConfig(str(place / "book.txt"))
        (place / "book.txt").write_text("some words of a book. " * 50)
        read(book, place / "cache")
        for folder in (place, place / "cache", place / "cache" / "tokens", folder_of(book, place / "cache")):
            folder.chmod(0o755)
        for path in folder_of(book, place / "cache").iterdir():
            path.chmod(0o644)
        (place / "home").mkdir()
        os.chown(place / "home", 65534, 65534)
        before = contents_below(place / "cache")
        assert in_place_of_nobody(place, book) == 0 and not list((place / "home").iterdir())
        (place / "book.txt").write_text("another text " * 90)
        assert in_place_of_nobody(place, book) == 0 and (place / "home" / "palimpsest" / "tokens").is_dir()
        assert contents_below(place / "cache") == before
    finally:
        shutil.rmtree(place)


def in_place_of_nobody(place, book):
    """Read the tokens in a process of another user; returns its exit code."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            os.environ["XDG_CACHE_HOME"] = str(place / "home")
            splits, _ = read(book, place / "cache")
            text = Path(book.data).read_bytes()
            code = int(bytes(splits["train"].tokens) != text[: len(text) * 90 // 100])
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_what_killed_processes_left_is_removed_when_a_cache_is_made(book, tmp_path):
    tokens = tmp_path / "cache" / "tokens"
    for name, file in (("left", "train.tokens.writing"), ("busy", "train.tokens.writing"), ("notes", "thoughts.txt")):
        (tokens / name).mkdir(parents=True)
        (tokens / name / file).write_text("half")
        (tokens / f"{name}.lock").touch()
    (tokens / "no-lock").mkdir()
    with FileLock(tokens / "busy.lock"):
        read(book, tmp_path / "cache")
    kept = {path.name for path in tokens.iterdir() if path.is_dir()}
    assert kept == {"busy", "notes", "no-lock", folder_of(book, tmp_path / "cache").name}
    assert (tokens / "notes" / "thoughts.txt").exists() and not list(folder_of(book, tmp_path / "cache").glob("*.writing"))
