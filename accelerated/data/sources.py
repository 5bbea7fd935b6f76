"""Texts and their splits, from files, folders and Python's standard library.

corpus.py tokenises them; named_sets.py adds the papers' sets and what the package datasets opens.
"""

import codecs
import contextlib
import hashlib
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from accelerated.data.config import MU_LAW, RECORDING, DataConfig
from accelerated.data.windows import SPLITS
from accelerated.program.errors import InputError
from accelerated.program.files import DATA_ADVICE, disk_errors, locked

TEXT_SUFFIXES = (
    ".txt",
    ".text",
    ".raw",
    ".tokens",
    ".md",
    ".py",
    ".tex",
    ".c",
    ".h",
    ".rst",
    ".json",
    ".html",
    ".xml",
    "",
)
SPLIT_NAMES = {
    "train": "train",
    "valid": "valid",
    "validation": "valid",
    "val": "valid",
    "dev": "valid",
    "test": "test",
}
say_once = cache(print)  # says a line once in a program
CONTINUING = bytes(range(0x80, 0xC0))  # bytes of a UTF-8 character after its first


class Text(NamedTuple):
    """A document before it is tokenised."""

    name: str
    parts: tuple  # functions that each return bytes, which stand one after another

    def read(self) -> bytes:
        """All of its bytes."""
        return b"".join(part() for part in self.parts)


class Source(NamedTuple):
    """Texts and their splits."""

    name: str  # identifies the source, together with the state of its files
    files: tuple  # paths
    texts: Callable  # texts() yields (split, Text)


def read_file(path: Path, utf8_as: str = "") -> bytes:
    """The bytes of a file; with a name they must be UTF-8, and lose a byte-order mark. Raises InputError."""
    try:
        content = path.read_bytes()
        if utf8_as:
            content.decode()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; give another --data") from None
    except UnicodeDecodeError as error:
        raise InputError(
            f"{utf8_as} is not UTF-8 text (byte {error.start}); convert it, or move it out of --data"
        ) from None
    if utf8_as and content.startswith(codecs.BOM_UTF8):
        say_once(
            "files begin with a byte-order mark, which is no text and is dropped", file=sys.stderr
        )
        return content.removeprefix(codecs.BOM_UTF8)
    return content


def split_of(name: str) -> str:
    """The split of a document, by a hash of its name: 5% valid, 5% test, the rest train."""
    bucket = (
        int.from_bytes(hashlib.sha256(name.encode(errors="surrogateescape")).digest()[:4], "big")
        % 20
    )
    return {0: "test", 1: "valid"}.get(bucket, "train")


def parts_by_position(text: Text) -> Iterator[tuple[str, Text]]:
    """Yield a text's first 90% as train, the next 5% as valid and the rest as test; never cuts inside a character."""
    content, ends = text.read(), [0]
    for percent in (90, 95):
        end = len(content) * percent // 100
        after = content[end : end + 3]
        ends.append(end + len(after) - len(after.lstrip(CONTINUING)))
    for split, start, stop in zip(SPLITS, ends, [*ends[1:], len(content)], strict=True):
        yield (
            split,
            Text(f"{text.name}:{split}", (partial(content.__getitem__, slice(start, stop)),)),
        )


def with_missing_splits(given: dict[str, Callable]) -> Iterator[tuple[str, Text]]:
    """Yield (split, Text) from {split: function that returns its texts}; splits that are not given are taken from train.

    Whole texts are taken by name (split_of) if that gives every split a text; otherwise each text is cut by position.
    """
    becomes = {
        split: "train" if split in given else split for split in SPLITS
    }  # {split_of(name): split that the text goes to}
    filled = set()
    by_name = any(
        filled.add(becomes[split_of(text.name)]) or filled == {*becomes.values()}
        for text in given["train"]()
    )
    for split in SPLITS[1:]:
        yield from ((split, text) for text in given.get(split, tuple)())
    for text in given["train"]():
        for split, part in [(split_of(text.name), text)] if by_name else parts_by_position(text):
            yield becomes[split], part


def source_of_path(data: DataConfig) -> Source:
    """The Source of a file or of a folder of files, texts or with --tokenizer mu-law recordings.

    One text is split 90/5/5 by position, several texts by their names. Subfolders train/, valid/ (or validation/, val/, dev/)
    and test/ of a folder are its splits.
    """
    path, of_text = Path(data.data), data.tokenizer != MU_LAW
    files = (
        [path] if path.is_file() else files_below(path, TEXT_SUFFIXES if of_text else (RECORDING,))
    )
    places = {file: file.relative_to(path).parts or (path.name,) for file in files}
    tops = {places[file][0] for file in files if len(places[file]) > 1}
    own = {top: SPLIT_NAMES[top] for top in sorted(tops) if top in SPLIT_NAMES}
    if not {"train"} < {*own.values()}:
        own = {}
    elif beside := sorted(tops - own.keys()):
        splits, beside = ", ".join(own), ", ".join(beside)
        raise InputError(
            f"--data {path} has the splits {splits} and also {beside}; move them into a split, or out of the folder"
        )

    def texts_of(split: str) -> Iterator[Text]:
        for file in files:
            if not own or own.get(places[file][0]) == split:
                name = "/".join(places[file])
                yield Text(name, (partial(read_file, file, name if of_text else ""),))

    given = {split: partial(texts_of, split) for split in {*own.values()} or {"train"}}
    return Source(os.path.realpath(path), tuple(files), lambda: with_missing_splits(given))


def files_below(folder: Path, suffixes: tuple) -> list[Path]:
    """The files below a folder that have one of the suffixes and are not hidden, sorted; raises InputError if there are none."""
    files = sorted(
        path for path in folder.rglob("*") if path.suffix.lower() in suffixes and path.is_file()
    )
    files = [
        path
        for path in files
        if not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]
    if not files:
        raise InputError(
            f"--data {folder}: no file in it ends in one of {' '.join(filter(None, suffixes))}; give another folder"
        )
    return files


def standard_library(root: Path | None = None) -> Source:
    """The running Python's standard library: one document per top-level package or module, its files joined in sorted order.

    It leaves out site-packages, which is not part of the library; `test`, which is most of the text and not always installed;
    and _sysconfigdata, which differs between builds. Tests give another folder as root.
    """
    root, files = Path(root or sysconfig.get_paths()["stdlib"]), {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).parts[0].removesuffix(".py")
        if name not in ("site-packages", "dist-packages", "test") and not name.startswith(
            "_sysconfigdata"
        ):
            files.setdefault(name, []).append(path)
    texts = [
        (split_of(name), Text(name, tuple(partial(read_file, path) for path in paths)))
        for name, paths in files.items()
    ]
    return Source("stdlib", tuple(chain.from_iterable(files.values())), lambda: texts)


def only_worker(folder: Path, doing: str) -> contextlib.AbstractContextManager:
    """Make a folder; inside, this process is the only one that works in it. Others wait, and say for what."""
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return locked(
        folder / ".lock",
        f"another process is {doing} {folder}; waiting for it",
        DATA_ADVICE,
        waits=True,
    )
