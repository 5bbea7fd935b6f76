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
    "y = x.sum((0, 2)) + f('ab->ab', x, dim=-1)": {
        "axes": [
            f"y = x.sum({axes}) + f('ab->ab', x, dim={dim})" for axes, dim in (("(0, 1)", -1), ("(0, 2)", -2), ("(1, 2)", -1))
        ],
    },
    "y = np.einsum('ab,bc->ac', a, b.T)": {
        "axes": ["y = np.einsum('ab,bc->ac', a, b)", "y = np.einsum('ab,bc->ca', a, b.T)"],
    },
    "y = x.a.detach() + x": {"detachments": ["y = x.a + x"]},
    "y = f(2, -0.5, True)": {"constants": ["y = f(2, -0.5, False)", "y = f(2, -1.0, True)", "y = f(3, -0.5, True)"]},
    "y = g(y)": {"removed_lines": ["pass"]},
    "y += 1": {"removed_lines": ["pass"]},
    "y.append(z)": {"removed_lines": ["pass"]},
    "y = max(x.sum(), reversed(z))": {
        "functions": ["y = max(x.mean(), reversed(z))", "y = max(x.sum(), z)", "y = min(x.sum(), reversed(z))"],
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
TEST = """import sys
sys.path.insert(0, {folder!r})
from sums import distance
def test_it():
    assert distance(5, 2) == 3 == distance(2, 5)
"""


@pytest.mark.parametrize("line", CHANGES)
def test_a_kind_of_fault_changes_what_it_says(line, tmp_path):
    """Nothing else of the file is changed, and what stands below stays on its line."""
    below = "\n\n\ndef g():\n    return 1"
    (tmp_path / "lines.py").write_text(f"def f(x, y):\n    {line}{below}")
    found = [mutant for mutant in mutants_of(tmp_path, "lines.py") if mutant.line == 2]
    assert {kind: sorted(mutant.after for mutant in found if mutant.kind == kind) for kind in CHANGES[line]} == CHANGES[line]
    for mutant in found:
        tree = planted(mutant)
        assert ast.unparse(tree) == f"def f(x, y):\n    {mutant.after}{below.replace(chr(10) * 3, chr(10) * 2)}"
        assert mutant.before == line and tree.body[1].lineno == 5 and compile(tree, "lines.py", "exec")
    assert {kind.__name__ for kind in KINDS} == set().union(*CHANGES.values())


@pytest.mark.parametrize("file", [f"reference/{paper}.py" for paper in (*PAPERS, "roberta")])
def test_the_demonstration_alone_is_skipped(file):
    """What every Transformer has, and all that a first reading skips, stands after it."""
    lines = (ROOT / file).read_text().splitlines()
    first = next(i for i, line in enumerate(lines, 1) if line.startswith("# demonstration"))
    last = next(i for i, line in enumerate(lines, 1) if i > first and line.startswith("# ---"))
    assert lines[last].startswith(("# what every Transformer has", "# variants"))
    places = [mutant.line for mutant in mutants_of(ROOT, file)]
    assert min(places) < first and max(places) > last and not [line for line in places if first <= line < last]


def test_a_draw_takes_every_file_and_kind_in_turn():
    found = [mutant for file in FILES[:2] for mutant in mutants_of(ROOT, file)]
    groups = {(mutant.file, mutant.kind) for mutant in found}
    drawn = sample(found, len(groups), seed=0)
    assert {(mutant.file, mutant.kind) for mutant in drawn} == groups
    assert drawn == sample(found, len(groups), seed=0) != sample(found, len(groups), seed=1)


@pytest.mark.skipif(sys.platform != "linux", reason="faults are planted in forked processes: run it on Linux")
def test_survivors_are_listed_unless_they_are_explained_and_without_a_fault_the_tests_must_pass(tmp_path):
    file, explained = tmp_path / "sums.py", tmp_path / "equivalent.txt"
    file.write_text(SOURCE)
    (tmp_path / "test_sums.py").write_text(TEST.format(folder=str(tmp_path)))
    (tmp_path / "test_wrong.py").write_text("def test_it():\n    assert False\n")

    def ended(*words):
        command = [sys.executable, "-m", "tests.tools.mutate", "--files", file, *words]
        env = os.environ | {"PYTEST_ADDOPTS": f"-o cache_dir={tmp_path / 'cache'}"}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout

    code, printed = ended("--tests", tmp_path / "test_sums.py")
    assert code == 1, printed
    assert {*re.findall(r"sums\.py:(\d+)", printed)} == {"4", "6"}, "not in what is only said"
    survivors = [block.splitlines()[:2] for block in printed.split(" survived\n")[1:]]
    assert "+ return a - b if a > b else b - a" in dict(survivors).values()
    assert f"caught       {file}:6 operators: return a + b if a >= b else b - a" in printed
    explained.write_text("\n".join(f"{file}\n{before}\n{after}\nThe two are equal.\n" for before, after in survivors))
    code, printed = ended("--equivalent", explained, "--tests", tmp_path / "test_sums.py")
    assert code == 0 and f"and {len(survivors)} that change nothing" in printed, printed
    code, printed = ended("--tests", tmp_path / "test_sums.py", tmp_path / "test_wrong.py")
    assert code == 2 and "test_wrong.py::test_it" in printed


def test_what_it_names_is_there():
    """Its files, its tests, and every explained survivor as a fault that can be planted."""
    assert [name for name in (*FILES, *TESTS) if not (ROOT / name).exists()] == []
    found = {(mutant.file, mutant.before, mutant.after) for file in FILES for mutant in mutants_of(ROOT, file)}
    explained = read_equivalent(EQUIVALENT)
    assert not explained.keys() - found and all(explained.values())
