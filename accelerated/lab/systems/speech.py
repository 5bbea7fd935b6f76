"""The command `python -m accelerated.lab.systems.speech IN OUT`: .wav to .ulaw, mu-law bytes that train.py learns, and back.

`read_aloud` makes the speech of Compressive's Figure 4 in the small.
"""

import ast
import subprocess
import sys
import sysconfig
import wave
from itertools import islice
from pathlib import Path

import numpy as np

from accelerated.program.errors import InputError, counted, run_program
from accelerated.program.files import written_whole
from accelerated.training.options import OptionParser

MU, FULL_SCALE = 255, 2**15  # of 16-bit samples
RECORDINGS, SPOKEN = 30, 400  # characters of a docstring that are read, about 25 seconds
SLOWER = 5  # samples of espeak-ng that become one, so that 100 ms are a segment of 441
UNREAD = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}  # folders


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


def read_wav(path: Path) -> tuple[np.ndarray, int]:
    """(mu-law values (n,), samples per second) of a .wav; raises InputError unless it is one whole channel of 16-bit samples."""
    try:
        with wave.open(str(path), "rb") as file:
            (channels, width, rate, count, *_), frames = (
                file.getparams(),
                file.readframes(file.getnframes()),
            )
    except (
        EOFError,
        RuntimeError,
        wave.Error,
    ) as error:  # RuntimeError: a chunk that is longer than the file
        raise InputError(
            f"{path} is not a recording of 16-bit PCM ({str(error) or 'it is cut off'}); convert it"
        ) from None
    if (channels, width) != (1, 2):
        raise InputError(
            f"{path} has {counted(channels, 'channel')} of {8 * width} bits; convert it to one channel of 16 bits"
        )
    if len(frames) != width * count:
        raise InputError(
            f"{path} is cut off after {len(frames) // width:,} of {count:,} samples; fetch it again"
        )
    return to_mu_law(np.frombuffer(frames, "<i2")), rate


def main(argv: list[str]) -> None:
    """Write the .wav that a command line names as .ulaw, or the .ulaw as .wav. Nothing is overwritten."""
    parser = OptionParser(prog="python -m accelerated.lab.systems.speech", description=__doc__)
    parser.add_argument(
        "source", metavar="IN", type=Path, help="a .wav (one channel, 16-bit PCM), or a .ulaw"
    )
    parser.add_argument("target", metavar="OUT", type=Path, help="the .ulaw or .wav")
    parser.add_argument(
        "--rate",
        type=int,
        default=22050,
        help="samples per second of a .wav that is written (default 22050)",
    )
    source, target, rate = vars(parser.parse(argv)).values()
    if rate < 1 or {source.suffix, target.suffix} != {".wav", ".ulaw"}:
        raise InputError(
            f"cannot convert {source} to {target} at --rate {rate}; give a .wav and a .ulaw, and a rate"
        )
    with written_whole(target, "give another OUT", new=True) as temporary:
        if target.suffix == ".ulaw":
            values, rate = read_wav(source)
            values.tofile(temporary)
        else:
            with wave.open(str(temporary), "wb") as file:
                file.setparams((1, 2, rate, 0, "NONE", ""))
                file.writeframes(from_mu_law(np.fromfile(source, np.uint8)).astype("<i2").tobytes())
    print(f"wrote 1 file, {rate:,} samples a second")


def read_aloud(folder: Path) -> None:
    """Write RECORDINGS .ulaw of the standard library's docstrings, 4,410 samples a second, into a folder; those there stay.

    Raises InputError if espeak-ng, which reads them aloud, is not installed, or fails.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    parts = {
        path: path.relative_to(root).with_suffix("").parts for path in sorted(root.rglob("*.py"))
    }
    texts = (
        (path, ast.get_docstring(ast.parse(path.read_bytes())) or "")
        for path in parts
        if UNREAD.isdisjoint(parts[path])
    )
    for path, text in islice((pair for pair in texts if len(pair[1]) >= SPOKEN), RECORDINGS):
        target = folder / f"{'-'.join(parts[path])}.ulaw"
        if target.exists():
            continue
        folder.mkdir(parents=True, exist_ok=True)
        with written_whole(target) as temporary:
            command = ["espeak-ng", "-v", "en-us", "-w", temporary, "--stdin"]
            try:
                subprocess.run(
                    command, input=text[:SPOKEN], text=True, stderr=subprocess.PIPE, check=True
                )
            except (OSError, subprocess.CalledProcessError) as error:
                said = getattr(error, "stderr", None) or error
                raise InputError(
                    f"espeak-ng could not read {path.stem} aloud: {said}; see apt install espeak-ng"
                ) from None
            samples = from_mu_law(read_wav(temporary)[0])
            to_mu_law(
                samples[: len(samples) // SLOWER * SLOWER].reshape(-1, SLOWER).mean(1)
            ).tofile(temporary)


if __name__ == "__main__":
    run_program("speech", main, sys.argv[1:])
