"""The corpus that --data names: documents in three splits, tokenised once into memory-mapped files.

For train.py, eval.py and experiments. A cache is a folder with an array of all tokens, a table of the documents, and a
manifest, written last, with checksums of both. If the source's files change, a new folder is made.
"""

import contextlib
import hashlib
from array import array
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np

from accelerated.data.config import DataConfig, check_data, is_opened_by_datasets
from accelerated.data.recall import RecallConfig, RecallDocuments
from accelerated.data.sources import Source, only_worker, source_of_path, standard_library
from accelerated.data.tokenizers import Tokenizer
from accelerated.data.windows import SPLITS, Document, Documents
from accelerated.program.errors import InputError
from accelerated.program.files import file_checksum, remove_unfinished, written_whole
from accelerated.program.progress import Progress

FORMAT = 9  # of the cached files and of the choice of splits; raise it to tokenise everything again
TOKENS, DOCUMENTS, MANIFEST = "tokens", "documents", "manifest"  # files of a cache


class Corpus(NamedTuple):
    """Documents in their splits, and a digest that identifies them."""

    splits: dict[str, Documents]
    digest: str  # of all tokens; empty if the documents are generated


class TextDocuments(Documents):
    """The documents of one split: all tokens (n,), a table (documents, 4) of first token, tokens, words, line ends."""

    def __init__(self, tokens: np.ndarray, table: np.ndarray):
        self.tokens, (self.starts, self.sizes, self.words, self.line_ends) = tokens, table.T
        self.lengths = np.maximum(self.sizes - 1, 0)

    def __getitem__(self, index):
        tokens = self.tokens[self.starts[index] : self.starts[index] + self.sizes[index]]
        scored = np.broadcast_to(np.True_, (self.lengths[index],))  # takes no memory
        return Document(str(index), tokens[:-1], tokens[1:], scored)

    def checksum(self) -> str:
        """The SHA-256 of every document's tokens, their number and that of its words."""
        state, view = hashlib.sha256(), memoryview(self.tokens)
        for start, size, words in zip(
            self.starts.tolist(), self.sizes.tolist(), self.words.tolist(), strict=True
        ):
            state.update(view[start : start + size])
            state.update(array("q", (size, words)))
        return state.hexdigest()


def fingerprint(*parts: object) -> str:
    """A short hash of the parts."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def cache_folder(source: Source, tokenizer: Tokenizer, data_dir: Path) -> Path:
    """The cache folder for a source, the present state of its files, and a tokenizer."""
    state = [
        (str(path.absolute()), (stat := path.stat()).st_size, stat.st_mtime_ns)
        for path in source.files
    ]
    stem = "".join(c if c.isalnum() or c in "-." else "_" for c in Path(source.name).name)[:40]
    return (
        Path(data_dir)
        / "tokens"
        / f"{stem}-{fingerprint(FORMAT, source.name, state, tokenizer.fingerprint)}"
    )


def write_tokens(source: Source, tokenizer: Tokenizer, folder: Path) -> None:
    """Tokenise a source into folder: tokens, a table of documents (split number, and what TextDocuments has), manifest."""
    table, start = array("q"), 0
    bar = Progress(f"tokenising {folder.name.rpartition('-')[0]}", unit="B")
    pool = ThreadPoolExecutor(1)  # Ctrl-C does not wait for a text that is being encoded
    with written_whole(folder / TOKENS) as path, path.open("wb") as file, bar:
        for split, text in source.texts():
            tokens = pool.submit(tokenizer.encode, content := text.read()).result()
            file.write(np.ascontiguousarray(tokens, tokenizer.dtype).data)
            words = len(content.split()) if tokenizer.spells_text else 0
            table.extend((SPLITS.index(split), start, len(tokens), words, content.count(b"\n")))
            start += len(tokens)
            bar.update(len(content))
    with written_whole(folder / DOCUMENTS) as path:
        path.write_bytes(table)
    _, checksum = open_cache(folder, tokenizer.dtype)
    with written_whole(folder / MANIFEST) as path:
        path.write_text(checksum)


def open_cache(folder: Path, dtype: type) -> tuple[Corpus, str]:
    """Return (the Corpus that is cached in folder, of tokens of this type; what its manifest says if it is whole)."""
    path, table = folder / TOKENS, np.fromfile(folder / DOCUMENTS, np.int64).reshape(-1, 5)
    tokens = np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)
    splits = {
        split: TextDocuments(tokens, table[table[:, 0] == number, 1:])
        for number, split in enumerate(SPLITS)
    }
    digest = fingerprint(*(documents.checksum() for documents in splits.values()))
    return Corpus(
        splits, digest
    ), f"{digest} {path.stat().st_size} {file_checksum(folder / DOCUMENTS)}"


def tokenised(source: Source, tokenizer: Tokenizer, data_dir: Path) -> Corpus:
    """The Corpus of a source, from the cache in data_dir, which is made first if needed; raises InputError if it is damaged."""
    folder = cache_folder(source, tokenizer, data_dir)
    if not (folder / MANIFEST).exists():
        with only_worker(folder, "making"):
            if not (folder / MANIFEST).exists():  # no other process made it meanwhile
                remove_unfinished(folder)
                write_tokens(source, tokenizer, folder)
    with contextlib.suppress(OSError, ValueError):  # if a file is missing or cut off
        corpus, checksum = open_cache(folder, tokenizer.dtype)
        if (folder / MANIFEST).read_text() == checksum:
            return corpus
    what = f"{folder} is damaged (a checksum is wrong)"
    raise InputError(
        f"{what}; remove that folder and it will be made again, or give another --data-dir"
    )


def open_source(data: DataConfig, data_dir: Path) -> Source:
    """The Source that --data names: a path, or any name except recall, which has no text."""
    check_data(data)
    if data.data in ("enwik8", "pg19") or is_opened_by_datasets(data.data):
        from accelerated.data import named_sets  # here: most runs need none of it

        fetched = {"enwik8": named_sets.enwik8, "pg19": named_sets.pg19}.get(data.data)
        source = (
            fetched(Path(data_dir) / data.data) if fetched else named_sets.table_source(data.data)
        )
    else:
        source = standard_library() if data.data == "stdlib" else source_of_path(data)
    if not data.training_documents:
        return source

    def texts():
        seen = count(1)
        return (
            part
            for part in source.texts()
            if part[0] != "train" or next(seen) <= data.training_documents
        )

    return source._replace(
        name=f"{source.name} with {data.training_documents} for training", texts=texts
    )


def load_corpus(
    data: DataConfig, tokenizer: Tokenizer, recall: RecallConfig, data_dir: Path
) -> Corpus:
    """The Corpus that --data names: generated for recall, otherwise tokenised once and cached in data_dir."""
    if data.data == "recall":
        return Corpus({split: RecallDocuments(recall, split) for split in SPLITS}, "")
    corpus = tokenised(open_source(data, data_dir), tokenizer, data_dir)
    corpus.splits["train"].whole = not data.training_documents
    return corpus
