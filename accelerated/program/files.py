"""Files that appear complete or not at all, checksums, and folders of one writer at a time."""

import contextlib
import errno
import hashlib
import os
import secrets
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from accelerated.program.errors import InputError

# A file that is not complete has its name, eight digits that no other file's has, and .writing
UNFINISHED = f"*.{'[0-9a-f]' * 8}.writing"
DATA_ADVICE = "give another --data-dir"
RESUME = "resume when it can be written; the last checkpoint is as it was"
FULL = (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def disk_errors(path: Path, advice: str = DATA_ADVICE) -> Iterator[None]:
    """Turn an error of writing to the disk into an InputError that ends with the advice."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        reason = f"{getattr(error, 'strerror', None) or error};"
        if getattr(error, "errno", errno.ENOSPC) in FULL:  # torch.save raises RuntimeError then
            reason = "the disk is full; free some space, or"
        raise InputError(f"cannot write {path}: {reason} {advice}") from None


def check_writable(path: Path, advice: str) -> None:
    """Raise InputError unless a file can be written to path."""
    with disk_errors(path, advice):
        tempfile.TemporaryFile(dir=path.parent).close()


@contextlib.contextmanager
def written_whole(path: str | Path, advice: str = DATA_ADVICE, new: bool = False) -> Iterator[Path]:
    """Yield a temporary path to write to, and rename it to `path` at the end.

    So the file appears complete or not at all. A `new` file never replaces another: InputError is
    raised if there is one by then. If writing fails, an older file stays, the temporary file is
    deleted, and a disk error becomes an InputError.
    """
    path = Path(path)
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.writing")
    try:
        with disk_errors(path, advice):
            yield temporary
            with open(temporary, "rb+") as file:
                os.fsync(file.fileno())  # so that it is complete even after a power failure
            if new and os.path.lexists(path):
                raise InputError(f"{path} exists by now, and nothing is overwritten; {advice}")
            os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def remove_unfinished(folder: Path) -> None:
    """Remove what processes that were killed left half-written in a folder.

    Call it only while the folder is locked.
    """
    for path in folder.glob(UNFINISHED):
        path.unlink(missing_ok=True)


def file_checksum(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    state = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):  # bytes
            state.update(piece)
    return state.hexdigest()


@contextlib.contextmanager
def locked(
    path: Path, busy: str, advice: str = "give another folder", waits: bool = False
) -> Iterator[None]:
    """Hold the lock file at path inside the block.

    The kernel releases it when its process ends, however it ends. If another process holds it,
    InputError(busy) is raised, or if this one `waits`, `busy` is printed. The file stays: another
    process may wait for this very file.
    """
    from filelock import FileLock, Timeout  # here: a wrong option is answered without it

    lock = FileLock(path)
    with disk_errors(path, advice):
        try:
            held = lock.acquire(timeout=0)
        except Timeout:
            if not waits:
                raise InputError(busy) from None
            print(busy, file=sys.stderr)
            held = lock.acquire()
    with held:
        yield


def only_worker(folder: Path, doing: str) -> contextlib.AbstractContextManager[None]:
    """Make a folder; inside, this process is the only one that works in it.

    Others wait, and say for what.
    """
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    busy = f"another process is {doing} {folder}; waiting for it"
    return locked(folder / ".lock", busy, DATA_ADVICE, waits=True)
