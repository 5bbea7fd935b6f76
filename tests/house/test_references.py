"""Each reference file stands alone and has its mathematics written out.

Its variants stand in a file behind it. (.ci/run runs their demonstrations.)
"""

import ast
import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.helpers.variants import PAPERS as MODELS

FOLDER = ROOT / "reference"
SOURCES = {
    path.stem: path.read_text()
    for path in sorted(FOLDER.glob("*.py"))
    if "\nclass Config:" in path.read_text()
}
VARIANTS = {path.stem: path.read_text() for path in sorted((FOLDER / "variants").glob("[a-z]*.py"))}
PAPERS = [*SOURCES]
MOST = 915  # lines of a file whose variants stand behind it; 750 is the aim, which GPT-2's has
FORWARD = 230  # the line before which its model begins
IN_BOTH = {"operations_of", "check_config"}  # what a paper's file and its variants both have
with_variants = pytest.mark.parametrize("name", VARIANTS)


def test_a_file_imports_numpy_the_standard_library_and_no_more():
    """A paper's file; its variants that file besides, programs each other.

    So a reference is checked, and a port's results too, where there is no torch.
    """
    for path in FOLDER.rglob("*.py"):
        allowed = [*sys.stdlib_module_names, "numpy"]
        if path.parent != FOLDER:
            allowed.append(f"reference.{path.stem}")
        elif path.stem not in PAPERS:
            allowed.append("reference")
        found = []
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import):
                found += [each.name for each in node.names]
            elif isinstance(node, ast.ImportFrom):
                found += [f"{node.module}.{each.name}" for each in node.names]
        names = tuple(f"{name}." for name in allowed)
        others = [each for each in found if not f"{each}.".startswith(names)]
        assert not others, f"{path} imports {others}"


@with_variants
def test_variants_name_their_papers_file_alike(name):
    """A module called `paper`: so a function of either file can be replaced for a moment."""
    assert f"\nfrom reference import {name} as paper\n" in VARIANTS[name]


def functions_of(source):
    """The names of a file's functions, in their order."""
    return [node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]


@with_variants
def test_a_config_without_variants_imports_none(name):
    """The model that it makes, too, forward and backward."""
    small = MODELS[name]
    first, *_ = small.variants
    program = f"""
import numpy as np, sys
from reference import {name} as reference
config = reference.{small.variant(first)!r}
params = reference.init_params(config, np.random.default_rng(0))
tokens = np.zeros((2, config.segment), int)
state = reference.initial_state(params, config, 2)
logits, next_state, cache = reference.forward(params, config, tokens, state)
reference.backward(params, config, cache, logits, next_state)
found = [module for module in sys.modules if module.startswith("reference.variants")]
sys.exit(f"imported: {{found}}" if found else 0)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, stderr=subprocess.PIPE)
    assert done.returncode == 0, done.stderr.decode()


@with_variants
def test_a_reference_is_read_in_one_sitting(name):
    lines = SOURCES[name].splitlines()
    assert len(lines) <= MOST
    forward = next(n for n, line in enumerate(lines, 1) if line.startswith("def forward("))
    assert forward < FORWARD


@with_variants
def test_no_function_stands_in_a_papers_file_and_in_its_variants(name):
    """They are found by their names alone."""
    assert {*functions_of(SOURCES[name])} & {*functions_of(VARIANTS[name])} <= IN_BOTH


@pytest.mark.parametrize(
    "path", [path for path in sorted(FOLDER.rglob("*.py")) if path.stem in SOURCES], ids=str
)
def test_the_backward_of_an_operation_follows_it(path):
    functions = functions_of(path.read_text())
    for each, after in zip(functions, [*functions[1:], ""], strict=True):
        assert not each.endswith("_forward") or after == each.removesuffix("forward") + "backward"


@pytest.mark.parametrize("name", PAPERS)
def test_every_decision_is_listed_once_and_cited_where_it_acts(name):
    file = ROOT / "docs" / "decisions" / f"{name}.md"
    assert file.exists(), f"docs/decisions/{file.name} is missing: a paper owes its decisions"
    listed = file.read_text().partition("\n## ")[0]
    items = re.split(r"^(\d+)\. ", listed, flags=re.M)[1:]
    numbers = [int(number) for number in items[::2]]
    texts = items[1::2]
    assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) > 9
    source = re.sub(r"\n *(# )?", " ", SOURCES[name] + VARIANTS.get(name, ""))
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
