"""The command that measures a table refuses what it cannot do in one line."""

import os
import runpy
import sys

import pytest

from accelerated.lab.tables.__main__ import parse_options
from accelerated.program.errors import InputError


def test_what_cannot_be_measured_is_refused_and_each_core_has_a_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tables", "memformer-9", "--runs", str(tmp_path / "x")])
    monkeypatch.delitem(sys.modules, "accelerated.lab.tables.__main__")
    with pytest.raises(SystemExit) as stopped:
        runpy.run_module("accelerated.lab.tables", run_name="__main__")
    out, line = capsys.readouterr()
    assert (stopped.value.code, out, line.count("\n")) == (2, "", 1) and "nearest: memformer-" in line
    assert not (tmp_path / "x").exists()
    words = ["recall-copying", "--out", str(tmp_path), "--runs", str(tmp_path)]
    for more, expected in (([], os.cpu_count()), (["--jobs", "3"], 3)):
        assert parse_options([*words, *more]).jobs == expected
    with pytest.raises(InputError, match="--jobs 0 must be at least 1"):
        parse_options([*words, "--jobs", "0"])
