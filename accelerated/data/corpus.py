"""The corpus that --data names: tokenised once into files that are mapped into memory, as documents in three splits.

train.py, eval.py and the bench load it.
"""

import hashlib
import importlib.util
import json
import mmap
import os
import shutil
import sys
from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import groupby, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from filelock import FileLock, Timeout
from tqdm import tqdm

from accelerated.data.named_sets import DATASETS, HUB, named_source
from accelerated.data.recall import RecallConfig, recall_splits
from accelerated.data.sources import Source, Text, nearest_name, read_bytes, source_of_path, standard_library
from accelerated.data.windows import SPLITS, WHITE_SPACE, Document, Documents, lengths_of
from accelerated.errors import InputError, disk_errors, written_whole

FORMAT = 3  # of the cache: files and which split a text belongs to; another number makes all anew
SOLID = bytes(byte not in WHITE_SPACE for byte in range(256))  # by byte, 1 if it is part of a word
CORPORA = ("stdlib", "recall", *DATASETS)


class Corpus(NamedTuple):
    """Documents to read, and what identifies them."""

    splits: dict  # {split: documents}
    digest: str  # of all tokens; empty if they are made when they are read


class TextDocuments(Documents):
    """The documents of one split, as arrays mapped into memory."""

    def __init__(self, folder: Path, split: str, dtype: np.dtype):
        table = np.fromfile(folder / f"{split}.documents", np.int64).reshape(-1, 2)  # tokens and words of each
        self.sizes, self.words = table[:, 0], table[:, 1]
        self.ends, self.lengths = np.cumsum(self.sizes), np.maximum(self.sizes - 1, 0)
        size = int(self.sizes.sum())
        self.tokens = np.memmap(folder / f"{split}.tokens", dtype, "r", shape=(size,)) if size else np.empty(0, dtype)

    def __len__(self):
        return len(self.sizes)

    def __getitem__(self, index):
        if not 0 <= index < len(self):
            raise IndexError(index)
        tokens = self.tokens[self.ends[index] - self.sizes[index] : self.ends[index]]
        scored = np.broadcast_to(np.True_, (self.lengths[index],))  # takes no memory
        return Document(str(index), tokens[:-1], tokens[1:], scored, int(self.words[index]))

    def release(self) -> None:
        """Let the system take back the memory of tokens that were read; what is read again comes from the file."""
        if isinstance(self.tokens, np.memmap) and hasattr(mmap, "MADV_DONTNEED"):
            self.tokens._mmap.madvise(mmap.MADV_DONTNEED)


def fingerprint(*parts: object) -> str:
    """A short name for what parts are made of."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def cache_folder(source: Source, tokenizer: object, data_dir: Path) -> tuple[Path, str]:
    """(folder, prefix of its name): the rest of the name says the path, size and time of writing of the source's files."""
    stem = "".join(c if c.isalnum() or c in "-." else "_" for c in Path(source.name).name)[:40]
    identity = os.path.realpath(source.name) if os.path.exists(source.name) else source.name
    prefix = f"{stem}-{fingerprint(FORMAT, identity, source.documents, tokenizer.fingerprint)}"
    stats = ((path, path.stat()) for path in source.files)
    state = [(str(path.absolute()), stat.st_size, stat.st_mtime_ns) for path, stat in stats]
    return Path(data_dir) / "tokens" / f"{prefix}-{fingerprint(state)}", prefix


def words_begun(before: bytes, piece: bytes) -> int:
    """How many words begin in a piece of a text; before is the byte that precedes it."""
    solid = np.frombuffer((before + piece).translate(SOLID), bool)
    return int(np.count_nonzero(solid[1:] > solid[:-1]))


def pieces_of(text: Text, tokenizer: object) -> Iterator[bytes]:
    """The bytes of a text in pieces that can be tokenised by themselves."""
    rest, at = b"", 0
    for piece in read_bytes(text):
        rest += piece
        if cut := tokenizer.last_cut(rest):
            yield check_utf8(rest[:cut], text, at)
            rest, at = rest[cut:], at + cut
    if rest:
        yield check_utf8(rest, text, at)


def check_utf8(piece: bytes, text: Text, at: int) -> bytes:
    """The piece, which begins at byte `at` of a text; InputError if it is not UTF-8 although the text must be."""
    if text.must_be_utf8:
        try:
            piece.decode()
        except UnicodeDecodeError as error:
            raise InputError(
                f"{text.name} is not UTF-8 text (byte {at + error.start}); convert it, or leave it out of --data"
            ) from None
    return piece


def encoded(texts: Iterator, tokenizer: object, bar: tqdm) -> Iterator[tuple]:
    """(number of the text, split, words, tokens) of every piece of every text, in order; threads encode."""

    def pieces():
        for number, (split, text) in enumerate(texts):
            before = b" "
            yield number, split, 0, b""  # a text may be empty
            for piece in pieces_of(text, tokenizer):
                yield number, split, words_begun(before, piece), piece
                before = piece[-1:]

    threads, parts = os.cpu_count() or 1, pieces()
    with ThreadPoolExecutor(threads) as pool:
        while batch := list(islice(parts, 4 * threads)):
            for (*place, piece), tokens in zip(batch, pool.map(tokenizer.encode, [part[-1] for part in batch]), strict=True):
                bar.update(len(piece))
                yield *place, tokens


class SplitWriter:
    """Writes the tokens of a split and, for each document, how many tokens and words it has."""

    def __init__(self, folder: Path, split: str, stack: ExitStack):
        names = (f"{split}.tokens", f"{split}.documents")
        self.tokens, self.documents = (stack.enter_context((folder / name).open("wb")) for name in names)
        self.digest = hashlib.sha256()

    def write(self, tokens: np.ndarray) -> None:
        self.tokens.write(tokens.data)
        self.digest.update(tokens.data)

    def end_document(self, size: int, words: int) -> None:
        row = array("q", (size, words)).tobytes()
        self.documents.write(row)
        self.digest.update(row)


def write_tokens(source: Source, tokenizer: object, folder: Path) -> None:
    """Tokenise a source into folder, its manifest last."""
    with ExitStack() as stack, tqdm(desc=f"tokenising {Path(source.name).name}", unit="B", unit_scale=True, leave=False) as bar:
        writers = {split: SplitWriter(folder, split, stack) for split in SPLITS}
        for (_, split), parts in groupby(encoded(source.texts(), tokenizer, bar), key=lambda part: part[:2]):
            size = words = 0
            for *_, begun, tokens in parts:
                writers[split].write(np.ascontiguousarray(tokens, tokenizer.dtype))
                size, words = size + len(tokens), words + begun
            writers[split].end_document(size, words)
    sizes = {}
    for path in folder.iterdir():
        sizes[path.name] = path.stat().st_size
        with open(path, "rb+") as file:
            os.fsync(file.fileno())  # a cache that has its name is whole after a power cut too
    digest = fingerprint(*(writer.digest.hexdigest() for writer in writers.values()))
    with written_whole(folder / "manifest.json") as path:
        path.write_text(json.dumps({"dtype": np.dtype(tokenizer.dtype).name, "digest": digest, "sizes": sizes}))


def read_cache(folder: Path) -> Corpus | None:
    """The Corpus of a cache; None if there is none that is whole."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        if any((folder / name).stat().st_size != size for name, size in manifest["sizes"].items()):
            return None
        dtype = np.dtype(manifest["dtype"])
        return Corpus({split: TextDocuments(folder, split, dtype) for split in SPLITS}, manifest["digest"])
    except (OSError, ValueError, KeyError):
        return None


def lock(stack: ExitStack, path: Path) -> None:
    """Hold the lock at path, which one process at a time can, until stack is closed."""
    held = FileLock(path)
    try:
        stack.enter_context(held.acquire(blocking=False))
    except Timeout:
        print(f"another run is tokenising the same text; waiting for it ({path})", file=sys.stderr)
        stack.enter_context(held.acquire())


def tokenised(source: Source, tokenizer: object, data_dir: Path) -> Corpus:
    """The Corpus of a source, from the cache in data_dir, or made there: it appears whole or not at all."""
    folder, prefix = cache_folder(source, tokenizer, data_dir)
    if found := read_cache(folder):
        return found
    with disk_errors(folder.parent), ExitStack() as stack:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock(stack, folder.parent / f"{prefix}.lock")
        if found := read_cache(folder):  # another process made it meanwhile
            return found
        for old in folder.parent.glob(f"{prefix}-*"):  # of files that have changed since, damaged, or half-written
            shutil.rmtree(old)
        writing = folder.with_name(f"{folder.name}.writing")
        stack.callback(shutil.rmtree, writing, ignore_errors=True)
        writing.mkdir()
        write_tokens(source, tokenizer, writing)
        writing.rename(folder)
    return read_cache(folder)


def default_data_dir() -> Path:
    """The user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "palimpsest"


def check_data(data: str, documents: str = "files") -> None:
    """Raise InputError unless data is a corpus's name or a path that is there, and can be cut into such documents."""
    if data.startswith(HUB):
        if importlib.util.find_spec("datasets") is None:
            raise InputError(f"--data {data} needs the package datasets; install the extra: pip install -e '.[datasets]'")
    elif data not in CORPORA and not os.path.exists(data):
        raise InputError(f"--data {data}: no such file or folder; {nearest_name(data, CORPORA)}")
    if documents == "folders" and (data in CORPORA or not os.path.isdir(data)):
        raise InputError(f"--documents folders needs a folder of folders as --data, not {data}; leave it out")


def open_source(data: str, data_dir: Path, documents: str = "files") -> Source:
    """The texts of --data, a name (except recall, which has none) or a path."""
    check_data(data, documents)
    if data == "stdlib":
        return standard_library()
    if data in DATASETS or data.startswith(HUB):
        return named_source(data, data_dir)
    return source_of_path(data, documents)


def load_corpus(data: str, tokenizer: object, recall: RecallConfig, data_dir: Path, documents: str = "files") -> Corpus:
    """The Corpus of --data: recall (of a RecallConfig), or texts tokenised once into data_dir."""
    if data == "recall":
        return Corpus(recall_splits(recall), "")
    return tokenised(open_source(data, data_dir, documents), tokenizer, data_dir)


def check_length(data: str, splits: dict[str, Sequence], segment: int, needed: tuple[str, ...] = ("train", "valid")) -> None:
    """Raise InputError if a split that is needed could not fill one segment."""
    for split in needed:
        tokens = int(lengths_of(splits[split]).sum())
        if tokens < segment:
            raise InputError(
                f"--data {data}: the {split} split has {tokens} tokens to predict, fewer than a segment of {segment}; "
                f"give more text or a smaller --segment"
            )
