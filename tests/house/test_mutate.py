"""python -m tests.tools.mutate: every kind of fault is planted as said; noticed and equivalent faults are told apart."""

import ast
import os
import re
import subprocess
import sys

import pytest

from tests.tools.mutants import KINDS, mutants_of, planted, sample
from tests.tools.mutate import EQUIVALENT, FILES, PAPERS, ROOT, TESTS, read_equivalent

CHANGES = {  # a line: {kind: the line with each of its faults of the kind}
    "y = a - -b": {"operators": ["y = a + -b", "y = a - b"], "dropped_terms": ["y = a"]},
    "y = a / b and (not c)": {"operators": ["y = a * b and (not c)", "y = a / b and c", "y = a / b or not c"]},
    "y = a <= b < c": {"operators": ["y = a < b < c", "y = a <= b <= c"]},
    "y = x[-1][a:b + 1]": {"indices": ["y = x[-1][a + 1:b + 1]", "y = x[-1][a:b + 1 + 1]", "y = x[-2][a:b + 1]"]},
    "y = a + b * c": {"dropped_terms": ["y = a", "y = a + b", "y = a + c", "y = b * c"]},
    "y = x.sum((0, 2), dim=-1)": {
        "axes": ["y = x.sum((0, 1), dim=-1)", "y = x.sum((0, 2), dim=-2)", "y = x.sum((1, 2), dim=-1)"]
    },
    "y = np.einsum('ab,bc->ac', a, b.T)": {"axes": ["y = np.einsum('ab,bc->ac', a, b)", "y = np.einsum('ab,bc->ca', a, b.T)"]},
    "y = x.a.detach() + x": {"detachments": ["y = x.a + x"]},
    "y = f(2, -0.5, True)": {"constants": ["y = f(2, -0.5, False)", "y = f(2, -1.0, True)", "y = f(3, -0.5, True)"]},
    "y = g(y)": {"removed_lines": ["pass"]},
    "y += 1": {"removed_lines": ["pass"]},
    "y.append(z)": {"removed_lines": ["pass"]},
    "y = max(a.sum(), reversed(b))": {
        "functions": ["y = max(a.mean(), reversed(b))", "y = max(a.sum(), b)", "y = min(a.sum(), reversed(b))"],
    },
    "y = f(a, b, c) @ d": {"arguments": ["y = d @ f(a, b, c)", "y = f(a, c, b) @ d", "y = f(b, a, c) @ d"]},
    "y = a if b or c else d": {"conditions": ["y = a if not (b or c) else d"]},
}
SOURCE = '''"""Said only."""
def distance(a: int, b: int = 1 + 1) -> int:
    """-1."""
    if b < 0:
        raise ValueError(f"{b - 1} below 0")
    return a - b if a >= b else b - a
# demonstration
def demonstrate():
    return 1 + 1
'''
TEST = """from sums import distance
def test_it():
    assert distance(5, 2) == {} == distance(2, 5)
"""


@pytest.mark.parametrize("line", CHANGES)
def test_a_kind_of_fault_changes_what_it_says(line, tmp_path):
    """Nothing else of the file is changed, and what stands below stays on its line."""
    text = "def f(x, y):\n    {}\n\ndef g():\n    return 1"
    (tmp_path / "lines.py").write_text(text.format(line))
    found = [mutant for mutant in mutants_of(tmp_path, "lines.py") if mutant.line == 2]
    assert {kind: sorted(mutant.after for mutant in found if mutant.kind == kind) for kind in CHANGES[line]} == CHANGES[line]
    for mutant in found:
        tree = planted(mutant)
        assert ast.unparse(tree) == text.format(mutant.after) and mutant.before == line
        assert tree.body[1].lineno == 4 and compile(tree, "lines.py", "exec")
    assert {kind.__name__ for kind in KINDS} == set().union(*CHANGES.values())


@pytest.mark.parametrize("file", [f"reference/{paper}.py" for paper in (*PAPERS, "roberta")])
def test_the_demonstration_alone_is_skipped(file):
    """What every Transformer has, and all that a first reading skips, stands after it."""
    begin, part, after = (ROOT / file).read_text().partition("\n# demonstration")
    first, last = begin.count("\n") + 2, (begin + part + after.partition("\n# ---")[0]).count("\n") + 1
    places = [mutant.line for mutant in mutants_of(ROOT, file)]
    assert min(places) < first and max(places) > last and not {*places} & {*range(first, last + 1)}


def test_a_draw_takes_every_file_and_kind_in_turn():
    found = [mutant for file in FILES[:2] for mutant in mutants_of(ROOT, file)]
    groups = {(mutant.file, mutant.kind) for mutant in found}
    drawn = sample(found, len(groups), seed=0)
    assert {(mutant.file, mutant.kind) for mutant in drawn} == groups
    assert drawn == sample(found, len(groups), seed=0) != sample(found, len(groups), seed=1)


@pytest.mark.skipif(sys.platform != "linux", reason="faults are planted in forked processes: run it on Linux")
def test_survivors_are_listed_unless_they_are_explained_and_without_a_fault_the_tests_must_pass(tmp_path):
    file, test, explained = tmp_path / "sums.py", tmp_path / "test_sums.py", tmp_path / "equivalent.txt"
    file.write_text(SOURCE)

    def ended(expected, *words):
        test.write_text(TEST.format(expected))
        command = [sys.executable, "-m", "tests.tools.mutate", "--files", file, "--tests", test, *words]
        env = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PYTEST_ADDOPTS": f"-o cache_dir={tmp_path / 'cache'}"}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout

    code, printed = ended(3)
    assert code == 1, printed
    assert {*re.findall(r"sums\.py:(\d+)", printed)} == {"4", "6"}, "not in what is only said"
    survivors = [block.splitlines()[:2] for block in printed.split(" survived\n")[1:]]
    assert "+ return a - b if a > b else b - a" in dict(survivors).values()
    assert f"caught       {file}:6 operators: return a + b if a >= b else b - a" in printed
    explained.write_text("\n".join(f"{file}\n{before}\n{after}\nThe two are equal.\n" for before, after in survivors))
    code, printed = ended(3, "--equivalent", explained)
    assert code == 0 and f"and {len(survivors)} that change nothing" in printed, printed
    code, printed = ended(4)
    assert code == 2 and "test_sums.py::test_it" in printed


def test_what_it_names_is_there():
    """Its files, its tests, and every explained survivor as a fault that can be planted."""
    assert [name for name in (*FILES, *TESTS) if not (ROOT / name).exists()] == []
    found = {(mutant.file, mutant.before, mutant.after) for file in FILES for mutant in mutants_of(ROOT, file)}
    explained = read_equivalent(EQUIVALENT)
    assert not explained.keys() - found and all(explained.values())
