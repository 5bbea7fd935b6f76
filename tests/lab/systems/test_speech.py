"""Recordings become the mu-law values of their samples and are written as they were read."""

import io
import math
import wave
from pathlib import Path

import numpy as np
import pytest

from accelerated.lab.systems import speech
from accelerated.lab.systems.speech import from_mu_law, to_mu_law
from accelerated.program.errors import InputError

ALL = np.arange(-(2**15), 2**15).astype(np.int16)  # every sample


def wav(samples, channels=1):
    """The bytes of a .wav."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((channels, 2, 8000, 0, "NONE", ""))
        writer.writeframes(np.asarray(samples, "<i2").tobytes())
    return file.getvalue()


def test_a_value_is_the_rounded_logarithm_and_stands_for_one_of_its_samples():
    """F(x) = sign(x) ln(1 + 255 |x|) / ln(256), from -1..1 to 0..255; silence is 128."""
    values, middle = to_mu_law(ALL), from_mu_law(np.arange(256, dtype=np.uint8))
    for sample, value in zip(ALL[::97].tolist(), values[::97].tolist(), strict=True):
        x = sample / 2**15
        scaled = (math.copysign(math.log(1 + 255 * abs(x)) / math.log(256), x) + 1) / 2 * 255
        assert abs(value - scaled) <= 0.5 + 1e-9
    assert (
        values.dtype == np.uint8
        and {*values} == {*range(256)}
        and to_mu_law(np.zeros(1, np.int16)) == 128
    )
    assert (
        middle.dtype == np.int16
        and (to_mu_law(middle) == np.arange(256)).all()
        and (middle == -middle[::-1])[1:-1].all()
    )
    assert middle[[0, 255]].tolist() == [-(2**15), 2**15 - 1]


def test_a_file_is_converted_and_back(tmp_path):
    """Nothing is overwritten."""
    names = [str(tmp_path / name) for name in ("a.ulaw", "a.wav", "b.ulaw")]
    Path(names[0]).write_bytes(bytes(range(256)))
    speech.main([*names[:2], "--rate", "16000"])
    with wave.open(names[1]) as reader:
        assert reader.getparams()[:4] == (1, 2, 16000, 256)
    speech.main(names[1:])
    assert Path(names[2]).read_bytes() == bytes(range(256))
    with pytest.raises(
        InputError, match=r"b\.ulaw exists by now, and nothing is overwritten; give another OUT"
    ):
        speech.main(names[1:])


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
        speech.main([str(tmp_path / "a.wav"), str(tmp_path / "b.ulaw")])
    assert [*tmp_path.iterdir()] == [tmp_path / "a.wav"]
