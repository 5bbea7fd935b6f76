"""Each reference file stands alone, has the idea first and its mathematics written out.

(.ci/run runs their demonstrations.)
"""

import ast
import re
import sys

import pytest

from tests.conftest import ROOT

SOURCES = {
    path.stem: path.read_text()
    for path in sorted((ROOT / "reference").glob("*.py"))
    if "\nclass Config:" in path.read_text()
}
TREES = {name: ast.parse(source) for name, source in SOURCES.items()}
PAPERS = [name for name in SOURCES if name != "roberta"]  # which has no chapter of its own
SECTIONS = [
    "configuration",
    "the method",
    "the model",
    "through segments",
    "demonstration",
]  # a first reading's, in this order
SECTIONS += ["what every Transformer has", "variants", "starting values", "checks"]
FIRST = 250  # lines, in which the whole idea stands


def test_imports_are_numpy_and_the_standard_library():
    """RoBERTa, which belongs to one of the papers, takes what every Transformer has from that
    paper's file.
    """
    allowed = {*sys.stdlib_module_names, "numpy"}
    other = set()
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            modules = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                modules = [node.module]
            other |= {(name, each) for each in modules if each.split(".")[0] not in allowed}
    assert other == {("roberta", "reference.pretrained_recurrence")}


@pytest.mark.parametrize("name", PAPERS)
def test_a_reference_has_the_idea_first(name):
    """Config, State and the method end within the first lines.

    What a first reading skips stands behind, in this order.
    """
    lines = SOURCES[name].splitlines()
    starts = [number for number, line in enumerate(lines, 1) if line == "# " + "-" * 76]
    sections = {lines[number].removeprefix("# ").partition(":")[0]: number for number in starts}
    assert list(sections) == [title for title in SECTIONS if title in sections]
    assert {*SECTIONS} - sections.keys() <= {"variants"}
    defined = {
        node.name: node.lineno for node in TREES[name].body if isinstance(node, ast.ClassDef)
    }
    assert (
        max(defined["Config"], defined["State"])
        < sections["the method"]
        < sections["the model"]
        <= FIRST + 1
    )


@pytest.mark.parametrize("name", SOURCES)
def test_the_backward_of_an_operation_follows_it(name):
    functions = [node.name for node in TREES[name].body if isinstance(node, ast.FunctionDef)]
    for each, after in zip(functions, [*functions[1:], ""], strict=True):
        assert not each.endswith("_forward") or after == each.removesuffix("forward") + "backward"


@pytest.mark.parametrize("name", SOURCES)
def test_annotations_are_read_from_a_class(name):
    """From Python 3.14 on an instance has no __annotations__."""
    owners = re.findall(r"(\w+)\.__annotations__", SOURCES[name])
    assert all(owner[0].isupper() for owner in owners), f"{owners} are to be classes"


@pytest.mark.parametrize("name", PAPERS)
def test_every_decision_is_listed_once_and_cited_where_it_acts(name):
    file = ROOT / "docs" / "decisions" / f"{name}.md"
    assert file.exists(), f"docs/decisions/{file.name} is missing: a paper owes its decisions"
    listed = file.read_text().partition("\n## ")[0]
    items = re.split(r"^(\d+)\. ", listed, flags=re.M)[1:]
    numbers = [int(number) for number in items[::2]]
    texts = items[1::2]
    assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) > 9
    source = re.sub(r"\n *(# )?", " ", SOURCES[name])
    assert not re.findall(r"decisions? \d+\b(?!: [^\s).;]+ \w).{20}", source), (
        "a citation says in three words what is decided"
    )
    cited = {int(number) for number in re.findall(r"decision (\d+): ", source)}
    elsewhere = {
        n
        for n, text in zip(numbers, texts, strict=True)
        if re.search(r"`(accelerated/|train\.py|eval\.py)", text)
    }
    assert cited <= set(numbers)
    assert set(numbers) <= cited | elsewhere, f"cited nowhere: {set(numbers) - cited - elsewhere}"
