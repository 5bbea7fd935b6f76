"""Texts and their splits, from files, folders, archives and Python's standard library.

corpus.py tokenises them; named_sets.py adds the papers' sets and those of the Hugging Face hub.
"""

import contextlib
import functools
import gzip
import hashlib
import io
import json
import lzma
import math
import os
import struct
import sysconfig
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby, pairwise
from pathlib import Path
from typing import NamedTuple

from accelerated.data.windows import SPLITS
from accelerated.program.errors import InputError

TEXT_SUFFIXES = (
    ".txt", ".text", ".raw", ".tokens", ".md", ".py", ".tex", ".c", ".h", ".rst", ".json", ".html", ".xml", ".csv", "",
)  # fmt: skip
ARCHIVE_SUFFIXES = (".jsonl", ".gz", ".zip")
SPLIT_NAMES = {"train": "train", "valid": "valid", "validation": "valid", "val": "valid", "dev": "valid", "test": "test"}
READ_SIZE = 1 << 20  # bytes read at a time
CONTINUING = bytes(range(0x80, 0xC0))  # bytes of a UTF-8 character after its first
ARCHIVE_ERRORS = (
    gzip.BadGzipFile, zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, EOFError, RuntimeError, ValueError,
)  # fmt: skip


class Text(NamedTuple):
    """A document before it is tokenised: bytes start .. stop - 1 of its joined files."""

    name: str
    files: tuple  # functions that each open one file for reading
    must_be_utf8: bool = True
    start: int = 0
    stop: float = math.inf


class Source(NamedTuple):
    """Texts and their splits."""

    name: str  # identifies the source, together with the state of its files
    files: tuple  # paths
    texts: Callable  # texts() yields (split, Text); read each Text before asking for the next


@contextlib.contextmanager
def read_errors(name: str) -> Iterator[None]:
    """Turn errors of reading a file or an archive into InputError."""
    try:
        yield
    except ARCHIVE_ERRORS as error:
        raise InputError(f"{name} is corrupt or not an archive ({error}); fetch it again, or leave it out") from None
    except OSError as error:
        raise InputError(f"cannot read {name}: {error.strerror or error}") from None


def read_bytes(text: Text, size: int = READ_SIZE) -> Iterator[bytes]:
    """Yield the bytes of a text, at most `size` at a time."""
    skip, left = text.start, text.stop - text.start
    for open_file in text.files:
        with read_errors(text.name), open_file() as file:
            if skip:
                skip -= file.seek(min(skip, file.seek(0, io.SEEK_END)))
            while left and (piece := file.read(min(size, left))):
                yield piece
                left -= len(piece)


def split_of(name: str) -> str:
    """The split of a document, by a hash of its name: 5% valid, 5% test, the rest train."""
    bucket = int.from_bytes(hashlib.sha256(name.encode(errors="surrogateescape")).digest()[:4], "big") % 20
    return {0: "test", 1: "valid"}.get(bucket, "train")


def parts_by_position(text: Text) -> Iterator[tuple[str, Text]]:
    """Yield a text's first 90% as train, the next 5% as valid and the rest as test; never cuts inside a character."""
    size, ends = sum(map(len, read_bytes(text))), [0]
    for percent in (90, 95):
        end = size * percent // 100
        after = b"".join(read_bytes(text._replace(start=end, stop=end + 3)))
        ends.append(end + len(after) - len(after.lstrip(CONTINUING)))
    for split, (start, stop) in zip(SPLITS, pairwise([*ends, size]), strict=True):
        yield split, text._replace(name=f"{text.name}:{split}", start=start, stop=stop)


def with_missing_splits(given: dict[str, Callable]) -> Iterator[tuple[str, Text]]:
    """Yield (split, Text) from {split: function that returns its texts}; splits that are not given are taken from train.

    Whole texts are taken by name (split_of) if that gives every split a text; otherwise each text is cut by position.
    """
    for split in [split for split in SPLITS[1:] if split in given]:
        yield from ((split, text) for text in given[split]())
    becomes = {split: "train" if split in given else split for split in SPLITS}  # {split_of(name): split that the text goes to}
    found = set()
    for text in given["train"]():
        found.add(becomes[split_of(text.name)])
        if by_name := found == set(becomes.values()):
            break
    for text in given["train"]():
        for split, part in [(split_of(text.name), text)] if by_name else parts_by_position(text):
            yield becomes[split], part


def splits_named(names: Iterable[str], data: str) -> dict[str, str]:
    """Return {split: name} for the names that mean a split; raises InputError if two names mean the same split."""
    found = {}
    for name in sorted(set(names) & SPLIT_NAMES.keys()):
        split = SPLIT_NAMES[name]
        if split in found:
            raise InputError(f"--data {data}: {found[split]} and {name} both name the {split} split; keep one of them")
        found[split] = name
    return found


def holds_text(name: str) -> bool:
    """Whether to read a file with this name from a folder or archive; not hidden files or macOS's additions to archives."""
    if any(part.startswith(".") or part == "__MACOSX" for part in Path(name).parts):
        return False
    suffix = Path(name).suffix.lower()
    return holds_text(Path(name).stem) if suffix == ".gz" else suffix in (*TEXT_SUFFIXES, *ARCHIVE_SUFFIXES)


def lines_of_json(name: str, open_file: Callable) -> Iterator[Text]:
    """Yield a Text for each line of a .jsonl file: the line's field `text`."""
    count = 0
    with read_errors(name), open_file() as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                content = json.loads(line)["text"].encode(errors="replace")  # JSON can hold half a surrogate pair
            except (ValueError, KeyError, TypeError, AttributeError):
                raise InputError(f"{name}, line {number}: not a JSON object with a string field `text`; correct it") from None
            count += 1
            yield Text(f"{name}:{count}", (functools.partial(io.BytesIO, content),))


def texts_in(name: str, open_file: Callable, kind: str | None = None) -> Iterator[Text]:
    """Yield the texts of a file: lines of a .jsonl, members of a .gz or .zip, or itself, by the suffix of `kind` or else name."""
    kind = kind or name
    suffix = Path(kind).suffix.lower()
    if suffix == ".gz":
        inside = Path(kind).stem
        if not holds_text(Path(kind).name):
            raise InputError(f"{name} holds a {Path(inside).suffix} file; give text, .jsonl or .zip in a .gz")
        yield from texts_in(name, lambda: gzip.GzipFile(fileobj=open_file()), inside)
    elif suffix == ".zip":
        with read_errors(name):
            archive = zipfile.ZipFile(open_file())  # stays open until its last text is deleted
            members = sorted(info.filename for info in archive.infolist() if not info.is_dir())
        for member in filter(holds_text, members):
            yield from texts_in(f"{name}:{member}", functools.partial(archive.open, member), member)
    elif suffix == ".jsonl":
        yield from lines_of_json(name, open_file)
    else:
        yield Text(name, (open_file,))


def joined_by_folder(texts: Iterable[Text], depth: int) -> Iterator[Text]:
    """Yield one Text per folder at that depth: its texts joined in order. A text above that depth stays as it is."""
    for name, group in groupby(texts, key=lambda text: "/".join(Path(text.name).parts[:depth])):
        yield Text(name, tuple(file for text in group for file in text.files), must_be_utf8=False)


def folders_with_splits(folder: Path, files: list[Path]) -> dict[str, str]:
    """Return {split: name of its subfolder}; empty if there is no train/ beside a valid/ or test/."""
    names = {path.relative_to(folder).parts[0] for path in files if path.parent != folder}
    found = splits_named(names, folder)
    if "train" not in found or len(found) == 1:
        return {}
    if beside := sorted(names - set(found.values())):
        raise InputError(
            f"--data {folder} has the splits {', '.join(found.values())} and also the folders {', '.join(beside)}; "
            f"move them into a split, or out of the folder"
        )
    return found


def source_of_path(data: str, documents: str = "files") -> Source:
    """The Source of a file or of a folder of files.

    One text is split 90/5/5 by position, several texts by their names. Subfolders train/, valid/ (or validation/, val/, dev/)
    and test/ of a folder are its splits. documents "folders" makes each subfolder one document.
    """
    path = Path(data)
    name = os.path.realpath(path) + (" by folders" if documents == "folders" else "")
    if path.is_file():
        read = functools.partial(texts_in, path.name, functools.partial(open, path, "rb"))
        return Source(name, (path,), lambda: with_missing_splits({"train": read}))
    files = sorted(p for p in path.rglob("*") if p.is_file() and holds_text(p.relative_to(path)))
    if not files:
        known = " ".join(suffix for suffix in (*TEXT_SUFFIXES, *ARCHIVE_SUFFIXES) if suffix)
        raise InputError(f"--data {data}: no text files in this folder; names should end in one of {known} or have no dot")
    splits = folders_with_splits(path, files)

    def texts_below(folder: Path) -> Iterator[Text]:
        below = (file for file in files if file.is_relative_to(folder))
        texts = (text for file in below for text in texts_in(str(file.relative_to(path)), functools.partial(open, file, "rb")))
        return joined_by_folder(texts, depth=2 if splits else 1) if documents == "folders" else texts

    given = {split: functools.partial(texts_below, path / below) for split, below in (splits or {"train": ""}).items()}
    return Source(name, tuple(files), lambda: with_missing_splits(given))


def standard_library(root: Path | None = None) -> Source:
    """The running Python's standard library: one document per top-level package or module, its files joined in sorted order.

    It leaves out site-packages, which is not part of the library; `test`, which is most of the text and not always installed;
    and _sysconfigdata, which differs between builds. Tests give another folder as root.
    """
    root = Path(root or sysconfig.get_paths()["stdlib"])
    files = {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).parts[0].removesuffix(".py")
        if name not in ("site-packages", "dist-packages", "test") and not name.startswith("_sysconfigdata"):
            files.setdefault(name, []).append(path)
    opened = {name: tuple(functools.partial(open, path, "rb") for path in paths) for name, paths in files.items()}
    texts = [(split_of(name), Text(name, parts, must_be_utf8=False)) for name, parts in opened.items()]
    return Source("stdlib", tuple(path for paths in files.values() for path in paths), lambda: texts)
