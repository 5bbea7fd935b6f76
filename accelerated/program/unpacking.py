"""Files that are unpacked within a limit, or read in another encoding; the data's sources open them."""

import io
from collections.abc import Callable
from typing import IO

from accelerated.program.errors import InputError

UNPACK_SIZE = 1 << 12  # bytes unpacked at a time; zipfile's bzip2 makes up to 20,000 times as many in memory


class Unpacked:
    """Counts the bytes that a file on the disk unpacks to, archives inside it included; too many raise InputError."""

    def __init__(self, name: str, gigabytes: float):
        self.name, self.gigabytes, self.sizes, self.total = name, gigabytes, {}, 0

    def count(self, part: tuple, size: int) -> None:
        """Note that a part, which any value identifies, has at least this size."""
        self.total += max(0, size - self.sizes.get(part, 0))
        self.sizes[part] = max(size, self.sizes.get(part, 0))
        if self.total > self.gigabytes * 1e9:
            raise InputError(
                f"{self.name} unpacks to more than {self.gigabytes:g} GB; give a larger --unpacked-limit if that is right, "
                "or leave it out"
            )

    def open(self, file: IO[bytes], part: tuple) -> IO[bytes]:
        """The unpacked file, whose bytes are counted as they are read: what an archive says of its size can be wrong."""
        return io.BufferedReader(UnpackedFile(file, lambda size: self.count(part, size)))


class UnpackedFile(io.RawIOBase):
    """An unpacked file that tells how far it has been read, a seek to its end included."""

    def __init__(self, file: IO[bytes], tell_size: Callable[[int], None]):
        self.file, self.tell_size = file, tell_size

    def readable(self) -> bool:
        """It can be read."""
        return True

    def seekable(self) -> bool:
        """It can be sought in, by unpacking again."""
        return True

    def readinto(self, buffer: memoryview) -> int:
        """Read bytes into the buffer, and return how many."""
        piece = self.file.read(min(len(buffer), UNPACK_SIZE))
        buffer[: len(piece)] = piece
        self.tell_size(self.file.tell())
        return len(piece)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a position, and return it."""
        while whence == io.SEEK_END and self.read(UNPACK_SIZE):
            pass
        return self.file.seek(offset, whence)

    def close(self) -> None:
        """Close the packed file too."""
        self.file.close()
        super().close()


class RecodedFile(io.RawIOBase):
    """A file in another encoding, read as UTF-8."""

    def __init__(self, file: IO[bytes], encoding: str):
        self.text, self.rest = io.TextIOWrapper(file, encoding, newline=""), b""

    def readable(self) -> bool:
        """It can be read."""
        return True

    def readinto(self, buffer: memoryview) -> int:
        """Read bytes into the buffer, and return how many."""
        self.rest = self.rest or self.text.read(len(buffer)).encode()
        piece, self.rest = self.rest[: len(buffer)], self.rest[len(buffer) :]
        buffer[: len(piece)] = piece
        return len(piece)

    def close(self) -> None:
        """Close the file too."""
        self.text.close()
        super().close()
