"""docs/ports: they compute what the vectors ask for, and a mistake that is planted in one is named at its tensor."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import save_file

from reference import check
from tests.tools.wrong import read_wrong

ROOT = Path(__file__).parents[2]
PORTS, VECTORS = ROOT / "docs" / "ports", ROOT / "docs" / "vectors"
C, JAX = PORTS / "pretrained_recurrence.c", PORTS / "compressive_jax.py"
COMPILER = shutil.which("cc")
needs_a_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler called cc")
JAX_CASES = ("conv-attention_reconstruction", "dilated_conv-auto_encoding", "short-memory-bptt", "simplified")


def compiled(source, folder, options=("-O0",)):
    """The C port as a program."""
    folder.mkdir(exist_ok=True)
    (folder / "port.c").write_text(source)
    command = [COMPILER, "-std=c11", *options, "-o", str(folder / "port"), str(folder / "port.c"), "-lm"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return folder / "port"


def first_wrong(paper, case, file):
    """(the first tensor that is wrong, None if all agree; how many agree) of a port's file for a case."""
    expected, metadata = check.load(VECTORS / paper / f"{case}.safetensors")
    rows = check.compare(expected, check.load(file)[0], json.loads(metadata["inner"]))
    wrong = [row for row in rows if not row.passes]
    return (wrong[0].name if wrong else None), len(rows) - len(wrong)


def run(program, paper, case, folder):
    """Run a port on a case; returns the file that it writes."""
    path = VECTORS / paper / f"{case}.safetensors"
    done = subprocess.run([*program, str(path), str(folder / "out")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "out"


# C


@pytest.fixture(scope="module")
def c_port(tmp_path_factory):
    return compiled(C.read_text(), tmp_path_factory.mktemp("port"), ("-O1", "-Wall", "-Wextra"))


@needs_a_compiler
@pytest.mark.parametrize("case", [path.stem for path in sorted((VECTORS / "pretrained_recurrence").iterdir())])
def test_the_c_port_agrees(case, c_port, tmp_path):
    wrong, agreed = first_wrong("pretrained_recurrence", case, run([c_port], "pretrained_recurrence", case, tmp_path))
    assert wrong is None and agreed > 100


MISTAKES = read_wrong("wrong_in_c.txt")


@needs_a_compiler
@pytest.mark.parametrize("mistake", MISTAKES, ids=[mistake.rule for mistake in MISTAKES])
def test_a_mistake_in_the_c_port_is_named(mistake, tmp_path):
    port = compiled(mistake.planted(C.read_text()), tmp_path)
    assert first_wrong(mistake.paper, mistake.case, run([port], mistake.paper, mistake.case, tmp_path))[0] == mistake.first


def test_there_are_enough_mistakes():
    assert len(MISTAKES) > 20 and len({(mistake.old, mistake.new) for mistake in MISTAKES}) == len(MISTAKES)


# JAX


@pytest.fixture(scope="module")
def jax_results(tmp_path_factory):
    """What the JAX port writes for a few cases, by one process."""
    pytest.importorskip("jax", reason="needs the package jax")
    given, written = tmp_path_factory.mktemp("given"), tmp_path_factory.mktemp("written")
    for case in JAX_CASES:
        shutil.copy(VECTORS / "compressive" / f"{case}.safetensors", given)
    done = subprocess.run([sys.executable, str(JAX), str(given), str(written)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return written


@pytest.mark.parametrize("case", JAX_CASES)
def test_the_jax_port_agrees(case, jax_results):
    wrong, agreed = first_wrong("compressive", case, jax_results / f"{case}.safetensors")
    assert wrong is None and agreed > 70


# Both


@pytest.mark.parametrize("port", [C, JAX], ids=lambda path: path.name)
def test_a_port_is_short(port):
    lines = port.read_text().splitlines()
    assert len(lines) <= 500 and max(map(len, lines)) <= 130


@needs_a_compiler
@pytest.mark.parametrize("what", ["missing", "of another model", "text", "without a tensor"])
def test_bad_input_is_one_line_and_exit_code_2(what, c_port, tmp_path):
    path = tmp_path / "in"
    if what == "text":
        path.write_text("not tensors at all")
    if what == "of another model":
        shutil.copy(VECTORS / "memformer" / "recall.safetensors", path)
    if what == "without a tensor":
        rows, metadata = check.load(VECTORS / "pretrained_recurrence" / "mean.safetensors")
        save_file({name: row for name, row in rows.items() if name != "given/param/layers.0.query"}, path, metadata)
    done = subprocess.run([c_port, path, tmp_path / "out"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("pretrained_recurrence: ") and not (tmp_path / "out").exists()
