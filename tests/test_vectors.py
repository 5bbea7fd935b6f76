"""docs/vectors: made again they are the same, PyTorch passes the checker, and a rule that is broken is noticed by a case."""

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
from safetensors.numpy import save_file

from reference import block_recurrent, check, compressive, memformer, pretrained_recurrence
from reference.gradients import read_case
from tests.helpers.programs import ROOT
from tests.helpers.rollouts import accelerated_rollout
from tests.helpers.variants import PAPERS
from tests.helpers.wrong import read_wrong
from tests.tools import vectors
from tests.tools.cases import EVERY_CASE
from tests.tools.vectors import FOLDER, case_file, computed, inputs_of, rules

WRONG = read_wrong("wrong_conventions.txt")
cases = pytest.mark.parametrize("paper,name", EVERY_CASE, ids=[" ".join(pair) for pair in EVERY_CASE])


def rows_against(paper, name, actual):
    """The checker's rows for what a port computed of a case."""
    expected, metadata = check.load(FOLDER / paper / f"{name}.safetensors")
    return check.compare(expected, actual, json.loads(metadata["inner"]))


# Made again


@cases
def test_a_file_is_what_its_command_writes(paper, name):
    (rows, metadata), (held, held_metadata) = case_file(paper, name), check.load(FOLDER / paper / f"{name}.safetensors")
    assert metadata == held_metadata and rows.keys() == held.keys()
    for key, row in rows.items():
        assert row.shape == held[key].shape and row.dtype == held[key].dtype, key
        np.testing.assert_allclose(row, held[key], rtol=1e-9, atol=1e-12, err_msg=key)
    assert {str(row.dtype) for row in rows.values()} <= {"float64", "int64", "bool"}
    assert all(np.isfinite(row).all() for row in rows.values())


def test_the_rules_are_what_their_command_writes():
    assert json.loads((FOLDER / "rules.json").read_text()) == json.loads(json.dumps(rules()))


RULES = [
    (block_recurrent, "tile_mask", lambda mask: ~mask),
    (block_recurrent, "tile_distance", lambda distance: -distance),
    (block_recurrent, "position_bucket", lambda bucket: bucket // 2),
    (compressive, "causal_mask", lambda mask: mask[:, ::-1]),
    (memformer, "distance_index", lambda index: index.T),
    (memformer.Config, "distances", lambda distances: distances + 1),
    (memformer.Config, "special", lambda token: token + 1),
    (pretrained_recurrence, "window_mask", lambda mask: ~mask),
    (pretrained_recurrence, "pooled_rows", lambda rows: rows + 1),
    (vectors, "cut", lambda windows: windows[:-1]),
    (vectors, "learning_rate", lambda rate: rate * 0.9),
    (vectors, "recall_document", lambda document: document._replace(scored=~document.scored)),
]


@pytest.mark.parametrize("owner,name,wrong", RULES, ids=[name for _, name, _ in RULES])
def test_a_rule_that_is_broken_changes_the_rules(owner, name, wrong, monkeypatch):
    right = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *given: wrong(right(*given)))
    assert json.loads((FOLDER / "rules.json").read_text()) != json.loads(json.dumps(rules()))


def test_every_file_is_a_case_and_together_they_are_small():
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    cases = {f"{paper}/{name}.safetensors" for paper, name in EVERY_CASE}
    assert {path.relative_to(FOLDER).as_posix() for path in files} == {*cases, "rules.json"}
    assert sum(path.stat().st_size for path in files) <= 3_150_000


@cases
def test_a_case_has_two_starts_padding_and_three_segments(paper, name):
    _, state, segments = inputs_of(paper, name)
    assert [segment.starts.tolist() for segment in segments] == [[False, False, True], [False, True, False], [False] * 3]
    assert not segments[-1].scored[2, -2:].any() and all(segment.scored.any() for segment in segments)
    assert any(field.any() for field in state) or not any(field.size for field in state)


# The checker


def test_a_right_port_passes_and_needs_nothing_inside_a_layer(tmp_path, capsys):
    rows, _ = check.load(FOLDER / "memformer" / "all-tasks.safetensors")
    save_file({name: row for name, row in rows.items() if not name.startswith(("given/", "inner/"))}, tmp_path / "mine")
    assert check.main([str(FOLDER / "memformer" / "all-tasks.safetensors"), str(tmp_path / "mine")]) == 0
    assert "memformer all-tasks: 233 of 233 tensors agree, 0 missing" in capsys.readouterr().out


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
    rows = {
        each: (np.asarray(change(row)) if each == name and change else row)
        for each, row in rows.items()
        if each != name or change
    }
    save_file(rows, tmp_path / "mine")
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


@pytest.mark.parametrize("kind", ["missing", "text", "folder", "swapped"])
def test_what_cannot_be_compared_is_one_line_and_exit_code_2(kind, tmp_path, capsys):
    path, mine = FOLDER / "compressive" / "conv-bptt.safetensors", tmp_path / "mine"
    if kind == "text":
        mine.write_text("no tensors")
    if kind == "swapped":
        save_file({"0/logits": np.zeros(3)}, mine)
    if kind == "folder":
        mine.mkdir()
    files = {"folder": (path.parent, mine), "swapped": (mine, path)}.get(kind, (path, mine))
    assert check.main([*map(str, files)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("reference.check: ")


def test_a_missing_package_is_one_line_and_exit_code_2():
    program = "import sys; sys.modules['safetensors'] = None; import reference.check"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and "pip install safetensors" in done.stderr


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


# PyTorch as a port


def of_pytorch(paper, name, dtype):
    """What the accelerated model computes of a case, except inside layers and the steps."""
    case = read_case(paper, name)
    model = PAPERS[paper].model_with(case.params, case.config).to(dtype)
    state = PAPERS[paper].to_torch(case.state)
    state = type(state)(*(field.to(dtype) if field.is_floating_point() else field for field in state))
    found = accelerated_rollout(paper, model, case.segments, state)
    return {key: row.detach().numpy() for key, row in found.items()}


@cases
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_pytorch_passes(paper, name, dtype):
    found = of_pytorch(paper, name, dtype)
    rows = [row for row in rows_against(paper, name, found) if not row.words.startswith("missing")]
    assert len(rows) >= len([key for key in found if found[key].size]) - 1
    assert not [row for row in rows if not row.passes]


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
    rows = rows_against(wrong.paper, wrong.case, computed(wrong.paper, wrong.case, planted(wrong)))
    failing = [row.name for row in rows if not row.passes]
    assert failing, "no tensor of this case notices"
    assert failing[0] == wrong.first


def test_there_are_enough_wrong_conventions_and_every_case_notices_one():
    assert len(WRONG) > 130 and {(wrong.paper, wrong.case) for wrong in WRONG} == set(EVERY_CASE)
    assert len({(wrong.paper, wrong.case, wrong.old, wrong.new) for wrong in WRONG}) == len(WRONG)
