"""The papers' data sets by name: where they come from, how they are cut into documents, and their official word counts."""

import base64
import functools
import hashlib
import http.client
import json
import re
import time
import urllib.request
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from accelerated.data.sources import Source, Span, Text, open_member, unpacked, whole_file
from accelerated.data.windows import SPLITS, count_words
from accelerated.errors import InputError, disk_errors


def words_of_split(data, split, documents):
    """(words of a split, how they were counted): officially where the set has such a count, otherwise in its text."""
    official = OFFICIAL_WORDS.get((data, split))
    return (official, "official count") if official else (count_words(documents), "counted between white space")


class Archive(NamedTuple):
    """One file that holds a whole set."""

    address: str
    sha256: str

    @property
    def file(self):
        return self.address.rpartition("/")[2]


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


def fetched_archive(archive, folder):
    """The path of an archive in folder, fetched if it is not there."""
    path = Path(folder) / archive.file
    if not path.exists():
        fetch(archive.address, path, archive.sha256)
    return path


def member_of(path, archive, member, workspace):
    """A zip's member as a plain file, after the zip's checksum was found right."""
    check_file(path, archive.sha256)
    with zipfile.ZipFile(path) as opened:
        names = [name for name in opened.namelist() if name.rpartition("/")[2] == member]
    if not names:
        raise InputError(f"{path} holds no {member}; remove it to fetch it again")
    return unpacked(f"{path}:{names[0]}", workspace, functools.partial(open_member, path, names[0]))


def enwik8(folder):
    """The first 10^8 bytes of a dump of Wikipedia, cut at 90 and 95 million bytes."""
    plain = folder / "enwik8"
    path = plain if plain.exists() else fetched_archive(ENWIK8, folder)

    def texts(workspace):
        file = path if path == plain else member_of(path, ENWIK8, "enwik8", workspace)
        if file.stat().st_size != ENWIK8_ENDS[-1]:
            raise InputError(f"{file} has {file.stat().st_size} bytes, enwik8 has {ENWIK8_ENDS[-1]}; remove it to fetch it again")
        for split, start, stop in zip(SPLITS, ENWIK8_ENDS, ENWIK8_ENDS[1:], strict=False):
            yield split, Text(f"enwik8:{split}", (Span(file, start, stop),), must_be_utf8=False)

    return Source("enwik8", (path,), texts)


def article_starts(path):
    """(byte offsets of the articles, bytes) of a WikiText file: each begins with a heading between two blank lines.

    What stands before the first heading is part of the first article.
    """
    starts, at, before, heading = [], 0, b" \n", None
    with open(path, "rb") as lines:
        for line in lines:
            if heading is not None and not line.strip():
                starts.append(heading)
            heading = at if HEADING.fullmatch(line) and not before.strip() else None
            at, before = at + len(line), line
    return [0, *starts[1:]] if at else [], at


def wikitext_103(folder):
    """Articles of Wikipedia as documents, in the three splits of their files; words are parted by spaces."""
    names = {split: f"wiki.{split}.tokens" for split in SPLITS}
    plain = all((folder / name).exists() for name in names.values())
    files = tuple(folder / name for name in names.values()) if plain else (fetched_archive(WIKITEXT_103, folder),)

    def texts(workspace):
        for split, name in names.items():
            path = folder / name if plain else member_of(files[0], WIKITEXT_103, name, workspace)
            starts, end = article_starts(path)
            for number, (start, stop) in enumerate(zip(starts, [*starts[1:], end], strict=True)):
                yield split, Text(f"{name}:{number}", (Span(path, start, stop),))

    return Source("wikitext-103", files, texts)


def listed_books(prefix):
    """[(name, MD5 in hexadecimal)] of the books in a folder of PG-19, as its server lists them."""
    books, token = [], ""
    while True:
        query = {"prefix": f"{prefix}/", "fields": "items(name,md5Hash),nextPageToken", "pageToken": token}
        try:
            with urllib.request.urlopen(f"{PG19_LIST}?{urllib.parse.urlencode(query)}", timeout=TIMEOUT) as response:
                page = json.load(response)
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise InputError(f"cannot list PG-19's books at {PG19_LIST} ({getattr(error, 'reason', error)})") from None
        items = [item for item in page.get("items", ()) if item["name"].endswith(".txt")]
        books += [(item["name"], base64.b64decode(item["md5Hash"]).hex()) for item in items]
        token = page.get("nextPageToken", "")
        if not token:
            return books


def fetch_books(folder):
    """Fetch what is missing of PG-19, several books at a time; every one is checked against its MD5."""
    try:
        books = [book for prefix in PG19_FOLDERS.values() for book in listed_books(prefix)]
    except InputError as error:
        raise InputError(
            f"{error}; try again later, or put the books of {PG19_BOOKS} into {folder}/train, /validation and /test"
        ) from None
    missing = [(name, md5) for name, md5 in books if not (folder / name).exists()]
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        jobs = [pool.submit(fetch, PG19_BOOKS + name, folder / name, md5, "md5", True) for name, md5 in missing]
        try:
            for job in tqdm(jobs, desc="pg19", unit="book", initial=len(books) - len(missing), total=len(books)):
                job.result()
        finally:
            pool.shutdown(cancel_futures=True)


def books_of(folder):
    """{split: paths of its books}."""
    return {split: sorted((folder / name).glob("*.txt")) for split, name in PG19_FOLDERS.items()}


def pg19(folder):
    """Books of Project Gutenberg published before 1919, a document each."""
    if any(len(paths) < PG19_COUNTS[split] for split, paths in books_of(folder).items()):
        fetch_books(folder)
    books = books_of(folder)
    for split, paths in books.items():
        if len(paths) != PG19_COUNTS[split]:
            raise InputError(f"{folder / PG19_FOLDERS[split]} has {len(paths)} books, PG-19 {PG19_COUNTS[split]}; put all there")
    files = tuple(path for paths in books.values() for path in paths)
    return Source("pg19", files, lambda _: ((s, whole_file(p.name, p)) for s, paths in books.items() for p in paths))


DATASETS = {"enwik8": enwik8, "wikitext-103": wikitext_103, "pg19": pg19}


def named_source(name, data_dir):
    """The Source of a named set, looked for in its folder of data_dir and fetched if it is absent."""
    folder = Path(data_dir) / name
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return DATASETS[name](folder)


PIECE = 1 << 20  # bytes
ATTEMPTS = 4
PAUSE = 1.0  # seconds before the second attempt, doubled before each further one
TIMEOUT = 60  # seconds without a byte


def file_checksum(path, kind="sha256"):
    """Checksum of a file's bytes, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, kind).hexdigest() if hasattr(hashlib, "file_digest") else checksum_in_pieces(file, kind)


def checksum_in_pieces(file, kind):
    """hashlib.file_digest, which Python 3.10 lacks."""
    state = hashlib.new(kind)
    while piece := file.read(PIECE):
        state.update(piece)
    return state.hexdigest()


def continue_download(address, part, bar):
    """One connection: append to the file `part` what it lacks of address. Raises OSError where the connection breaks."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(address, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code != 416:  # nothing is left to send: what is there is whole, or of another file, as the checksum will tell
            raise
        return
    with response:
        goes_on = response.status == 206
        length = response.headers.get("Content-Length")
        bar.total = int(length) + have * goes_on if length else None
        bar.n = have * goes_on
        with ExitStack() as stack:
            with disk_errors(part):
                file = stack.enter_context(open(part, "ab" if goes_on else "wb"))
            while piece := response.read(PIECE):
                with disk_errors(part):
                    file.write(piece)
                bar.update(len(piece))
    if length and part.stat().st_size < bar.total:
        raise ConnectionError(f"{part.stat().st_size} of {bar.total} bytes came")


def fetch(address, path, checksum, kind="sha256", quiet=False):
    """Fetch address to path; raises InputError saying which file to put where, where it cannot.

    A download that breaks off is kept as PATH.part and gone on with, now and in a later run. path appears whole, with the
    expected checksum, or not at all.
    """
    path = Path(path)
    part = path.with_name(path.name + ".part")
    by_hand = f"or put a copy of {address} ({kind} {checksum}) at {path}"
    with disk_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    for attempt in range(ATTEMPTS):
        with tqdm(desc=path.name, unit="B", unit_scale=True, disable=quiet, leave=False) as bar:
            try:
                continue_download(address, part, bar)
                break
            except (OSError, http.client.HTTPException) as error:
                final = attempt == ATTEMPTS - 1 or (isinstance(error, urllib.error.HTTPError) and error.code < 500)
                if final:
                    reason = getattr(error, "reason", None) or error
                    raise InputError(f"cannot fetch {path.name} ({reason}); try again later, {by_hand}") from None
        time.sleep(PAUSE * 2**attempt)
    found = file_checksum(part, kind)
    if found != checksum:
        part.unlink()
        raise InputError(f"what came from {address} has {kind} {found}, expected {checksum}; try again, {by_hand}")
    part.rename(path)


def check_file(path, sha256):
    """Raise InputError unless the file at path has that checksum."""
    found = file_checksum(path)
    if found != sha256:
        raise InputError(f"{path} has sha256 {found}, expected {sha256}; remove it to fetch it again, or put a good copy there")
