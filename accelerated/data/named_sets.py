"""Data sets with names: the papers' own, downloaded and checked, and any set of the Hugging Face hub (hf:OWNER/NAME).

corpus.py opens them; eval.py uses their official word counts for perplexity per word.
"""

import base64
import contextlib
import functools
import http.client
import io
import json
import re
import urllib.parse
import urllib.request
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import pairwise
from pathlib import Path
from typing import IO, NamedTuple

from accelerated.data.config import HUB
from accelerated.data.sources import Source, Text, read_errors, size_of, splits_named, with_missing_splits
from accelerated.data.windows import SPLITS, count_words
from accelerated.program.errors import InputError
from accelerated.program.files import disk_errors, file_checksum, locked_in_turn
from accelerated.program.progress import Progress
from accelerated.program.sharing import make_shared_folder, share


class Archive(NamedTuple):
    """One file that holds a whole set."""

    address: str
    sha256: str


ENWIK8 = Archive("https://mattmahoney.net/dc/enwik8.zip", "547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc")
ENWIK8_ENDS = (0, 90_000_000, 95_000_000, 100_000_000)  # bytes; the splits between them are the papers'
# Merity's own address; the paper's (s3.amazonaws.com/research.metamind.io) is gone
WIKITEXT_103 = Archive(
    "https://wikitext.smerity.com/wikitext-103-v1.zip", "242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590"
)
# The same articles before rare words were replaced by <unk>
WIKITEXT_103_RAW = Archive(
    "https://wikitext.smerity.com/wikitext-103-raw-v1.zip", "91c00ae287f0d699e18605c84afc9e45c192bc6b7797ff8837e5474655a33794"
)
HEADING = re.compile(rb" = [^=].* = \n")  # of an article; a section's heading has several =
PG19_LIST = "https://storage.googleapis.com/storage/v1/b/deepmind-gutenberg/o"  # names, sizes and MD5 of the books
PG19_BOOKS = "https://storage.googleapis.com/deepmind-gutenberg/"
PG19_FOLDERS = {"train": "train", "valid": "validation", "test": "test"}
PG19_COUNTS = {"train": 28_602, "valid": 50, "test": 100}  # Compressive Transformers, Table 2
CONNECTIONS = 8  # books fetched at a time
DOWNLOAD_SIZE = 1 << 20  # bytes received at a time
ATTEMPTS = 4  # connections before a download fails
TIMEOUT = 60  # seconds without a byte
# PG-19: Compressive Transformers, Table 2. WikiText-103: Merity et al. (2016), which counts every line's end as a word
OFFICIAL_WORDS = {
    ("pg19", "train"): 1_973_136_207, ("pg19", "valid"): 3_007_061, ("pg19", "test"): 6_966_499,
    ("wikitext-103", "train"): 103_227_021, ("wikitext-103", "valid"): 217_646, ("wikitext-103", "test"): 245_569,
}  # fmt: skip
OFFICIAL_WORDS |= {("wikitext-103-raw", split): OFFICIAL_WORDS["wikitext-103", split] for split in SPLITS}  # <unk> is a word


def words_of_split(data: str, split: str, documents: Sequence) -> tuple[int, str]:
    """Return (words in a split, how they were counted): the official count if there is one, otherwise counted in the text.

    An official count is that of a whole split.
    """
    official = OFFICIAL_WORDS.get((data, split)) if getattr(documents, "whole", True) else None
    return (official, "official count") if official else (count_words(documents), "counted between white space")


def open_member(path: Path, archive: Archive, name: str) -> IO[bytes]:
    """Open a file in the zip at path for reading; raises InputError if the zip's checksum is wrong."""
    found = file_checksum(path)
    if found != archive.sha256:
        raise InputError(
            f"{path} has sha256 {found}, expected {archive.sha256}; remove it to fetch it again, or put a good copy there"
        )
    members = zipfile.ZipFile(path)
    [member] = [member for member in members.namelist() if member.rpartition("/")[2] == name]
    return members.open(member)


def files_of_archive(folder: Path, archive: Archive, names: list[str]) -> tuple[tuple, list[Callable]]:
    """Return (paths, functions that open each name): of unpacked files if all exist, otherwise of the archive (fetched)."""
    unpacked = tuple(folder / name for name in names)
    if all(path.exists() for path in unpacked):
        return unpacked, [functools.partial(open, path, "rb") for path in unpacked]
    path = folder / Path(archive.address).name
    if not path.exists():
        with only_fetcher(path):
            if not path.exists():  # no other process fetched it meanwhile
                fetch(archive.address, path, archive.sha256)
    return (path,), [functools.partial(open_member, path, archive, name) for name in names]


def enwik8(folder: Path) -> Source:
    """The first 10^8 bytes of a Wikipedia dump, split at 90 and 95 million bytes."""
    [path], [open_file] = files_of_archive(folder, ENWIK8, ["enwik8"])

    def texts():
        with read_errors(path), open_file() as file:
            size = file.seek(0, io.SEEK_END)
        if size != ENWIK8_ENDS[-1]:
            raise InputError(f"{path} has {size} bytes, enwik8 has {ENWIK8_ENDS[-1]}; remove it to fetch it again")
        for split, (start, stop) in zip(SPLITS, pairwise(ENWIK8_ENDS), strict=True):
            yield split, Text(f"enwik8:{split}", (open_file,), False, start, stop)

    return Source("enwik8", (path,), texts)


def articles(lines: list[bytes]) -> Iterator[bytes]:
    """The articles of a WikiText file: each begins at a heading between two blank lines, the first at the file's beginning."""
    blank = [True, *(not line.strip() for line in lines), False]  # blank[i + 1] is line i; the file's beginning counts as blank
    headings = [i for i, line in enumerate(lines) if blank[i] and blank[i + 2] and HEADING.fullmatch(line)]
    return (b"".join(lines[start:stop]) for start, stop in pairwise([0, *headings[1:], len(lines)]) if stop)


def wikitext_103(folder: Path, raw: bool = False) -> Source:
    """Wikipedia articles, each one document, in the splits of the set's files; spaces separate words. raw: without <unk>."""
    names = [f"wiki.{split}.{'raw' if raw else 'tokens'}" for split in SPLITS]
    paths, openers = files_of_archive(folder, WIKITEXT_103_RAW if raw else WIKITEXT_103, names)

    def texts():
        for split, name, open_file in zip(SPLITS, names, openers, strict=True):
            with read_errors(folder / name), open_file() as file:
                lines = file.readlines()
            for number, article in enumerate(articles(lines)):
                yield split, Text(f"{name}:{number}", (functools.partial(io.BytesIO, article),))

    return Source("wikitext-103-raw" if raw else "wikitext-103", paths, texts)


def listed_books(prefix: str) -> Iterator[tuple[str, str]]:
    """Yield (name, MD5 in hexadecimal) of the books in a folder of PG-19; the server lists them page by page."""
    token = ""
    while token is not None:
        query = {"prefix": f"{prefix}/", "fields": "items(name,md5Hash),nextPageToken", "pageToken": token}
        with urllib.request.urlopen(f"{PG19_LIST}?{urllib.parse.urlencode(query)}", timeout=TIMEOUT) as response:
            page = json.load(response)
        for item in page.get("items", ()):
            if item["name"].endswith(".txt"):
                yield item["name"], base64.b64decode(item["md5Hash"]).hex()
        token = page.get("nextPageToken")


def fetch_books(folder: Path) -> None:
    """Fetch PG-19's missing books, several at a time, and check each against its MD5."""
    try:
        books = [book for prefix in PG19_FOLDERS.values() for book in listed_books(prefix)]
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise InputError(
            f"cannot list PG-19's books at {PG19_LIST} ({getattr(error, 'reason', error)}); try again later, or put the books "
            f"of {PG19_BOOKS} into {folder}/train, /validation and /test"
        ) from None
    missing = [(PG19_BOOKS + name, folder / name, md5) for name, md5 in books if not (folder / name).exists()]
    pool = ThreadPoolExecutor(CONNECTIONS)
    try:
        with Progress("fetching pg19", len(missing), "book") as bar:
            for fetched in as_completed([pool.submit(fetch, *book, "md5", quiet=True) for book in missing]):
                fetched.result()
                bar.update()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # after Ctrl-C or an error


def pg19(folder: Path) -> Source:
    """Project Gutenberg's books published before 1919; each is one document."""
    folders = {split: folder / name for split, name in PG19_FOLDERS.items()}
    if any(len(list(books.glob("*.txt"))) < PG19_COUNTS[split] for split, books in folders.items()):
        with only_fetcher(folder):
            fetch_books(folder)
    books = [(split, path) for split, books in folders.items() for path in sorted(books.glob("*.txt"))]
    counts = Counter(split for split, _ in books)
    for split, count in PG19_COUNTS.items():
        if counts[split] != count:
            raise InputError(f"{folders[split]} has {counts[split]} books, PG-19 has {count}; keep exactly those there")
    texts = [(split, Text(path.name, (functools.partial(open, path, "rb"),))) for split, path in books]
    paths = tuple(path for _, path in books)
    return Source("pg19", paths, lambda: texts, size_of(paths))


def hub_set(data: str) -> Source:
    """The Source of a set that `datasets` opens, hf:OWNER/NAME or hf:OWNER/NAME:CONFIG; each row's `text` is one document.

    The set's own splits are used; a missing one is taken from train. The library stores the set in HF_HOME.
    """
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # errors are reported below, in one line
    name, _, config = data.removeprefix(HUB).partition(":")
    try:
        tables = datasets.load_dataset(name, config or None)
    except Exception as error:  # the library raises many types
        raise InputError(
            f"--data {data}: datasets cannot open it ({error.__cause__ or error}); check name, files and network"
        ) from None
    given = {split: tables[name] for split, name in splits_named(tables, data).items()}
    if "train" not in given:
        raise InputError(f"--data {data} has no split train, only {', '.join(tables)}; give a set that has one")
    for table in given.values():
        if getattr(table.features.get("text"), "dtype", None) not in ("string", "large_string"):
            raise InputError(f"--data {data} needs a string column `text`, has {', '.join(table.column_names)}; use another set")

    def rows(split):
        for number, row in enumerate(given[split].select_columns("text"), start=1):
            text = (row["text"] or "").encode(errors="replace")
            yield Text(f"{split}:{number}", (functools.partial(io.BytesIO, text),))

    files = tuple(Path(file["filename"]) for table in given.values() for file in table.cache_files)
    return Source(data, files, lambda: with_missing_splits({split: functools.partial(rows, split) for split in given}))


OPENERS = {
    "enwik8": enwik8, "wikitext-103": wikitext_103, "wikitext-103-raw": functools.partial(wikitext_103, raw=True), "pg19": pg19,
}  # fmt: skip


def continue_download(address: str, file: io.FileIO, show: bool) -> None:
    """Append to file the part of address that it lacks, over one connection; raises OSError if that breaks."""
    have = file.tell()
    request = urllib.request.Request(address, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code != 416:  # nothing is left to send; the checksum tells whether the file is right
            raise
        return
    with response:
        if response.status != 206:  # the server sends the whole file
            have = file.truncate(0)
        length = response.headers.get("Content-Length")
        total = int(length) + have if length else None
        with Progress(f"fetching {Path(file.name).stem}", total, "B", done=have, show=show) as bar:
            while piece := response.read(DOWNLOAD_SIZE):
                with disk_errors(file.name):
                    bar.update(file.write(piece))
    if length and file.tell() < total:
        raise ConnectionError(f"{file.tell()} of {total} bytes arrived")


@contextlib.contextmanager
def only_fetcher(path: Path) -> Iterator[None]:
    """Inside, no other process fetches the file or folder at path."""
    with disk_errors(path.parent):
        make_shared_folder(path.parent)
    with locked_in_turn(path.with_name(f"{path.name}.lock"), f"another process is fetching {path}; waiting for it"):
        yield


def fetch(address: str, path: Path, checksum: str, kind: str = "sha256", quiet: bool = False) -> None:
    """Fetch address to path; the file appears at path only if it is complete and its checksum is right.

    An interrupted download stays in PATH.part and is continued, in this run and the next. If it still fails, InputError says
    which file to put where.
    """
    part = path.with_name(path.name + ".part")
    by_hand = f"or put a copy of {address} ({kind} {checksum}) at {path}"
    with disk_errors(path.parent):
        make_shared_folder(path.parent)
        file = part.open("ab", buffering=0)
    with file:
        for attempt in range(ATTEMPTS):
            try:
                continue_download(address, file, not quiet)
                break
            except (OSError, http.client.HTTPException) as error:
                if attempt == ATTEMPTS - 1:
                    reason = getattr(error, "reason", None) or error
                    raise InputError(f"cannot fetch {path.name} ({reason}); try again later, {by_hand}") from None
    found = file_checksum(part, kind)
    if found != checksum:
        part.unlink()
        raise InputError(f"the file from {address} has {kind} {found}, expected {checksum}; try again, {by_hand}")
    share(part)
    part.rename(path)
