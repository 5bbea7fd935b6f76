"""The command `python -m accelerated.lab.systems.speech IN OUT`: .wav to .txt or .jsonl, and back.

The text has a character for each sample: one of the 256 Braille patterns, which stands for a
mu-law value. train.py learns it as any text, with mu_law.json as its tokenizer, so that a token is
a sample.
"""

import json
import wave
from pathlib import Path

import numpy as np

from accelerated.evaluation.options import at_least
from accelerated.lab.harness import parser_of, run_command
from accelerated.program.errors import InputError
from accelerated.program.files import written_whole

MU = 255
FULL_SCALE = 2**15  # of 16-bit samples
SILENT = 0x2800  # the pattern without a dot, and character of the value 0
CHUNK = 3840  # samples of a document in section 5.6
WAYS = ((".wav", ".txt"), (".wav", ".jsonl"), (".txt", ".wav"))


def to_mu_law(samples: np.ndarray) -> np.ndarray:
    """Samples (n,) int16 to mu-law values 0..255, (n,) uint8, silence at 128 (WaveNet, 2.2).

    Quiet sounds have finer steps.
    """
    x = samples / FULL_SCALE  # -1..1
    companded = np.sign(x) * np.log1p(MU * np.abs(x)) / np.log1p(MU)
    return np.floor((companded + 1) / 2 * MU + 0.5).astype(np.uint8)


def from_mu_law(values: np.ndarray) -> np.ndarray:
    """Mu-law values 0..255 (n,) to samples (n,) int16."""
    companded = values / MU * 2 - 1
    x = np.sign(companded) * np.expm1(np.abs(companded) * np.log1p(MU)) / MU
    return np.rint(x * FULL_SCALE).clip(-FULL_SCALE, FULL_SCALE - 1).astype(np.int16)


def to_text(values: np.ndarray) -> str:
    """Mu-law values (n,) to n characters."""
    return (values + np.uint16(SILENT)).astype("<u2").tobytes().decode("utf-16-le")


def from_text(text: str) -> np.ndarray:
    """The mu-law values (n,) uint8 of a text; characters that stand for none are left out."""
    return np.array([ord(c) - SILENT for c in text if 0 <= ord(c) - SILENT <= MU], np.uint8)


def read_wav(path: Path) -> tuple[np.ndarray, int]:
    """(mu-law values (n,), samples per second) of a .wav.

    Raises InputError unless it is one channel of 16-bit samples.
    """
    try:
        with wave.open(str(path), "rb") as file:
            channels, width, rate, count, *_ = file.getparams()
            frames = file.readframes(count)
        if (channels, width, len(frames)) != (1, 2, 2 * count):
            raise wave.Error(f"{channels} x {8 * width} bits, {len(frames):,} bytes of samples")
    except (EOFError, RuntimeError, wave.Error) as error:
        # RuntimeError is that of a chunk which is longer than the file
        raise InputError(
            f"{path} is not a whole recording of one channel of 16-bit PCM "
            f"({str(error) or 'it is cut off'}); convert it"
        ) from None
    return to_mu_law(np.frombuffer(frames, "<i2")), rate


def write_wav(path: Path, values: np.ndarray, rate: int) -> None:
    """Write mu-law values (n,) as a .wav of so many samples per second."""
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, rate, 0, "NONE", ""))
        file.writeframes(from_mu_law(values).astype("<i2").tobytes())


def main(argv: list[str]) -> None:
    """Write the .wav that a command line names as .txt or .jsonl, or the .txt as .wav.

    No file is written twice.
    """
    parser = parser_of("systems.speech", __doc__)
    add = parser.add_argument
    add("source", type=Path, help="a .wav (one channel, 16-bit PCM), or a .txt")
    target_help = "the .txt (a character a sample), the .jsonl (a row for 3,840), or the .wav"
    add("target", type=Path, help=target_help)
    rate_help = "samples per second of a .wav that is written (default 22050)"
    add("--rate", type=at_least(1), default=22050, help=rate_help)
    source, target, rate = vars(parser.parse(argv)).values()
    if (source.suffix, target.suffix) not in WAYS:
        raise InputError(f"cannot convert {source} to {target}; give a .wav and one of the others")
    if source.suffix == ".wav":
        values, rate = read_wav(source)
    else:
        values = from_text(source.read_text(encoding="utf-8", errors="replace"))
    if len(values) == 0:
        raise InputError(f"{source} has no samples; give a recording, or what this command wrote")
    text = to_text(values)
    if target.suffix == ".jsonl":
        rows = [text[at : at + CHUNK] for at in range(0, len(text), CHUNK)]
        text = "".join(json.dumps({"text": row}) + "\n" for row in rows)
    with written_whole(target, "give another OUT", new=True) as temporary:
        if target.suffix == ".wav":
            write_wav(temporary, values, rate)
        else:
            temporary.write_text(text, encoding="utf-8")
    print(f"wrote 1 file, {rate:,} samples a second")


if __name__ == "__main__":
    run_command("speech", main)
