"""A recording becomes text, a character a sample, and is written back; a sample is a token."""

import json
import math
import wave

import numpy as np
import pytest

from accelerated.data.tokenizers import open_tokenizer
from accelerated.lab.systems import speech
from accelerated.lab.systems.speech import from_mu_law, from_text, to_mu_law, to_text

ALL = np.arange(-(2**15), 2**15).astype(np.int16)  # every sample
VALUES = np.arange(256, dtype=np.uint8)


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
    """Section 5.6: "windows of size 3840". The last one is as long as what is left."""
    values = np.resize(VALUES, 2 * 3840 + 5)
    text = to_text(values)
    names = ("a.txt", "a.wav", "b.txt", "b.jsonl")
    first, recording, again, table = (tmp_path / name for name in names)
    first.write_text(text, encoding="utf-8")
    speech.main([str(first), str(recording), "--rate", "16000"])
    with wave.open(str(recording)) as reader:
        assert reader.getparams()[:4] == (1, 2, 16000, len(values))
        assert (np.frombuffer(reader.readframes(9000), "<i2") == from_mu_law(values)).all()
    for path in (again, table):
        speech.main([str(recording), str(path)])
    assert again.read_text(encoding="utf-8") == text
    lines = table.read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line)["text"] for line in lines]
    assert [len(row) for row in rows] == [3840, 3840, 5]
    assert "".join(rows) == text
