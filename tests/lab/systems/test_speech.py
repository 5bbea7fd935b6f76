"""A recording becomes text, a character a sample, and is written back; a sample is a token."""

import io
import json
import math
import wave
from pathlib import Path

import numpy as np
import pytest

from accelerated.data.tokenizers import open_tokenizer
from accelerated.lab.systems import speech
from accelerated.lab.systems.speech import from_mu_law, from_text, to_mu_law, to_text
from accelerated.program.errors import InputError

ALL = np.arange(-(2**15), 2**15).astype(np.int16)  # every sample
VALUES = np.arange(256, dtype=np.uint8)


def wav(samples, channels=1):
    """The bytes of a .wav."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((channels, 2, 8000, 0, "NONE", ""))
        writer.writeframes(np.asarray(samples, "<i2").tobytes())
    return file.getvalue()


def test_a_value_is_the_rounded_logarithm():
    """F(x) = sign(x) ln(1 + 255 |x|) / ln(256), from -1..1 to 0..255; silence is 128."""
    values = to_mu_law(ALL)
    for sample, value in zip(ALL[::97].tolist(), values[::97].tolist(), strict=True):
        x = sample / 2**15
        magnitude = math.log(1 + 255 * abs(x)) / math.log(256)
        scaled = (math.copysign(magnitude, x) + 1) / 2 * 255
        assert abs(value - scaled) <= 0.5 + 1e-9
    assert values.dtype == np.uint8
    assert set(values.tolist()) == set(range(256))
    assert to_mu_law(np.zeros(1, np.int16)) == 128


def test_a_value_stands_for_one_of_its_samples():
    middle = from_mu_law(VALUES)
    assert middle.dtype == np.int16
    assert (to_mu_law(middle) == VALUES).all()
    assert (middle == -middle[::-1])[1:-1].all()
    assert middle[[0, 255]].tolist() == [-(2**15), 2**15 - 1]


def test_a_character_is_a_value_and_a_token_of_its_number():
    """So bits per token are bits per sample. What else stands in a text is no sample."""
    pytest.importorskip("tokenizers", reason="a .json needs the extra bpe")
    text = to_text(VALUES)
    tokenizer = open_tokenizer("accelerated/lab/systems/mu_law.json")
    assert len(text) == tokenizer.vocabulary == 256
    assert tokenizer.encode(text + "\n").tolist() == VALUES.tolist()
    assert tokenizer.decode(VALUES).decode() == text
    assert from_text("a sample:\n" + text + "\n").tolist() == VALUES.tolist()


def test_a_file_is_converted_and_back(tmp_path):
    """Nothing is overwritten."""
    names = [str(tmp_path / name) for name in ("a.txt", "a.wav", "b.txt")]
    Path(names[0]).write_text(to_text(VALUES), encoding="utf-8")
    speech.main([*names[:2], "--rate", "16000"])
    with wave.open(names[1]) as reader:
        assert reader.getparams()[:4] == (1, 2, 16000, 256)
    speech.main(names[1:])
    assert Path(names[2]).read_text(encoding="utf-8") == to_text(VALUES)
    words = r"b\.txt exists by now, and nothing is overwritten; give another OUT"
    with pytest.raises(InputError, match=words):
        speech.main(names[1:])


def test_a_row_of_a_table_has_3840_samples(tmp_path):
    """Section 5.6: "windows of size 3840". The last one is as long as what is left."""
    samples = np.arange(2 * 3840 + 5, dtype=np.int16)
    (tmp_path / "a.wav").write_bytes(wav(samples))
    speech.main([str(tmp_path / "a.wav"), str(tmp_path / "a.jsonl")])
    lines = (tmp_path / "a.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [from_text(json.loads(line)["text"]) for line in lines]
    assert [len(row) for row in rows] == [3840, 3840, 5]
    assert (np.concatenate(rows) == to_mu_law(samples)).all()


@pytest.mark.parametrize(
    "content, words",
    [
        (wav([1, 2, 3, 4], channels=2), r"one channel of 16-bit PCM \(2 x 16 bits"),
        (b"no recording", "a.wav is not a whole recording of one channel of 16-bit PCM"),
        (wav(range(100))[:-51], "16 bits, 149 bytes of samples"),
    ],
    ids=["two channels", "no recording", "cut off"],
)
def test_what_cannot_be_converted_is_refused(tmp_path, content, words):
    (tmp_path / "a.wav").write_bytes(content)
    with pytest.raises(InputError, match=words):
        speech.main([str(tmp_path / "a.wav"), str(tmp_path / "b.txt")])
    assert [*tmp_path.iterdir()] == [tmp_path / "a.wav"]


@pytest.mark.parametrize(
    "words, error, message",
    [
        ("gone.wav b.txt", FileNotFoundError, "gone.wav"),
        ("gone.txt b.wav", FileNotFoundError, "gone.txt"),
        ("latin.txt b.wav", InputError, "latin.txt has no samples; give a recording"),
        ("latin.txt b.jsonl", InputError, "cannot convert latin.txt to b.jsonl"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, monkeypatch, words, error, message):
    """A program says of a missing file that it cannot be used."""
    monkeypatch.chdir(tmp_path)
    Path("latin.txt").write_bytes(b"\xe9")
    with pytest.raises(error, match=message):
        speech.main(words.split())
    assert [path.name for path in tmp_path.iterdir()] == ["latin.txt"]
