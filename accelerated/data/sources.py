"""Texts and their splits, from files, folders and Python's standard library.

corpus.py tokenises them; named_sets.py adds the papers' sets and what the package datasets opens.
"""

import codecs
import contextlib
import functools
import hashlib
import io
import math
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from itertools import groupby, pairwise
from pathlib import Path
from typing import NamedTuple

from accelerated.data.config import HUB, MU_LAW, PACKED, RECORDING, TABLES, DataConfig
from accelerated.data.windows import SPLITS
from accelerated.program.errors import InputError
from accelerated.program.files import DATA_ADVICE, READ_SIZE, disk_errors, locked

TEXT_SUFFIXES = (".txt", ".text", ".raw", ".tokens", ".md", ".py", ".tex", ".c", ".h", ".rst", ".json", ".html", ".xml", "")
SPLIT_NAMES = {"train": "train", "valid": "valid", "validation": "valid", "val": "valid", "dev": "valid", "test": "test"}
say_once = functools.cache(print)  # says a line once in a program
CONTINUING = bytes(range(0x80, 0xC0))  # bytes of a UTF-8 character after its first


class Text(NamedTuple):
    """A document before it is tokenised: bytes start .. stop - 1 of its files, one after another."""

    name: str
    files: tuple  # functions that each open one file for reading
    must_be_utf8: bool = True
    start: int = 0
    stop: float = math.inf


class Source(NamedTuple):
    """Texts and their splits."""

    name: str  # identifies the source, together with the state of its files
    files: tuple  # paths
    texts: Callable  # texts() yields (split, Text)
    packed: bool = False  # whether the texts are not the bytes of the files


@contextlib.contextmanager
def read_errors(name: str) -> Iterator[None]:
    """Turn an error of reading a file into an InputError."""
    try:
        yield
    except OSError as error:
        raise InputError(f"cannot read {error.filename or name}: {error.strerror or error}; give another --data") from None


def read_bytes(text: Text, size: int = READ_SIZE, check: bool = True) -> Iterator[bytes]:
    """Yield the bytes of a text, at most `size` at a time; raises InputError if they must be UTF-8 and are not, if check."""
    skip, left, at = text.start, text.stop - text.start, text.start
    decoder = codecs.getincrementaldecoder("utf-8")("strict" if check and text.must_be_utf8 else "ignore")
    try:
        for open_file in text.files:
            with read_errors(text.name), open_file() as file:
                if text.must_be_utf8 and file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8:
                    say_once("files begin with a byte-order mark, which is no text and is dropped", file=sys.stderr)
                else:
                    file.seek(0)
                begin, end = file.tell(), file.seek(0, io.SEEK_END)
                skip -= file.seek(min(begin + skip, end)) - begin
                while left and (piece := file.read(min(size, left))):
                    at, left = at + len(piece), left - len(piece)
                    decoder.decode(piece)
                    yield piece
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:  # its object is the piece, after a character that the piece before cut off
        place = at - len(error.object) + error.start
        raise InputError(f"{text.name} is not UTF-8 text (byte {place}); convert it, or move it out of --data") from None


def split_of(name: str) -> str:
    """The split of a document, by a hash of its name: 5% valid, 5% test, the rest train."""
    bucket = int.from_bytes(hashlib.sha256(name.encode(errors="surrogateescape")).digest()[:4], "big") % 20
    return {0: "test", 1: "valid"}.get(bucket, "train")


def parts_by_position(text: Text) -> Iterator[tuple[str, Text]]:
    """Yield a text's first 90% as train, the next 5% as valid and the rest as test; never cuts inside a character."""
    size, ends = sum(map(len, read_bytes(text))), [0]
    for percent in (90, 95):
        end = size * percent // 100
        after = b"".join(read_bytes(text._replace(start=end, stop=end + 3), check=False))
        ends.append(end + len(after) - len(after.lstrip(CONTINUING)))
    for split, (start, stop) in zip(SPLITS, pairwise([*ends, size]), strict=True):
        yield split, text._replace(name=f"{text.name}:{split}", start=start, stop=stop)


def with_missing_splits(given: dict[str, Callable]) -> Iterator[tuple[str, Text]]:
    """Yield (split, Text) from {split: function that returns its texts}; splits that are not given are taken from train.

    Whole texts are taken by name (split_of) if that gives every split a text; otherwise each text is cut by position.
    """
    for split in SPLITS[1:]:
        yield from ((split, text) for text in given.get(split, tuple)())
    becomes = {split: "train" if split in given else split for split in SPLITS}  # {split_of(name): split that the text goes to}
    by_name, filled = False, set()
    for text in given["train"]():
        filled.add(becomes[split_of(text.name)])
        if by_name := filled == {*becomes.values()}:
            break
    for text in given["train"]():
        for split, part in [(split_of(text.name), text)] if by_name else parts_by_position(text):
            yield becomes[split], part


def files_below(folder: Path, suffixes: tuple) -> list[Path]:
    """The files below a folder that have one of the suffixes and are not hidden, sorted; raises InputError if there are none."""
    shown = (path for path in folder.rglob("*") if not any(part.startswith(".") for part in path.relative_to(folder).parts))
    with read_errors(folder):
        files = sorted(path for path in shown if path.suffix.lower() in suffixes and path.is_file())
    if not files:
        known = " ".join(filter(None, suffixes)) + " or have no dot" * ("" in suffixes)
        raise InputError(
            f"--data {folder}: no file in this folder ends in one of {known}; --tokenizer {MU_LAW} reads recordings "
            f"({RECORDING}), and --data {HUB}{folder} opens {' '.join((*TABLES, *PACKED))}"
        )
    return files


def splits_of_folder(folder: Path, files: list[Path]) -> dict[str, str]:
    """Return {split: name of its subfolder}; if there is no train/ beside a valid/ or test/, the folder itself is train."""
    names = {path.relative_to(folder).parts[0] for path in files if path.parent != folder}
    splits = {SPLIT_NAMES[name]: name for name in sorted(names) if name in SPLIT_NAMES}
    if "train" not in splits or len(splits) == 1:
        return {"train": ""}
    if beside := sorted(names - set(splits.values())):
        raise InputError(
            f"--data {folder} has the splits {', '.join(splits.values())} and also the folders {', '.join(beside)}; "
            "move them into a split, or out of the folder"
        )
    return splits


def source_of_path(data: DataConfig) -> Source:
    """The Source of a file or of a folder of files, texts or with --tokenizer mu-law recordings.

    One text is split 90/5/5 by position, several texts by their names. Subfolders train/, valid/ (or validation/, val/, dev/)
    and test/ of a folder are its splits. documents "folders" makes each subfolder one document.
    """
    path, of_text, by_folder = Path(data.data), data.tokenizer != MU_LAW, data.documents == "folders"
    suffix = path.suffix.lower() if path.is_file() else ""
    if suffix in (RECORDING, ".wav") if of_text else suffix not in (RECORDING, ""):
        raise InputError(
            f"--data {data.data}: {RECORDING} is for --tokenizer {MU_LAW}, and that reads nothing else "
            "(python -m accelerated.lab.systems.speech makes it of .wav)"
        )
    files = [path] if path.is_file() else files_below(path, TEXT_SUFFIXES if of_text else (RECORDING,))
    splits = {"train": ""} if path.is_file() else splits_of_folder(path, files)
    depth = (2 if len(splits) > 1 else 1) if by_folder else None

    def document_of(file: Path) -> str:
        return "/".join((file.relative_to(path).parts or (path.name,))[:depth])

    def texts_below(folder: Path) -> Iterator[Text]:
        for name, group in groupby((file for file in files if file.is_relative_to(folder)), key=document_of):
            yield Text(name, tuple(functools.partial(open, file, "rb") for file in group), of_text and not by_folder)

    given = {split: functools.partial(texts_below, path / below) for split, below in splits.items()}
    name = os.path.realpath(path) + " by folders" * by_folder + f" as {MU_LAW}" * (not of_text)
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


def only_worker(folder: Path, doing: str) -> contextlib.AbstractContextManager:
    """Make a folder; inside, this process is the only one that works in it. Others wait, and say for what."""
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return locked(folder / ".lock", f"another process is {doing} {folder}; waiting for it", DATA_ADVICE, waits=True)
