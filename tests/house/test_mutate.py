"""python -m tests.tools.mutate: noticed and equivalent faults are told apart."""

import os
import re
import subprocess
import sys

import pytest

from tests.tools.mutants import mutants_of
from tests.tools.mutate import EQUIVALENT, FILES, ROOT, TESTS, read_equivalent

SOURCE = '''"""Said only."""
def distance(a: int, b: int = 1 + 1) -> int:
    """-1."""
    if b < 0:
        raise ValueError(f"{b - 1} below 0")
    return abs(a - b)
# demonstration
def demonstrate():
    return 1 + 1
'''
TEST = """from sums import distance
def test_it():
    assert distance(5, 2) == {} == distance(2, 5)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="faults are planted in forked processes: run it on Linux")
def test_survivors_are_listed_unless_they_are_explained_and_without_a_fault_the_tests_must_pass(tmp_path):
    file, test, explained = tmp_path / "sums.py", tmp_path / "test_sums.py", tmp_path / "equivalent.txt"
    file.write_text(SOURCE)
    explained.write_text(f"{file}\n- if b < 0:\n+ if b < 1:\nThe two are equal.\n")

    def ended(expected):
        test.write_text(TEST.format(expected))
        command = [sys.executable, "-m", "tests.tools.mutate", "--files", file, "--tests", test, "--equivalent", explained]
        env = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        return done.returncode, done.stdout

    code, printed = ended(3)
    assert code == 1 and "4 of 5 faults, and 1 that change nothing" in printed, printed
    assert {*re.findall(r"sums\.py:(\d+)", printed)} == {"4", "6"}, "not in what is only said"
    assert f"caught    {file}:6 operators: return abs(a + b)" in printed
    assert re.findall(r" survived\n- (.*)\n\+ (.*)", printed) == [("if b < 0:", "if b <= 0:")]
    code, printed = ended(4)
    assert code == 2 and "Without any fault" in printed


def test_what_it_names_is_there():
    """Its files, its tests, and every explained survivor as a fault that can be planted."""
    assert [name for name in (*FILES, *TESTS) if not (ROOT / name).exists()] == []
    found = {(mutant.file, mutant.before, mutant.after) for file in FILES for mutant in mutants_of(ROOT, file)}
    explained = read_equivalent(EQUIVALENT)
    assert not explained.keys() - found and all(explained.values())
