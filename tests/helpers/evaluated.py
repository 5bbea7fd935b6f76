"""Runs of two steps that tests of eval.py's reports share, and what eval.py says about a run."""

import json
from types import SimpleNamespace

import pytest

from accelerated.program.errors import InputError
from tests.helpers.scripts import COMPRESSIVE, MEMFORMER, MEMORIZING, ROOT, TINY, WINDOWED, evaluate, train

BRIEF = ["--sample", 0, "--validation-segments", 2, "--steps", 2]


def trained_runs(folder):
    """A run of each model, trained for two steps on one text."""
    book = folder / "book.txt"
    content = (ROOT / "reference" / "block_recurrent.py").read_bytes()
    book.write_bytes(b" some common words ".join(content[at : at + 100] for at in range(0, 14_000, 100)))
    kinds = {
        "recurrent": [*TINY, "--save-every", 1, "--keep", 2],
        "compressive": COMPRESSIVE,
        "memformer": MEMFORMER,
        "memorizing": MEMORIZING,
        "windowed": [*WINDOWED, "--overlap", 2],
        "plain": [*WINDOWED, "--vectors", 0],
    }
    for name, options in kinds.items():
        train(*options, "--data", book, *BRIEF, "--out", folder / name)
    return SimpleNamespace(book=book, **{name: folder / name for name in kinds})


def joined_runs(folder):
    """Runs that were trained with memory carried over documents, and the folder of documents."""
    texts = folder / "texts"
    texts.mkdir()
    for number in range(80):
        (texts / f"{number}.txt").write_text(f"text number {number} of some. " * (number % 7 + 1))
    kinds = {"compressive": COMPRESSIVE, "windowed": [*WINDOWED, "--overlap", 2], "plain": [*WINDOWED, "--vectors", 0]}
    for name, options in kinds.items():
        train(*options, "--data", texts, "--carry-over-documents", *BRIEF, "--out", folder / name)
    return SimpleNamespace(texts=texts, **{name: folder / name for name in kinds})


def printed(capsys, *argv):
    capsys.readouterr()
    evaluate(*argv)
    return capsys.readouterr().out


def as_json(capsys, *argv):
    [line] = printed(capsys, *argv, "--json").splitlines()
    return json.loads(line)


def refused(capsys, *argv):
    """The one-line error message, from the parser or from an InputError."""
    capsys.readouterr()
    with pytest.raises((InputError, SystemExit)) as caught:
        evaluate(*argv)
    line = str(caught.value) if isinstance(caught.value, InputError) else capsys.readouterr().err.rstrip("\n")
    assert "\n" not in line and (isinstance(caught.value, InputError) or caught.value.code == 2)
    return line
