"""A model is found by its files: a copy of one gets another name, and no other file changes."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.helpers.programs import MEMORIZING

FILES_OF_A_MODEL = ("reference", "accelerated", "accelerated/presets")
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy of the project with a model `toy`, which is Memorizing by another name.

    It has none of what a model may have beside its three files: no fast generation, no tests of its
    own, no chapter, no list of decisions, no vectors.
    """
    folder = tmp_path_factory.mktemp("project")
    for name in ("accelerated", "reference", "tests", "docs"):
        shutil.copytree(
            ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", ".*")
        )
    for name in ("train.py", "eval.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder)
    for place in FILES_OF_A_MODEL:
        text = (folder / place / "memorizing.py").read_text()
        text = text.replace("memorizing", "toy").replace("Memorizing", "Toy")
        (folder / place / "toy.py").write_text(text)
    (folder / "text.txt").write_text("a text that a toy can read " * 400)
    return folder


def run(project, *words):
    """What a program of the project prints; it must end well."""
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def printed_of_the_toy(project, *files):
    """What pytest prints of the tests in these files whose names have `toy`."""
    command = [sys.executable, "-m", "pytest", "-m", "", "-k", "toy", "-rf", "--tb=no", *files]
    wide = os.environ | {"COLUMNS": "300"}
    return subprocess.run(command, cwd=project, capture_output=True, text=True, env=wide).stdout


def test_it_is_trained_resumed_evaluated_and_generates(project):
    """By the programs, whose reports take a model that they have never seen."""
    small = MEMORIZING[2:]  # without --model memorizing
    data = ["--data", "text.txt", "--out", "run", "--sample", 20]
    trained = run(project, "train.py", "--model", "toy", *small, *data, "--steps", 3)
    assert "bits per byte" in trained and "a sample:" in trained
    assert "bits per byte" in run(project, "train.py", "--resume", "run", "--steps", 5)
    assert "bits per byte" in run(project, "eval.py", "score", "run")
    assert "1" in run(project, "eval.py", "positions", "run")
    assert "a toy" in run(project, "eval.py", "sample", "run", "--prompt", "a toy", "--tokens", 9)
    run(project, "eval.py", "view", "run", "--segments", 2, "--out", "page.html")
    assert "gradient" in run(project, "-m", "reference.toy")


def test_the_contract_runs_on_it(project):
    printed = printed_of_the_toy(project, "tests/test_contract.py", "tests/generation")
    assert re.search(r"\d+ passed", printed) and "failed" not in printed, printed


def test_what_it_lacks_is_what_a_new_paper_owes(project):
    """And each failure says so in a sentence."""
    files = [f"tests/house/test_{name}.py" for name in ("check", "docs", "references", "vectors")]
    printed = printed_of_the_toy(project, *files, "tests/lab/speed", "tests/paths/training")
    failures = re.findall(r"^FAILED .*", printed, re.M)
    assert all("owes" in failure for failure in failures), printed
    for owed in ("chapter", "decisions", "presets", "vectors"):
        assert owed in str(failures), printed


def test_a_file_that_is_missing_is_named(project, tmp_path):
    """A file of presets alone is no model."""
    for name in ("accelerated", "reference"):
        shutil.copytree(project / name, tmp_path / name)
    shutil.copy(project / "train.py", tmp_path)
    (tmp_path / "reference" / "toy.py").unlink()
    command = [sys.executable, "train.py", "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert "accelerated/presets/toy.py has no reference/toy.py beside it" in done.stderr
