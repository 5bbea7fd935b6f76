"""docs/ports: a port computes what the vectors ask for, as the porters' own checker says."""

import shutil
import subprocess

import pytest

from reference import check
from tests.conftest import ROOT

PORT = ROOT / "docs" / "ports" / "pretrained_recurrence.c"
GIVEN = ROOT / "docs" / "vectors" / "pretrained_recurrence"
COMPILER = shutil.which("cc")


@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler called cc")
def test_the_c_port_agrees(tmp_path, capfd):
    """Its compiler and the port itself say nothing."""
    port = tmp_path / "port"
    written = tmp_path / "written"
    written.mkdir()
    options = ["-std=c11", "-O1", "-Wall", "-Wextra", "-o", port]
    subprocess.run([COMPILER, *options, PORT, "-lm"], check=True)
    for vectors in GIVEN.glob("*.safetensors"):
        subprocess.run([port, vectors, written / vectors.name], check=True)
    assert check.main([str(GIVEN), str(written)]) == 0
    printed, error = capfd.readouterr()
    assert "10 of 10 cases agree; 0 are not in" in printed and not error
