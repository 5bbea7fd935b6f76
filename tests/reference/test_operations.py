"""Operations that several references share, against finite differences in every entry.

Each is tested once, because sources are equal. What else a paper has of its own is differentiated
in whole models, in all variants (test_gradients.py).
"""

import ast
import collections
import dataclasses
from pathlib import Path

import numpy as np
import pytest

from reference import block_recurrent as ref
from reference import compressive, memformer, pretrained_recurrence, roberta
from tests.helpers.comparison import check_operation, draw
from tests.helpers.variants import PAPERS

SEEN = np.array([[1, 0, 1, 1], [0, 1, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0]], bool)
FILES = sorted((Path(__file__).parents[2] / "reference").glob("*.py"))


def dropping():
    """A rate of dropout, and the same random numbers each time."""
    return 0.4, np.random.default_rng(8)


TARGETS = np.array([[1, 3, 0], [2, 2, 1]])
SCORED = np.array([[1, 0, 1], [1, 1, 0]], bool)
OPERATIONS = {  # {name: (forward, backward, shapes of the inputs)}
    "linear": (ref.linear_forward, ref.linear_backward, {"x": (2, 3, 4), "weight": (5, 4)}),
    "affine": (
        lambda x, **p: memformer.affine_forward(p, "own", x),
        memformer.affine_backward,
        {"x": (2, 3, 4), "own": (5, 4), "own_bias": (5,)},
    ),
    "layer_norm": (
        lambda x, **p: ref.layer_norm_forward(p, "own", x),
        ref.layer_norm_backward,
        {"x": (2, 3, 5), "own.scale": (5,), "own.bias": (5,)},
    ),
    "unit_norm": (ref.unit_norm_forward, ref.unit_norm_backward, {"x": (2, 3, 5)}),
    "softmax": (ref.softmax_forward, ref.softmax_backward, {"scores": (3, 5)}),
    "dropout": (lambda x: ref.dropout_forward(x, *dropping()), ref.dropout_backward, {"x": (3, 5)}),
    "cross_entropy": (
        lambda logits: ref.cross_entropy_forward(logits, TARGETS, SCORED),
        ref.cross_entropy_backward,
        {"logits": (2, 3, 5)},
    ),
    "gelu": (
        pretrained_recurrence.gelu_forward,
        pretrained_recurrence.gelu_backward,
        {"x": (3, 4)},
    ),
    "exact_gelu": (roberta.exact_gelu_forward, roberta.exact_gelu_backward, {"x": (3, 5)}),
    "masked_attention": (
        lambda **inputs: memformer.masked_attention_forward(*inputs.values(), SEEN, *dropping()),
        memformer.masked_attention_backward,
        dict.fromkeys(("query", "key", "value"), (2, 2, 4, 3)),
    ),
    "scaled attention": (
        lambda **inputs: ref.attention_forward(*inputs.values(), SEEN[:3], *dropping()),
        ref.attention_backward,
        {
            "query": (1, 2, 3, 5),
            "key": (1, 2, 4, 5),
            "value": (1, 2, 4, 5),
            "scale": (2,),
            "bias": (2, 3, 4),
        },
    ),
}

CONFIG = dataclasses.replace(
    PAPERS["compressive"].small, dilations=(1, 3), compression_rate=2, segment=6
)
USAGE = np.random.default_rng(2).random((2, 6))


def compression(name):
    """A compression. In a model what is evicted is data, so that its gradient shows here alone."""
    compress, backward = compressive.COMPRESSIONS[name]

    def forward(evicted, **p):
        return compress(p, CONFIG, evicted, USAGE)

    config = dataclasses.replace(CONFIG, compression=name)
    p = compressive.init_compression(config, np.random.default_rng(1))
    shapes = {"evicted": (2, 6, 6)} | {key: value.shape for key, value in p.items()}
    return forward, backward, shapes


OPERATIONS |= {f"compression {name}": compression(name) for name in compressive.COMPRESSIONS}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_gradient(name):
    forward, backward, shapes = OPERATIONS[name]
    check_operation(forward, backward, {each: draw(*shape) for each, shape in shapes.items()}, name)


OWN = {  # what a paper defines for itself
    "forward",
    "backward",
    "initial_state",
    "initial_state_backward",
    "init_params",
    "init_layer",
    "layer_forward",
    "layer_backward",
    "loss_and_gradients",
    "demonstrate",
    "check_config",
    "stopped",
}


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
        if "\nclass Config:" in path.read_text():
            for name, source in functions_of(path).items():
                sources[name][path.name] = source
    assert len(sources["linear_forward"]) > 1, "nothing is compared"
    for name in sources.keys() - OWN:
        alike = len(set(sources[name].values())) == 1
        assert alike, f"{name} is not the same in {', '.join(sources[name])}"
