"""Programs under an ASCII locale without UTF-8 mode, as a bare server has it.

Sources, settings and texts are UTF-8, whatever the locale says.
"""

import os
import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.helpers.programs import BRIEF, COMPRESSIVE, train, words

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
SIZES = '{"vocabulary": 5, "width": 4, "heads": 2, "segment": 4, "memory": 4, "retrieved": 2}'
COMMANDS = [
    "train.py --help",
    "eval.py --help",
    "train.py --resume RUN --steps 2",
    "eval.py view RUN --out page.html",
    "eval.py sample RUN --tokens 3 --prompt é",
    """-c "import accelerated; accelerated.load('RUN')" """,
    f"-m reference.vectors --model memorizing --config '{SIZES}' --out v.safetensors",
    "-m docs.practice --help",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a text that is no ASCII, and a run of it."""
    folder = tmp_path_factory.mktemp("locale")
    (folder / "book.txt").write_text("Ein Satz über Bücher, ohne Ende. " * 200, "utf-8")
    train(*COMPRESSIVE, *BRIEF, f"--data {folder}/book.txt --steps 1 --out {folder}/RUN")
    return folder


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[:40])
def test_a_program_works_under_an_ascii_locale(folder, command):
    command = words(re.sub(r"^\w+\.py", lambda script: str(ROOT / script[0]), command))
    environment = os.environ | ASCII | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")
