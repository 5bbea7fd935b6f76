"""The corpus that --data names: documents in three splits, tokenised once into memory-mapped files.

For train.py, eval.py and experiments. A cache is a folder with an array of tokens for each split, a table of the documents, and
a manifest, written last, with their sizes and checksums. Another state of the source has another folder.
"""

import hashlib
import json
import os
from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import chain, count, groupby, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from accelerated.data.config import DataConfig, check_data, is_opened_by_datasets
from accelerated.data.lanes import Parts
from accelerated.data.recall import RecallConfig, RecallDocuments
from accelerated.data.sources import Source, Text, only_worker, read_bytes, read_errors, source_of_path, standard_library
from accelerated.data.windows import SPLITS, Document, Documents, lengths_of
from accelerated.program.errors import InputError, counted
from accelerated.program.files import file_checksum, remove_unfinished, written_whole
from accelerated.program.progress import Progress

FORMAT = 6  # of the cached files and of the choice of splits; raise it to tokenise everything again
FILES = (*(f"{split}.tokens" for split in SPLITS), "documents")
MANIFEST = "manifest.json"


class Corpus(NamedTuple):
    """Documents in their splits, and a digest that identifies them."""

    splits: dict  # {split: documents}
    digest: str  # of all tokens; empty if the documents are generated


class TextDocuments(Documents):
    """The documents of one split, from the tokens of all (n,) and a table (documents, 3) of their tokens, words and line ends."""

    def __init__(self, tokens: np.ndarray, table: np.ndarray):
        self.tokens, (self.sizes, self.words, self.line_ends) = tokens, table.T
        self.ends, self.lengths = np.cumsum(self.sizes), np.maximum(self.sizes - 1, 0)

    def __getitem__(self, index):
        tokens = self.tokens[self.ends[index] - self.sizes[index] : self.ends[index]]
        scored = np.broadcast_to(np.True_, (self.lengths[index],))  # takes no memory
        return Document(str(index), tokens[:-1], tokens[1:], scored, int(self.words[index]))


def truncated(documents: Sequence, tokens: int, tokenizer: object) -> Parts:
    """The documents cut to their first `tokens` tokens; their words are those that begin there."""
    parts = Parts(
        documents, [(number, 0, min(length, tokens - 1)) for number, length in enumerate(lengths_of(documents).tolist())]
    )
    texts = (tokenizer.decode([*part.inputs[:1], *part.targets]) for part in parts) if tokenizer.spells_text else ()
    parts.whole, parts.words = False, np.array([len(text.split()) for text in texts], np.int64)
    return parts


def fingerprint(*parts: object) -> str:
    """A short hash of the parts."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def cache_folder(source: Source, tokenizer: object, data_dir: Path) -> Path:
    """The folder that holds the tokens of a source, whose files are in a certain state, by this tokenizer."""
    with read_errors(source.name):
        state = [(str(path.absolute()), (stat := path.stat()).st_size, stat.st_mtime_ns) for path in source.files]
    stem = "".join(c if c.isalnum() or c in "-." else "_" for c in Path(source.name).name)[:40]
    return Path(data_dir) / "tokens" / f"{stem}-{fingerprint(FORMAT, source.name, state, tokenizer.fingerprint)}"


def pieces_of(text: Text, tokenizer: object) -> Iterator[tuple[int, bytes]]:
    """Yield (words that begin in the piece, piece): each can be tokenised alone."""
    rest = before = b""
    for read in chain(read_bytes(text), [b""]):
        rest += read
        cut = tokenizer.last_cut(rest) if read else len(rest)
        piece, rest = rest[:cut], rest[cut:]
        in_a_word = bool(before.strip() and piece[:1].strip())  # the piece begins inside a word
        yield (len(piece.split()) - in_a_word) * tokenizer.spells_text, piece
        before = piece[-1:] or before


def encoded(texts: Iterator, tokenizer: object, bar: Progress) -> Iterator[tuple]:
    """Yield (text number, split, words, line ends, tokens) of every piece of every text, in order; several threads encode."""
    parts = (
        (number, split, words, piece) for number, (split, text) in enumerate(texts) for words, piece in pieces_of(text, tokenizer)
    )
    threads = os.cpu_count() or 1
    pool = ThreadPoolExecutor(threads)
    try:
        while batch := list(islice(parts, 4 * threads)):
            for (*place, piece), tokens in zip(batch, pool.map(tokenizer.encode, [part[-1] for part in batch]), strict=True):
                bar.update(len(piece))
                yield *place, piece.count(b"\n"), tokens
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # Ctrl-C does not wait for pieces that are being encoded


def write_tokens(source: Source, tokenizer: object, folder: Path) -> None:
    """Tokenise a source into folder: tokens of each split, a table of documents (split, tokens, words, line ends), manifest."""
    digests, table = {split: hashlib.sha256() for split in SPLITS}, array("q")
    size = None if source.packed else sum(path.stat().st_size for path in source.files)
    with ExitStack() as stack:
        bar = stack.enter_context(Progress(f"tokenising {folder.name.rpartition('-')[0]}", size, "B"))
        files = {name: stack.enter_context(stack.enter_context(written_whole(folder / name)).open("wb")) for name in FILES}
        for (_, split), parts in groupby(encoded(source.texts(), tokenizer, bar), key=lambda part: part[:2]):
            sums = np.zeros(3, np.int64)
            for *_, words, line_ends, tokens in parts:
                content = np.ascontiguousarray(tokens, tokenizer.dtype).data
                files[f"{split}.tokens"].write(content)
                digests[split].update(content)
                sums += len(tokens), words, line_ends
            digests[split].update(array("q", sums[:2].tolist()))
            table.extend((SPLITS.index(split), *sums.tolist()))
        files["documents"].write(table)
    digest = fingerprint(*(digests[split].hexdigest() for split in SPLITS))
    checksums = {name: file_checksum(folder / name) for name in FILES}
    with written_whole(folder / MANIFEST) as path:
        path.write_text(manifest_text({"dtype": np.dtype(tokenizer.dtype).name, "digest": digest, "files": checksums}))


def manifest_text(contents: dict) -> str:
    """The text of a manifest with these contents, and their checksum."""
    return json.dumps(contents | {"checksum": fingerprint(contents)})


def open_cache(folder: Path) -> Corpus:
    """The Corpus cached in folder; raises InputError if anything in it is not as it was written."""
    name = MANIFEST
    try:
        text = (folder / MANIFEST).read_text()
        contents = json.loads(text)
        del contents["checksum"]
        if manifest_text(contents) != text:
            raise ValueError
        with Progress(f"checking {folder.name}", sum((folder / name).stat().st_size for name in FILES), "B") as bar:
            for name in FILES:
                if file_checksum(folder / name, told=bar.update) != contents["files"][name]:
                    raise ValueError
    except (OSError, KeyError, TypeError, ValueError, RecursionError):
        what = f"{folder} is damaged (the checksum of {name} is wrong)"
        raise InputError(f"{what}; remove that folder and it will be made again, or give another --data-dir") from None
    table, splits = np.fromfile(folder / "documents", np.int64).reshape(-1, 4), {}
    for number, split in enumerate(SPLITS):
        path, dtype = folder / f"{split}.tokens", np.dtype(contents["dtype"])
        tokens = np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)
        splits[split] = TextDocuments(tokens, table[table[:, 0] == number, 1:])
    return Corpus(splits, contents["digest"])


def tokenised(source: Source, tokenizer: object, data_dir: Path) -> Corpus:
    """The Corpus of a source, from the cache in data_dir, which is made first if needed."""
    folder = cache_folder(source, tokenizer, data_dir)
    if not (folder / MANIFEST).exists():
        with only_worker(folder, "making"):
            if not (folder / MANIFEST).exists():  # no other process made it meanwhile
                remove_unfinished(folder)
                write_tokens(source, tokenizer, folder)
    return open_cache(folder)


def open_source(data: DataConfig, data_dir: Path) -> Source:
    """The Source that --data names: a path, or any name except recall, which has no text."""
    check_data(data)
    if data.data in ("enwik8", "pg19") or is_opened_by_datasets(data.data):
        from accelerated.data import named_sets  # here: most runs need none of it

        fetched = {"enwik8": named_sets.enwik8, "pg19": named_sets.pg19}.get(data.data)
        source = fetched(Path(data_dir) / data.data) if fetched else named_sets.table_source(data.data)
    else:
        source = standard_library() if data.data == "stdlib" else source_of_path(data)
    if not data.training_documents:
        return source

    def texts():
        seen = count(1)
        return (part for part in source.texts() if part[0] != "train" or next(seen) <= data.training_documents)

    return source._replace(name=f"{source.name} with {data.training_documents} for training", texts=texts, packed=True)


def load_corpus(data: DataConfig, tokenizer: object, recall: RecallConfig, data_dir: Path) -> Corpus:
    """The Corpus that --data names: generated for recall, otherwise tokenised once and cached in data_dir."""
    if data.data == "recall":
        return Corpus({split: RecallDocuments(recall, split) for split in SPLITS}, "")
    corpus = tokenised(open_source(data, data_dir), tokenizer, data_dir)
    corpus.splits["train"].whole = not data.training_documents
    if data.validation_tokens:
        corpus.splits["valid"] = truncated(corpus.splits["valid"], data.validation_tokens, tokenizer)
    return corpus


def check_length(data: str, splits: dict[str, Sequence], segment: int, lanes: int) -> None:
    """Raise InputError if the training split is too short for a segment in each lane, or the validation split for one."""
    for split, parts in (("train", lanes), ("valid", 1)):
        tokens = int(lengths_of(splits[split]).sum())
        if tokens < parts * segment:
            advice = f"at most --batch {tokens // segment}" if tokens >= segment else "more text or a smaller --segment"
            what = f"the {split} split has {tokens:,} tokens to predict, {counted(parts, 'lane')} of a segment of {segment:,}"
            raise InputError(f"--data {data}: {what} need {parts * segment:,}; give {advice}")
