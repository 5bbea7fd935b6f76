"""Checkpoints are whole, safe to load, and refused in one line when they do not fit."""

import os
import pickle

import pytest
import torch

from accelerated.errors import InputError
from accelerated.training import checkpoint as checkpoint
from accelerated.training.checkpoint import FIELDS, load_checkpoint, load_parameters, save_checkpoint

CONTENTS = {field: {} for field in FIELDS} | {
    "step": 3,
    "parameters": {"w": torch.arange(6.0).view(2, 3)},
    "lanes": {"reading": [(1, 2)]},
}


def test_round_trip(tmp_path):
    save_checkpoint(tmp_path / "c.pt", CONTENTS)
    loaded = load_checkpoint(tmp_path / "c.pt")
    assert loaded["step"] == 3 and torch.equal(loaded["parameters"]["w"], CONTENTS["parameters"]["w"])
    assert [p.name for p in tmp_path.iterdir()] == ["c.pt"], "nothing is left behind"


@pytest.mark.parametrize("moment", ["torch.save", "os.replace"])
def test_a_crash_while_writing_leaves_the_old_file_whole(tmp_path, monkeypatch, moment):
    save_checkpoint(tmp_path / "c.pt", CONTENTS)

    def write_half(contents, file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    def refuse(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(*((torch, "save", write_half) if moment == "torch.save" else (os, "replace", refuse)))
    with pytest.raises(InputError, match="cannot write"):
        save_checkpoint(tmp_path / "c.pt", CONTENTS | {"step": 4})
    assert load_checkpoint(tmp_path / "c.pt")["step"] == 3
    assert [p.name for p in tmp_path.iterdir()] == ["c.pt"]


class Malicious:
    def __reduce__(self):
        return (os.mkdir, ("executed",))


@pytest.mark.parametrize("case", ["missing", "truncated", "empty", "html", "pickle", "foreign", "version", "damaged", "tensor"])
def test_what_is_no_checkpoint_is_refused(tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "c.pt"
    save_checkpoint(path, CONTENTS)
    if case == "missing":
        path.unlink()
    elif case == "truncated":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif case in ("empty", "html"):
        path.write_bytes(b"<html>" * (case == "html"))
    elif case == "pickle":
        path.write_bytes(pickle.dumps(Malicious()))
    elif case == "foreign":
        torch.save({"model_state_dict": {}}, path)
    elif case == "tensor":
        torch.save(torch.zeros(2), path)
    elif case == "version":
        torch.save({"format": "palimpsest", "version": 99} | CONTENTS, path)
    elif case == "damaged":
        torch.save({"format": "palimpsest", "version": checkpoint.VERSION, "step": 3}, path)
    words = {
        "missing": "no checkpoint at", "truncated": "truncated", "empty": "truncated", "html": "not a checkpoint",
        "pickle": "not a checkpoint", "foreign": "not a palimpsest", "tensor": "not a palimpsest", "version": "version 99",
        "damaged": "lacks model, ",
    }[case]  # fmt: skip
    with pytest.raises(InputError, match=words) as caught:
        load_checkpoint(path)
    assert "\n" not in str(caught.value) and not (tmp_path / "executed").exists()


def test_parameters_of_another_shape_are_refused():
    model = torch.nn.Linear(3, 2)
    for parameters, words in (
        ({"weight": torch.zeros(2, 4), "bias": torch.zeros(2)}, r"weight should be \(2, 3\), is \(2, 4\)"),
        ({"weight": torch.zeros(2, 3)}, r"bias should be \(2,\), is absent"),
        ({"weight": torch.zeros(2, 3), "bias": torch.zeros(2), "extra": torch.zeros(1)}, r"extra should be absent"),
    ):
        before = model.weight.clone()
        with pytest.raises(InputError, match=words):
            load_parameters(model, parameters, "run")
        assert torch.equal(model.weight, before)
