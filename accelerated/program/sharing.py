"""Folders that several users share: who may write them, open to the group, and verified without reading all each time."""

import contextlib
import json
import os
import time
from pathlib import Path

from accelerated.program.errors import InputError
from accelerated.program.files import file_checksum, nearest_existing, written_whole
from accelerated.program.progress import Progress

VERIFIED = "verified.json"  # says which files of a folder were read and found right, in which state
SETTLED = 2.0  # seconds after a change; a file that is changed again sooner may keep the time of the first change


def share(path: Path) -> None:
    """Let the group read a file, or what is in a folder, whatever the umask."""
    path = Path(path)
    path.chmod(path.stat().st_mode | (0o050 if path.is_dir() else 0o040))


def make_shared_folder(folder: Path) -> None:
    """Make a folder and those above it, if they do not exist; those that are made are open to the group."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in made:
        share(path)


def is_own(path: Path) -> bool:
    """Whether a file or folder belongs to this user."""
    return path.stat().st_uid == os.geteuid()


def may_write(path: Path) -> bool:
    """Whether this user may write a file or folder, or make it in the nearest folder above that exists."""
    found = nearest_existing(path)
    if found != path.absolute() and not found.is_dir():
        return True  # writing will say what stands in the way
    return os.access(found, os.W_OK | os.X_OK if found.is_dir() else os.W_OK)


def state_of_file(path: Path) -> list[int]:
    """What changes when a file is written to: size, times of modification and of change, inode."""
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def read_verified(folder: Path) -> dict[str, list[int]]:
    """The states in which files of a folder were found right."""
    try:
        return dict(json.loads((folder / VERIFIED).read_bytes()))
    except (OSError, ValueError, TypeError, RecursionError):
        return {}


def wrong_file(folder: Path, checksums: dict[str, str]) -> str | None:
    """The first file of a folder that has not the checksum of {name: sha256}, or None.

    A file that was found right is read again only when its state changes; a flipped bit changes at least its time of change.
    """
    known, states = read_verified(folder), {}
    for name in checksums:
        try:
            states[name] = state_of_file(folder / name)
        except OSError:
            return name
    unknown = [name for name in checksums if known.get(name) != states[name]]
    with Progress(f"checking {folder.name}", sum(states[name][0] for name in unknown), "B") as bar:
        for name in unknown:
            try:
                if file_checksum(folder / name, told=bar.update) != checksums[name]:
                    return name
            except OSError:
                return name
    if unknown and is_own(folder) and os.access(folder, os.W_OK):
        settled = {name: found for name, found in states.items() if time.time() - found[2] / 1e9 > SETTLED}
        with contextlib.suppress(InputError), written_whole(folder / VERIFIED) as path:
            path.write_text(json.dumps(settled))
            share(path)
    return None
