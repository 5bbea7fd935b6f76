"""The corpus that --data names: documents in three splits, tokenised once into memory-mapped files.

train.py, eval.py and the bench load it.
"""

import hashlib
import json
import os
import shutil
from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import chain, groupby, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from filelock import FileLock
from tqdm import tqdm

from accelerated.data.config import HUB, check_data
from accelerated.data.named_sets import OPENERS, hub_set
from accelerated.data.recall import RecallConfig, RecallDocuments
from accelerated.data.sources import Source, Text, read_bytes, source_of_path, standard_library
from accelerated.data.windows import SPLITS, WHITE_SPACE, Document, Documents, lengths_of
from accelerated.program.errors import InputError
from accelerated.program.files import disk_errors, written_whole

FORMAT = 4  # of the cached files and of the choice of splits; raise it to tokenise everything again
IN_A_WORD = bytes(byte not in WHITE_SPACE for byte in range(256))  # (256,) 1 if that byte is part of a word


class Corpus(NamedTuple):
    """Documents in their splits, and a digest that identifies them."""

    splits: dict  # {split: documents}
    digest: str  # of all tokens; empty if the documents are generated


class TextDocuments(Documents):
    """The documents of one split, as memory-mapped arrays; raises ValueError if a file has the wrong size."""

    def __init__(self, folder: Path, split: str, dtype: np.dtype):
        table = np.fromfile(folder / f"{split}.documents", np.int64).reshape(-1, 2)  # (documents, 2): tokens, words
        self.sizes, self.words = table[:, 0], table[:, 1]
        self.ends, self.lengths = np.cumsum(self.sizes), np.maximum(self.sizes - 1, 0)
        path = folder / f"{split}.tokens"
        self.tokens = np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)
        if len(self.tokens) != self.sizes.sum():
            raise ValueError(f"{path} does not have the tokens of its documents")

    def __getitem__(self, index):
        tokens = self.tokens[self.ends[index] - self.sizes[index] : self.ends[index]]
        scored = np.broadcast_to(np.True_, (self.lengths[index],))  # takes no memory
        return Document(str(index), tokens[:-1], tokens[1:], scored, int(self.words[index]))


def fingerprint(*parts: object) -> str:
    """A short hash of the parts."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def cache_folder(source: Source, tokenizer: object, data_dir: Path) -> Path:
    """The folder that holds a source's tokens by this tokenizer."""
    stem = "".join(c if c.isalnum() or c in "-." else "_" for c in Path(source.name).name)[:40]
    return Path(data_dir) / "tokens" / f"{stem}-{fingerprint(FORMAT, source.name, tokenizer.fingerprint)}"


def state_of_files(source: Source) -> str:
    """A fingerprint of the paths, sizes and modification times of a source's files."""
    stats = ((path, path.stat()) for path in source.files)
    return fingerprint([(str(path.absolute()), stat.st_size, stat.st_mtime_ns) for path, stat in stats])


def pieces_of(text: Text, tokenizer: object) -> Iterator[tuple[int, bytes]]:
    """Yield (words that begin in the piece, piece): each can be tokenised alone. Raises InputError if the text is not UTF-8."""
    rest, at, before = b"", 0, b" "
    for read in chain(read_bytes(text), [b""]):
        rest += read
        cut = tokenizer.last_cut(rest) if read else len(rest)
        piece, rest = rest[:cut], rest[cut:]
        try:
            if text.must_be_utf8:
                piece.decode()
        except UnicodeDecodeError as error:
            place = f"byte {at + error.start}"
            raise InputError(f"{text.name} is not UTF-8 text ({place}); convert it, or leave it out of --data") from None
        joined = before + piece
        in_a_word = np.frombuffer(joined.translate(IN_A_WORD), bool)
        yield np.count_nonzero(in_a_word[1:] > in_a_word[:-1]), piece
        at, before = at + cut, joined[-1:]


def encoded(texts: Iterator, tokenizer: object, bar: tqdm) -> Iterator[tuple]:
    """Yield (text number, split, words, tokens) of every piece of every text, in order; several threads encode."""
    parts = (
        (number, split, words, piece) for number, (split, text) in enumerate(texts) for words, piece in pieces_of(text, tokenizer)
    )
    threads = os.cpu_count() or 1
    with ThreadPoolExecutor(threads) as pool:
        while batch := list(islice(parts, 4 * threads)):
            for (*place, piece), tokens in zip(batch, pool.map(tokenizer.encode, [part[-1] for part in batch]), strict=True):
                bar.update(len(piece))
                yield *place, tokens


def write_tokens(source: Source, state: str, tokenizer: object, folder: Path) -> None:
    """Tokenise a source into folder: each split's tokens, each document's size in tokens and words, and last the manifest."""
    digests = {split: hashlib.sha256() for split in SPLITS}
    with ExitStack() as stack, tqdm(desc=f"tokenising {Path(source.name).name}", unit="B", unit_scale=True, leave=False) as bar:
        names = [f"{split}.{kind}" for split in SPLITS for kind in ("tokens", "documents")]
        paths = {name: stack.enter_context(written_whole(folder / name)) for name in names}
        files = {name: stack.enter_context(path.open("wb")) for name, path in paths.items()}

        def write(split, kind, content):
            files[f"{split}.{kind}"].write(content)
            digests[split].update(content)

        for (_, split), parts in groupby(encoded(source.texts(), tokenizer, bar), key=lambda part: part[:2]):
            size = words = 0
            for *_, begun, tokens in parts:
                write(split, "tokens", np.ascontiguousarray(tokens, tokenizer.dtype).data)
                size, words = size + len(tokens), words + begun
            write(split, "documents", array("q", (size, words)))
    digest = fingerprint(*(digest.hexdigest() for digest in digests.values()))
    manifest = {"dtype": np.dtype(tokenizer.dtype).name, "digest": digest, "state": state}
    with written_whole(folder / "manifest.json") as path:
        path.write_text(json.dumps(manifest))


def read_cache(folder: Path, state: str) -> Corpus | None:
    """The Corpus cached in folder; None if it is missing, damaged, or made from files in another state."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        if manifest["state"] != state:
            return None
        return Corpus({split: TextDocuments(folder, split, np.dtype(manifest["dtype"])) for split in SPLITS}, manifest["digest"])
    except (OSError, ValueError, KeyError):
        return None


def tokenised(source: Source, tokenizer: object, data_dir: Path) -> Corpus:
    """The Corpus of a source, read from the cache in data_dir; tokenises the source into the cache first if needed."""
    folder, state = cache_folder(source, tokenizer, data_dir), state_of_files(source)
    if found := read_cache(folder, state):
        return found
    with disk_errors(folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if found := read_cache(folder, state):  # another process made it meanwhile
                return found
            if folder.exists():  # the source has changed, or a file is damaged or missing
                shutil.rmtree(folder)
            folder.mkdir()
            write_tokens(source, state, tokenizer, folder)
    return read_cache(folder, state)


def open_source(data: str, data_dir: Path, documents: str = "files") -> Source:
    """The Source that --data names: a path, or any name except recall, which has no text."""
    check_data(data, documents)
    if data == "stdlib":
        return standard_library()
    if data in OPENERS:
        return OPENERS[data](Path(data_dir) / data)
    if data.startswith(HUB):
        return hub_set(data)
    return source_of_path(data, documents)


def load_corpus(data: str, tokenizer: object, recall: RecallConfig, data_dir: Path, documents: str = "files") -> Corpus:
    """The Corpus that --data names: generated for recall, otherwise tokenised once and cached in data_dir."""
    if data == "recall":
        return Corpus({split: RecallDocuments(recall, split) for split in SPLITS}, "")
    return tokenised(open_source(data, data_dir, documents), tokenizer, data_dir)


def check_length(data: str, splits: dict[str, Sequence], segment: int, needed: tuple[str, ...] = ("train", "valid")) -> None:
    """Raise InputError if a needed split has too few tokens for one segment (what a model reads at once)."""
    for split in needed:
        tokens = int(lengths_of(splits[split]).sum())
        if tokens < segment:
            raise InputError(
                f"--data {data}: the {split} split has {tokens} tokens to predict, fewer than a segment of {segment}; "
                f"give more text or a smaller --segment"
            )
