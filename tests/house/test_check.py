"""The porters' tools: `python -m reference.<paper> --check`, `python -m reference.check`, and what the vectors notice."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import save_file

from reference import check, compressive, gradients
from tests.helpers.rollouts import accelerated_rollout
from tests.helpers.variants import PAPERS
from tests.tools.cases import CASES, EVERY_CASE
from tests.tools.vectors import FOLDER, computed
from tests.tools.wrong import read_wrong

ROOT = Path(__file__).parents[2]
WRONG = read_wrong("wrong_conventions.txt")


# Gradients by finite differences


@pytest.mark.parametrize("paper", CASES)
def test_a_right_reference_passes(paper, capsys):
    status, table = gradients.main(paper, ["--check"]), capsys.readouterr().out
    assert status == 0 and "grad/embedding" in table and "grad_state/" in table, table


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
        ("compressive", "simplified", "relative_attention_backward", (3,), "layers.0.positions", "distance_keys_backward"),
        ("block_recurrent", "lstm-dual", "lstm_gate_backward", (2, "weight_f"), "attention_gate.weight_f", None),
        ("block_recurrent", "slide", "layer_norm_backward", (1, ".scale"), "final_norm.scale", "layer_norm_backward"),
        ("memformer", "recall", "slot_attention_backward", (2, "retention"), "writer.retention", "slot_attention_backward"),
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


def test_what_is_stopped_is_held(monkeypatch, capsys):
    """A reference says what that is; without it the differences pass what the paper stops, and nothing agrees."""
    monkeypatch.setattr(compressive, "stopped", lambda config: {})
    assert gradients.main("compressive", ["--check"]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_the_default_case_is_one_whose_layers_are_in_its_file():
    found = {paper: gradients.default_case(paper) for paper in ("compressive", "memformer")}
    assert found == {"compressive": "conv-attention_reconstruction", "memformer": "all-tasks"}


def test_the_reference_is_left_as_it_was():
    case = gradients.read_case("compressive", "conv-none")
    before = dict(vars(case.reference)), dict(case.reference.AUXILIARY)
    gradients.errors_of(case, gradients.gradients_of(case)[0], np.random.default_rng(0))
    assert (dict(vars(case.reference)), dict(case.reference.AUXILIARY)) == before


def test_unknown_cases_are_one_line_and_exit_code_2(capsys, monkeypatch, tmp_path):
    assert gradients.main("memformer", ["--check", "--case", "recal"]) == 2
    assert "(nearest: recall)" in capsys.readouterr().err
    monkeypatch.setattr(gradients, "VECTORS", tmp_path)
    assert gradients.main("memformer", ["--check"]) == 2
    assert "run this in a clone" in capsys.readouterr().err
    with pytest.raises(check.CheckError):
        gradients.read_case("memformer", "recall")


@pytest.mark.parametrize(
    "paper,case,name,functions",
    [
        ("block_recurrent", "slide", "layers.0.norm.bias", "stack layer token_projection layer_norm"),
        ("compressive", "conv-none", "embedding", "adaptive_embedding"),
        ("memformer", "recall", "encoder.layers.0.read.memory_norm.scale", "encoder encoder_layer layer_norm"),
    ],
)
def test_a_gradient_is_followed_to_the_function_that_makes_it(paper, case, name, functions):
    """By the longest name: `norm.bias` belongs to many layers, and to the last norm."""
    _, calls = gradients.gradients_of(gradients.read_case(paper, case))
    assert [call.function for call in gradients.path_to(calls, name)] == [
        "backward",
        *(f"{function}_backward" for function in functions.split()),
    ]


# A port's results


def test_a_right_port_passes_and_needs_nothing_inside_a_layer(tmp_path, capsys):
    rows, _ = check.load(FOLDER / "memformer" / "all-tasks.safetensors")
    save_file({name: row for name, row in rows.items() if not name.startswith(("given/", "inner/"))}, tmp_path / "mine")
    assert check.main([str(FOLDER / "memformer" / "all-tasks.safetensors"), str(tmp_path / "mine")]) == 0
    verdict, *table = capsys.readouterr().out.splitlines()
    assert verdict == "memformer all-tasks: 233 of 233 tensors agree, 0 missing"
    asked = [name for name in rows if not name.startswith(("given/", "inner/"))]
    assert sorted(line.split()[0] for line in table) == sorted(asked) and not any("FAIL" in line for line in table)


CHANGES = [
    ("0/logits", lambda row: row + 1e-7 * np.abs(row).max(), "begin with 0/logits, the first that is wrong: 1.0e-07 at"),
    ("0/logits", lambda row: np.where(row == row.max(), np.nan, row), "begin with 0/logits, the first that is wrong: 1 of"),
    ("1/next.memory", lambda row: row.swapaxes(0, 1), "begin with 1/next.memory, the first that is wrong: shape (1, 3, 5, 4)"),
    ("1/next.previous", lambda row: row + 1, "begin with 1/next.previous, the first that is wrong: "),
    ("grad/decoder.norm.bias", None, "begin with grad/decoder.norm.bias, the first that is missing: missing, shape (4,)"),
    ("grad/encoder.layers.0.read.key_bias", lambda row: row + 1e-6, "expected exactly zero"),
    ("2/loss", lambda row: row.astype(np.float32) * 1.01, "begin with 2/loss"),
    ("objective", lambda row: row * 1.001, "begin with objective"),
    ("inner/slot_scores", lambda row: row[..., ::-1].copy(), "begin with inner/slot_scores"),
]


@pytest.mark.parametrize("name,change,says", CHANGES, ids=[f"{name} {i}" for i, (name, _, _) in enumerate(CHANGES)])
def test_one_wrong_tensor_is_named(name, change, says, tmp_path, capsys):
    path = FOLDER / "memformer" / "all-tasks.safetensors"
    rows, _ = check.load(path)
    right = rows.pop(name)
    save_file(rows | ({name: np.asarray(change(right))} if change else {}), tmp_path / "mine")
    assert check.main([str(path), str(tmp_path / "mine")]) == 1
    out = capsys.readouterr().out
    assert says in out and out.count("FAIL") == 1 and f"{len([*check.load(path)[0]]) - 95 - 1} of" in out


def test_what_is_wrong_comes_before_what_is_missing_and_in_the_order_of_computation(tmp_path, capsys):
    path = FOLDER / "compressive" / "conv-bptt.safetensors"
    rows, _ = check.load(path)
    del rows["0/logits"]
    wrong = ("grad/embedding", "grad/layers.0.query", "grad/layers.1.query", "1/loss", "sgd/embedding")
    rows |= {name: np.asarray(rows[name] + 1) for name in wrong}
    save_file(rows, tmp_path / "mine")
    check.main([str(path), str(tmp_path / "mine")])
    lines = capsys.readouterr().out.splitlines()
    assert "1 missing" in lines[0] and "begin with 1/loss" in lines[1]
    order = [line.split()[0] for line in lines if line.endswith("FAIL")]
    assert order == ["0/logits", "1/loss", "grad/layers.1.query", "grad/layers.0.query", "grad/embedding", "sgd/embedding"]


def test_unknown_names_are_said_and_folders_are_compared(tmp_path, capsys):
    for name in ("plain", "mean"):
        rows, _ = check.load(FOLDER / "pretrained_recurrence" / f"{name}.safetensors")
        save_file(
            rows | {"logit": np.zeros(2)} | ({"0/loss": np.array(0.0)} if name == "plain" else {}),
            tmp_path / f"{name}.safetensors",
        )
    assert check.main([str(FOLDER / "pretrained_recurrence"), str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "not in the vectors: logit" in out and "1 of 2 cases agree; 8 are not in" in out
    assert out.count("FAIL") == 1 and out.count("  0/") == 1, "of a folder, failures only"


def test_of_a_folder_the_case_with_the_earliest_wrong_value_is_named(tmp_path, capsys):
    """Not the first by its name, of which only the logits are wrong."""
    for name, wrong in {"attention": "0/logits", "max": "inner/mixed", "mean": "inner/weights"}.items():
        rows, _ = check.load(FOLDER / "pretrained_recurrence" / f"{name}.safetensors")
        save_file(rows | {wrong: rows[wrong] + 1}, tmp_path / f"{name}.safetensors")
    assert check.main([str(FOLDER / "pretrained_recurrence"), str(tmp_path)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "begin with mean.safetensors, inner/weights"


def test_wrong_steps_of_adamw_alone_are_told_apart(tmp_path, capsys):
    path = FOLDER / "pretrained_recurrence" / "mean.safetensors"
    rows, _ = check.load(path)
    wrong = {name: row + 1e-6 for name, row in rows.items() if name.startswith("adamw/")}
    for also, said in (({}, True), ({"grad/embedding": rows["grad/embedding"] * 1.01}, False)):
        save_file(rows | wrong | also, tmp_path / "mine")
        assert check.main([str(path), str(tmp_path / "mine")]) == 1
        assert ("only adamw/ is wrong: gradients are right" in capsys.readouterr().out) == said


@pytest.mark.parametrize("kind", ["missing", "text", "folder", "swapped", "of all papers"])
def test_what_cannot_be_compared_is_one_line_and_exit_code_2(kind, tmp_path, capsys):
    path, mine = FOLDER / "compressive" / "conv-bptt.safetensors", tmp_path / "mine"
    if kind == "text":
        mine.write_text("no tensors")
    if kind == "swapped":
        save_file({"0/logits": np.zeros(3)}, mine)
    if kind == "folder":
        mine.mkdir()
    files = {"folder": (path.parent, mine), "swapped": (mine, path), "of all papers": (FOLDER, tmp_path)}.get(kind, (path, mine))
    assert check.main([*map(str, files)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("reference.check: ")
    assert ("give a paper's folder" in error) == (kind == "of all papers")


def test_gradients_are_checked_with_numpy_alone():
    """Its own reader of safetensors gives what the package gives."""
    others = "import sys; sys.modules |= dict.fromkeys(('torch', 'safetensors', 'tqdm', 'tiktoken', 'filelock'))"
    program = f"{others}; from reference.gradients import main; sys.exit(main('pretrained_recurrence', ['--check']))"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True).returncode == 0
    for path in FOLDER.rglob("*.safetensors"):
        arrays, metadata = check.load(path)
        with safe_open(path, "numpy") as file:
            assert metadata == file.metadata() and arrays.keys() == {*file.keys()}
            for name, array in arrays.items():
                assert array.dtype == file.get_tensor(name).dtype and np.array_equal(array, file.get_tensor(name))


@pytest.mark.parametrize("module", ["reference.check {folder} {folder}", "reference.compressive --check"])
def test_output_that_nobody_reads_is_no_error(module):
    command = module.format(folder=FOLDER / "compressive").split()
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_copy_of_the_checker_works_alone(tmp_path):
    shutil.copy(ROOT / "reference" / "check.py", tmp_path)
    command = [sys.executable, "check.py", str(FOLDER / "memformer"), str(FOLDER / "memformer")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "8 of 8 cases agree; 0 are not in" in done.stdout


@pytest.mark.parametrize("paper,name", EVERY_CASE, ids=[" ".join(pair) for pair in EVERY_CASE])
def test_pytorch_passes_in_float64_and_in_float32(paper, name):
    expected, metadata = check.load(FOLDER / paper / f"{name}.safetensors")
    case = gradients.read_case(paper, name)
    for dtype in (torch.float64, torch.float32):
        model = PAPERS[paper].model_with(case.params, case.config).to(dtype)
        state = PAPERS[paper].to_torch(case.state)
        state = type(state)(*(field.to(dtype) if field.is_floating_point() else field for field in state))
        found = {key: row.detach().numpy() for key, row in accelerated_rollout(paper, model, case.segments, state).items()}
        rows = check.compare(expected, found, json.loads(metadata["inner"]))
        rows = [row for row in rows if not row.words.startswith("missing")]  # what stands inside a layer, and the steps
        assert len(rows) >= len([key for key in found if found[key].size]) - 1
        assert not [row for row in rows if not row.passes], dtype


# Wrong conventions


def planted(wrong):
    """The reference of a paper with a mistake."""
    source = Path(PAPERS[wrong.paper].reference.__file__).read_text()
    module = ModuleType(f"wrong_{wrong.paper}")
    module.__file__ = f"{module.__name__}.py"
    sys.modules[module.__name__] = module  # dataclasses ask for it
    try:
        exec(compile(wrong.planted(source), module.__file__, "exec"), vars(module))
    finally:
        del sys.modules[module.__name__]
    return module


@pytest.mark.parametrize("wrong", WRONG, ids=[f"{wrong.paper}: {wrong.rule}" for wrong in WRONG])
def test_a_broken_rule_is_noticed_and_named(wrong):
    """By the case that is for it; the first tensor that is wrong is the one next to the mistake."""
    expected, metadata = check.load(FOLDER / wrong.paper / f"{wrong.case}.safetensors")
    rows = check.compare(expected, computed(wrong.paper, wrong.case, planted(wrong), steps=False), json.loads(metadata["inner"]))
    failing = [row.name for row in rows if not row.passes and not row.name.startswith(("sgd/", "adamw/"))]
    assert failing, "no tensor of this case notices"
    assert failing[0] == wrong.first


def test_there_are_enough_wrong_conventions_and_every_case_notices_one():
    assert len(WRONG) > 130 and {(wrong.paper, wrong.case) for wrong in WRONG} == set(EVERY_CASE)
    assert len({(wrong.paper, wrong.case, wrong.old, wrong.new) for wrong in WRONG}) == len(WRONG)
