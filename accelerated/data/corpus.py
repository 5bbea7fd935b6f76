"""The corpus that --data names: documents in three splits, tokenised once into files on the disk.

For train.py, eval.py and experiments. A cache is a folder with an array of all tokens, a table of
the documents, and a manifest, written last, with checksums of both. If the contents of the source's
files change, a new folder is made: their sizes and times of writing are not trusted.
"""

import contextlib
import hashlib
import itertools
import re
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from accelerated.data import named_sets
from accelerated.data.config import DataConfig, check_data, is_opened_by_datasets
from accelerated.data.recall import RecallConfig, RecallDocuments
from accelerated.data.sources import Source, Text, fingerprint, source_of_path, standard_library
from accelerated.data.tokenizers import Tokenizer
from accelerated.data.windows import SPLITS, Document, Documents
from accelerated.program.errors import InputError
from accelerated.program.files import (
    file_checksum,
    only_worker,
    remove_unfinished,
    written_whole,
)
from accelerated.program.progress import Progress

# Of the cached files and of the choice of splits; raise it to tokenise everything again
FORMAT = 11
TOKENS = "tokens"  # files of a cache
DOCUMENTS = "documents"
MANIFEST = "manifest"
COLUMNS = 5  # of the table: number of the split, first token, tokens, words, line ends


class Corpus(NamedTuple):
    """Documents in their splits, and a digest that identifies them."""

    splits: dict[str, Documents]
    digest: str  # of all tokens; empty if the documents are generated


class TextDocuments(Documents):
    """The documents of one split: all tokens (n,), and the split's rows of the table of documents.

    The table is (documents, 4) int64: first token, tokens, words, line ends.
    """

    def __init__(self, tokens: np.ndarray, table: np.ndarray):
        self.tokens = tokens
        self.starts, self.sizes, self.words, self.line_ends = table.T
        self.lengths = np.maximum(self.sizes - 1, 0)

    def __getitem__(self, index: int) -> Document:
        start = self.starts[index]
        tokens = self.tokens[start : start + self.sizes[index]]
        scored = np.broadcast_to(np.True_, int(self.lengths[index]))  # takes no memory
        return Document(str(index), tokens[:-1], tokens[1:], scored)

    def checksum(self) -> str:
        """The SHA-256 of every document's tokens, their number and that of its words."""
        state = hashlib.sha256()
        for start, size, words in zip(self.starts, self.sizes, self.words, strict=True):
            state.update(self.tokens[start : start + size].data)
            state.update(array("q", (size, words)))
        return state.hexdigest()


def cache_folder(source: Source, tokenizer: Tokenizer, data_dir: Path) -> Path:
    """The cache folder for a source, the present contents of its files, and a tokenizer."""
    state = [(str(path.absolute()), file_checksum(path)) for path in source.files]
    stem = re.sub(r"[^\w.-]", "_", Path(source.name).name)[:40]
    digest = fingerprint(FORMAT, source.name, state, tokenizer.fingerprint)
    return data_dir / "tokens" / f"{stem}-{digest}"


def count_words(text: bytes) -> int:
    """The number of words between white space, Unicode's too.

    No list of them is made, which would take several times as much memory as the text.
    """
    return sum(1 for _ in re.finditer(r"\S+", text.decode(errors="replace")))


def write_tokens(source: Source, tokenizer: Tokenizer, folder: Path) -> None:
    """Tokenise a source into the files of a folder: tokens, and a table of documents."""
    table = array("q")
    start = 0
    title = folder.name.rpartition("-")[0]
    with (
        written_whole(folder / TOKENS) as path,
        path.open("wb") as file,
        Progress(f"tokenising {title}", unit="B") as bar,
    ):
        for split, text in source.texts():
            content = text.read()
            tokens = tokenizer.encode(content)
            file.write(np.ascontiguousarray(tokens, tokenizer.dtype).data)
            line_ends = content.count(b"\n")
            words = count_words(content)
            table.extend((SPLITS.index(split), start, len(tokens), words, line_ends))
            start += len(tokens)
            bar.update(len(content))
    with written_whole(folder / DOCUMENTS) as path:
        path.write_bytes(table)


def write_manifest(source: Source, tokenizer: Tokenizer, folder: Path) -> None:
    """Write that a cache is whole; raises InputError if the source changed meanwhile."""
    if cache_folder(source, tokenizer, folder.parent.parent) != folder:
        raise InputError(f"{source.name} changed while it was read; give the command again")
    _, checksum = open_cache(folder, tokenizer.dtype)
    with written_whole(folder / MANIFEST) as path:
        path.write_bytes(checksum.encode())


def open_cache(folder: Path, dtype: type) -> tuple[Corpus, str]:
    """(The Corpus that a folder caches, with tokens of dtype; the manifest it should have)."""
    path = folder / TOKENS
    size = path.stat().st_size
    tokens = np.memmap(path, dtype, "r") if size else np.empty(0, dtype)
    table = np.fromfile(folder / DOCUMENTS, np.int64).reshape(-1, COLUMNS)
    splits = {}
    for number, split in enumerate(SPLITS):
        splits[split] = TextDocuments(tokens, table[table[:, 0] == number, 1:])
    digest = fingerprint(*(documents.checksum() for documents in splits.values()))
    return Corpus(splits, digest), f"{digest} {size} {file_checksum(folder / DOCUMENTS)}"


def tokenised(source: Source, tokenizer: Tokenizer, data_dir: Path) -> Corpus:
    """The Corpus of a source, from the cache in data_dir, which is made first if needed.

    Raises InputError if the cache is damaged.
    """
    folder = cache_folder(source, tokenizer, data_dir)
    if not (folder / MANIFEST).exists():
        with only_worker(folder, "making"):
            if not (folder / MANIFEST).exists():  # no other process made it meanwhile
                remove_unfinished(folder)
                write_tokens(source, tokenizer, folder)
                write_manifest(source, tokenizer, folder)
    with contextlib.suppress(OSError, ValueError):  # if a file is missing or cut off
        corpus, checksum = open_cache(folder, tokenizer.dtype)
        if (folder / MANIFEST).read_bytes() == checksum.encode():
            return corpus
    raise InputError(
        f"{folder} is damaged (a checksum is wrong); "
        "remove that folder and it will be made again, or give another --data-dir"
    )


def open_source(data: DataConfig, data_dir: Path) -> Source:
    """The Source that --data names: a path, or any name except recall, which has no text."""
    check_data(data)
    if data.data == "stdlib":
        source = standard_library()
    elif data.data == "enwik8":
        source = named_sets.enwik8(data_dir)
    elif is_opened_by_datasets(data.data):
        source = named_sets.table_source(data.data, data.text_column)
    else:
        source = source_of_path(data.data)
    if data.training_documents:
        return first_documents(source, data.training_documents)
    return source


def first_documents(source: Source, count: int) -> Source:
    """The source with only the first `count` documents of its training split."""

    def texts() -> Iterator[tuple[str, Text]]:
        number = itertools.count()
        for split, text in source.texts():
            if split != "train" or next(number) < count:
                yield split, text

    return source._replace(name=f"{source.name} with {count} for training", texts=texts)


def load_corpus(
    data: DataConfig, tokenizer: Tokenizer, recall: RecallConfig, data_dir: Path
) -> Corpus:
    """The Corpus that --data names: generated for recall, otherwise tokenised once and cached."""
    if data.data == "recall":
        return Corpus({split: RecallDocuments(recall, split) for split in SPLITS}, "")
    corpus = tokenised(open_source(data, data_dir), tokenizer, data_dir)
    corpus.splits["train"].whole = data.training_documents == 0
    return corpus
