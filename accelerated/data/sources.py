"""Texts and their splits, from files, folders, archives and Python's standard library.

corpus.py tokenises them; named_sets.py adds the papers' sets and those of the Hugging Face hub.
"""

import codecs
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
import sys
import sysconfig
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, groupby, pairwise
from pathlib import Path
from typing import IO, NamedTuple

from accelerated.data.config import MU_LAW, DataConfig
from accelerated.data.windows import SPLITS
from accelerated.program.errors import InputError, counted
from accelerated.program.recordings import Recording
from accelerated.program.unpacking import RecodedFile, Unpacked

TEXT_SUFFIXES = (
    ".txt", ".text", ".raw", ".tokens", ".md", ".py", ".tex", ".c", ".h", ".rst", ".json", ".html", ".xml", ".csv", "",
)  # fmt: skip
ARCHIVE_SUFFIXES = (".jsonl", ".gz", ".zip")
RECORDING = ".wav"
SPLIT_NAMES = {"train": "train", "valid": "valid", "validation": "valid", "val": "valid", "dev": "valid", "test": "test"}
READ_SIZE = 1 << 20  # bytes read at a time
DEEPEST = 8  # archives inside one another
NAMED = 10  # files that an error names
CONTINUING = bytes(range(0x80, 0xC0))  # bytes of a UTF-8 character after its first
ARCHIVE_ERRORS = (
    gzip.BadGzipFile, zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, EOFError, RuntimeError, ValueError,
)  # fmt: skip


class Undecodable(InputError):
    """Raised for a text that is not in its encoding; the message names it and, if that is known, the place."""

    def __init__(self, name: str, place: str = ""):
        super().__init__(name + place)
        self.name = name


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
    size: int | None = None  # bytes of all texts, if that is known without reading
    whole: Callable = tuple  # whole() yields each Text that may be in another encoding, before texts are cut or joined
    encoding: str = "UTF-8"  # that these must be in


@contextlib.contextmanager
def read_errors(name: str) -> Iterator[None]:
    """Turn errors of reading a file or an archive into InputError."""
    try:
        yield
    except UnicodeError:
        raise Undecodable(name) from None
    except ARCHIVE_ERRORS as error:
        raise InputError(f"{name} is corrupt or not an archive ({error}); fetch it again, or leave it out") from None
    except OSError as error:
        raise InputError(f"cannot read {name}: {error.strerror or error}") from None


def read_bytes(text: Text, size: int = READ_SIZE) -> Iterator[bytes]:
    """Yield the bytes of a text, at most `size` at a time."""
    skip, left = text.start, text.stop - text.start
    for open_file in text.files:
        with read_errors(text.name), open_file() as file:
            if skip and file.seekable():
                skip -= file.seek(min(skip, file.seek(0, io.SEEK_END)))
            while skip and (piece := file.read(min(size, skip))):
                skip -= len(piece)
            while left and (piece := file.read(min(size, left))):
                yield piece
                left -= len(piece)


def decoded(text: Text, size: int = READ_SIZE) -> Iterator[tuple[str, int]]:
    """Yield (string, its bytes) for every piece of a text; raises Undecodable if it must be UTF-8 and is not."""
    decoder, at = codecs.getincrementaldecoder("utf-8")("strict" if text.must_be_utf8 else "ignore"), 0
    for piece in chain(read_bytes(text, size), [b""]):
        begun, _ = decoder.getstate()  # a character that the last piece cut off
        try:
            string = decoder.decode(piece, final=not piece)
        except UnicodeDecodeError as error:
            place = f" (byte {text.start + at - len(begun) + error.start})"
            raise Undecodable(text.name, place) from None
        yield string, len(piece)
        at += len(piece)


def undecodable(texts: Iterable[Text]) -> Iterator[Undecodable]:
    """Yield the error of each text that is not in its encoding; reads them all."""
    for text in texts:
        try:
            for _ in decoded(text):
                pass
        except Undecodable as error:
            yield error


@contextlib.contextmanager
def naming_all_undecodable(source: Source) -> Iterator[None]:
    """Turn Undecodable into an InputError that names all such files of the source, so that they can be mended at once."""
    try:
        yield
    except Undecodable as first:
        names = [str(error) for error in undecodable(source.whole())] or [str(first)]
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        what = f"{counted(len(names), 'file')} {'is' if len(names) == 1 else 'are'}"
        raise InputError(
            f"{what} not {source.encoding} text: {', '.join(names[:NAMED])}{more}; give --encoding NAME, or --skip-undecodable "
            "to leave such files out"
        ) from None


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


def holds_text(name: str, suffixes: tuple = (*TEXT_SUFFIXES, *ARCHIVE_SUFFIXES)) -> bool:
    """Whether to read a file with this name from a folder or archive; not hidden files or macOS's additions to archives."""
    if any(part.startswith(".") or part == "__MACOSX" for part in Path(name).parts):
        return False
    suffix = Path(name).suffix.lower()
    return holds_text(Path(name).stem, suffixes) if suffix == ".gz" else suffix in suffixes


class Reading(NamedTuple):
    """How a file and the archives inside it are read."""

    suffixes: tuple
    encoding: str
    unpacked: Unpacked
    rates: dict  # {samples per second: a recording that has them}
    depth: int = 0  # of the archives around

    def deeper(self, name: str) -> "Reading":
        """The same inside an archive with that name; raises InputError if that is too deep."""
        if self.depth == DEEPEST:
            raise InputError(f"{name} holds more than {DEEPEST} archives inside one another; unpack it")
        return self._replace(depth=self.depth + 1)

    def recording(self, name: str, open_file: Callable) -> Text:
        """The Text of a recording; raises InputError if it has another rate than those before it."""
        with read_errors(name), Recording(name, open_file()) as recording:
            self.rates.setdefault(recording.rate, name)
        if len(self.rates) > 1:
            found = " and ".join(f"{own} {rate:,}" for rate, own in self.rates.items())
            raise InputError(f"recordings have different rates, in samples per second: {found}; convert them to one")
        return Text(name, (lambda: io.BufferedReader(Recording(name, open_file())),), must_be_utf8=False)


def lines_of_json(name: str, open_file: Callable) -> Iterator[Text]:
    """Yield a Text for each line of a .jsonl file: the line's field `text`."""
    count = 0
    with read_errors(name), open_file() as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                content = json.loads(line)["text"].encode(errors="replace")  # JSON can hold half a surrogate pair
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                raise InputError(f"{name}, line {number}: not a JSON object with a string field `text`; correct it") from None
            count += 1
            yield Text(f"{name}:{count}", (functools.partial(io.BytesIO, content),))


def texts_in(name: str, open_file: Callable, reading: Reading, kind: str | None = None) -> Iterator[Text]:
    """Yield the texts of a file: lines of a .jsonl, members of a .gz or .zip, or itself, by the suffix of `kind` or else name."""
    kind = kind or name
    suffix = Path(kind).suffix.lower()
    if suffix == ".gz":
        inside, part = Path(kind).stem, (name, kind)
        if not holds_text(Path(kind).name, (*reading.suffixes, *ARCHIVE_SUFFIXES)):
            raise InputError(
                f"{name} holds a {Path(inside).suffix} file; give text, .jsonl or .zip in a .gz, or name it in --suffixes"
            )
        unpack = functools.partial(open_gzip, open_file, reading.unpacked, part)
        yield from texts_in(name, unpack, reading.deeper(name), inside)
    elif suffix == ".zip":
        yield from texts_in_zip(name, open_file, reading.deeper(name))
    elif reading.encoding == MU_LAW:
        yield reading.recording(name, open_file)
    elif suffix == ".jsonl":
        yield from lines_of_json(name, open_file)
    elif reading.encoding != "utf-8":
        yield Text(name, (lambda: io.BufferedReader(RecodedFile(open_file(), reading.encoding)),))
    else:
        yield Text(name, (open_file,))


def texts_in_zip(name: str, open_file: Callable, reading: Reading) -> Iterator[Text]:
    """Yield the texts of a .zip, in the order of its members' names; nothing is written to the disk."""
    with read_errors(name):
        archive = zipfile.ZipFile(open_file())  # stays open until its last text is deleted
        members = sorted(archive.infolist(), key=lambda member: member.filename)
    members = [member for member in members if not member.is_dir() and holds_text(member.filename, reading.suffixes)]
    for number, member in enumerate(members):
        reading.unpacked.count((name, number), member.file_size)
    for number, member in enumerate(members):
        unpack = functools.partial(open_member, archive, member, reading.unpacked, (name, number))
        yield from texts_in(f"{name}:{member.filename}", unpack, reading, member.filename)


def open_gzip(open_file: Callable, unpacked: Unpacked, part: tuple) -> IO[bytes]:
    """Open what is in a .gz for reading; its bytes are counted."""
    return unpacked.open(gzip.GzipFile(fileobj=open_file()), part)


def open_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo, unpacked: Unpacked, part: tuple) -> IO[bytes]:
    """Open a member of a .zip for reading; its bytes are counted."""
    return unpacked.open(archive.open(member), part)


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


def files_below(folder: Path, suffixes: tuple) -> list[Path]:
    """The files below a folder that hold text, sorted; a subfolder that cannot be read raises InputError."""

    def refuse(error):
        raise InputError(f"cannot read {error.filename}: {error.strerror}; make it readable, or move it out of --data") from None

    found = []
    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = (name for name in folders if not name.startswith("."))
        found += [Path(parent, name) for name in names if holds_text(name, suffixes)]
    with read_errors(folder):
        return sorted(path for path in found if path.is_file() and holds_text(path.relative_to(folder), suffixes))


def chosen_suffixes(data: DataConfig) -> tuple:
    """The suffixes of the files to read from folders and archives."""
    if data.suffixes:
        return tuple(data.suffixes.lower().split(","))
    return (RECORDING, ".zip") if data.tokenizer == MU_LAW else (*TEXT_SUFFIXES, *ARCHIVE_SUFFIXES)


def chosen_encoding(data: DataConfig) -> str:
    """Python's own name for --encoding; mu-law for recordings."""
    return MU_LAW if data.tokenizer == MU_LAW else codecs.lookup(data.encoding).name


def name_of_path(data: DataConfig) -> str:
    """What identifies a file or folder and how its texts are read."""
    encoding = chosen_encoding(data)
    how = {
        "by folders": data.documents == "folders", f"as {encoding}": encoding != "utf-8",
        "without undecodable files": data.skip_undecodable, f"only {data.suffixes}": data.suffixes,
    }  # fmt: skip
    return " ".join([os.path.realpath(data.data), *(words for words, chosen in how.items() if chosen)])


def texts_of_files(files: Iterable[Path], data: DataConfig, rates: dict | None = None) -> Iterator[Text]:
    """Yield the texts of the files of --data, neither cut nor joined; rates are those of recordings that were read before."""
    root, suffixes, encoding = Path(data.data), chosen_suffixes(data), chosen_encoding(data)
    rates = {} if rates is None else rates
    for file in files:
        name = root.name if file == root else str(file.relative_to(root))
        reading = Reading(suffixes, encoding, Unpacked(name, data.unpacked_limit), rates)
        yield from texts_in(name, functools.partial(open, file, "rb"), reading)


def names_left_out(files: Iterable[Path], data: DataConfig) -> frozenset[str]:
    """The names of the texts that --skip-undecodable leaves out; reads all texts if it is given, and says how many there are."""
    names = [error.name for error in undecodable(texts_of_files(files, data))] if data.skip_undecodable else []
    if names:
        what = f"{counted(len(names), 'file')} that {'is' if len(names) == 1 else 'are'}"
        print(f"left out {what} not {chosen_encoding(data).upper()} text; the first is {names[0]}", file=sys.stderr)
    return frozenset(names)


def source_of_path(data: DataConfig) -> Source:
    """The Source of a file or of a folder of files.

    One text is split 90/5/5 by position, several texts by their names. Subfolders train/, valid/ (or validation/, val/, dev/)
    and test/ of a folder are its splits. documents "folders" makes each subfolder one document.
    """
    path, suffixes = Path(data.data), chosen_suffixes(data)
    if path.suffix.lower() == RECORDING and data.tokenizer != MU_LAW:
        raise InputError(f"--data {data.data} is a recording, and --tokenizer {data.tokenizer} reads text; give {MU_LAW}")
    files = [path] if path.is_file() else files_below(path, suffixes)
    if not files:
        known = " ".join(filter(None, suffixes)) + " or have no dot" * ("" in suffixes)
        raise InputError(
            f"--data {data.data}: no {'recordings' if data.tokenizer == MU_LAW else 'text files'} in this folder; names should "
            f"end in one of {known}; see --suffixes" + f", or for recordings --tokenizer {MU_LAW}" * (data.tokenizer != MU_LAW)
        )
    splits = {} if path.is_file() else folders_with_splits(path, files)
    left_out, rates = functools.cache(functools.partial(names_left_out, files, data)), {}  # one rate for all splits

    def texts_below(folder: Path) -> Iterator[Text]:
        below = (file for file in files if file.is_relative_to(folder))
        texts = (text for text in texts_of_files(below, data, rates) if text.name not in left_out())
        return joined_by_folder(texts, depth=2 if splits else 1) if data.documents == "folders" else texts

    given = {split: functools.partial(texts_below, path / below) for split, below in (splits or {"train": ""}).items()}
    packed = any(file.suffix.lower() in ARCHIVE_SUFFIXES for file in files)
    return Source(
        name_of_path(data), tuple(files), texts=lambda: with_missing_splits(given),
        size=None if packed or chosen_encoding(data) != "utf-8" else size_of(files),
        whole=functools.partial(texts_of_files, files, data), encoding=chosen_encoding(data).upper(),
    )  # fmt: skip


def size_of(files: Iterable[Path]) -> int:
    """The bytes of files together."""
    with read_errors("the files of --data"):
        return sum(path.stat().st_size for path in files)


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
    paths = tuple(path for paths in files.values() for path in paths)
    return Source("stdlib", paths, lambda: texts, size_of(paths))
