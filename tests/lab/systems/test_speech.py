"""Docstrings are chosen and read aloud once each, by a program that may be missing."""

import subprocess

import pytest

from accelerated.lab.systems import speech
from accelerated.program.errors import InputError


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A library in which two docstrings are long enough; returns where its recordings are to go."""
    root = tmp_path / "library"
    for name, text in {"b": "b" * 500, "a/z": "z" * 400, "c": "short", "test/d": "d" * 500, "e": ""}.items():
        (root / f"{name}.py").parent.mkdir(parents=True, exist_ok=True)
        (root / f"{name}.py").write_text(f'"""{text}"""\n' if text else "x = 1\n")
    monkeypatch.setattr(speech.sysconfig, "get_paths", lambda: {"stdlib": str(root)})
    return tmp_path / "speech"


def test_each_long_docstring_is_read_once(library, monkeypatch):
    spoken = []

    def speak(command, input, text, stderr):
        assert command[:-2] == ["espeak-ng", "-v", "en-us", "-w"] and command[-1] == "--stdin" and text
        command[-2].write_bytes(b"spoken")
        spoken.append(input)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(speech.shutil, "which", lambda program: program)
    monkeypatch.setattr(speech.subprocess, "run", speak)
    speech.read_aloud(library)
    assert spoken == ["z" * 400, "b" * 400] and sorted(path.name for path in library.iterdir()) == ["a-z.wav", "b.wav"]
    (library / "b.wav").unlink()
    speech.read_aloud(library)
    assert spoken[2:] == ["b" * 400], "what is there stays"
    monkeypatch.setattr(speech, "RECORDINGS", 1)
    (library / "b.wav").unlink()
    speech.read_aloud(library)
    assert len(spoken) == 3


def test_a_failed_reading_leaves_no_recording(library, monkeypatch):
    def fail(command, **how):
        command[-2].write_bytes(b"half")
        return subprocess.CompletedProcess(command, 1, None, "no such voice\n")

    monkeypatch.setattr(speech.shutil, "which", lambda program: program)
    monkeypatch.setattr(speech.subprocess, "run", fail)
    with pytest.raises(InputError, match=r"espeak-ng could not read .* aloud: no such voice; see espeak-ng --voices"):
        speech.read_aloud(library)
    assert not list(library.iterdir())


def test_a_missing_program_is_one_line(library, monkeypatch):
    monkeypatch.setattr(speech.shutil, "which", lambda program: None)
    with pytest.raises(InputError, match="espeak-ng reads the speech of this table aloud, and it is not installed; see apt inst"):
        speech.read_aloud(library)
    assert not library.exists()
