"""Where texts come from: files, folders, archives and Python's own source, as byte ranges of plain files."""

import contextlib
import difflib
import functools
import gzip
import hashlib
import json
import lzma
import struct
import sysconfig
import zipfile
import zlib
from array import array
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from accelerated.data.windows import SPLITS
from accelerated.errors import InputError, disk_errors

TEXT_SUFFIXES = (".txt", ".text", ".md", ".py", ".tex", ".c", ".h", ".rst", ".json", ".html", ".xml", ".csv", "")
ARCHIVE_SUFFIXES = (".jsonl", ".gz", ".zip")
PIECE = 1 << 20  # bytes read at a time
ARCHIVE_ERRORS = (
    gzip.BadGzipFile, zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, EOFError, NotImplementedError, RuntimeError,
    ValueError,
)  # fmt: skip


class Span(NamedTuple):
    """Bytes start .. stop - 1 of a file."""

    path: Path
    start: int
    stop: int


class Text(NamedTuple):
    """A document before it is tokenised: the bytes of its spans, one after another."""

    name: str
    spans: tuple
    must_be_utf8: bool = True

    @property
    def size(self):
        """Bytes of it."""
        return sum(span.stop - span.start for span in self.spans)


class Source(NamedTuple):
    """Texts and the splits that they belong to.

    files are those whose change makes it another source; texts(workspace) yields (split, Text) and may put extracted files into
    the folder workspace, which must last until the texts are read.
    """

    name: str
    files: tuple
    texts: object


def whole_file(name, path):
    return Text(name, (Span(path, 0, path.stat().st_size),))


def part_of(text, name, start, stop):
    """Bytes start .. stop - 1 of a text."""
    spans, before = [], 0
    for span in text.spans:
        first, last = (min(max(at - before, 0), span.stop - span.start) for at in (start, stop))
        if first < last:
            spans.append(Span(span.path, span.start + first, span.start + last))
        before += span.stop - span.start
    return Text(name, tuple(spans), text.must_be_utf8)


def read_bytes(text, size=PIECE):
    """The bytes of a text, at most `size` at a time."""
    for span in text.spans:
        try:
            with open(span.path, "rb") as file:
                file.seek(span.start)
                left = span.stop - span.start
                while left and (piece := file.read(min(size, left))):
                    yield piece
                    left -= len(piece)
        except OSError as error:
            raise InputError(f"cannot read {span.path}: {error.strerror}") from None


def split_of(name):
    """The split of a document, by a hash of its name: 5% valid, 5% test, the rest train."""
    bucket = int.from_bytes(hashlib.sha256(name.encode(errors="surrogateescape")).digest()[:4], "big") % 20
    return {0: "test", 1: "valid"}.get(bucket, "train")


def split_by_name(texts):
    return ((split_of(text.name), text) for text in texts)


def character_start(text, at):
    """The first place from byte `at` on where a UTF-8 character begins."""
    following = b"".join(read_bytes(part_of(text, text.name, at, at + 3)))
    return at + next((i for i, byte in enumerate(following) if not 0x80 <= byte < 0xC0), len(following))


def split_by_position(texts):
    """Every text cut 90/5/5 into a train, a valid and a test document: for sources of too few documents to deal out.

    No character is cut in two.
    """
    for text in texts:
        ends = [0, *(character_start(text, text.size * percent // 100) for percent in (90, 95)), text.size]
        for split, (start, stop) in zip(SPLITS, pairwise(ends), strict=True):
            yield split, part_of(text, f"{text.name}:{split}", start, stop)


def reaches_all_splits(texts):
    """Whether names alone give every split a text; stops reading as soon as that is known."""
    found = set()
    return any(found.add(split_of(text.name)) or len(found) == len(SPLITS) for text in texts)


def standard_library_texts(root=None):
    """A Text of each top-level package or module of the running Python's standard library, files in sorted order.

    Left out: site-packages, which is not part of it, `test`, which not every installation has and which would be most of the
    text, and the build's own _sysconfigdata. root is the library's folder, for tests.
    """
    root = Path(root or sysconfig.get_paths()["stdlib"])
    spans = {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).parts[0].removesuffix(".py")
        if name in ("site-packages", "dist-packages", "test") or name.startswith("_sysconfigdata"):
            continue
        spans.setdefault(name, []).extend(whole_file(name, path).spans)
    return [Text(name, tuple(parts), must_be_utf8=False) for name, parts in spans.items()]


@contextlib.contextmanager
def archive_errors(path):
    """An archive that cannot be read, inside, as InputError."""
    try:
        yield
    except ARCHIVE_ERRORS as error:
        raise InputError(f"{path} is corrupt or no archive ({error}); fetch it again, or leave it out") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None


@contextlib.contextmanager
def plain_file(path):
    """A function that writes to a new file at path, with a disk's errors as InputError."""
    with disk_errors(path), open(path, "wb") as file:

        def write(piece):
            with disk_errors(path):
                file.write(piece)

        yield write


def short_name(path):
    """A file name for what is put into the workspace in place of path."""
    return hashlib.sha256(str(path).encode(errors="surrogateescape")).hexdigest()[:16]


def unpacked(path, workspace, open_archive):
    """A plain file in workspace with what open_archive() reads; made once."""
    plain = Path(workspace) / short_name(path)
    if not plain.exists():
        writing = plain.with_suffix(".writing")
        with plain_file(writing) as write, archive_errors(path), open_archive() as archive:
            while piece := archive.read(PIECE):
                write(piece)
        writing.rename(plain)
    return plain


def lines_of_json(name, path, workspace):
    """A Text for the field `text` of each line of a .jsonl file; the texts themselves are put into workspace."""
    plain, ends = Path(workspace) / f"{short_name(name)}.text", array("q", [0])
    with plain_file(plain) as write, archive_errors(path), open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)["text"].encode(errors="replace")  # JSON can hold halves of characters
            except (ValueError, KeyError, TypeError, AttributeError):
                raise InputError(f"{name}, line {number}: not a JSON object with a string field `text`; mend the line") from None
            write(text)
            ends.append(ends[-1] + len(text))
    for number, (start, stop) in enumerate(pairwise(ends), start=1):
        yield Text(f"{name}:{number}", (Span(plain, start, stop),))


def zip_members(path):
    """Names of the files in a zip that hold text."""
    with archive_errors(path), zipfile.ZipFile(path) as archive:
        names = sorted(info.filename for info in archive.infolist() if not info.is_dir())
    return [name for name in names if holds_text(name)]


def holds_text(name):
    """Whether a file of that name in a folder or an archive is read; hidden files never are, nor what macOS adds to archives."""
    if any(part.startswith(".") or part == "__MACOSX" for part in Path(name).parts):
        return False
    suffix = Path(name).suffix.lower()
    return holds_text(Path(name).stem) if suffix == ".gz" else suffix in (*TEXT_SUFFIXES, *ARCHIVE_SUFFIXES)


def open_member(path, name):
    """A file object of a zip's member, which keeps the zip open."""
    return zipfile.ZipFile(path).open(name)


def texts_in(name, path, workspace, suffix_of=None):
    """The texts of a file, by its name: a .jsonl's lines, what a .gz or .zip holds, or the file itself."""
    suffix = Path(suffix_of or name).suffix.lower()
    if suffix == ".gz":
        if not holds_text(Path(suffix_of or name).name):
            raise InputError(f"{path} holds a {Path(Path(name).stem).suffix} file; give text, .jsonl or .zip in a .gz")
        plain = unpacked(path, workspace, functools.partial(gzip.open, path))
        yield from texts_in(name, plain, workspace, Path(suffix_of or name).stem)
    elif suffix == ".zip":
        for member in zip_members(path):
            plain = unpacked(f"{path}:{member}", workspace, functools.partial(open_member, path, member))
            yield from texts_in(f"{name}:{member}", plain, workspace, member)
    elif suffix == ".jsonl":
        yield from lines_of_json(name, path, workspace)
    else:
        yield whole_file(name, path)


def source_of_path(data):
    """A file (split 90/5/5 by position if it is one text, otherwise by names) or a folder of files (by their names)."""
    path = Path(data)
    if not path.exists():
        raise InputError(f"--data {data}: no such file or folder")
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file() and holds_text(p.relative_to(path)))
    if not files:
        known = " ".join(suffix for suffix in (*TEXT_SUFFIXES, *ARCHIVE_SUFFIXES) if suffix)
        raise InputError(f"--data {data}: no text files in this folder; names should end in one of {known} or have no dot")
    names = [p.name if path.is_file() else str(p.relative_to(path)) for p in files]

    def every_text(workspace):
        for name, file in zip(names, files, strict=True):
            yield from texts_in(name, file, workspace)

    def texts(workspace):
        deal = split_by_name if reaches_all_splits(every_text(workspace)) else split_by_position
        return deal(every_text(workspace))

    return Source(str(data), tuple(files), texts)


def standard_library():
    """Python's own source, a document for each package."""
    texts = standard_library_texts()
    files = tuple(span.path for text in texts for span in text.spans)
    return Source("stdlib", files, lambda workspace: split_by_name(texts))


def nearest_name(data, names):
    """What to say of a --data that is neither a name nor a path."""
    near = difflib.get_close_matches(str(data), names, n=1)
    return f"did you mean {near[0]}?" if near else f"give a file, a folder, or one of {', '.join(names)}"
