"""The house: imports run one way, rooms and functions stay small, files say what they are for."""

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from accelerated.models import NAMES

ROOT = Path(__file__).parents[2]
FILES = {  # {dotted name: file} of the project's modules and scripts
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in [
        *ROOT.glob("*.py"),
        *sorted(ROOT.glob("accelerated/**/*.py")),
        *ROOT.glob("reference/*.py"),
    ]
}
TREES = {
    module: ast.parse(path.read_text())
    for module, path in FILES.items()
    if not module.startswith("reference")
}
# What each room may import besides itself; the models, protocol and replay are "accelerated"
ROOMS = {
    "reference": set(),
    "program": set(),
    "accelerated": {"presets", "attention", "data", "reference"},
    "presets": {"reference"},
    "attention": {"reference"},
    "data": set(),
    "training": {"accelerated", "presets", "attention", "data", "reference"},
    "generation": {"accelerated", "attention", "data"},
    "evaluation": {
        "generation",
        "accelerated",
        "presets",
        "attention",
        "data",
        "training",
        "reference",
    },
}
ROOMS["lab"] = ROOMS["evaluation"] | {"evaluation"}
ROOMS["scripts"] = ROOMS["lab"] - {"presets"}
FROM_REFERENCE = {
    "Config",
    "init_params",
    "NORM_EPSILON",
    "pooled_rows",
    "POOLS",
    "SPECIALS",
}  # and pure helpers
every_module = pytest.mark.parametrize("module", TREES)


def room_of(module):
    """The room that a module stands in; None for what everybody may import, and for libraries."""
    first, *rest = module.split(".")
    if module in ("train", "eval", "accelerated"):
        return "scripts"  # what a user runs and imports
    if first != "accelerated" or rest[0] == "program":
        return "reference" if first == "reference" else None
    return rest[0] if (ROOT / "accelerated" / rest[0]).is_dir() else "accelerated"


def project_imports(module):
    """[(module, name)] of what a module imports of the project; of a whole module (module, None),
    however it is written.
    """
    found = []
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Import):
            found += [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are written from the root"
            pairs = [(f"{node.module}.{alias.name}", alias.name) for alias in node.names]
            found += [
                (whole, None) if whole in FILES else (node.module, name) for whole, name in pairs
            ]
    return [
        (module, name)
        for module, name in found
        if module.split(".")[0] in ("accelerated", "reference")
    ]


@every_module
def test_imports_run_one_way(module):
    """Of a reference names alone are imported: whoever has the module could take its forward."""
    room = room_of(module)
    for imported, name in project_imports(module):
        assert room_of(imported) in {None, room} | ROOMS.get(room, set()), imported
        assert room_of(imported) != "reference" or name in FROM_REFERENCE, name


def test_rooms_hold_at_most_nine_files():
    """Besides one for each model."""
    files = [
        path
        for module, path in FILES.items()
        if module.startswith("accelerated.") and path.stem not in ("__init__", *NAMES)
    ]
    counts = Counter(path.parent for path in files)
    assert not {folder: count for folder, count in counts.items() if count > 9}


@every_module
def test_a_file_begins_with_what_it_is_for_and_its_functions_are_short(module):
    tree = TREES[module]
    first = (ast.get_docstring(tree) or "").partition("\n")[0]
    assert len(first) > 20 and first.rstrip().endswith((".", ":", ";"))
    assert FILES[module].stem not in ("utils", "common", "helpers", "base")
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert not [node.name for node in functions if node.end_lineno - node.lineno >= 65]


def test_presets_and_command_lines_load_no_torch():
    """A misspelt option and --help are answered at once."""
    modules = [
        f"accelerated.{name}"
        for name in (*(f"presets.{n}" for n in NAMES), "training.options", "evaluation.options")
    ]
    code = (
        f"import importlib, sys; [importlib.import_module(name) for name in {modules}]; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
