"""A recording becomes text, a character a sample, and is written back; a sample is a token."""

import io
import json
import math
import wave
from pathlib import Path

import numpy as np
import pytest

from accelerated.data.config import DataConfig
from accelerated.data.corpus import load_corpus
from accelerated.data.recall import RecallConfig
from accelerated.data.tokenizers import open_tokenizer
from accelerated.lab.systems import speech
from accelerated.lab.systems.speech import TOKENIZER, from_mu_law, from_text, to_mu_law, to_text
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
    tokenizer = open_tokenizer(str(TOKENIZER))
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
        (wav([1, 2, 3, 4], channels=2), "a.wav has 2 channels of 16 bits"),
        (b"no recording", "a.wav is not a recording of 16-bit PCM"),
        (wav(range(100))[:-51], "a.wav is cut off after 74 of 100 samples"),
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
        ("latin.txt b.wav --rate 99999999999", InputError, "and a rate from 1 to 2"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, monkeypatch, words, error, message):
    """A program says of a missing file that it cannot be used."""
    monkeypatch.chdir(tmp_path)
    Path("latin.txt").write_bytes(b"\xe9")
    with pytest.raises(error, match=message):
        speech.main(words.split())
    assert [path.name for path in tmp_path.iterdir()] == ["latin.txt"]


def test_what_is_read_aloud_is_split_by_samples(tmp_path, monkeypatch):
    """Of each recording 90% are for training, 5% for validation; what is there stays."""
    pytest.importorskip("tokenizers", reason="a .json needs the extra bpe")
    unread = {"a": np.arange(100), "b": np.arange(50, 171)}
    names = list(unread)
    monkeypatch.setattr(speech, "docstrings", lambda: ((name, "") for name in names))
    monkeypatch.setattr(speech, "spoken", lambda text, recording: unread.pop(recording.stem))
    monkeypatch.setattr(speech.shutil, "which", lambda program: program)
    for _ in range(2):  # the second time none is left to ask for
        speech.read_aloud(tmp_path / "speech")

    data = DataConfig(str(tmp_path / "speech"), tokenizer=str(TOKENIZER))
    tokenizer = open_tokenizer(str(TOKENIZER))
    splits = load_corpus(data, tokenizer, RecallConfig(), tmp_path).splits
    tokens = {"train": [(0, 90), (50, 158)], "valid": [(90, 95), (158, 164)]}
    for split, spans in (tokens | {"test": [(95, 100), (164, 171)]}).items():
        for document, (start, stop) in zip(splits[split], spans, strict=True):
            assert document.inputs.tolist() == [*range(start, stop - 1)]
            assert document.targets.tolist() == [*range(start + 1, stop)]


def test_five_samples_of_the_voice_become_their_mean(tmp_path, monkeypatch):
    """The last ones, if they are fewer, are left out."""
    samples = np.repeat(np.array([-8000, 0, 8000]), 5)

    def speak(command, **_):
        Path(command[command.index("-w") + 1]).write_bytes(wav([*samples, 99, 99]))

    monkeypatch.setattr(speech.subprocess, "run", speak)
    values = speech.spoken("a text", tmp_path / "a.wav")
    assert values.tolist() == to_mu_law(samples[::5]).tolist()


def test_without_a_voice_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(speech.shutil, "which", lambda program: None)
    with pytest.raises(InputError, match="see apt install espeak-ng"):
        speech.read_aloud(tmp_path / "speech")
    assert not (tmp_path / "speech").exists()
