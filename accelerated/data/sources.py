"""Where texts come from and which split each belongs to: files, folders, archives and Python's own source.

corpus.py tokenises them; named_sets.py adds the sets that have a name.
"""

import contextlib
import difflib
import functools
import gzip
import hashlib
import io
import json
import lzma
import math
import struct
import sysconfig
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby, pairwise
from pathlib import Path
from typing import NamedTuple

from accelerated.data.windows import SPLITS
from accelerated.errors import InputError

TEXT_SUFFIXES = (
    ".txt", ".text", ".raw", ".tokens", ".md", ".py", ".tex", ".c", ".h", ".rst", ".json", ".html", ".xml", ".csv", "",
)  # fmt: skip
ARCHIVE_SUFFIXES = (".jsonl", ".gz", ".zip")
SPLIT_NAMES = {"train": "train", "valid": "valid", "validation": "valid", "val": "valid", "dev": "valid", "test": "test"}
READ_SIZE = 1 << 20  # bytes read at a time
ARCHIVE_ERRORS = (
    gzip.BadGzipFile, zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, EOFError, RuntimeError, ValueError,
)  # fmt: skip


class Text(NamedTuple):
    """A document before it is tokenised: bytes start .. stop - 1 of its files, read one after another."""

    name: str
    files: tuple  # functions that open each of them for reading
    must_be_utf8: bool = True
    start: int = 0
    stop: float = math.inf


class Source(NamedTuple):
    """Texts and the splits that they belong to."""

    name: str
    files: tuple  # paths of the files whose change makes it another source
    texts: Callable  # texts() yields (split, Text); each Text is read before the next is asked for
    documents: str = "files"  # or "folders": what was made one document


@contextlib.contextmanager
def read_errors(name: str) -> Iterator[None]:
    """Turn the errors of a file or an archive that cannot be read, inside, into InputError."""
    try:
        yield
    except ARCHIVE_ERRORS as error:
        raise InputError(f"{name} is corrupt or no archive ({error}); fetch it again, or leave it out") from None
    except OSError as error:
        raise InputError(f"cannot read {name}: {error.strerror or error}") from None


def read_bytes(text: Text, size: int = READ_SIZE) -> Iterator[bytes]:
    """The bytes of a text, at most `size` at a time."""
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


def character_start(text: Text, at: int) -> int:
    """The first place from byte `at` on where a UTF-8 character begins."""
    following = b"".join(read_bytes(text._replace(start=at, stop=at + 3)))
    return at + next((i for i, byte in enumerate(following) if not 0x80 <= byte < 0xC0), len(following))


def parts_by_position(text: Text) -> Iterator[tuple[str, Text]]:
    """A text cut 90/5/5 into a train, a valid and a test document; no character is cut in two."""
    size = sum(map(len, read_bytes(text)))
    ends = [0, *(character_start(text, size * percent // 100) for percent in (90, 95)), size]
    for split, (start, stop) in zip(SPLITS, pairwise(ends), strict=True):
        yield split, text._replace(name=f"{text.name}:{split}", start=start, stop=stop)


def dealt(own: dict[str, Callable]) -> Iterator[tuple[str, Text]]:
    """(split, Text) of {split: function that gives its texts}; a split that is not there is cut out of train.

    It is cut by names (split_of) if they give every split a text, otherwise every text is cut by position.
    """
    for split in SPLITS[1:]:
        yield from ((split, text) for text in (own[split]() if split in own else ()))
    missing, found = set(SPLITS) - own.keys(), set()

    def to_be(split: str) -> str:
        return split if split in missing else "train"

    by_name = any(found.add(to_be(split_of(text.name))) or len(found) == 1 + len(missing) for text in own["train"]())
    for text in own["train"]():
        for split, part in [(split_of(text.name), text)] if by_name else parts_by_position(text):
            yield to_be(split), part


def splits_named(names: Iterable[str], data: str) -> dict[str, str]:
    """{split: name} of those names that mean a split; InputError if two mean the same."""
    found = {}
    for name in sorted(set(names) & SPLIT_NAMES.keys()):
        split = SPLIT_NAMES[name]
        if split in found:
            raise InputError(f"--data {data}: {found[split]} and {name} both name the {split} split; keep one of them")
        found[split] = name
    return found


def holds_text(name: str) -> bool:
    """Whether a file of that name in a folder or an archive is read; hidden files never are, nor what macOS adds to archives."""
    if any(part.startswith(".") or part == "__MACOSX" for part in Path(name).parts):
        return False
    suffix = Path(name).suffix.lower()
    return holds_text(Path(name).stem) if suffix == ".gz" else suffix in (*TEXT_SUFFIXES, *ARCHIVE_SUFFIXES)


def lines_of_json(name: str, open_file: Callable) -> Iterator[Text]:
    """A Text for the field `text` of each line of a .jsonl file."""
    count = 0
    with read_errors(name), open_file() as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                content = json.loads(line)["text"].encode(errors="replace")  # JSON can hold halves of characters
            except (ValueError, KeyError, TypeError, AttributeError):
                raise InputError(f"{name}, line {number}: not a JSON object with a string field `text`; mend the line") from None
            count += 1
            yield Text(f"{name}:{count}", (functools.partial(io.BytesIO, content),))


def texts_in(name: str, open_file: Callable, kind: str | None = None) -> Iterator[Text]:
    """The texts of a file, by its name or `kind`: a .jsonl's lines, what a .gz or .zip holds, or the file itself."""
    kind = kind or name
    suffix = Path(kind).suffix.lower()
    if suffix == ".gz":
        inside = Path(kind).stem
        if not holds_text(Path(kind).name):
            raise InputError(f"{name} holds a {Path(inside).suffix} file; give text, .jsonl or .zip in a .gz")
        yield from texts_in(name, lambda: gzip.GzipFile(fileobj=open_file()), inside)
    elif suffix == ".zip":
        with read_errors(name):
            archive = zipfile.ZipFile(open_file())  # stays open as long as one of its texts
            members = sorted(info.filename for info in archive.infolist() if not info.is_dir())
        for member in filter(holds_text, members):
            yield from texts_in(f"{name}:{member}", functools.partial(archive.open, member), member)
    elif suffix == ".jsonl":
        yield from lines_of_json(name, open_file)
    else:
        yield Text(name, (open_file,))


def joined_by_folder(texts: Iterable[Text], depth: int) -> Iterator[Text]:
    """A Text for each folder at that depth, of its texts in their order; a text that lies above stays by itself."""
    for name, group in groupby(texts, key=lambda text: "/".join(Path(text.name).parts[:depth])):
        yield Text(name, tuple(file for text in group for file in text.files), must_be_utf8=False)


def folders_with_splits(folder: Path, files: list[Path]) -> dict[str, str]:
    """{split: name of the folder directly below that holds it}; empty if there is no train/ beside valid/ or test/."""
    names = {path.relative_to(folder).parts[0] for path in files if path.parent != folder}
    found = splits_named(names, folder)
    if "train" not in found or len(found) == 1:
        return {}
    if beside := sorted(names - set(found.values())):
        raise InputError(
            f"--data {folder} has the splits {', '.join(found.values())} and beside them {', '.join(beside)}; move that into "
            f"a split, or out of the folder"
        )
    return found


def source_of_path(data: str, documents: str = "files") -> Source:
    """A file or a folder of files.

    A file is split 90/5/5 by position if it is one text, otherwise by names; a folder by names, or by its own folders train/,
    valid/ (validation/, val/, dev/) and test/. documents: "folders" makes each folder directly below one document.
    """
    path = Path(data)
    if not path.exists():
        raise InputError(f"--data {data}: no such file or folder")
    if path.is_file():
        return Source(
            str(data), (path,), lambda: dealt({"train": lambda: texts_in(path.name, functools.partial(open, path, "rb"))})
        )
    files = sorted(p for p in path.rglob("*") if p.is_file() and holds_text(p.relative_to(path)))
    if not files:
        known = " ".join(suffix for suffix in (*TEXT_SUFFIXES, *ARCHIVE_SUFFIXES) if suffix)
        raise InputError(f"--data {data}: no text files in this folder; names should end in one of {known} or have no dot")
    splits = folders_with_splits(path, files)

    def texts_below(folder: Path) -> Iterator[Text]:
        below = (file for file in files if file.is_relative_to(folder))
        texts = (text for file in below for text in texts_in(str(file.relative_to(path)), functools.partial(open, file, "rb")))
        return joined_by_folder(texts, depth=2 if splits else 1) if documents == "folders" else texts

    own = {split: functools.partial(texts_below, path / name) for split, name in (splits or {"train": ""}).items()}
    return Source(str(data), tuple(files), lambda: dealt(own), documents)


def standard_library(root: Path | None = None) -> Source:
    """The running Python's standard library: a document for each top-level package or module, of its files in sorted order.

    Left out: site-packages, which is not part of it, `test`, which not every installation has and which would be most of the
    text, and the build's own _sysconfigdata. root is the library's folder, for tests.
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


def nearest_name(data: str, names: Iterable[str]) -> str:
    """What to say of a --data that is neither a name nor a path."""
    near = difflib.get_close_matches(str(data), names, n=1)
    return f"did you mean {near[0]}?" if near else f"give a file, a folder, or one of {', '.join(names)}"
