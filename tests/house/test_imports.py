"""The house: imports run one way, rooms and functions stay small, files say what they are for."""

import ast
import re
from graphlib import TopologicalSorter

import pytest

from tests.conftest import ROOT

LONGEST = 53  # lines of a function
SOURCES = ("*.py", "accelerated/**/*.py", "reference/**/*.py")


def dotted_name(path):
    """What a file is imported as."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


# {dotted name: file} of the project's modules and scripts, and {dotted name: syntax tree}
FILES = {dotted_name(path): path for source in SOURCES for path in sorted(ROOT.glob(source))}
TREES = {
    module: ast.parse(path.read_text())
    for module, path in FILES.items()
    if not module.startswith("reference")
}
# What each room may import besides itself; the models, protocol and replay are "accelerated".
# A file of export is copied to a user
LISTED = """
reference:
program:
accelerated: presets attention data reference
presets: reference
attention: reference
data:
training: accelerated presets attention data reference
generation: accelerated attention data
fast: accelerated attention data generation
evaluation: accelerated presets attention data reference generation training
lab: accelerated presets attention data reference generation training evaluation
export: accelerated presets attention data reference generation training evaluation scripts
scripts: accelerated presets attention data reference generation training evaluation lab export
"""
ROOMS = {room: {*others.split()} for room, others in re.findall("(.*):(.*)", LISTED)}
HOOK = "accelerated.attention.heads"  # its with_fast_path asks for accelerated/fast/
# A config, its initial values, constants and pure helpers
FROM_REFERENCE = {"Config", "init_params", "NORM_EPSILON", "pooled_rows", "SPECIALS"}
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
    """[(module, name)] of what a module imports of the project; the name of a whole one is None."""
    found = []
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Import):
            found += [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are written from the root"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.append((whole, None) if whole in FILES else (node.module, alias.name))
    return [pair for pair in found if pair[0].split(".")[0] in ("accelerated", "reference")]


@every_module
def test_imports_run_one_way(module):
    """Of a reference names alone are imported: whoever has the module could take its forward."""
    room = room_of(module)
    for imported, name in project_imports(module):
        if module == HOOK and imported.startswith("accelerated.fast"):
            continue
        assert room_of(imported) in {None, room} | ROOMS.get(room, set()), imported
        assert room_of(imported) != "reference" or name in FROM_REFERENCE, name


def test_no_module_imports_itself_by_way_of_others():
    """But for the hook, whose import stands in a function."""
    imports = {}
    for module in TREES:
        found = {imported for imported, _ in project_imports(module) if imported in TREES}
        if module == HOOK:
            found = {imported for imported in found if room_of(imported) != "fast"}
        imports[module] = found - {module, "accelerated"}
    TopologicalSorter(imports).prepare()  # it names a cycle


@every_module
def test_a_file_begins_with_what_it_is_for_and_its_functions_are_short(module):
    tree = TREES[module]
    first = (ast.get_docstring(tree) or "").partition("\n")[0]
    assert len(first) > 20 and first.rstrip().endswith((".", ":", ";"))
    assert FILES[module].stem not in ("utils", "common", "helpers", "base")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            lines = node.end_lineno - node.lineno + 1
            assert lines <= LONGEST, (
                f"{node.name} has {lines} lines; which of its steps has a name?"
            )


WRITERS = ("write_text", "write_bytes", "savefig")


def test_files_are_written_whole():
    """Checkpoints, settings, caches, exports, pages, figures and records, as metrics anew."""
    for path in (ROOT / "accelerated").rglob("*.py"):
        nodes = [*ast.walk(ast.parse(path.read_bytes()))]
        opened = [node for node in nodes if isinstance(node, ast.With)]
        whole = {
            node
            for block in opened
            if "written_whole(" in ast.unparse(block.items)
            for node in ast.walk(block)
        }
        for node in nodes:
            is_written = getattr(node, "attr", "") in WRITERS
            where = f"{path.relative_to(ROOT)}, line {getattr(node, 'lineno', 0)}"
            assert node in whole or not is_written, f"{where}: not in written_whole"
