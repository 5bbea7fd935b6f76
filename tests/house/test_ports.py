"""docs/ports: they compute what the vectors ask for, and a mistake that is planted in one is named at its tensor."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from reference import check
from tests.tools.wrong import read_wrong

ROOT = Path(__file__).parents[2]
PORTS, VECTORS = ROOT / "docs" / "ports", ROOT / "docs" / "vectors"
C, JAX = PORTS / "pretrained_recurrence.c", PORTS / "compressive_jax.py"
C_CASES = sorted(path.name for path in (VECTORS / "pretrained_recurrence").iterdir())
JAX_CASES = ("conv-attention_reconstruction", "dilated_conv-auto_encoding", "short-memory-bptt", "simplified")
MISTAKES = read_wrong("wrong_in_c.txt")
COMPILER = shutil.which("cc")
needs_a_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler called cc")


def run(*command):
    """Run a port or a compiler, which must succeed and say nothing."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr


def compiled(source, folder, *options):
    """The C port as a program."""
    (folder / "port.c").write_text(source)
    run(COMPILER, "-std=c11", *options, "-o", folder / "port", folder / "port.c", "-lm")
    return folder / "port"


def first_wrong(vectors, written):
    """(the first tensor that is wrong, None if all agree; how many agree) of what a port wrote for a file of the vectors."""
    expected, metadata = check.load(vectors)
    rows = check.compare(expected, check.load(written)[0], json.loads(metadata["inner"]))
    wrong = [row.name for row in rows if not row.passes]
    return (wrong[0] if wrong else None), len(rows) - len(wrong)


@pytest.fixture(scope="module")
def c_port(tmp_path_factory):
    return compiled(C.read_text(), tmp_path_factory.mktemp("port"), "-O1", "-Wall", "-Wextra")


@needs_a_compiler
@pytest.mark.parametrize("case", C_CASES)
def test_the_c_port_agrees(case, c_port, tmp_path):
    vectors = VECTORS / "pretrained_recurrence" / case
    run(c_port, vectors, tmp_path / "out")
    wrong, agreed = first_wrong(vectors, tmp_path / "out")
    assert wrong is None and agreed > 100


@needs_a_compiler
@pytest.mark.parametrize("mistake", MISTAKES, ids=[mistake.rule for mistake in MISTAKES])
def test_a_mistake_in_the_c_port_is_named(mistake, tmp_path):
    vectors = VECTORS / mistake.paper / f"{mistake.case}.safetensors"
    run(compiled(mistake.planted(C.read_text()), tmp_path, "-O0"), vectors, tmp_path / "out")
    assert first_wrong(vectors, tmp_path / "out")[0] == mistake.first


def test_the_jax_port_agrees(tmp_path):
    """One process reads a folder of a few cases: compilation takes most of its time."""
    pytest.importorskip("jax", reason="needs the package jax")
    given, written = tmp_path / "given", tmp_path / "written"
    given.mkdir()
    for case in JAX_CASES:
        shutil.copy(VECTORS / "compressive" / f"{case}.safetensors", given)
    done = subprocess.run([sys.executable, JAX, given, written], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for vectors in given.iterdir():
        wrong, agreed = first_wrong(vectors, written / vectors.name)
        assert wrong is None and agreed > 70, vectors.name


@needs_a_compiler
@pytest.mark.parametrize("path", [VECTORS / "missing", C, VECTORS / "memformer" / "recall.safetensors"])
def test_bad_input_is_one_line_and_exit_code_2(path, c_port, tmp_path):
    done = subprocess.run([c_port, path, tmp_path / "out"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("pretrained_recurrence: ") and not (tmp_path / "out").exists()
