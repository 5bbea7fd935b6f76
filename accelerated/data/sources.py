"""Texts and their splits, from files, folders and Python's standard library.

corpus.py tokenises them; named_sets.py adds the papers' sets and what the package datasets opens.
"""

import codecs
import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from accelerated.data.windows import SPLITS
from accelerated.program.errors import InputError

SUFFIXES = ".txt .text .raw .tokens .md .py .tex .c .h .rst .json .html .xml"
TEXT_SUFFIXES = {*SUFFIXES.split(), ""}
# A folder with one of these is a run, weights or a cache of tokens, and no text
OURS = (".lock", "checkpoint.pt", "best.pt", "model.safetensors")
SPLIT_NAMES = {
    "train": "train",
    "valid": "valid",
    "validation": "valid",
    "val": "valid",
    "dev": "valid",
    "test": "test",
}
CONTINUING = bytes(range(0x80, 0xC0))  # bytes of a UTF-8 character after its first
NOT_OF_THE_LIBRARY = ("site-packages", "dist-packages", "test")


class Text(NamedTuple):
    """A document before it is tokenised."""

    name: str
    parts: tuple[Callable[[], bytes], ...]  # their bytes stand one after another

    def read(self) -> bytes:
        """All of its bytes."""
        return b"".join(part() for part in self.parts)


class Source(NamedTuple):
    """Texts and their splits."""

    name: str  # identifies the source, together with the state of its files
    files: tuple[Path, ...]
    texts: Callable[[], Iterable[tuple[str, Text]]]  # returns (split, Text) of each


def fingerprint(*parts: object) -> str:
    """A short hash of the parts."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def read_file(path: Path) -> bytes:
    """The bytes of a file; raises InputError if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; give another --data") from None


def read_text(path: Path, name: str) -> bytes:
    """The bytes of a text file without a byte-order mark; raises InputError if it is not UTF-8."""
    content = read_file(path)
    try:
        content.decode()
    except UnicodeDecodeError as error:
        raise InputError(
            f"{name} is not UTF-8 text (byte {error.start}); convert it, or move it out of --data"
        ) from None
    return content.removeprefix(codecs.BOM_UTF8)


def split_of(name: str) -> str:
    """The split of a document, by a hash of its name: 5% valid, 5% test, the rest train."""
    digest = hashlib.sha256(name.encode(errors="surrogateescape")).digest()
    bucket = int.from_bytes(digest[:4], "big") % 20
    return {0: "test", 1: "valid"}.get(bucket, "train")


def parts_by_position(text: Text) -> Iterator[tuple[str, Text]]:
    """Yield a text's first 90% as train, the next 5% as valid and the rest as test.

    No character is cut in two.
    """
    content = text.read()
    ends = [0]
    for percent in (90, 95):
        end = len(content) * percent // 100
        after = content[end : end + 3]
        ends.append(end + len(after) - len(after.lstrip(CONTINUING)))
    ends.append(len(content))

    for number, split in enumerate(SPLITS):
        part = content[ends[number] : ends[number + 1]]
        yield split, Text(f"{text.name}:{split}", (partial(bytes, part),))


def with_missing_splits(
    given: Mapping[str, Callable[[], Iterable[Text]]],
) -> Iterator[tuple[str, Text]]:
    """Yield (split, Text) from {split: function that returns its texts}, of which train is one.

    Splits that are not given are taken from train. Whole texts are taken by name (split_of) if that
    gives every split a text; otherwise each text is cut by position.
    """
    for split in ("valid", "test"):
        if split in given:
            for text in given[split]():
                yield split, text

    # {split_of(name): the split that the text goes to}
    becomes = {split: "train" if split in given else split for split in SPLITS}
    missing = set(becomes.values())
    for text in given["train"]():
        missing.discard(becomes[split_of(text.name)])
        if not missing:
            break
    for text in given["train"]():
        parts = parts_by_position(text) if missing else [(split_of(text.name), text)]
        for split, part in parts:
            yield becomes[split], part


def source_of_path(data: str) -> Source:
    """The Source of a file of text, or of a folder of them.

    One text is split 90/5/5 by position, several texts by their names. Subfolders train/, valid/
    (or validation/, val/, dev/) and test/ of a folder are its splits.
    """
    path = Path(data)
    if path.is_file():
        names = {path: path.name}
    else:
        names = {file: file.relative_to(path).as_posix() for file in files_below(path)}
    splits = splits_of_folder(path, list(names.values()))

    def texts_of(split: str) -> Iterator[Text]:
        for file, name in names.items():
            top = name.partition("/")[0]
            if not splits or splits.get(top) == split:
                yield Text(name, (partial(read_text, file, name),))

    names_of_splits = set(splits.values()) or {"train"}
    given = {split: partial(texts_of, split) for split in names_of_splits}
    return Source(os.path.realpath(path), tuple(names), lambda: with_missing_splits(given))


def splits_of_folder(path: Path, names: list[str]) -> dict[str, str]:
    """{subfolder: its split} of a folder's files with these names; empty if it has no splits.

    Raises InputError if other folders with texts stand beside them; files beside them are not read.
    """
    folders = {name.partition("/")[0] for name in names if "/" in name}
    splits = {folder: SPLIT_NAMES[folder] for folder in sorted(folders) if folder in SPLIT_NAMES}
    if "train" not in splits or set(splits.values()) == {"train"}:
        return {}
    listed = ", ".join(splits)
    others = ", ".join(sorted(folders - splits.keys()))
    if others:
        raise InputError(
            f"--data {path} has the splits {listed} and also {others}; "
            "move them into a split, or out of the folder"
        )
    return splits


def files_below(folder: Path) -> list[Path]:
    """The files of text below a folder, by their suffixes, that are not hidden; sorted.

    A run inside it is left out, so that what it writes never changes what it reads. Raises
    InputError if there are none.
    """
    files = []
    paths = sorted(folder.rglob("*"))
    ours = {path.parent for path in paths if path.name in OURS} - {folder}
    for path in paths:
        is_hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        is_text = path.suffix.lower() in TEXT_SUFFIXES and not is_hidden
        if is_text and ours.isdisjoint(path.parents) and path.is_file():
            files.append(path)
    if not files:
        raise InputError(
            f"--data {folder}: no file in it ends in one of {SUFFIXES}; give another folder"
        )
    return files


def standard_library(root: Path | None = None) -> Source:
    """The running Python's standard library: one document per top-level package or module.

    A document is its files, joined in sorted order. It leaves out site-packages, which is not part
    of the library; `test`, which is most of the text and not always installed; and _sysconfigdata,
    which differs between builds. Tests give another folder as root.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    files: dict[str, list[Path]] = {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).parts[0].removesuffix(".py")
        if name not in NOT_OF_THE_LIBRARY and not name.startswith("_sysconfigdata"):
            files.setdefault(name, []).append(path)

    texts = []
    for name, paths in files.items():
        parts = tuple(partial(read_file, path) for path in paths)
        texts.append((split_of(name), Text(name, parts)))
    all_files = tuple(path for paths in files.values() for path in paths)
    return Source("stdlib", all_files, lambda: texts)
