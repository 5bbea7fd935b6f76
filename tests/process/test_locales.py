"""Programs under an ASCII locale without UTF-8 mode, as a bare server has it.

Sources, settings and texts are UTF-8, whatever the locale says.
"""

import ast
import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.helpers.programs import COMPRESSIVE, train

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
SIZES = '{"vocabulary": 5, "width": 4, "heads": 2, "segment": 4, "memory": 4, "retrieved": 2}'
VECTORS = ["-m", "reference.vectors", "--model", "memorizing"]
COMMANDS = [
    ["train.py", "--help"],
    ["eval.py", "--help"],
    ["train.py", "--resume", "RUN", "--steps", "2"],
    ["eval.py", "view", "RUN", "--out", "page.html"],
    ["eval.py", "sample", "RUN", "--tokens", "3", "--prompt", "é"],
    ["-c", "import accelerated; accelerated.load('RUN')"],
    [*VECTORS, "--config", SIZES, "--out", "v.safetensors"],
    ["-m", "docs.practice", "--help"],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a text that is no ASCII, and a run of it."""
    folder = tmp_path_factory.mktemp("locale")
    (folder / "book.txt").write_text("Ein Satz über Bücher, ohne Ende. " * 200, "utf-8")
    words = ["--data", folder / "book.txt", "--steps", 1, "--validation-tokens", 48]
    train(*COMPRESSIVE, *words, "--out", folder / "RUN")
    return folder


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: " ".join(words)[:40])
def test_a_program_works_under_an_ascii_locale(folder, command):
    command = [str(ROOT / word) if word.endswith(".py") else word for word in command]
    environment = os.environ | ASCII | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")


def test_every_text_file_is_opened_with_its_encoding():
    """Otherwise it is read by the locale: CP932, 949, 950 and 1252 cannot decode our sources.

    ruff's PLW1514 sees a call only if it knows that the object is a path.
    """
    for room in ("accelerated", "reference", "docs"):
        for path in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_bytes())):
                if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                    continue
                needed = {"read_text": 1, "write_text": 2}.get(node.func.attr, 0)
                named = {keyword.arg for keyword in node.keywords}
                given = len(node.args) >= needed or "encoding" in named
                assert given, f"{path.relative_to(ROOT)}, line {node.lineno}: no encoding"
