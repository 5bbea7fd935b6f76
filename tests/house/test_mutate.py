"""python -m tests.tools.mutate: every kind of fault is planted as said; noticed and equivalent faults are told apart."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.mutants import KINDS, changed, mutants_of, sample
from tests.tools.mutate import EQUIVALENT, FILES, ROOT, digest_of, read_equivalent

linux = pytest.mark.skipif(sys.platform != "linux", reason="faults are planted in forked processes: run it on Linux")
CHANGES = {  # kind: (a line, with each of its faults of the kind)
    "sign": ("y = a - -b", ["y = a + -b", "y = a - b"]),
    "operator": ("y = a / b and not c", ["y = a * b and not c", "y = a / b or not c", "y = a / b and (c)"]),
    "comparison": ("y = a <= b < c", ["y = a < b < c", "y = a <= b <= c"]),
    "index": ("y = x[-1][a : b + 1]", ["y = x[-2][a : b + 1]", "y = x[-1][(a + 1) : b + 1]", "y = x[-1][a : (b + 1 + 1)]"]),
    "dropped term": ("y = a + b * c", ["y = (a)", "y = (b * c)", "y = a + (b)", "y = a + (c)"]),
    "axis": (
        'y = x.sum((0, 2)) + f("ab->ab", x, dim=-1)',
        [
            'y = x.sum((1, 2)) + f("ab->ab", x, dim=-1)',
            'y = x.sum((0, 1)) + f("ab->ab", x, dim=-1)',
            'y = x.sum((0, 2)) + f("ab->ab", x, dim=-2)',
        ],
    ),
    "detach": ("y = x.a.detach() + x", ["y = x.a + x"]),
    "constant": ("y = f(2, -0.5, True)", ["y = f(3, -0.5, True)", "y = f(2, (-1.0), True)", "y = f(2, -0.5, False)"]),
    "removed line": (
        "y = g(y); y += 1; y.append(z)",
        [
            "pass; y += 1; y.append(z)",
            "y = g(y); pass; y.append(z)",
            "y = g(y); y += 1; pass",
        ],
    ),
    "function": (
        "y = max(x.sum(), reversed(z))",
        [
            "y = min(x.sum(), reversed(z))",
            "y = max(x.mean(), reversed(z))",
            "y = max(x.sum(), (z))",
        ],
    ),
    "arguments": ("y = f(a, b, c) @ d", ["y = (d) @ (f(a, b, c))", "y = f(b, a, c) @ d", "y = f(a, c, b) @ d"]),
    "condition": ("y = a if b or c else d", ["y = a if (not (b or c)) else d"]),
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
    assert distance(5, 2) == 3 == distance(2, 5)
"""


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_fault_changes_what_it_says(kind, tmp_path):
    line, expected = CHANGES[kind]
    (tmp_path / "lines.py").write_text(f"def f(x, y):\n    {line}\n")
    found = [mutant for mutant in mutants_of(tmp_path, "lines.py") if mutant.kind == kind]
    assert [mutant.after for mutant in found] == expected
    assert all(changed(tmp_path, mutant) == f"def f(x, y):\n    {mutant.after}\n" for mutant in found)


def test_a_fault_over_several_lines_keeps_the_lines_below_it(tmp_path):
    (tmp_path / "lines.py").write_text("def f(a, b):\n    g(\n        a,\n        b\n    )\n    return a + (\n        b * 2)\n")
    assert {changed(tmp_path, mutant).count("\n") for mutant in mutants_of(tmp_path, "lines.py")} == {7}


def test_the_demonstration_alone_is_skipped():
    """What every Transformer has, and all that a first reading skips, stands after it."""
    papers = [file for file in FILES if file.startswith("reference/") and "# demonstration" in (ROOT / file).read_text()]
    for file in papers:
        lines = (ROOT / file).read_text().splitlines()
        first = next(i for i, line in enumerate(lines, 1) if line.startswith("# demonstration"))
        last = next(i for i, line in enumerate(lines, 1) if i > first and line.startswith("# ---"))
        assert lines[last].startswith(("# what every Transformer has", "# variants"))
        places = [mutant.line for mutant in mutants_of(ROOT, file)]
        assert min(places) < first and max(places) > last and not [line for line in places if first <= line < last]
    assert len(papers) == 6


def test_a_draw_takes_every_file_and_kind_in_turn():
    found = [mutant for file in FILES[:2] for mutant in mutants_of(ROOT, file)]
    groups = {(mutant.file, mutant.kind) for mutant in found}
    drawn = sample(found, len(groups), seed=0)
    assert {(mutant.file, mutant.kind) for mutant in drawn} == groups
    assert drawn == sample(found, len(groups), seed=0) != sample(found, len(groups), seed=1)


def planted(folder: Path, *more: str) -> subprocess.CompletedProcess:
    """All faults of SOURCE, before its one test."""
    (folder / "sums.py").write_text(SOURCE)
    (folder / "test_sums.py").write_text(f"import sys\nsys.path.insert(0, {str(folder)!r})\n{TEST}")
    given = ["--all", "--files", str(folder / "sums.py"), "--tests", str(folder / "test_sums.py"), *more]
    env = os.environ | {"PYTEST_ADDOPTS": f"-o cache_dir={folder / 'cache'}"}
    command = [sys.executable, "-m", "tests.tools.mutate", *given]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)


@linux
def test_survivors_are_listed_unless_they_are_explained(tmp_path):
    ended = planted(tmp_path, "--equivalent", str(tmp_path / "equivalent.txt"))
    assert ended.returncode == 1, ended.stdout + ended.stderr
    blocks = [block.splitlines() for block in ended.stdout.split(" survived\n")[1:]]
    survivors = [(before, after) for before, after, *_ in blocks]
    same, wrong = "return a - b if a > b else b - a", "return a + b if a >= b else b - a"
    assert f"+ {same}" in dict(survivors).values() and f"caught       {tmp_path / 'sums.py'}:6 sign: {wrong}" in ended.stdout
    explained = [f"{tmp_path / 'sums.py'}\n{before}\n{after}\nThe two are equal.\n" for before, after in survivors]
    (tmp_path / "equivalent.txt").write_text("\n".join(explained))
    ended = planted(tmp_path, "--equivalent", str(tmp_path / "equivalent.txt"))
    assert ended.returncode == 0, ended.stdout + ended.stderr


@linux
def test_without_a_fault_the_tests_must_pass(tmp_path):
    (tmp_path / "test_wrong.py").write_text("def test_it():\n    assert False\n")
    ended = planted(tmp_path, str(tmp_path / "test_wrong.py"))
    assert ended.returncode == 2 and "test_wrong.py::test_it" in ended.stdout


def test_what_a_test_reaches_is_kept_for_the_chosen_files_alone(tmp_path):
    names = ["a.py", "b.py"]
    for name in names:
        (tmp_path / name).write_text(name)
    paths = [tmp_path / name for name in names]
    assert len({digest_of(paths, chosen) for chosen in ([], names, names[:1], names[1:])}) == 4
    assert digest_of(paths, names) == digest_of(paths[::-1], names[::-1]) != digest_of(paths[:1], names)


def test_every_explained_survivor_is_a_fault_that_can_be_planted():
    found = {(m.file, m.before, m.after) for file in FILES for m in mutants_of(ROOT, file)}
    explained = read_equivalent(EQUIVALENT)
    assert not explained.keys() - found and all(explained.values())
