"""`python -m reference.<paper> --check`: it passes on every case, and names the function where a gradient goes wrong."""

import importlib

import numpy as np
import pytest

from reference import gradients
from reference.check import CheckError
from tests.tools.cases import CASES, EVERY_CASE
from tests.tools.vectors import inputs_of

cases = pytest.mark.parametrize("paper,case", EVERY_CASE, ids=[" ".join(pair) for pair in EVERY_CASE])


@cases
def test_every_gradient_is_the_objectives_derivative(paper, case, capsys):
    assert gradients.main(paper, ["--check", "--case", case]) == 0, capsys.readouterr().out


def doubled(place):
    """A change of a backward function: one of the results is twice what it was."""

    def change(function):
        def wrong(*arguments):
            result = list(function(*arguments))
            part = result[place[0]]
            changed = [name for name in part if name.endswith(place[1])] if len(place) > 1 else []
            result[place[0]] = part | {name: 2 * part[name] for name in changed} if len(place) > 1 else 2 * part
            return tuple(result)

        wrong.__code__ = wrong.__code__.replace(co_name=function.__name__, co_filename=function.__code__.co_filename)
        return wrong

    return change


@pytest.mark.parametrize(
    "paper,case,function,change,first,named",
    [
        ("compressive", "conv-bptt", "conv_backward", (1, "weight"), "layers.1.compression.weight", "conv_backward"),
        ("compressive", "transformer-xl", "relative_attention_backward", (4, "content_bias"), "layers.1.content_bias", None),
        ("compressive", "simplified", "relative_attention_backward", (3,), "layers.0.positions", "distance_keys_backward"),
        ("compressive", "conv-auto_encoding", "auto_encoding_backward", (1, "decoder"), "layers.1.compression.decoder", None),
        ("compressive", "no-memory", "mlp_backward", (1, "mlp_hidden_bias"), "layers.1.mlp_hidden_bias", "mlp_backward"),
        ("block_recurrent", "lstm-dual", "lstm_gate_backward", (2, "weight_f"), "attention_gate.weight_f", None),
        ("block_recurrent", "slide", "layer_norm_backward", (1, ".scale"), "final_norm.scale", "layer_norm_backward"),
        ("memformer", "recall", "slot_attention_backward", (2, "retention"), "writer.retention", "slot_attention_backward"),
        ("memformer", "decoder-only", "simplified_attention_backward", (3, "positions"), "layers.1.attention.positions", None),
        ("pretrained_recurrence", "attention", "attention_over_positions_backward", (1, "fixed_key"), "module.fixed_key", None),
        ("pretrained_recurrence", "plain", "gelu_mlp_backward", (1, "mlp_output"), "layers.1.mlp_output", "affine_backward"),
    ],
)
def test_a_wrong_backward_is_named_with_its_file(paper, case, function, change, first, named, capsys, monkeypatch):
    module = importlib.import_module(f"reference.{paper}")
    right = getattr(module, function)
    wrong = doubled(change)(right)
    for name in [name for name in vars(module) if getattr(module, name) is right]:
        monkeypatch.setattr(module, name, wrong)
    for table in ("COMPRESSIONS", "AUXILIARY", "GATES", "POOLINGS"):
        for key, pair in getattr(module, table, {}).items():
            if pair[1] is right:
                monkeypatch.setitem(getattr(module, table), key, (pair[0], wrong))
    assert gradients.main(paper, ["--check", "--case", case]) == 1
    *_, verdict, advice = capsys.readouterr().out.splitlines()
    assert first in verdict and f"look at {named or function} (reference/{paper}.py:" in advice


def test_a_wrong_gradient_of_the_state_is_found(capsys, monkeypatch):
    module = importlib.import_module("reference.memformer")
    right = module.slot_mean_backward

    def wrong(dnew, cache):
        dscores, dslots, dvalue = right(dnew, cache)
        return dscores, 1.01 * dslots, dvalue

    monkeypatch.setattr(module, "slot_mean_backward", wrong)
    assert gradients.main("memformer", ["--check"]) == 1
    assert "grad_state/memory" in capsys.readouterr().out


@pytest.mark.parametrize("paper", ["compressive", "memorizing"])
def test_what_is_stopped_is_held(paper, monkeypatch, capsys):
    """A reference says what that is; without it the differences pass what the paper stops, and nothing agrees."""
    monkeypatch.setattr(importlib.import_module(f"reference.{paper}"), "stopped", lambda config: {}, raising=False)
    assert gradients.main(paper, ["--check"]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_the_default_case_is_one_whose_layers_are_in_its_file():
    found = {paper: gradients.default_case(paper) for paper in CASES}
    assert found["compressive"] == "conv-attention_reconstruction" and found["block_recurrent"] == "fixed-skip"
    assert found["memformer"] == "all-tasks" and found["pretrained_recurrence"] == "mean"


def test_the_reference_is_left_as_it_was():
    case = gradients.read_case("compressive", "conv-none")
    before = dict(vars(case.reference)), dict(case.reference.AUXILIARY)
    gradients.errors_of(case, gradients.gradients_of(case)[0], np.random.default_rng(0))
    assert (dict(vars(case.reference)), dict(case.reference.AUXILIARY)) == before


@pytest.mark.parametrize("paper", CASES)
def test_a_case_is_read_as_it_was_written(paper):
    for name in CASES[paper]:
        case, (params, state, segments) = gradients.read_case(paper, name), inputs_of(paper, name)
        assert case.config == CASES[paper][name].config
        assert case.params.keys() == params.keys()
        pairs = [(case.params[each], params[each]) for each in params] + [*zip(case.state, state, strict=True)]
        for mine, theirs in zip(case.segments, segments, strict=True):
            pairs += [*zip(mine[:4], theirs[:4], strict=True), *zip(mine.task or (), theirs.task or (), strict=True)]
        assert all(np.array_equal(a, b) for a, b in pairs)


def test_unknown_cases_are_one_line_and_exit_code_2(capsys, monkeypatch, tmp_path):
    assert gradients.main("memformer", ["--check", "--case", "recal"]) == 2
    assert "(nearest: recall)" in capsys.readouterr().err
    monkeypatch.setattr(gradients, "VECTORS", tmp_path)
    assert gradients.main("memformer", ["--check"]) == 2
    assert "run this in a clone" in capsys.readouterr().err
    with pytest.raises(CheckError):
        gradients.read_case("memformer", "recall")


@pytest.mark.parametrize(
    "paper,case,name,functions",
    [
        (
            "block_recurrent",
            "slide",
            "layers.0.norm.bias",
            ["backward", "stack_backward", "layer_backward", "token_projection_backward", "layer_norm_backward"],
        ),
        ("compressive", "conv-none", "embedding", ["backward", "adaptive_embedding_backward"]),
        (
            "memformer",
            "recall",
            "encoder.layers.0.read.memory_norm.scale",
            ["backward", "encoder_backward", "encoder_layer_backward", "layer_norm_backward"],
        ),
    ],
)
def test_a_gradient_is_followed_to_the_function_that_makes_it(paper, case, name, functions):
    """By the longest name: `norm.bias` belongs to many layers, and to the last norm."""
    _, calls = gradients.gradients_of(gradients.read_case(paper, case))
    assert [call.function for call in gradients.path_to(calls, name)] == functions
