"""What cannot be used is one line and exit code 2, before data is read; nothing is written.

Each refusal is a row of refusals.txt, which says how a row is written.
"""

import os
import re
import shlex
import sys
from pathlib import Path

import pytest

import accelerated
import eval as evaluation_script
from accelerated.data.named_sets import table_source
from accelerated.data.sources import source_of_path
from accelerated.lab import memory
from accelerated.lab.systems import speech
from accelerated.lab.systems.hotpotqa import read_questions
from accelerated.training import opening
from docs.ports import archive, end_to_end
from docs.practice import __main__ as practice
from reference import check, gradients, vectors
from tests.conftest import ROOT
from tests.helpers.programs import evaluate, refusal, train

LISTED = Path(__file__).with_name("refusals.txt").read_text()
LINES = [line for line in LISTED.splitlines() if line and line[0] != "#"]
ROWS = [line.split(" => ") for line in LINES if " => " in line]
FILES = [line.split(" <= ") for line in LINES if " <= " in line]
NAMES = {
    "NUL": "a\0b",
    "LONG": "a" * 5_000,
    "HALF": "a\udc80",
    "RIGHT": str(ROOT / "docs" / "vectors" / "memorizing"),
    "SMALL": '{"vocabulary": 5, "width": 4, "heads": 2, "segment": 4, "memory": 4, "retrieved": 2}',
}
MAINS = {  # programs that take their words in a list
    "archive": archive,
    "check": check,
    "end_to_end": end_to_end,
    "memory": memory,
    "practice": practice,
    "speech": speech,
    "vectors": vectors,
}


def generate(run, prompt, name="seed", value=0):
    """A text by a run, with one option by its name."""
    model, tokenizer, _ = accelerated.load(run)
    return accelerated.generate(model, tokenizer, prompt, **{name: float(value)})


PROGRAMS = {
    "train": lambda *argv: train(shlex.join(argv)),
    "eval": lambda *argv: evaluate(shlex.join(argv)),
    "load": accelerated.load,
    "generate": generate,
    "hotpotqa": lambda path: read_questions(Path(path)),
    "source": source_of_path,
    "table": table_source,
    "gradients": lambda paper, *argv: gradients.main(paper, ["--check", *argv]),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder in which a row is run, with the files that rows name."""
    monkeypatch.chdir(tmp_path)
    Path("book").write_text("some words of a book. " * 900, "utf-8")
    os.mkfifo("pipe")
    for name, content in FILES:
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode().decode("unicode_escape").encode("latin-1"))
    for name in ("dangling", "dangling.safetensors", "dangling.html"):
        Path(name).symlink_to("nowhere")
    return tmp_path


def named(word, request):
    """A word of a row with what its names stand for."""
    for name, value in NAMES.items():
        word = word.replace(f"${name}", value)
    if word.startswith("$"):
        return str(getattr(request.getfixturevalue("runs"), word[1:].lower()))
    return word


@pytest.mark.parametrize("row, words", ROWS, ids=lambda given: given[:60])
def test_it_is_refused_in_one_line(folder, monkeypatch, request, row, words):
    argv = [named(word, request) for word in shlex.split(row)]
    while "=" in argv[0]:
        name, _, value = argv.pop(0).partition("=")
        if name == "WITHOUT":
            monkeypatch.setitem(sys.modules, value, None)
        else:
            monkeypatch.setenv(name, value)
    for module, function in ((opening, "load_data"), (evaluation_script, "load_corpus")):
        monkeypatch.setattr(module, function, lambda *_: pytest.fail("data was read"))
    before = sorted(folder.rglob("*"))
    program, *given = argv
    if program in MAINS:
        said = refusal(MAINS[program].main, given)
    else:
        said = refusal(PROGRAMS[program], *given)
    assert re.search(re.escape(words).replace(r"\.\.\.", ".*"), said), said
    assert sorted(folder.rglob("*")) == before, "something was written"
