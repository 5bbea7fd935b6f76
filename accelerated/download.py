"""Fetching files: what was begun is gone on with, and nothing is used whose checksum is not the expected one."""

import hashlib
import http.client
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path

from tqdm import tqdm

from accelerated.errors import InputError, disk_errors

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
