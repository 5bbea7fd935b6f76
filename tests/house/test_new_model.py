"""A model is found by its files: three files are a new model, and no other file changes.

They are those of tests/house/retention, written as a contributor would write them.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.copies import copy_of_the_project, run

MODEL = Path(__file__).parent / "retention"
SMALL = "--width 16 --segment 8 --batch 3 --validation-tokens 0"
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy of the project with the model.

    It has none of what a model may have beside its three files: no fast generation, no tests of its
    own, no chapter, no list of decisions, no vectors. It has no attention by softmax, no compilable
    method, no checkpointable layer and no preset for the recall task either.
    """
    folder = copy_of_the_project(tmp_path_factory.mktemp("project"))
    shutil.copytree(MODEL, folder, dirs_exist_ok=True)
    (folder / "text.txt").write_text("a text that a model can read " * 400)
    return folder


def printed_by_tests(project, *files):
    """What pytest prints of the model's tests in these files."""
    command = [sys.executable, "-m", "pytest", "-m", "", "-k", "retention", "-rf"]
    wide = os.environ | {"COLUMNS": "300"}
    done = subprocess.run(
        [*command, "--tb=no", *files], cwd=project, capture_output=True, text=True, env=wide
    )
    assert not re.search(r"\d+ errors?\b", done.stdout), done.stdout  # of collection
    return done.stdout


def test_it_is_trained_resumed_evaluated_and_generates(project):
    """By the programs, whose reports take a model that they have never seen."""
    begun = "--data text.txt --out run --sample 20 --steps 3"
    trained = run(project, f"train.py --model retention {SMALL} {begun}")
    assert "bits per byte" in trained and "a sample:" in trained
    assert "bits per byte" in run(project, "train.py --resume run --steps 5")
    assert "bits per byte" in run(project, "eval.py score run")
    assert "1" in run(project, "eval.py positions run")
    assert "a text" in run(project, "eval.py sample run --prompt 'a text' --tokens 9")
    run(project, "eval.py view run --segments 2 --out page.html")


def test_the_contract_runs_on_it(project):
    """And so does start_here, and whatever is asked of every model."""
    files = [f"tests/test_{name}.py" for name in ("contract", "edges", "replay", "types")]
    folders = [f"tests/{name}" for name in ("start_here", "generation", "compile", "lab/speed")]
    printed = printed_by_tests(project, *files, *folders, "tests/attention", "tests/reference")
    assert re.search(r"\d+ passed", printed) and "failed" not in printed, printed


def test_what_it_lacks_is_what_a_new_paper_owes(project):
    """And each failure says so in a sentence."""
    files = [f"tests/house/test_{name}.py" for name in ("check", "docs", "references", "vectors")]
    opened = ("checkpoint", "folder", "options", "run", "settings")
    files += [f"tests/training/test_{name}.py" for name in opened]
    pages = ("tests/evaluation/test_view.py", "tests/paths/evaluation")
    printed = printed_by_tests(project, *files, *pages)
    failures = re.findall(r"^FAILED .*", printed, re.M)
    assert all("owes" in failure for failure in failures), printed
    for owed in ("chapter", "decisions", "presets", "vectors"):
        assert owed in str(failures), printed


def test_a_file_that_is_missing_is_named(project, tmp_path):
    """A file of presets alone is no model."""
    shutil.copytree(project, tmp_path, dirs_exist_ok=True)
    (tmp_path / "reference" / "retention.py").unlink()
    command = [sys.executable, "train.py", "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert "accelerated/presets/retention.py has no reference/retention.py beside it" in done.stderr
