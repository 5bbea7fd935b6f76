"""Data sets with names: the papers' own, fetched and checked, and what the package datasets opens; corpus.py uses them."""

import base64
import glob
import hashlib
import http.client
import json
import os
import re
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from accelerated.data.config import HUB, PACKED, TABLES, WIKITEXTS, DataConfig
from accelerated.data.sources import (
    SPLIT_NAMES,
    Source,
    Text,
    only_worker,
    source_of_path,
    with_missing_splits,
)
from accelerated.data.windows import SPLITS
from accelerated.program.errors import InputError
from accelerated.program.files import disk_errors, file_checksum, written_whole
from accelerated.program.progress import Progress

AGENT = {
    "User-Agent": "palimpsest (long-memory Transformers, for research)"
}  # servers answer 403 to urllib's own
ENWIK8 = "https://mattmahoney.net/dc/enwik8.zip"
ENWIK8_SHA256 = "547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc"
ENWIK8_ENDS = (
    0,
    90_000_000,
    95_000_000,
    100_000_000,
)  # bytes; the splits between them are the papers'
WIKITEXT = "Salesforce/wikitext"  # on the hub; both forms are its configurations NAME-v1
HEADING = re.compile(
    rb" = (?!=)(?=.*[A-Za-z]).* = \n"
)  # of an article: a section has several =, and " = 5 = " is a formula
PG19_LIST = (
    "https://storage.googleapis.com/storage/v1/b/deepmind-gutenberg/o"  # names and MD5 of the books
)
PG19_BOOKS = "https://storage.googleapis.com/deepmind-gutenberg/"
PG19_COPY = "hf:emozilla/pg19"  # the hub's deepmind/pg19 is a script, which datasets 4 refuses
PG19_COUNTS = {
    "train": 28_602,
    "validation": 50,
    "test": 100,
}  # books; Compressive Transformers, Table 2
TIMEOUT = 60  # seconds without a byte


def opened_by_datasets(data: str) -> dict:
    """Return {split: table with a column `text`} of WikiText-103, hf:OWNER/NAME, hf:OWNER/NAME:CONFIG, or a file of a table.

    The package datasets keeps what it has opened in HF_HOME. A text inside a packed file is one row.
    """
    import datasets

    packed = Path(data).suffix.lower() in PACKED
    reader = TABLES.get(
        (Path(data).with_suffix("") if packed else Path(data)).suffix.lower(), "text"
    )
    given = {"text": {"sample_by": "document"}, "csv": {"keep_default_na": False}}.get(
        reader, {}
    )  # "None" is a text
    what, given, advice = (
        [reader],
        given | {"data_files": glob.escape(data)},
        "check name, files and network",
    )
    if data in WIKITEXTS:
        what, given = [WIKITEXT, f"{data}-v1"], {}
        advice += "; HF_ENDPOINT may name a mirror of the hub"
    elif data.startswith(HUB):
        what, given = data.removeprefix(HUB).split(":", 1), {}
    datasets.logging.set_verbosity(
        datasets.logging.CRITICAL
    )  # errors are reported below, in one line
    try:
        opened = datasets.load_dataset(*what, **given)
    except Exception as error:  # the library raises many types
        reason = error.__cause__ or error
        words = f"datasets cannot open it ({str(reason) or type(reason).__name__})"
        raise InputError(f"--data {data}: {words}; {advice}") from None
    tables = {SPLIT_NAMES[name]: table for name, table in opened.items() if name in SPLIT_NAMES}
    if "train" not in tables:
        raise InputError(
            f"--data {data} has no split train, only {', '.join(opened)}; give a set that has one"
        )
    for table in tables.values():
        if getattr(table.features.get("text"), "dtype", None) not in ("string", "large_string"):
            raise InputError(
                f"--data {data} needs a string column `text`, has {', '.join(table.column_names)}; use another set"
            )
    return tables


def table_source(data: str) -> Source:
    """The Source of what the package datasets opens: each row is a document; WikiText's lines are joined to articles."""
    tables, is_file = opened_by_datasets(data), data not in WIKITEXTS and os.path.exists(data)

    def texts(split):
        rows = (
            (row["text"] or "").encode(errors="replace")
            for row in tables[split].select_columns("text")
        )
        for number, row in enumerate(articles(rows) if data in WIKITEXTS else rows, start=1):
            yield Text(f"{Path(data).name if is_file else split}:{number}", (partial(bytes, row),))

    name = os.path.realpath(data) if is_file else data
    files = tuple(Path(file["filename"]) for table in tables.values() for file in table.cache_files)
    return Source(
        name, files, lambda: with_missing_splits({split: partial(texts, split) for split in tables})
    )


def articles(rows: Iterable[bytes]) -> Iterator[bytes]:
    """The articles of WikiText's lines: each begins at a heading between two blank lines, the first at the file's beginning."""
    lines = [row or b" \n" for row in rows]  # the hub has an empty row for a blank line
    blank = [
        True,
        *(not line.strip() for line in lines),
        False,
    ]  # blank[i + 1] is line i; the file's beginning counts as blank
    headings = [
        i for i, line in enumerate(lines) if blank[i] and blank[i + 2] and HEADING.fullmatch(line)
    ]
    return (
        b"".join(lines[start:stop])
        for start, stop in pairwise([0, *headings[1:], len(lines)])
        if stop
    )


def enwik8(folder: Path) -> Source:
    """The first 10^8 bytes of a Wikipedia dump, split at 90 and 95 million bytes."""
    path = folder / "enwik8.zip"
    if not path.exists():
        with only_worker(folder, "fetching"):
            fetch(ENWIK8, path, ENWIK8_SHA256)
    if file_checksum(path) != ENWIK8_SHA256:
        raise InputError(
            f"{path} does not have sha256 {ENWIK8_SHA256}; remove it to fetch it again, or put a good copy there"
        )
    spans = zip(SPLITS, pairwise(ENWIK8_ENDS), strict=True)
    texts = [
        (split, Text("enwik8", (lambda s=slice(*span): zipfile.ZipFile(path).read("enwik8")[s],)))
        for split, span in spans
    ]
    return Source("enwik8", (path,), lambda: texts)


def pg19(folder: Path) -> Source:
    """Project Gutenberg's books published before 1919; each is one document."""
    if any(len(list((folder / name).glob("*.txt"))) < count for name, count in PG19_COUNTS.items()):
        with only_worker(folder, "fetching"):
            fetch_books(folder)
    return source_of_path(DataConfig(str(folder)))._replace(name="pg19")


def fetch_books(folder: Path) -> None:
    """Fetch PG-19's missing books, several at a time; the server lists names and MD5, page by page."""
    by_hand = f"give --data {PG19_COPY}, or put the books of {PG19_BOOKS} into {folder}/train, /validation and /test"
    pool, work = ThreadPoolExecutor(8), []
    try:
        for name in PG19_COUNTS:
            query = {
                "prefix": f"{name}/",
                "fields": "items(name,md5Hash),nextPageToken",
                "pageToken": "",
            }
            while query["pageToken"] is not None:
                page = fetched(f"{PG19_LIST}?{urllib.parse.urlencode(query)}", by_hand, json.loads)
                for book in page.get("items", ()):
                    if book["name"].endswith(".txt"):
                        md5 = base64.b64decode(book["md5Hash"]).hex()
                        work.append(
                            pool.submit(
                                fetch, PG19_BOOKS + book["name"], folder / book["name"], md5, "md5"
                            )
                        )
                query["pageToken"] = page.get("nextPageToken")
        for done in Progress("fetching pg19", len(work), "book", over=as_completed(work)):
            done.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # after Ctrl-C or an error


def fetch(address: str, path: Path, checksum: str, kind: str = "sha256") -> None:
    """Fetch address to path, if it is not there; it appears only if its checksum is right. InputError says what to do by hand."""
    if path.exists():
        return
    content = fetched(address, by_hand := f"put a copy ({kind} {checksum}) at {path}")
    if hashlib.new(kind, content).hexdigest() != checksum:
        raise InputError(
            f"the file from {address} has another {kind} than {checksum}; try again, or {by_hand}"
        )
    with disk_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as temporary:
        temporary.write_bytes(content)


def fetched(address: str, by_hand: str, parse: Callable = bytes) -> Any:
    """What is at an address, parsed; an InputError advises what to do by hand."""
    try:
        with urllib.request.urlopen(
            urllib.request.Request(address, headers=AGENT), timeout=TIMEOUT
        ) as response:
            return parse(response.read())
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise InputError(
            f"cannot fetch {address} ({getattr(error, 'reason', None) or error}); {by_hand}"
        ) from None
