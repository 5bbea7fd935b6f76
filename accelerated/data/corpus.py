"""What --data names, tokenised once into files that are mapped into memory, as documents in three splits."""

import contextlib
import hashlib
import json
import mmap
import os
import shutil
import tempfile
import time
from array import array
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from accelerated.data.named_sets import DATASETS, named_source
from accelerated.data.recall import recall_splits
from accelerated.data.sources import nearest_name, read_bytes, source_of_path, standard_library
from accelerated.data.windows import SPLITS, WHITE_SPACE, Document, lengths_of
from accelerated.errors import InputError, disk_errors

FORMAT = 2  # of the cache's files; another number makes all anew
STALE = 3600  # seconds without a write after which a folder half-written by another process counts as abandoned
SOLID = bytes(byte not in WHITE_SPACE for byte in range(256))  # by byte, 1 where it is part of a word


class TextDocuments(Sequence):
    """The documents of one split, as arrays mapped into memory."""

    def __init__(self, folder, split, dtype):
        path = folder / f"{split}.tokens"
        self.table = np.fromfile(folder / f"{split}.documents", np.int64).reshape(-1, 2)  # tokens and words of each
        self.ends = np.cumsum(self.table[:, 0])
        size = int(self.ends[-1]) if len(self.ends) else 0
        self.tokens = np.memmap(path, dtype, "r", shape=(size,)) if size else np.empty(0, dtype)

    @property
    def lengths(self):
        """Predictions in each document, (documents,)."""
        return np.maximum(self.table[:, 0] - 1, 0)

    @property
    def words(self):
        """Words of each document's text, between white space, (documents,)."""
        return self.table[:, 1]

    def __len__(self):
        return len(self.table)

    def __getitem__(self, index):
        if not 0 <= index < len(self):
            raise IndexError(index)
        tokens = self.tokens[self.ends[index] - self.table[index, 0] : self.ends[index]]
        scored = np.broadcast_to(np.True_, (max(len(tokens) - 1, 0),))  # takes no memory
        return Document(str(index), tokens[:-1], tokens[1:], scored, int(self.table[index, 1]))

    def release(self):
        """Let the system take back the memory of tokens that were read; what is read again comes from the file."""
        if isinstance(self.tokens, np.memmap) and hasattr(mmap, "MADV_DONTNEED"):
            self.tokens._mmap.madvise(mmap.MADV_DONTNEED)


class WordCounter:
    """Counts words between ASCII white space in bytes that arrive in pieces."""

    def __init__(self):
        self.words, self.inside = 0, False

    def push(self, piece):
        solid = np.frombuffer(piece.translate(SOLID), bool)
        if len(solid):
            self.words += int(np.count_nonzero(solid[1:] > solid[:-1])) + int(solid[0] and not self.inside)
            self.inside = bool(solid[-1])


def fingerprint(*parts):
    """A short name for what parts are made of."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def state_of(files):
    """What changes when a file does: its path, size and time of writing."""
    found = ((path, path.stat()) for path in files)
    return [(str(path.absolute()), state.st_size, state.st_mtime_ns) for path, state in found]


def cache_folder(source, tokenizer, data_dir):
    """(folder, prefix of its name): the rest of the name says the state of the source's files."""
    stem = "".join(c if c.isalnum() or c in "-." else "_" for c in Path(source.name).name)[:40]
    identity = os.path.realpath(source.name) if os.path.exists(source.name) else source.name
    prefix = f"{stem}-{fingerprint(FORMAT, identity, tokenizer.fingerprint)}"
    return Path(data_dir) / "tokens" / f"{prefix}-{fingerprint(state_of(source.files))}", prefix


def pieces_of(text, tokenizer):
    """The bytes of a text in pieces that can be tokenised by themselves."""
    rest, at = b"", 0
    for piece in read_bytes(text):
        rest += piece
        if cut := tokenizer.last_cut(rest):
            yield check_utf8(rest[:cut], text, at)
            rest, at = rest[cut:], at + cut
    if rest:
        yield check_utf8(rest, text, at)


def check_utf8(piece, text, at):
    """The piece, which begins at byte `at` of a text; InputError where it is not UTF-8 although the text must be."""
    if text.must_be_utf8:
        try:
            piece.decode()
        except UnicodeDecodeError as error:
            raise InputError(
                f"{text.name} is not UTF-8 text (byte {at + error.start}); convert it, or leave it out of --data"
            ) from None
    return piece


def encoded(texts, tokenizer, bar):
    """(number of the text, split, words so far, tokens) of every piece of every text, in order; threads encode."""

    def jobs():
        for number, (split, text) in enumerate(texts):
            counter = WordCounter()
            yield number, split, 0, b""  # a text may be empty
            for piece in pieces_of(text, tokenizer):
                counter.push(piece)
                yield number, split, counter.words, piece

    waiting, threads = deque(), os.cpu_count() or 1
    with ThreadPoolExecutor(threads) as pool:
        for number, split, words, piece in jobs():
            waiting.append((number, split, words, pool.submit(tokenizer.encode, piece)))
            bar.update(len(piece))
            while len(waiting) > 2 * threads:
                *place, job = waiting.popleft()
                yield *place, job.result()
        for *place, job in waiting:
            yield *place, job.result()


class SplitWriter:
    """Writes the tokens of a split and, for each document, how many tokens and words it has."""

    def __init__(self, folder, split, open_file):
        self.tokens, self.documents = (open_file(folder / f"{split}.{kind}", "wb") for kind in ("tokens", "documents"))
        self.digest = hashlib.sha256()

    def write(self, tokens):
        self.tokens.write(tokens)
        self.digest.update(tokens)

    def end_document(self, size, words):
        row = array("q", (size, words)).tobytes()
        self.documents.write(row)
        self.digest.update(row)


def write_tokens(source, tokenizer, folder, workspace):
    """Tokenise a source into folder, its manifest last."""
    with ExitStack() as stack, tqdm(desc=f"tokenising {Path(source.name).name}", unit="B", unit_scale=True, leave=False) as bar:
        writers = {split: SplitWriter(folder, split, lambda *a: stack.enter_context(open(*a))) for split in SPLITS}
        parts = encoded(source.texts(workspace), tokenizer, bar)
        for (_, split), pieces in groupby(parts, key=lambda part: part[:2]):
            size = 0
            for part in pieces:
                *_, words, tokens = part
                writers[split].write(np.ascontiguousarray(tokens, tokenizer.dtype).data)
                size += len(tokens)
            writers[split].end_document(size, words)  # those of the last piece, which are of the whole text
        digest = fingerprint(*(writer.digest.hexdigest() for writer in writers.values()))
    sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    manifest = {"dtype": np.dtype(tokenizer.dtype).name, "digest": digest, "sizes": sizes}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    for path in folder.iterdir():
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())  # a cache that has its name is whole after a power cut too


def last_written(folder):
    """The time at which anything in a folder was last written."""
    return max((path.stat().st_mtime for path in folder.rglob("*")), default=folder.stat().st_mtime)


def remove_outdated(folder, prefix):
    """Remove caches of the same source and tokenizer in another state, and what processes that are gone left half-written."""
    for other in folder.parent.glob(f"{prefix}-*"):
        half_written = ".writing" in other.name
        if other != folder and not (half_written and time.time() - last_written(other) < STALE):
            shutil.rmtree(other, ignore_errors=True)


def build_cache(source, tokenizer, folder, prefix):
    """Make the cache at folder, which appears whole or not at all."""
    with disk_errors(folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        writing = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{folder.name}.writing"))
        try:
            workspace = writing / "extracted"
            workspace.mkdir()
            write_tokens(source, tokenizer, writing, workspace)
            shutil.rmtree(workspace)
            if not folder.exists():  # another process may have been faster
                writing.rename(folder)
        finally:
            shutil.rmtree(writing, ignore_errors=True)
    remove_outdated(folder, prefix)


def read_cache(folder):
    """({split: TextDocuments}, digest) of a cache; None where there is none that is whole."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        if any((folder / name).stat().st_size != size for name, size in manifest["sizes"].items()):
            return None
        dtype = np.dtype(manifest["dtype"])
        return {split: TextDocuments(folder, split, dtype) for split in SPLITS}, manifest["digest"]
    except (OSError, ValueError, KeyError):
        return None


def tokenised(source, tokenizer, data_dir):
    """({split: TextDocuments}, digest of all tokens) of a source, from the cache in data_dir or made there."""
    folder, prefix = cache_folder(source, tokenizer, data_dir)
    for _ in range(3):  # another process may repair the same cache meanwhile
        if found := read_cache(folder):
            return found
        if folder.exists():
            damaged = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{folder.name}.writing"))
            with contextlib.suppress(OSError):
                folder.rename(damaged)
            shutil.rmtree(damaged, ignore_errors=True)
        build_cache(source, tokenizer, folder, prefix)
    raise InputError(f"{folder} changes while it is read; wait until other runs have begun, then try again")


CORPORA = ("stdlib", "recall", *DATASETS)


def default_data_dir():
    """The user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "palimpsest"


def text_document(name, text, tokenizer):
    """A document that predicts each of its own tokens after the first."""
    tokens = tokenizer.encode(text)
    return Document(name, tokens[:-1], tokens[1:], np.ones(max(len(tokens) - 1, 0), bool), len(text.split()))


def check_data(data):
    """Raise InputError unless data is a corpus's name or a path that is there."""
    if data not in CORPORA and not os.path.exists(data):
        raise InputError(f"--data {data}: no such file or folder; {nearest_name(data, CORPORA)}")


def open_source(data, data_dir):
    """The texts of --data, a name (but recall, which has none) or a path."""
    check_data(data)
    if data == "stdlib":
        return standard_library()
    return named_source(data, data_dir) if data in DATASETS else source_of_path(data)


class Corpus(NamedTuple):
    """Documents to read, and what identifies them."""

    splits: dict  # {split: documents}
    digest: str  # of all tokens; empty where they are made when they are read


def load_corpus(data, tokenizer, recall, data_dir):
    """The Corpus of --data: recall (of a RecallConfig), or texts tokenised once into data_dir."""
    if data == "recall":
        return Corpus(recall_splits(recall), "")
    return Corpus(*tokenised(open_source(data, data_dir), tokenizer, data_dir))


def check_length(data, splits, segment, needed=("train", "valid")):
    """Raise InputError where a split that is needed could not fill one segment."""
    for split in needed:
        tokens = int(lengths_of(splits[split]).sum())
        if tokens < segment:
            raise InputError(
                f"--data {data}: the {split} split has {tokens} tokens to predict, fewer than a segment of {segment}; "
                f"give more text or a smaller --segment"
            )
