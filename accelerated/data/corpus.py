"""The corpus that --data names: documents in three splits, tokenised once into memory-mapped files.

For train.py, eval.py and experiments. A cache is a folder with a file of tokens and one of documents for each split, and a
manifest with their checksums. verified.json says which of them were read and found right, in which state.
"""

import contextlib
import functools
import hashlib
import json
import os
import shutil
import sys
from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, groupby, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from filelock import FileLock, Timeout

from accelerated.data.config import HUB, DataConfig, check_data, default_data_dir
from accelerated.data.named_sets import OPENERS, hub_set
from accelerated.data.recall import RecallConfig, RecallDocuments
from accelerated.data.sources import (
    Source,
    Text,
    Undecodable,
    naming_all_undecodable,
    read_bytes,
    read_errors,
    source_of_path,
    standard_library,
)
from accelerated.data.windows import SPLITS, WHITE_SPACE, Document, Documents, lengths_of
from accelerated.program.errors import InputError
from accelerated.program.files import WRITING, disk_errors, locked_in_turn, written_whole
from accelerated.program.progress import Progress
from accelerated.program.sharing import is_own, make_shared_folder, may_write, share, wrong_file

FORMAT = 5  # of the cached files and of the choice of splits; raise it to tokenise everything again
FILES = [f"{split}.{kind}" for split in SPLITS for kind in ("tokens", "documents")]
MANIFEST = "manifest.json"
IN_A_WORD = bytes(byte not in WHITE_SPACE for byte in range(256))  # (256,) 1 if that byte is part of a word


class Corpus(NamedTuple):
    """Documents in their splits, and a digest that identifies them."""

    splits: dict  # {split: documents}
    digest: str  # of all tokens; empty if the documents are generated


class TextDocuments(Documents):
    """The documents of one split, as memory-mapped arrays."""

    def __init__(self, folder: Path, split: str, dtype: np.dtype):
        table = np.fromfile(folder / f"{split}.documents", np.int64).reshape(-1, 2)  # (documents, 2): tokens, words
        self.sizes, self.words = table[:, 0], table[:, 1]
        self.ends, self.lengths = np.cumsum(self.sizes), np.maximum(self.sizes - 1, 0)
        path = folder / f"{split}.tokens"
        self.tokens = np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)

    def __getitem__(self, index):
        tokens = self.tokens[self.ends[index] - self.sizes[index] : self.ends[index]]
        scored = np.broadcast_to(np.True_, (self.lengths[index],))  # takes no memory
        return Document(str(index), tokens[:-1], tokens[1:], scored, int(self.words[index]))


class Beginnings(Documents):
    """The first `tokens` tokens of each of the documents, read as a document."""

    whole = False

    def __init__(self, documents: Sequence, tokens: int, tokenizer: object):
        self.documents, self.tokenizer = documents, tokenizer
        self.lengths = np.minimum(lengths_of(documents), tokens - 1)

    def __getitem__(self, index):
        document, length = self.documents[index], self.lengths[index]
        fields = (field[:length] for field in (document.inputs, document.targets, document.scored))
        return Document(document.name, *fields)

    @functools.cached_property
    def words(self) -> np.ndarray:
        """(documents,) words that begin in each; counted in the text of the tokens when they are asked for."""
        if not self.tokenizer.spells_text:
            return np.zeros(len(self.documents), np.int64)
        texts = (self.tokenizer.decode([*document.inputs[:1], *document.targets]) for document in self)
        return np.array([len(text.split()) for text in texts], np.int64)


def fingerprint(*parts: object) -> str:
    """A short hash of the parts."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def cache_folder(source: Source, tokenizer: object, data_dir: Path) -> Path:
    """The folder that holds a source's tokens by this tokenizer."""
    stem = "".join(c if c.isalnum() or c in "-." else "_" for c in Path(source.name).name)[:40]
    return Path(data_dir) / "tokens" / f"{stem}-{fingerprint(FORMAT, source.name, tokenizer.fingerprint)}"


def state_of_files(source: Source) -> str:
    """A fingerprint of the paths, sizes and modification times of a source's files."""
    stats = []
    for path in source.files:
        with read_errors(path):
            stat = path.stat()
        stats.append((str(path.absolute()), stat.st_size, stat.st_mtime_ns))
    return fingerprint(stats)


def pieces_of(text: Text, tokenizer: object) -> Iterator[tuple[int, bytes]]:
    """Yield (words that begin in the piece, piece): each can be tokenised alone. Raises Undecodable if it is not UTF-8."""
    rest, at, before = b"", 0, b" "
    for read in chain(read_bytes(text), [b""]):
        rest += read
        cut = tokenizer.last_cut(rest) if read else len(rest)
        piece, rest = rest[:cut], rest[cut:]
        try:
            if text.must_be_utf8:
                piece.decode()
        except UnicodeDecodeError as error:
            raise Undecodable(text.name, f" (byte {text.start + at + error.start})") from None
        joined = before + piece
        in_a_word = np.frombuffer(joined.translate(IN_A_WORD), bool)
        yield np.count_nonzero(in_a_word[1:] > in_a_word[:-1]) if tokenizer.spells_text else 0, piece
        at, before = at + cut, joined[-1:]


def encoded(texts: Iterator, tokenizer: object, bar: Progress) -> Iterator[tuple]:
    """Yield (text number, split, words, tokens) of every piece of every text, in order; several threads encode."""
    parts = (
        (number, split, words, piece) for number, (split, text) in enumerate(texts) for words, piece in pieces_of(text, tokenizer)
    )
    threads = os.cpu_count() or 1
    pool = ThreadPoolExecutor(threads)
    try:
        while batch := list(islice(parts, 4 * threads)):
            for (*place, piece), tokens in zip(batch, pool.map(tokenizer.encode, [part[-1] for part in batch]), strict=True):
                bar.update(len(piece))
                yield *place, tokens
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # Ctrl-C does not wait for pieces that are being encoded


def manifest_text(contents: dict) -> str:
    """The text of a manifest with these contents, and their checksum."""
    return json.dumps(contents | {"checksum": hashlib.sha256(json.dumps(contents).encode()).hexdigest()})


def write_tokens(source: Source, state: str, tokenizer: object, folder: Path) -> None:
    """Tokenise a source into folder: each split's tokens, each document's size in tokens and words, and last the manifest."""
    digests = {name: hashlib.sha256() for name in (*SPLITS, *FILES)}
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(Progress(f"tokenising {folder.name.rpartition('-')[0]}", source.size, "B"))
        files = {name: stack.enter_context(stack.enter_context(written_whole(folder / name)).open("wb")) for name in FILES}

        def write(split, kind, content):
            name = f"{split}.{kind}"
            files[name].write(content)
            for digest in (digests[name], digests[split]):
                digest.update(content)

        stack.enter_context(naming_all_undecodable(source))
        for (_, split), parts in groupby(encoded(source.texts(), tokenizer, bar), key=lambda part: part[:2]):
            size = words = 0
            for *_, begun, tokens in parts:
                write(split, "tokens", np.ascontiguousarray(tokens, tokenizer.dtype).data)
                size, words = size + len(tokens), words + begun
            write(split, "documents", array("q", (size, words)))
    for name in FILES:
        share(folder / name)
    manifest = {
        "dtype": np.dtype(tokenizer.dtype).name, "digest": fingerprint(*(digests[split].hexdigest() for split in SPLITS)),
        "state": state, "files": {name: digests[name].hexdigest() for name in FILES},
    }  # fmt: skip
    with written_whole(folder / MANIFEST) as path:
        path.write_text(manifest_text(manifest))
        share(path)


def damaged(folder: Path, name: str) -> InputError:
    """The error of a cache with a file that is not as it was written."""
    return InputError(
        f"{folder} is damaged (the checksum of {name} is wrong); remove that folder and it will be made again, or give another "
        "--data-dir"
    )


def read_cache(folder: Path, state: str) -> Corpus | None:
    """The Corpus cached in folder; None if there is none, or if it was made from files in another state.

    Raises InputError if anything in the folder is not as it was written.
    """
    try:
        text = (folder / MANIFEST).read_bytes()
    except OSError:  # it was never finished, or it is closed to this user
        return None
    try:
        manifest = json.loads(text)
        del manifest["checksum"]
        right = manifest_text(manifest).encode() == text
    except (ValueError, KeyError, TypeError, RecursionError):
        right = False
    if not right:
        raise damaged(folder, MANIFEST)
    if manifest["state"] != state:
        return None
    if wrong := wrong_file(folder, manifest["files"]):
        raise damaged(folder, wrong)
    return Corpus({split: TextDocuments(folder, split, np.dtype(manifest["dtype"])) for split in SPLITS}, manifest["digest"])


def may_make(folder: Path) -> bool:
    """Whether this user may make the cache in folder, or replace it: nobody's cache is replaced but one's own."""
    return may_write(folder) and may_write(lock_of(folder)) and (not folder.exists() or is_own(folder))


def lock_of(folder: Path) -> Path:
    """The lock file of a cache."""
    return folder.with_name(f"{folder.name}.lock")


def remove_leftovers(tokens: Path) -> None:
    """Remove this user's caches in the folder tokens that were never finished and that no process is making."""
    for lock in tokens.glob("*.lock"):
        folder = lock.with_suffix("")
        with contextlib.suppress(Timeout, OSError), FileLock(lock, timeout=0):
            names = [path.name for path in folder.iterdir()]
            only_ours = all(name.removesuffix(WRITING) in (*FILES, MANIFEST) for name in names)
            if only_ours and MANIFEST not in names and is_own(folder):
                shutil.rmtree(folder)


def make_cache(source: Source, state: str, tokenizer: object, folder: Path) -> Corpus:
    """Tokenise a source into folder and return the Corpus, or wait for the process that is doing it."""
    with disk_errors(folder.parent):
        make_shared_folder(folder.parent)
        remove_leftovers(folder.parent)
        with locked_in_turn(lock_of(folder), f"another process is making {folder}; waiting for it"):
            if found := read_cache(folder, state):  # another process made it meanwhile
                return found
            if folder.exists():  # the source has changed, or a process was killed
                (folder / MANIFEST).unlink(missing_ok=True)  # first: what is being removed is no cache
                shutil.rmtree(folder)
            make_shared_folder(folder)
            try:
                write_tokens(source, state, tokenizer, folder)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            return read_cache(folder, state)


def tokenised(source: Source, tokenizer: object, data_dir: Path) -> Corpus:
    """The Corpus of a source, read from the cache in data_dir; tokenises the source into the cache first if needed.

    If the cache there is missing or outdated and may not be made or replaced, that of default_data_dir takes its place.
    """
    state = state_of_files(source)
    shared, own = (cache_folder(source, tokenizer, place) for place in (data_dir, default_data_dir()))
    if found := read_cache(shared, state):
        return found
    if may_make(shared):
        return make_cache(source, state, tokenizer, shared)
    if own.resolve() == shared.resolve() or not may_make(own):
        raise InputError(f"{shared} is missing or outdated, and this user may not write it; give another --data-dir")
    print(f"{shared} is missing or outdated, and this user may not write it; the tokens are kept in {own}", file=sys.stderr)
    return read_cache(own, state) or make_cache(source, state, tokenizer, own)


def open_source(data: DataConfig, data_dir: Path) -> Source:
    """The Source that --data names: a path, or any name except recall, which has no text."""
    check_data(data)
    if data.data == "stdlib":
        source = standard_library()
    elif data.data in OPENERS:
        source = OPENERS[data.data](Path(data_dir) / data.data)
    else:
        source = hub_set(data.data) if data.data.startswith(HUB) else source_of_path(data)
    return with_fewer(source, data.training_documents) if data.training_documents else source


def with_fewer(source: Source, count: int) -> Source:
    """The Source with only the first `count` texts of the training split."""

    def texts():
        left = count
        for split, text in source.texts():
            left -= split == "train"
            if split != "train" or left >= 0:
                yield split, text

    return source._replace(name=f"{source.name} with {count} for training", texts=texts, size=None)


def load_corpus(data: DataConfig, tokenizer: object, recall: RecallConfig, data_dir: Path) -> Corpus:
    """The Corpus that --data names: generated for recall, otherwise tokenised once and cached in data_dir."""
    if data.data == "recall":
        return Corpus({split: RecallDocuments(recall, split) for split in SPLITS}, "")
    corpus = tokenised(open_source(data, data_dir), tokenizer, data_dir)
    corpus.splits["train"].whole = not data.training_documents
    if data.validation_tokens:
        corpus.splits["valid"] = Beginnings(corpus.splits["valid"], data.validation_tokens, tokenizer)
    return corpus


def check_length(data: str, splits: dict[str, Sequence], segment: int, lanes: int) -> None:
    """Raise InputError if the training split is too short for a segment in each lane, or the validation split for one."""
    for split, count in (("train", lanes), ("valid", 1)):
        tokens = int(lengths_of(splits[split]).sum())
        if tokens < segment:
            raise InputError(
                f"--data {data}: the {split} split has {tokens:,} tokens to predict, fewer than a segment of {segment:,}; "
                f"give more text or a smaller --segment"
            )
        if tokens < count * segment:
            raise InputError(
                f"--batch {lanes:,} lanes need {lanes * segment:,} tokens for a segment of {segment:,} each, the {split} split "
                f"has {tokens:,}; give at most --batch {tokens // segment}"
            )
