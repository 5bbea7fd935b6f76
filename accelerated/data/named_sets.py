"""Sets that have a name: the papers' own, fetched and checked, and any set of the Hugging Face hub (hf:OWNER/NAME).

corpus.py opens them; eval.py divides by their official word counts.
"""

import base64
import functools
import hashlib
import http.client
import io
import json
import re
import time
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from accelerated.data.sources import Source, Text, dealt, read_errors, splits_named
from accelerated.data.windows import SPLITS, count_words
from accelerated.errors import InputError, disk_errors

HUB = "hf:"  # what the name of a set of the hub begins with


class Archive(NamedTuple):
    """One file that holds a whole set."""

    address: str
    sha256: str


ENWIK8 = Archive("https://mattmahoney.net/dc/enwik8.zip", "547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc")
ENWIK8_ENDS = (0, 90_000_000, 95_000_000, 100_000_000)  # bytes: what the papers train, validate and test on
# Merity's own address; that of the paper (s3.amazonaws.com/research.metamind.io) is gone
WIKITEXT_103 = Archive(
    "https://wikitext.smerity.com/wikitext-103-v1.zip", "242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590"
)
HEADING = re.compile(rb" = [^=].* = \n")  # an article's; its sections have two and more of =
PG19_LIST = "https://storage.googleapis.com/storage/v1/b/deepmind-gutenberg/o"  # names, sizes and MD5 of the books
PG19_BOOKS = "https://storage.googleapis.com/deepmind-gutenberg/"
PG19_FOLDERS = {"train": "train", "valid": "validation", "test": "test"}
PG19_COUNTS = {"train": 28_602, "valid": 50, "test": 100}  # Compressive Transformers, Table 2
CONNECTIONS = 8
# PG-19: Compressive Transformers, Table 2. WikiText-103: Merity et al. (2016), a word for every line's end among them
OFFICIAL_WORDS = {
    ("pg19", "train"): 1_973_136_207, ("pg19", "valid"): 3_007_061, ("pg19", "test"): 6_966_499,
    ("wikitext-103", "train"): 103_227_021, ("wikitext-103", "valid"): 217_646, ("wikitext-103", "test"): 245_569,
}  # fmt: skip


def words_of_split(data: str, split: str, documents: Sequence) -> tuple[int, str]:
    """(words of a split, how they were counted): officially if the set has such a count, otherwise in its text."""
    official = OFFICIAL_WORDS.get((data, split))
    return (official, "official count") if official else (count_words(documents), "counted between white space")


def fetched_archive(archive: Archive, folder: Path) -> Path:
    """The path of an archive in folder, fetched if it is not there."""
    path = folder / Path(archive.address).name
    if not path.exists():
        fetch(archive.address, path, archive.sha256)
    return path


def open_member(path: Path, archive: Archive, member: str) -> Callable:
    """A function that opens a zip's member for reading; InputError if the zip's checksum is wrong."""
    found = file_checksum(path)
    if found != archive.sha256:
        raise InputError(
            f"{path} has sha256 {found}, expected {archive.sha256}; remove it to fetch it again, or put a good copy there"
        )
    opened = zipfile.ZipFile(path)
    [name] = [name for name in opened.namelist() if name.rpartition("/")[2] == member]
    return functools.partial(opened.open, name)


def enwik8(folder: Path) -> Source:
    """The first 10^8 bytes of a dump of Wikipedia, cut at 90 and 95 million bytes."""
    plain = folder / "enwik8"
    path = plain if plain.exists() else fetched_archive(ENWIK8, folder)

    def texts():
        open_file = functools.partial(open, path, "rb") if path == plain else open_member(path, ENWIK8, "enwik8")
        with open_file() as file:
            size = file.seek(0, io.SEEK_END)
        if size != ENWIK8_ENDS[-1]:
            raise InputError(f"{path} has {size} bytes, enwik8 has {ENWIK8_ENDS[-1]}; remove it to fetch it again")
        for split, start, stop in zip(SPLITS, ENWIK8_ENDS, ENWIK8_ENDS[1:], strict=False):
            yield split, Text(f"enwik8:{split}", (open_file,), False, start, stop)

    return Source("enwik8", (path,), texts)


def articles(lines: Iterable[bytes]) -> Iterator[bytes]:
    """The articles of a WikiText file: each begins with a heading between two blank lines.

    What stands before the first heading is part of the first article.
    """
    article, before, heading, headings = [], b"", False, 0
    for line in lines:
        if heading and not line.strip():
            headings += 1
            if headings > 1:
                yield b"".join(article[:-1])
                article = article[-1:]
        heading = bool(HEADING.fullmatch(line)) and not before.strip()
        article.append(line)
        before = line
    if article:
        yield b"".join(article)


def wikitext_103(folder: Path) -> Source:
    """Articles of Wikipedia as documents, in the three splits of their files; words are parted by spaces."""
    names = {split: f"wiki.{split}.tokens" for split in SPLITS}
    plain = all((folder / name).exists() for name in names.values())
    files = tuple(folder / name for name in names.values()) if plain else (fetched_archive(WIKITEXT_103, folder),)

    def texts():
        for split, name in names.items():
            open_file = functools.partial(open, folder / name, "rb") if plain else open_member(files[0], WIKITEXT_103, name)
            with read_errors(folder / name), open_file() as lines:
                for number, article in enumerate(articles(lines)):
                    yield split, Text(f"{name}:{number}", (functools.partial(io.BytesIO, article),))

    return Source("wikitext-103", files, texts)


def listed_books(prefix: str) -> Iterator[tuple[str, str]]:
    """(name, MD5 in hexadecimal) of the books in a folder of PG-19, as its server lists them, page by page."""
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
    """Fetch what is missing of PG-19, several books at a time; every one is checked against its MD5."""
    try:
        books = [book for prefix in PG19_FOLDERS.values() for book in listed_books(prefix)]
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise InputError(
            f"cannot list PG-19's books at {PG19_LIST} ({getattr(error, 'reason', error)}); try again later, or put the books "
            f"of {PG19_BOOKS} into {folder}/train, /validation and /test"
        ) from None
    missing = [(name, md5) for name, md5 in books if not (folder / name).exists()]
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        jobs = [pool.submit(fetch, PG19_BOOKS + name, folder / name, md5, "md5", True) for name, md5 in missing]
        try:
            for job in tqdm(jobs, desc="pg19", unit="book", initial=len(books) - len(missing), total=len(books)):
                job.result()
        finally:
            pool.shutdown(cancel_futures=True)


def pg19(folder: Path) -> Source:
    """Books of Project Gutenberg published before 1919, a document each."""

    def books_there():
        return {split: sorted((folder / name).glob("*.txt")) for split, name in PG19_FOLDERS.items()}

    if any(len(paths) < PG19_COUNTS[split] for split, paths in books_there().items()):
        fetch_books(folder)
    books = books_there()
    for split, paths in books.items():
        if len(paths) != PG19_COUNTS[split]:
            raise InputError(f"{folder / PG19_FOLDERS[split]} has {len(paths)} books, PG-19 {PG19_COUNTS[split]}; put all there")
    texts = [(split, Text(path.name, (functools.partial(open, path, "rb"),))) for split, paths in books.items() for path in paths]
    return Source("pg19", tuple(path for paths in books.values() for path in paths), lambda: texts)


def hub_set(data: str) -> Source:
    """Any set that the `datasets` library opens, hf:OWNER/NAME or hf:OWNER/NAME:CONFIG: one row's `text` is one document.

    Its own splits are used; a missing one is cut out of train. The library keeps the set where HF_HOME says.
    """
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what goes wrong is said below, in one line
    name, _, config = data.removeprefix(HUB).partition(":")
    try:
        tables = datasets.load_dataset(name, config or None)
    except Exception as error:  # the library has many kinds of its own
        raise InputError(
            f"--data {data}: datasets cannot open it ({error.__cause__ or error}); check name, files and network"
        ) from None
    own = {split: tables[name] for split, name in splits_named(tables, data).items()}
    if "train" not in own:
        raise InputError(f"--data {data} has no split train, only {', '.join(tables)}; give a set that has one")
    for table in own.values():
        if getattr(table.features.get("text"), "dtype", None) not in ("string", "large_string"):
            raise InputError(f"--data {data} has no column `text` of strings, only {', '.join(table.column_names)}; rename one")

    def rows(split):
        for number, row in enumerate(own[split].select_columns("text"), start=1):
            text = (row["text"] or "").encode(errors="replace")
            yield Text(f"{split}:{number}", (functools.partial(io.BytesIO, text),))

    files = tuple(Path(file["filename"]) for table in own.values() for file in table.cache_files)
    return Source(data, files, lambda: dealt({split: functools.partial(rows, split) for split in own}))


DATASETS = {"enwik8": enwik8, "wikitext-103": wikitext_103, "pg19": pg19}


def named_source(name: str, data_dir: Path) -> Source:
    """The Source of a named set; the papers' own are looked for in their folder of data_dir and fetched if absent."""
    if name.startswith(HUB):
        return hub_set(name)
    folder = Path(data_dir) / name
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return DATASETS[name](folder)


DOWNLOAD_SIZE = 1 << 20  # bytes received at a time
ATTEMPTS = 4
PAUSE = 1.0  # seconds before the second attempt, doubled before each further one
TIMEOUT = 60  # seconds without a byte


def file_checksum(path: Path, kind: str = "sha256") -> str:
    """Checksum of a file's bytes, in hexadecimal."""
    state = hashlib.new(kind)
    with open(path, "rb") as file:
        while piece := file.read(DOWNLOAD_SIZE):
            state.update(piece)
    return state.hexdigest()


def continue_download(address: str, file: io.FileIO, bar: tqdm) -> None:
    """One connection: append to file what it lacks of address. Raises OSError if the connection breaks."""
    have = file.tell()
    request = urllib.request.Request(address, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code != 416:  # nothing is left to send: what is there is whole, or of another file, as the checksum will tell
            raise
        return
    with response:
        if response.status != 206:  # the server begins anew
            have = file.truncate(0)
        length = response.headers.get("Content-Length")
        bar.n, bar.total = have, int(length) + have if length else None
        while piece := response.read(DOWNLOAD_SIZE):
            with disk_errors(file.name):
                bar.update(file.write(piece))
    if length and file.tell() < bar.total:
        raise ConnectionError(f"{file.tell()} of {bar.total} bytes came")


def fetch(address: str, path: Path, checksum: str, kind: str = "sha256", quiet: bool = False) -> None:
    """Fetch address to path; raises InputError saying which file to put where if it cannot.

    A download that breaks off is kept as PATH.part and continued, now and in a later run. path appears whole, with the
    expected checksum, or not at all.
    """
    part = path.with_name(path.name + ".part")
    by_hand = f"or put a copy of {address} ({kind} {checksum}) at {path}"
    with disk_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = part.open("ab", buffering=0)
    with file, tqdm(desc=path.name, unit="B", unit_scale=True, disable=quiet, leave=False) as bar:
        for attempt in range(ATTEMPTS):
            try:
                continue_download(address, file, bar)
                break
            except (OSError, http.client.HTTPException) as error:
                if attempt == ATTEMPTS - 1 or (isinstance(error, urllib.error.HTTPError) and error.code < 500):
                    reason = getattr(error, "reason", None) or error
                    raise InputError(f"cannot fetch {path.name} ({reason}); try again later, {by_hand}") from None
            time.sleep(PAUSE * 2**attempt)
    found = file_checksum(part, kind)
    if found != checksum:
        part.unlink()
        raise InputError(f"what came from {address} has {kind} {found}, expected {checksum}; try again, {by_hand}")
    part.rename(path)
