"""Each reference file stands alone, has the idea first and its mathematics written out. (.ci/run runs their demonstrations.)"""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = {
    path.stem: path.read_text() for path in sorted((ROOT / "reference").glob("*.py")) if "\nclass Config:" in path.read_text()
}
TREES = {name: ast.parse(source) for name, source in SOURCES.items()}
DEFINED = {  # {reference: {name: its function or class}}
    name: {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for name, tree in TREES.items()
}
PAPERS = [name for name in SOURCES if name != "roberta"]  # which has no chapter of its own
SECTIONS = ["configuration", "the method", "the model", "through segments", "demonstration"]  # a first reading's, in this order
SECTIONS += ["what every Transformer has", "variants", "starting values", "checks"]
FIRST = 250  # lines, in which the whole idea stands
OBVIOUS = {"forward", "backward", "layer", "model", "dropout", "norm", "mlp", "gelu_mlp", "initial_state", "token_projection"}


def sections_of(name):
    """{title: (first line, last line, what its heading says)}, lines from 1."""
    lines = SOURCES[name].splitlines()
    starts = [number for number, line in enumerate(lines, 1) if line == "# " + "-" * 76]
    titles = [lines[number].removeprefix("# ").partition(": ") for number in starts]
    ends = [*starts[1:], len(lines) + 1]
    return {title: (start, end - 1, words) for start, end, (title, _, words) in zip(starts, ends, titles, strict=True)}


def operation(name):
    """What a function computes, forward or backward; merge_heads is the backward of split_heads."""
    return "heads" if name in ("split_heads", "merge_heads") else name.removesuffix("_forward").removesuffix("_backward")


def test_imports_are_numpy_and_the_standard_library():
    """RoBERTa, which belongs to one of the papers, takes what every Transformer has from that paper's file."""
    nodes = [(name, node) for name, tree in TREES.items() for node in ast.walk(tree)]
    imported = {(name, part.name) for name, node in nodes if isinstance(node, ast.Import) for part in node.names}
    imported |= {(name, node.module) for name, node in nodes if isinstance(node, ast.ImportFrom)}
    other = {(name, module) for name, module in imported if module.split(".")[0] not in sys.stdlib_module_names | {"numpy"}}
    assert other == {("roberta", "reference.pretrained_recurrence")}


@pytest.mark.parametrize("name", SOURCES)
def test_a_reference_has_the_idea_first(name):
    """What a first reading skips stands behind and says so; a Config only calls its checks, which stand last."""
    sections, defined = sections_of(name), DEFINED[name]
    absent = {"variants"} if name in PAPERS else {"what every Transformer has"}
    assert list(sections) == [title for title in SECTIONS if title in sections] and set(SECTIONS) - set(sections) <= absent
    assert all("first reading" in sections[title][2] for title in SECTIONS[5:] if title in sections)
    checks = re.search(r"def __post_init__\(self\):\n        (\w+)\(.*\)\n\n", SOURCES[name])[1]
    assert defined[checks].lineno > sections["checks"][0]


@pytest.mark.parametrize("name", PAPERS)
def test_the_whole_idea_stands_in_the_first_250_lines(name):
    """Config, State and the method end there, and the method calls at most five operations that are explained later."""
    start, end, _ = sections_of(name)["the method"]
    defined = DEFINED[name]
    assert max(end, defined["Config"].end_lineno, defined["State"].end_lineno) <= FIRST
    method = [node for node in defined.values() if start < node.lineno <= end and isinstance(node, ast.FunctionDef)]
    assert sum(node.name.endswith("_backward") for node in method) > 2
    names = {node.id for function in method for node in ast.walk(function) if isinstance(node, ast.Name)}
    later = {operation(called) for called in names & set(defined) if defined[called].lineno > FIRST}
    assert len(later) <= 5, f"explained later: {', '.join(sorted(later))}"


@pytest.mark.parametrize("name", SOURCES)
def test_the_backward_of_an_operation_follows_it_with_its_mathematics_above(name):
    """Of the section `what every Transformer has`, where a backward is a formula; others, where it is no chain of calls."""
    functions = [node.name for node in DEFINED[name].values() if isinstance(node, ast.FunctionDef)]
    for each, after in zip(functions, [*functions[1:], ""], strict=True):
        assert not each.endswith("_forward") or after == each.removesuffix("forward") + "backward"
    start, end, _ = sections_of(name).get("what every Transformer has", (0, 0, ""))
    explained = re.findall(r"^# .+: .*d.*\ndef ([a-z_0-9]+)_backward\(", SOURCES[name], re.M)
    operations = re.findall(r"\ndef ([a-z_0-9]+)_backward\(", "\n".join(SOURCES[name].splitlines()[start:end]))
    assert len(operations) > 3 or name not in PAPERS
    assert set(operations) - set(explained) <= OBVIOUS


@pytest.mark.parametrize("name", PAPERS)
def test_every_decision_is_listed_once_and_cited_where_it_acts(name):
    listed = (ROOT / "docs" / "decisions" / f"{name}.md").read_text().partition("\n## ")[0]
    items = re.split(r"^(\d+)\. ", listed, flags=re.M)[1:]
    numbers, texts = [int(number) for number in items[::2]], items[1::2]
    assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) > 9
    assert all(" Ours:" in text for text in texts)
    source = re.sub(r"\n *(# )?", " ", SOURCES[name])
    assert not re.findall(r"decisions? \d+\b(?!: [^\s).;]+ \w).{20}", source), "a citation says in three words what is decided"
    cited = {int(number) for number in re.findall(r"decision (\d+): ", source)}
    elsewhere = {n for n, text in zip(numbers, texts, strict=True) if re.search(r"`(accelerated/|train\.py|eval\.py)", text)}
    assert cited <= set(numbers) and set(numbers) <= cited | elsewhere, f"cited nowhere: {set(numbers) - cited - elsewhere}"
