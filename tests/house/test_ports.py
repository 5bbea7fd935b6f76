"""docs/ports: they compute what the vectors ask for, as the porters' own checker says."""

import shutil
import subprocess
import sys

import pytest

from reference import check
from tests.conftest import ROOT

PORTS = ROOT / "docs" / "ports"
VECTORS = ROOT / "docs" / "vectors"
JAX_CASES = (
    "conv-attention_reconstruction",
    "conv-bptt",
    "short-memory-bptt",
    "transformer-xl",
)
COMPILER = shutil.which("cc")


@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler called cc")
def test_the_c_port_agrees(tmp_path, capfd):
    """Its compiler and the port itself say nothing."""
    port = tmp_path / "port"
    given = VECTORS / "pretrained_recurrence"
    written = tmp_path / "written"
    written.mkdir()
    options = ["-std=c11", "-O1", "-Wall", "-Wextra", "-o", port]
    subprocess.run([COMPILER, *options, PORTS / "pretrained_recurrence.c", "-lm"], check=True)
    for vectors in given.glob("*.safetensors"):
        subprocess.run([port, vectors, written / vectors.name], check=True)
    assert check.main([str(given), str(written)]) == 0
    printed, error = capfd.readouterr()
    assert "10 of 10 cases agree; 0 are not in" in printed and not error


def test_the_jax_port_agrees(tmp_path, capfd):
    """One process reads a folder of a few cases: compilation takes most of its time."""
    pytest.importorskip("jax", reason="needs the package jax")
    given = tmp_path / "given"
    written = tmp_path / "written"
    given.mkdir()
    for case in JAX_CASES:
        shutil.copy(VECTORS / "compressive" / f"{case}.safetensors", given)
    subprocess.run([sys.executable, PORTS / "compressive_jax.py", given, written], check=True)
    assert check.main([str(given), str(written)]) == 0
    assert "4 of 4 cases agree; 0 are not in" in capfd.readouterr().out
