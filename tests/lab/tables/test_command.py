"""The command that measures a table refuses what it cannot do in one line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from accelerated.lab.tables.__main__ import parse_options
from accelerated.program.errors import InputError

ROOT = Path(__file__).parents[3]


def test_an_unknown_name_is_one_line(tmp_path):
    command = [sys.executable, "-m", "accelerated.lab.tables", "memformer-9", "--runs", str(tmp_path / "x")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == "" and "nearest: memformer-" in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "x").exists()


def test_each_core_has_a_run(tmp_path):
    words = ["recall-copying", "--out", str(tmp_path), "--runs", str(tmp_path)]
    for more, expected in (([], os.cpu_count()), (["--jobs", "3"], 3)):
        assert parse_options([*words, *more]).jobs == expected
    with pytest.raises(InputError, match="--jobs 0 must be at least 1"):
        parse_options([*words, "--jobs", "0"])
