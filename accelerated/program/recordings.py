"""Recordings of speech (.wav) as mu-law bytes, one a sample: the data's sources read them, eval.py sample writes them."""

import io
import wave
from pathlib import Path
from typing import IO

import numpy as np

from accelerated.program.errors import InputError, counted
from accelerated.program.files import written_whole

MU = 255
FULL_SCALE = 2**15  # of 16-bit samples
WIDTH = 2  # bytes of a sample
HIGHEST_RATE = 1 << 20  # samples per second
UNKNOWN = 0xFFFFFFFF  # the size that a header has if its writer could not go back to it


def to_mu_law(samples: np.ndarray) -> np.ndarray:
    """Samples (n,) int16 to mu-law values 0..255, (n,) uint8, silence at 128; quiet sounds have finer steps (WaveNet, 2.2)."""
    x = samples / FULL_SCALE  # -1..1
    companded = np.sign(x) * np.log1p(MU * np.abs(x)) / np.log1p(MU)
    return np.floor((companded + 1) / 2 * MU + 0.5).astype(np.uint8)


def from_mu_law(values: np.ndarray) -> np.ndarray:
    """Mu-law values 0..255 (n,) to samples (n,) int16."""
    companded = values / MU * 2 - 1
    x = np.sign(companded) * np.expm1(np.abs(companded) * np.log1p(MU)) / MU
    return np.rint(x * FULL_SCALE).clip(-FULL_SCALE, FULL_SCALE - 1).astype(np.int16)


def open_wav(name: str, file: IO[bytes]) -> wave.Wave_read:
    """The reader of a .wav; raises InputError unless it holds one channel of 16-bit samples, at a rate that can be."""
    try:
        reader = wave.Wave_read(file)
    except (wave.Error, EOFError, RuntimeError) as error:  # RuntimeError: a chunk that is longer than the file
        raise InputError(f"{name} is not a recording of 16-bit PCM ({str(error) or 'it is cut off'}); give such a .wav") from None
    if (found := (reader.getnchannels(), reader.getsampwidth())) != (1, WIDTH):
        raise InputError(
            f"{name} has {counted(found[0], 'channel')} of {8 * found[1]} bits; convert it to one channel of 16 bits"
        )
    if not 0 < reader.getframerate() <= HIGHEST_RATE:
        raise InputError(f"{name} has {reader.getframerate():,} samples a second; give one with 1 to {HIGHEST_RATE:,}")
    if reader.getnframes() == UNKNOWN // WIDTH:
        raise InputError(f"{name} does not say how long it is, as what came through a pipe; convert it to a .wav with a length")
    return reader


class Recording(io.RawIOBase):
    """A .wav read as mu-law bytes."""

    def __init__(self, name: str, file: IO[bytes]):
        self.name, self.file = name, file
        try:
            self.reader = open_wav(name, file)
        except InputError:
            self.close()
            raise
        self.rate = self.reader.getframerate()  # samples per second

    def readable(self) -> bool:
        """It can be read."""
        return True

    def seekable(self) -> bool:
        """It can be sought in."""
        return True

    def readinto(self, buffer: memoryview) -> int:
        """Read mu-law bytes into the buffer, and return how many; raises InputError if the file has fewer than it says."""
        at = self.reader.tell()
        found = self.reader.readframes(len(buffer))
        values = to_mu_law(np.frombuffer(found[: len(found) // WIDTH * WIDTH], "<i2"))
        if not len(values) and at < self.reader.getnframes():
            raise InputError(f"{self.name} is cut off after {at:,} of {self.reader.getnframes():,} samples; fetch it again")
        buffer[: len(values)] = values.data
        return len(values)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a sample, at most to the end, and return which it is."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self.reader.tell(), io.SEEK_END: self.reader.getnframes()}[whence]
        self.reader.setpos(min(start + offset, self.reader.getnframes()))
        return self.reader.tell()

    def close(self) -> None:
        """Close the file too."""
        self.file.close()
        super().close()


def read_recording(path: str | Path) -> tuple[bytes, int]:
    """(mu-law bytes, samples per second) of the .wav at path."""
    with Recording(str(path), open(path, "rb")) as recording:
        return recording.read(), recording.rate


def write_recording(path: str | Path, values: np.ndarray, rate: int) -> None:
    """Write mu-law values (n,) as a .wav of `rate` samples per second."""
    with written_whole(path, "give another --out", new=True) as temporary, wave.open(str(temporary), "wb") as file:
        file.setparams((1, WIDTH, rate, 0, "NONE", ""))
        file.writeframes(from_mu_law(values).astype("<i2").tobytes())
