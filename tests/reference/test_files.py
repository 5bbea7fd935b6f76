"""Each reference file stands alone, and what stands in several of them is the same."""

import ast
import collections
import functools
import importlib
import re
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent.parent
REFERENCES = sorted(path for path in (ROOT / "reference").glob("*.py") if path.name != "__init__.py")


def imported_modules(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


@pytest.mark.parametrize("path", REFERENCES, ids=lambda path: path.stem)
def test_imports_are_numpy_and_the_standard_library(path):
    for module in imported_modules(ast.parse(path.read_text())):
        assert module.split(".")[0] in sys.stdlib_module_names | {"numpy"}, f"{path.name} imports {module}"


def test_functions_of_one_name_are_the_same_in_every_reference():
    """Compared without docstrings; `forward`, `backward` and what a paper defines for itself may differ."""
    own = {"forward", "backward", "initial_state", "initial_state_backward", "init_params", "init_layer"}
    own |= {"layer_forward", "layer_backward", "loss_and_gradients", "check_gradients", "demonstrate"}
    bodies = collections.defaultdict(dict)
    for path in REFERENCES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name not in own:
                if isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant):
                    node.body = node.body[1:]
                bodies[node.name][path.name] = ast.dump(node)
    for name, found in bodies.items():
        assert len(set(found.values())) == 1, f"{name} differs between {', '.join(found)}"


@pytest.mark.parametrize("path", REFERENCES, ids=lambda path: path.stem)
def test_every_forward_stands_directly_before_its_backward(path):
    names = [node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    for name in names:
        if name.endswith("_forward"):
            partner = name.removesuffix("forward") + "backward"
            assert names[names.index(name) + 1] == partner, f"{partner} should follow {name}"


@pytest.mark.parametrize("path", REFERENCES, ids=lambda path: path.stem)
def test_every_function_the_chapter_names_exists(path):
    """Code in the chapter's tables: `name` of the reference, `accelerated/file.py::name`, or `tests/file.py::name`."""
    chapter = (ROOT / "docs" / f"{path.stem}.md").read_text()
    cells = re.findall(r"`([a-z_]+_(?:forward|backward))`", chapter)
    assert cells and not [name for name in cells if name not in functions_of(path)]
    named = re.findall(r"`((?:accelerated|tests)/[a-z_0-9/]+\.py)::(\w+)`", chapter)
    assert named and not [f"{file}::{name}" for file, name in named if name not in functions_of(ROOT / file)]


@functools.cache
def functions_of(path):
    if not path.is_file():
        return set()
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)}


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
    assert "Largest relative error" in printed and "cleared" in printed
    for name, broken in faults.items():
        with monkeypatch.context() as patch:
            patch.setattr(module, name, broken)
            if name == "segment_rng":  # noticed by what comes after the finite differences, which take long
                patch.setattr(module, "check_gradients", lambda *given: 0.0)
            with pytest.raises(SystemExit):
                module.demonstrate()
