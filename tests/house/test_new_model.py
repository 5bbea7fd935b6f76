"""A model is found by its files: three files are a new model, and no other file changes.

They are Gated DeltaNet's under another name, without what a model need not have; a fourth says what
its tests cannot know.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from tests.conftest import ROOT

# {folder: {text of Gated DeltaNet's file there: what stands in its place}}
CHANGES = {
    "reference": {},
    "accelerated": {"@compilable\n    ": "", "CheckpointableLayer": "ParameterModule"},
    # No preset for the recall task, and no sizes to be timed
    "accelerated/presets": {r"(?s)\} \| \{\n.*?\}  # fmt: skip": "}", "(?s)BENCHMARK = .*": ""},
}
KNOWN = 'LONG_LIVED = ("matrices", "inputs")\nSOLVES = True\n'
SMALL = "--width 16 --segment 8 --batch 3 --validation-tokens 0"
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy of the project with the model, which is called newcomer.

    It has none of what a model may have beside its files: no fast generation, no variants, no
    chapter, no list of decisions, no vectors. It has no attention by softmax, no compilable method,
    no checkpointable layer and no preset for the recall task either.
    """
    folder = tmp_path_factory.mktemp("project")
    for name in ("accelerated", "reference", "tests", "docs"):
        shutil.copytree(
            ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", ".*")
        )
    for name in ("train.py", "eval.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder)
    for room, changes in CHANGES.items():
        text = (folder / room / "gated_deltanet.py").read_text()
        for old, new in changes.items():
            text, count = re.subn(old, new, text)
            assert count, f"{room}/gated_deltanet.py has no {old}"
        text = text.replace("gated_deltanet", "newcomer").replace("GatedDeltanet", "Newcomer")
        (folder / room / "newcomer.py").write_text(text)
    (folder / "tests" / "models" / "newcomer.py").write_text(KNOWN)
    (folder / "text.txt").write_text("a text that a model can read " * 400)
    return folder


def run(project, line):
    """What a program of the project prints; it must end well."""
    command = [sys.executable, *shlex.split(line)]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def printed_by_tests(project, *files):
    """What pytest prints of the model's tests in these files."""
    command = [sys.executable, "-m", "pytest", "-m", "", "-k", "newcomer", "-rf"]
    wide = os.environ | {"COLUMNS": "300"}
    done = subprocess.run(
        [*command, "--tb=no", *files], cwd=project, capture_output=True, text=True, env=wide
    )
    assert not re.search(r"\d+ errors?\b", done.stdout), done.stdout  # of collection
    return done.stdout


def test_it_is_trained_resumed_evaluated_and_generates(project):
    """By the programs, whose reports take a model that they have never seen."""
    begun = "--data text.txt --out run --sample 20 --steps 3"
    trained = run(project, f"train.py --model newcomer {SMALL} {begun}")
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
    for name in ("accelerated", "reference"):
        shutil.copytree(project / name, tmp_path / name)
    shutil.copy(project / "train.py", tmp_path)
    (tmp_path / "reference" / "newcomer.py").unlink()
    command = [sys.executable, "train.py", "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert "accelerated/presets/newcomer.py has no reference/newcomer.py beside it" in done.stderr
