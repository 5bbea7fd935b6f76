"""Operations of the references against finite differences in every entry; what several files share stands once."""

import ast
import collections
import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest

from reference import block_recurrent, compressive, memformer, memorizing, pretrained_recurrence, roberta
from reference import block_recurrent as ref
from tests.helpers.finite_differences import check_operation, draw
from tests.helpers.variants import PAPERS, shaken

FILES = sorted((Path(__file__).parents[2] / "reference").glob("*.py"))


def dropping():
    """A rate of dropout, and the same random numbers each time."""
    return 0.4, np.random.default_rng(8)


TARGETS, SCORED = np.array([[1, 3, 0], [2, 2, 1]]), np.array([[1, 0, 1], [1, 1, 0]], bool)
OPERATIONS = {  # {name: (forward, backward, shapes of the inputs, or their values)}
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
}


# Block-Recurrent


def gating(kind, configuration):
    """The operation of a gate configuration: the attention's gate, the MLP and its gate."""
    config = dataclasses.replace(PAPERS["block_recurrent"].small, gate=kind, configuration=configuration)
    recurrence = block_recurrent.init_recurrence(config, np.random.default_rng(1))
    p = {name: value for name, value in recurrence.items() if name.startswith(("attention_gate", "mlp"))}
    forward = lambda states, attended, **p: block_recurrent.gating_forward(p, config, states, attended)  # noqa: E731
    backward = lambda *given: block_recurrent.gating_backward(config, *given)  # noqa: E731
    return forward, backward, {"states": (1, 3, 6), "attended": (1, 3, 20)} | p


SEEN = np.array([[1, 0, 1, 1], [0, 1, 1, 0], [1, 1, 1, 1]], bool)
OPERATIONS |= {
    "block_recurrent attention": (
        lambda **inputs: block_recurrent.attention_forward(*inputs.values(), SEEN, *dropping()),
        block_recurrent.attention_backward,
        {"query": (1, 2, 3, 5), "key": (1, 2, 4, 5), "value": (1, 2, 4, 5), "scale": (2,), "bias": (2, 3, 4)},
    ),
    "block_recurrent position_bias": (
        lambda table: block_recurrent.position_bias_forward(table, 4, 5),
        block_recurrent.position_bias_backward,
        {"table": (2, 6)},
    ),
}
for pair in itertools.product(("fixed", "lstm"), ("dual", "single", "skip")):
    OPERATIONS["block_recurrent gates " + " ".join(pair)] = gating(*pair)


# Compressive

CONFIG = dataclasses.replace(PAPERS["compressive"].small, dilations=(1, 3), compression_rate=2, segment=6)
USAGE, HIDDEN, EVICTED = np.random.default_rng(2).random((2, 6)), draw(2, 4, 6), draw(2, 8, 6)  # read as data
HEADS = {name: draw(10, 6) for name in ("query", "key", "value")}
RELATIVE = {"query": (2, 2, 3, 5), "key": (2, 2, 7, 5), "value": (2, 2, 7, 5), "distance_key": (2, 7, 5)}
RELATIVE |= {"content_bias": (2, 5), "distance_bias": (2, 5)}


def compression(name):
    """The operation of a compression."""
    forward = lambda evicted, **p: compressive.COMPRESSIONS[name][0](p, CONFIG, evicted, USAGE)  # noqa: E731
    p = compressive.init_compression(dataclasses.replace(CONFIG, compression=name), np.random.default_rng(1))
    return forward, compressive.COMPRESSIONS[name][1], {"evicted": (2, 6, 6)} | p


OPERATIONS |= {
    "compressive attention": (
        lambda **inputs: compressive.relative_attention_forward(*inputs.values(), *dropping()),
        compressive.relative_attention_backward,
        RELATIVE,
    ),
    "compressive attention in values": (
        lambda **inputs: compressive.relative_attention_forward(*inputs.values(), *dropping(), True),
        compressive.relative_attention_backward,
        RELATIVE,
    ),
    "compressive attention_reconstruction": (
        lambda new: compressive.attention_reconstruction_forward(HEADS, PAPERS["compressive"].small, HIDDEN, EVICTED, new),
        lambda *given: compressive.attention_reconstruction_backward(*given)[0],
        {"new": (2, 2, 6)},
    ),
    "compressive auto_encoding": (
        lambda new, decoder: compressive.auto_encoding_forward(
            {"compression.decoder": decoder}, PAPERS["compressive"].small, HIDDEN, EVICTED, new
        ),
        compressive.auto_encoding_backward,
        {"new": (2, 2, 6), "decoder": (24, 6)},
    ),
} | {f"compression {name}": compression(name) for name in compressive.COMPRESSIONS}


# Memformer

READABLE = np.array([[True, True, False, False], [True] * 4])
SLOT_MASK = memformer.readable_mask(np.array([[True, False, True, True], [True] * 4]))


def self_attention(kind, distances, before, parameters):
    """The operation of an attention by distances, with dropout; causal after a memory, or with padding."""
    mask = memformer.self_attention_mask(4, before, before > 0, None if before else READABLE)
    forward, backward = (getattr(memformer, f"{kind}_attention_{way}") for way in ("forward", "backward"))
    run = lambda query, key, value, **p: forward(p, query, key, value, distances, mask, *dropping())  # noqa: E731
    return run, backward, {"query": (2, 2, 4, 3), "key": (2, 2, 4 + before, 3), "value": (2, 2, 4 + before, 3)} | parameters


def slot_scores(query, self_key, key, retention):
    """Scores with zeros for what is hidden, whose gradient softmax hands back as zero."""
    scores, cache = memformer.slot_scores_forward(query, self_key, key, retention, SLOT_MASK)
    return np.where(np.isinf(scores), 0.0, scores), cache


def slot_scores_backward(dout, cache):
    return memformer.slot_scores_backward(dout * np.concatenate([np.ones((2, 1, 1, 1), bool), SLOT_MASK], axis=-1), cache)


XL = {"distance_key": (6, 8), "content_bias": (2, 3), "distance_bias": (2, 3)}
OPERATIONS |= {
    "memformer simplified with padding": self_attention("simplified", np.arange(-2, 3), 0, {"positions": (5, 3)}),
    "memformer simplified after a memory": self_attention("simplified", np.arange(4), 2, {"positions": (4, 3)}),
    "memformer transformer_xl with padding": self_attention("transformer_xl", np.arange(-2, 3), 0, XL),
    "memformer transformer_xl after a memory": self_attention("transformer_xl", np.arange(4), 2, XL),
    "memformer masked_attention": (
        lambda **inputs: memformer.masked_attention_forward(*inputs.values(), memformer.readable_mask(READABLE), *dropping()),
        memformer.masked_attention_backward,
        dict.fromkeys(("query", "key", "value"), (2, 2, 4, 3)),
    ),
    "memformer slot_scores": (
        slot_scores,
        slot_scores_backward,
        {"query": (2, 3, 2, 5), "self_key": (2, 3, 2, 5), "key": (2, 3, 4, 5), "retention": (3,)},
    ),
    "memformer slot_mean": (
        memformer.slot_mean_forward,
        memformer.slot_mean_backward,
        {"scores": (2, 3, 2, 5), "slots": (2, 3, 2, 6), "value": (2, 3, 4, 6)},
    ),
}


# Memorizing, recurrence in GPT-2 and in RoBERTa

KEYS, VALUES = memorizing.unit_norm_forward(draw(2, 3, 6, 5))[0], draw(2, 3, 6, 5)
COUNTED = np.array([[1, 1, 0, 1], [0, 0, 0, 0]], bool)


def pooling(kind, pool, length):
    """The operation of a pooling over all positions, or over those that the next window does not read."""
    config = dataclasses.replace(PAPERS["pretrained_recurrence"].small, pooling=kind, pool=pool)
    inputs = {"outputs": (3, 2, length, 10), "layer_scores": (3,)} | ({"fixed_key": (10,)} if kind == "attention" else {})
    forward = lambda outputs, **p: pretrained_recurrence.pool_forward(p, config, outputs)  # noqa: E731
    return forward, lambda *given: pretrained_recurrence.pool_backward(config, *given), inputs


def module(layers):
    """The operation of the network that makes inserted vectors of the pooled one."""
    config = dataclasses.replace(PAPERS["pretrained_recurrence"].small, width=4, vectors=2, module_layers=layers)
    p = shaken(pretrained_recurrence.init_module(config, np.random.default_rng(0)), np.random.default_rng(1))
    del p["layer_scores"]
    forward = lambda pooled, **p: pretrained_recurrence.module_forward(p, config, pooled)  # noqa: E731
    return forward, pretrained_recurrence.module_backward, {"pooled": (2, 4)} | p


OPERATIONS |= {
    "memorizing retrieval": (
        lambda query, scale: memorizing.retrieval_forward(query, KEYS, VALUES, scale, 4),
        memorizing.retrieval_backward,
        {"query": (2, 3, 2, 5), "scale": (3,)},
    ),
    "memorizing memory_gate": (
        memorizing.memory_gate_forward,
        memorizing.memory_gate_backward,
        {"local": (2, 3, 4, 5), "found": (2, 3, 4, 5), "bias": (3,)},
    ),
    "gelu": (pretrained_recurrence.gelu_forward, pretrained_recurrence.gelu_backward, {"x": (3, 4)}),
    "mix": (
        pretrained_recurrence.mix_forward,
        pretrained_recurrence.mix_backward,
        {"layer_scores": (3,), "outputs": (3, 2, 4, 5)},
    ),
    "module": module(2),
    "linear module": module(0),
    "exact_gelu": (roberta.exact_gelu_forward, roberta.exact_gelu_backward, {"x": (3, 5)}),
    "mean_of_rows": (lambda x: roberta.mean_of_rows_forward(x, COUNTED), roberta.mean_of_rows_backward, {"x": (2, 4, 3)}),
    "larger": (roberta.larger_forward, roberta.larger_backward, {"a": (3, 5), "b": (3, 5)}),
}
for kind, (pool, length) in itertools.product(pretrained_recurrence.POOLINGS, {"all": 6, "advance": 3}.items()):
    OPERATIONS[f"pool {kind} of {pool}"] = pooling(kind, pool, length)


@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_gradient(name):
    forward, backward, inputs = OPERATIONS[name]
    values = {each: draw(*value) if isinstance(value, tuple) else value for each, value in inputs.items()}
    check_operation(forward, backward, values, name)


def test_dropout_rate_and_scale():
    x = np.ones(200_000)
    dropped, _ = ref.dropout_forward(x, 0.25, np.random.default_rng(0))
    assert set(np.unique(dropped)) == {0.0, 1 / 0.75}
    assert abs((dropped == 0).mean() - 0.25) < 0.005
    assert ref.dropout_forward(x, 0.25, None)[0] is x


def test_softmax_and_norms_of_what_is_large_small_and_equal():
    assert (ref.softmax_forward(np.array([1e4, 1e4, -np.inf, -1e4]))[0] == [0.5, 0.5, 0, 0]).all()
    for size in (0.0, 1e-3, 1e6):
        x = size * np.array([[3.0, 4.0]])
        assert ref.unit_norm_forward(x)[0] == pytest.approx(x / np.sqrt(25 * size**2 + 1e-6), rel=1e-12)
        normal, _ = ref.layer_norm_forward({"own.scale": np.full(2, 2.0), "own.bias": np.ones(2)}, "own", x)
        assert normal[0, 1] == pytest.approx(1 + size / np.sqrt(0.25 * size**2 + 1e-6), rel=1e-12)


def test_functions_of_one_name_are_the_same_in_every_reference():
    """Compared without docstrings; `forward`, `backward` and what a paper defines for itself may differ."""
    own = {"forward", "backward", "initial_state", "initial_state_backward", "init_params", "init_layer"}
    own |= {"layer_forward", "layer_backward", "loss_and_gradients", "demonstrate", "check_config", "stopped"}
    bodies = collections.defaultdict(dict)
    for path in FILES:
        if "\nclass Config:" in path.read_text():
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.FunctionDef) and node.name not in own:
                    if isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant):
                        node.body = node.body[1:]
                    bodies[node.name][path.name] = ast.dump(node)
    different = {name: [*found] for name, found in bodies.items() if len(set(found.values())) > 1}
    assert not different and len(bodies["linear_forward"]) == 5
