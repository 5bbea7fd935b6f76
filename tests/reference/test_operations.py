"""Operations of the references against finite differences in every entry.

They are those of docs/vectors/operators, with the shapes that a model calls them with. What else a
paper has of its own is differentiated in whole models, in all variants (test_gradients.py).
"""

import ast
import collections
import inspect
from pathlib import Path

import numpy as np
import pytest

from reference import compressive
from reference.gradients import function_of, stopped
from tests.helpers.comparison import check_operation
from tests.tools import operators
from tests.tools.cases import VARIANTS
from tests.tools.vectors import operators_case

FILES = sorted((Path(__file__).parents[2] / "reference").rglob("*.py"))
OPERATIONS = {}  # {title: paper, case, how operators.txt calls the function, its gradients}
for paper in VARIANTS:
    for case, functions in operators.listed(paper).items():
        for call, names in functions.items():
            if not names[0].startswith("="):
                title = f"{paper} {call}: {', '.join(names)}"
                OPERATIONS[title] = paper, case, call, names

# Its gradients are named without the module
NAMES = {("auto_encoding", "p"): "p.compression"}


def arrays(prefix, value):
    """{name: array} of an array, or of the arrays in a dict, whose names begin with the prefix."""
    if isinstance(value, dict):
        return {f"{prefix}.{key}": array for key, array in value.items()}
    return {prefix: value}


@pytest.mark.parametrize("title", OPERATIONS)
def test_operation_gradient(title, monkeypatch):
    """By every input and parameter, of the sum of all results times what arrives at them."""
    monkeypatch.setattr(operators, "LARGE", {})  # differences of large numbers are rounded
    paper, name, call, names = OPERATIONS[title]
    case = operators_case(paper, name)
    function = call.removesuffix("[-1]")
    found = operators.calls_of(case, {call: names})[call]
    given, computed = operators.operator(case.reference, function, found, names)
    forward = function_of(case.reference, f"{function}_forward")
    own = {key: given.pop(key) for key in inspect.signature(forward).parameters if key in given}
    arriving = list(given.values())

    data = stopped(case).get(f"{function}_forward", ())  # what the paper stops
    inputs = {}
    gradients = {}
    for key, value in own.items():
        gradient = computed.get("dparams" if key in operators.PARAMS else f"d{key}")
        if gradient is not None and key not in data:
            inputs |= arrays(key, value)
            gradients |= arrays(NAMES.get((function, key), key), gradient)
    # softmax cancels a bias of keys
    inputs = {key: value for key, value in inputs.items() if not key.endswith("key_bias")}
    assert inputs, "no gradient is compared"
    for key, value in inputs.items():
        gradients.setdefault(key, np.zeros_like(value))  # that backward leaves out

    def objective(moved):
        arguments = dict(own)
        for key, value in own.items():
            if isinstance(value, dict):
                arguments[key] = {part: moved.get(f"{key}.{part}", value[part]) for part in value}
            elif key in moved:
                arguments[key] = moved[key]
        *outs, _ = forward(**arguments)
        return sum((out * dout).sum() for out, dout in zip(outs, arriving, strict=False))

    check_operation(objective, inputs, {key: gradients[key] for key in inputs}, title)


# What a paper defines for itself
OWN = """
forward backward initial_state initial_state_backward init_params init_layer layers_forward
layers_backward layer_forward layer_backward demonstrate check_config stopped operations_of
operations_with is_published
"""


def functions_of(path):
    """{name: its source without the docstring} of a file's functions."""
    found = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            if ast.get_docstring(node) is not None:
                node.body = node.body[1:]
            found[node.name] = ast.dump(node)
    return found


def test_functions_of_one_name_are_the_same_in_every_reference():
    sources = collections.defaultdict(dict)
    for path in FILES:
        is_a_paper = "\nclass Config:" in path.read_text() or path.parent.name == "variants"
        if is_a_paper:
            for name, source in functions_of(path).items():
                sources[name][f"{path.parent.name}/{path.name}"] = source
    assert len(sources["linear_forward"]) > 1, "nothing is compared"
    for name in sources.keys() - OWN.split():
        alike = len(set(sources[name].values())) == 1
        assert alike, f"{name} is not the same in {', '.join(sources[name])}"


def test_a_target_outside_the_vocabulary_is_an_error():
    """It would count nothing in the loss, and its row's gradient would be wrong."""
    logits = np.zeros((2, 3, 5))
    scored = np.ones((2, 3), bool)
    targets = np.full((2, 3), 4)
    compressive.cross_entropy_forward(logits, targets, scored)
    targets[1, 2] = 5
    with pytest.raises(IndexError, match="5 is out of bounds"):
        compressive.cross_entropy_forward(logits, targets, scored)
