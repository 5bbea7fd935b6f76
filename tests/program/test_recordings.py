"""Recordings are read as the mu-law values of their samples, wherever one begins, and written as they were read."""

import io
import math
import wave

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelerated.program.errors import InputError
from accelerated.program.recordings import Recording, from_mu_law, read_recording, to_mu_law, write_recording

ALL = np.arange(-(2**15), 2**15).astype(np.int16)  # every sample


def wav(samples, channels=1, width=2, rate=8000):
    """The bytes of a .wav."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((channels, width, rate, 0, "NONE", ""))
        writer.writeframes(np.asarray(samples, "<i2").tobytes())
    return file.getvalue()


@given(st.integers(-(2**15), 2**15 - 1))
def test_a_value_is_the_rounded_logarithm(sample):
    """F(x) = sign(x) ln(1 + 255 |x|) / ln(256), from -1..1 to 0..255."""
    x = sample / 2**15
    scaled = (math.copysign(math.log(1 + 255 * abs(x)) / math.log(256), x) + 1) / 2 * 255
    [value] = to_mu_law(np.array([sample], np.int16))
    assert abs(value - scaled) <= 0.5 + 1e-9


def test_values_rise_with_the_samples_and_stand_for_one_of_their_own():
    values = to_mu_law(ALL)
    assert values.dtype == np.uint8 and (np.diff(values.astype(int)) >= 0).all() and {*values} == {*range(256)}
    assert to_mu_law(np.zeros(1, np.int16)) == 128 and (values[0], values[-1]) == (0, 255)
    middle = from_mu_law(np.arange(256, dtype=np.uint8))
    assert middle.dtype == np.int16 and (to_mu_law(middle) == np.arange(256)).all() and (middle == -middle[::-1])[1:-1].all()
    error = np.abs(from_mu_law(values) - ALL.astype(float))
    assert (error <= 4 + 0.022 * np.abs(ALL.astype(float))).all(), "quiet samples are kept more exactly than loud ones"


@given(st.lists(st.integers(-(2**15), 2**15 - 1), max_size=40), st.integers(0, 50), st.integers(1, 50))
def test_a_recording_is_read_from_any_sample_in_pieces_of_any_size(samples, start, size):
    values = to_mu_law(np.array(samples, np.int16)).tobytes()
    with io.BufferedReader(Recording("a.wav", io.BytesIO(wav(samples)))) as file:
        assert file.seekable() and file.seek(0, io.SEEK_END) == len(values)
        assert file.seek(start) == min(start, len(values))
        assert b"".join(iter(lambda: file.read(size), b"")) == values[start:]
        assert file.seek(0) == 0 and file.read() == values


def test_the_ends_of_the_scale_are_those_of_16_bits():
    assert from_mu_law(np.array([0, 255], np.uint8)).tolist() == [-(2**15), 2**15 - 1]


@pytest.mark.parametrize("rate", [1, 16_000, 2**20])
def test_what_is_written_is_read_again(tmp_path, rate):
    values = np.arange(256, dtype=np.uint8)
    write_recording(tmp_path / "a.wav", values, rate)
    assert read_recording(tmp_path / "a.wav") == (values.tobytes(), rate)
    with wave.open(str(tmp_path / "a.wav")) as reader:
        assert reader.getparams()[:4] == (1, 2, rate, 256)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (wav([1, 2, 3, 4], channels=2), r"a\.wav has 2 channels of 16 bits; convert it to one channel of 16 bits"),
        (wav([1, 2], width=1), r"a\.wav has 1 channel of 8 bits"),
        (b"no recording", r"a\.wav is not a recording of 16-bit PCM \(file does not start with RIFF id\); give such a \.wav"),
        (b"", r"a\.wav is not a recording of 16-bit PCM \(it is cut off\)"),
        (wav(range(100))[:-50], r"a\.wav is cut off after 75 of 100 samples; fetch it again"),
        (wav(range(100))[:-51], r"a\.wav is cut off after 74 of 100 samples"),
    ],
)
def test_what_is_no_such_recording_is_refused_in_one_line(tmp_path, content, words):
    path = tmp_path / "a.wav"
    path.write_bytes(content)
    with pytest.raises(InputError, match=words) as caught:
        read_recording(path)
    assert "\n" not in str(caught.value)
