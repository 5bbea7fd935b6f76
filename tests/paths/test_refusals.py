"""What cannot be used is one line, whichever option names it: a row for each that once was not."""

import os
import shlex

import pytest

import accelerated
from accelerated.program.errors import InputError
from reference import check, vectors
from tests.conftest import ROOT
from tests.helpers.programs import evaluate, train

RIGHT = ROOT / "docs" / "vectors" / "memorizing"
LONG = "a" * 5_000
# (program, its command line in which these names stand, words of the line)
NAMES = {
    "NUL": "a\0b",
    "LONG": LONG,
    "HALF": "a\udc80",
    "NESTED": "[" * 100_000,
    "PIPE": "pipe",
    "LINK": "dangling",
    "RIGHT": str(RIGHT),
    "SMALL": '{"vocabulary": 5, "width": 4, "heads": 2, "segment": 4, "memory": 4, "retrieved": 2}',
}
MADE = "--model memorizing --config"
ROWS = [
    ("train", "--data HALF", "no such file or folder"),
    ("train", "--data PIPE", "no such file or folder"),
    ("train", "--data book --out LONG", "File name too long"),
    ("train", "--data book --out LINK", "File exists"),
    ("train", "--data book --out PIPE", "File exists"),
    ("train", "--data book --device xla", "device is 'xla'; it must be one of auto"),
    ("train", "--data book --device meta", "device is 'meta'; it must be one of"),
    ("train", "--resume LONG", "File name too long"),
    ("train", "--init PIPE", "no checkpoint at"),
    ("eval", "score LONG", "File name too long"),
    ("load", "NUL", "no checkpoint at"),
    ("load", "LONG", "File name too long"),
    ("load", "HALF", "no checkpoint at"),
    ("load", "book vulkan", "device vulkan: torch finds none here"),
    ("check", "NUL RIGHT", "no such file"),
    ("check", "RIGHT LONG", "File name too long"),
    ("vectors", "MADE NESTED --out v.safetensors", "recursion"),
    ("vectors", "MADE '{\"layers\": 1000000000}' --out v.safetensors", "above"),
    ("vectors", "MADE '{\"width\": 1e9}' --out v.safetensors", "above"),
    ("vectors", '--model memorizing --config \'{"width": "x"}\' --out v.safetensors', "--config"),
    ("vectors", "MADE {} --out LINK.safetensors", "is there; give --out"),
    ("vectors", "MADE SMALL --out none/v.safetensors", "cannot write none/v"),
]
PROGRAMS = {
    "train": train,
    "eval": evaluate,
    "load": lambda path, device="cpu": accelerated.load(path, device=device),
    "check": lambda *words: check.main([*words]),
    "vectors": lambda *words: vectors.main([*words]),
}


@pytest.mark.parametrize("program, line, words", ROWS, ids=lambda given: given[:60])
def test_it_is_refused_in_one_line(tmp_path, monkeypatch, capsys, program, line, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book").write_text("some words of a book. " * 900)
    os.mkfifo("pipe")
    for name in ("dangling", "dangling.safetensors"):
        (tmp_path / name).symlink_to("nowhere")
    argv = []
    for word in shlex.split(line.replace("MADE", MADE)):
        for name, stands_for in NAMES.items():
            word = word.replace(name, stands_for)
        argv.append(word)
    before = sorted(tmp_path.iterdir())
    try:
        assert PROGRAMS[program](*argv) == 2
        said = capsys.readouterr().err.removesuffix("\n")
    except (InputError, OSError) as error:  # which run_program turns into one line
        said = str(error)
    except SystemExit as ended:
        assert ended.code == 2
        said = capsys.readouterr().err.removesuffix("\n")
    assert words in said and "\n" not in said
    assert sorted(tmp_path.iterdir()) == before, "something was written"
