"""The house: imports run one way, rooms and files stay small, every file says what it is for."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from accelerated.models import NAMES

ROOT = Path(__file__).parents[2]
FILES = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in sorted((ROOT / "accelerated").rglob("*.py"))}
SCRIPTS = {name: ast.parse((ROOT / name).read_text()) for name in ("train.py", "eval.py")}
ROOMS = {  # what each room may import besides itself; the models, protocol and replay are "accelerated"
    "reference": set(),
    "program": set(),
    "accelerated": {"attention", "reference"},
    "presets": {"reference"},
    "attention": {"reference"},
    "data": set(),
    "training": {"accelerated", "presets", "attention", "data", "reference"},
    "evaluation": {"accelerated", "presets", "attention", "data", "training", "reference"},
    "lab": {"accelerated", "presets", "attention", "data", "training", "evaluation", "reference"},
    "scripts": {"accelerated", "attention", "data", "training", "evaluation", "reference"},
}
FROM_REFERENCE = {"Config", "init_params", "NORM_EPSILON", "pooled_rows", "POOLS", "SPECIALS"}  # and pure helpers
every_file = pytest.mark.parametrize("file", [*FILES, *SCRIPTS])


def room_of(file):
    """The room that a file or a dotted module stands in; None for what everybody may import, and for libraries."""
    parts = file.removesuffix(".py").replace("/", ".").split(".")
    if file in SCRIPTS or parts == ["accelerated", "__init__"]:
        return "scripts"  # what a user runs and imports
    if parts[0] != "accelerated":
        return "reference" if parts[0] == "reference" else None
    if parts[1:2] == ["program"]:
        return None
    return parts[1] if len(parts) > 1 and (ROOT / "accelerated" / parts[1]).is_dir() else "accelerated"


def file_of(module):
    """The project's file of a dotted name, or None."""
    path = Path(*module.split("."))
    found = [p for p in (path.with_suffix(".py"), path / "__init__.py") if (ROOT / p).is_file()]
    return found[0].as_posix() if found else None


def project_imports(file):
    """[(module, name)] of each import of the project in a file; of a whole module (module, None), however it is written."""
    found = []
    for node in ast.walk((FILES | SCRIPTS)[file]):
        if isinstance(node, ast.Import):
            found += [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are written from the root"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.append((whole, None) if file_of(whole) else (node.module, alias.name))
    return [(module, name) for module, name in found if module.split(".")[0] in ("accelerated", "reference")]


@every_file
def test_imports_run_one_way(file):
    room = room_of(file)
    allowed = {None, room} | ROOMS[room] if room else {None}
    assert not [module for module, _ in project_imports(file) if room_of(module) not in allowed]


@pytest.mark.parametrize("file", FILES)
def test_of_a_reference_configs_and_initial_values_are_imported(file):
    """Names alone: whoever has the module could take its forward."""
    assert {name for module, name in project_imports(file) if module.split(".")[0] == "reference"} <= FROM_REFERENCE


def test_no_circles_between_files():
    graph = {file: {file_of(module) for module, _ in project_imports(file)} - {file} for file in FILES}
    while graph:
        leaves = [file for file, targets in graph.items() if not targets & graph.keys()]
        assert leaves, f"files that import each other: {sorted(graph)}"
        for file in leaves:
            del graph[file]


def test_rooms_hold_at_most_nine_files():
    folders = [ROOT / "accelerated", *(path for path in (ROOT / "accelerated").rglob("*") if path.is_dir())]
    counts = {folder.name: len([file for file in folder.glob("*.py") if file.name != "__init__.py"]) for folder in folders}
    assert not {name: count for name, count in counts.items() if count > 9}


@every_file
def test_a_file_is_short_and_begins_with_what_it_is_for(file):
    tree, most = (FILES | SCRIPTS)[file], {"train.py": 200, "eval.py": 150}.get(file, 400)
    first = (ast.get_docstring(tree) or "").partition("\n")[0]
    assert len(first) > 20 and first.rstrip().endswith((".", ":", ";"))
    assert Path(file).stem not in ("utils", "common", "helpers", "base")
    assert len((ROOT / file).read_text().splitlines()) <= most
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert not [node.name for node in functions if node.end_lineno - node.lineno >= 50]


def test_presets_and_command_lines_load_no_torch():
    """A misspelt option and --help are answered at once."""
    modules = [
        *(f"accelerated.presets.{name}" for name in NAMES),
        "accelerated.training.options",
        "accelerated.evaluation.options",
    ]
    code = f"import importlib, sys; [importlib.import_module(name) for name in {modules}]; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
