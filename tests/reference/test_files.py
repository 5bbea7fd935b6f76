"""Each reference file stands alone, and what stands in several of them is the same."""

import ast
import collections
import importlib
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from accelerated.models import MODELS

ROOT = Path(__file__).parent.parent.parent
REFERENCES = [ROOT / "reference" / f"{name}.py" for name in MODELS]
SELF_CONTAINED = [*REFERENCES, ROOT / "reference" / "roberta.py"]


def imported_modules(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


@pytest.mark.parametrize("path", SELF_CONTAINED, ids=lambda path: path.stem)
def test_imports_are_numpy_and_the_standard_library(path):
    for module in imported_modules(ast.parse(path.read_text())):
        assert module.split(".")[0] in sys.stdlib_module_names | {"numpy"}, f"{path.name} imports {module}"


def test_functions_of_one_name_are_the_same_in_every_reference():
    """Compared without docstrings; `forward`, `backward` and what a paper defines for itself may differ."""
    own = {"forward", "backward", "initial_state", "initial_state_backward", "init_params", "init_layer"}
    own |= {"layer_forward", "layer_backward", "loss_and_gradients", "check_gradients", "demonstrate"}
    bodies = collections.defaultdict(dict)
    for path in SELF_CONTAINED:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name not in own:
                if isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant):
                    node.body = node.body[1:]
                bodies[node.name][path.name] = ast.dump(node)
    for name, found in bodies.items():
        assert len(set(found.values())) == 1, f"{name} differs between {', '.join(found)}"


@pytest.mark.parametrize("path", SELF_CONTAINED, ids=lambda path: path.stem)
def test_every_forward_stands_directly_before_its_backward(path):
    names = [node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    for name in names:
        if name.endswith("_forward"):
            partner = name.removesuffix("forward") + "backward"
            assert names[names.index(name) + 1] == partner, f"{partner} should follow {name}"


SECTIONS = ["parameters", "operations", "the method", "the model", "through segments", "demonstration"]
LINES = {
    "block_recurrent": 845,
    "compressive": 931,
    "memformer": 1040,
    "memorizing": 645,
    "pretrained_recurrence": 763,
    "roberta": 670,
}
OBVIOUS = {"forward", "backward", "layer", "model", "dropout", "norm", "mlp", "gelu_mlp", "initial_state", "token_projection"}


@pytest.mark.parametrize("path", SELF_CONTAINED, ids=lambda path: path.stem)
def test_a_reference_has_six_sections_and_says_in_which_order_to_read_it(path):
    source = path.read_text()
    rule = "# " + "-" * 76
    assert re.findall(f"^{rule}\n# ([a-z ]+): .+$", source, re.M) == SECTIONS
    assert "Read in this order" in ast.get_docstring(ast.parse(source))


@pytest.mark.parametrize("path", SELF_CONTAINED, ids=lambda path: path.stem)
def test_a_reference_grows_no_longer(path):
    assert len(path.read_text().splitlines()) <= LINES[path.stem]


@pytest.mark.parametrize("path", SELF_CONTAINED, ids=lambda path: path.stem)
def test_the_backward_of_an_operation_has_its_mathematics_above_it(path):
    """Of the section `operations`, where every backward is a formula and not a chain of calls."""
    source = path.read_text()
    operations = source.partition("\n# operations: ")[2].partition("\n# the method: ")[0]
    found = re.findall(r"(.*)\ndef ([a-z_0-9]+)_backward\(", operations)
    assert len(found) > 5
    assert not [name for above, name in found if not re.match("# .+: .*d", above) and name not in OBVIOUS]


@pytest.mark.parametrize("path", SELF_CONTAINED, ids=lambda path: path.stem)
def test_caches_of_more_than_five_fields_have_names(path):
    tree = ast.parse(path.read_text())
    indexed = [node for node in ast.walk(tree) if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant)]
    assert not [node.lineno for node in indexed if "cache" in ast.unparse(node.value) and isinstance(node.slice.value, int)]
    forwards = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.endswith("forward")]
    tuples = [node.value for forward in forwards for node in ast.walk(forward) if isinstance(node, ast.Return | ast.Assign)]
    tuples = [part for value in tuples if isinstance(value, ast.Tuple) for part in (value, *value.elts)]
    assert not [part.lineno for part in tuples if isinstance(part, ast.Tuple) and len(part.elts) > 5]


@pytest.mark.parametrize("path", REFERENCES, ids=lambda path: path.stem)
def test_every_decision_is_listed_once_and_cited_where_it_acts(path):
    chapter = (ROOT / "docs" / f"{path.stem}.md").read_text()
    listed = chapter.partition("\n## Departures and decisions\n")[2].partition("\n## ")[0]
    items = re.split(r"^(\d+)\. ", listed, flags=re.M)[1:]
    numbers, texts = [int(number) for number in items[::2]], items[1::2]
    assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) > 9
    assert all("   Ours:" in text or " Ours:" in text for text in texts)
    cited = {
        int(number) for group in re.findall(r"decisions? ([\d, and]+)", path.read_text()) for number in re.findall(r"\d+", group)
    }
    elsewhere = {
        number for number, text in zip(numbers, texts, strict=True) if re.search(r"`(accelerated/|train\.py|eval\.py)", text)
    }
    assert cited <= set(numbers) and set(numbers) <= cited | elsewhere, f"cited nowhere: {set(numbers) - cited - elsewhere}"


@pytest.mark.parametrize(
    "module,faults",
    [
        ("block_recurrent", {"sigmoid": np.tanh}),  # its derivative is another
        (
            "compressive",
            {
                "relative_shift_backward": lambda dout, cache: dout,
                "content_attention_backward": lambda dout, cache: (0 * cache[1], 0 * cache[1]),  # the compression's own loss
            },
        ),
        (
            "memformer",
            {
                "softmax_backward": lambda dweights, weights: weights * dweights,
                "segment_rng": lambda seed, t: None if seed is None else np.random.default_rng(),  # no replay of dropout
            },
        ),
        ("memorizing", {"sigmoid": np.tanh}),
        ("roberta", {"exact_gelu_backward": lambda dy, cache: dy * (cache[0] > 0)}),
        (
            "pretrained_recurrence",
            {
                "gelu_backward": lambda dy, cache: dy * (cache[0] > 0),
                "segment_rng": lambda seed, t: None if seed is None else np.random.default_rng(),  # no replay of dropout
            },
        ),
    ],
)
def test_the_demonstration_runs_and_notices_faults(module, faults, capsys, monkeypatch):
    module = importlib.import_module(f"reference.{module}")
    module.demonstrate()
    printed = capsys.readouterr().out
    assert "Largest relative error" in printed and ("cleared" in printed or "disjoint" in printed)
    for name, broken in faults.items():
        with monkeypatch.context() as patch:
            patch.setattr(module, name, broken)
            if name == "segment_rng":  # noticed by what comes after the finite differences, which take long
                patch.setattr(module, "check_gradients", lambda *given: 0.0)
            with pytest.raises(SystemExit):
                module.demonstrate()
