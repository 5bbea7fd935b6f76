"""Checkpoints are complete, safe to load, and refused in one line if they do not fit."""

import os
import pickle

import numpy as np
import pytest
import torch

from accelerated.program.errors import InputError
from accelerated.training import checkpoint
from accelerated.training.checkpoint import check_tokenizer, load_checkpoint, load_parameters, save_checkpoint, save_in_run
from accelerated.training.folder import checkpoint_path, numbered_checkpoints
from tests.helpers.programs import EMPTY_CHECKPOINT

CONTENTS = EMPTY_CHECKPOINT | {
    "step": 3,
    "parameters": {"w": torch.arange(6.0).view(2, 3)},
    "lanes": {"reading": [(1, 2)]},
}


def test_round_trip(tmp_path):
    save_checkpoint(tmp_path / "c.pt", CONTENTS)
    loaded = load_checkpoint(tmp_path / "c.pt")
    assert loaded["step"] == 3 and torch.equal(loaded["parameters"]["w"], CONTENTS["parameters"]["w"])
    assert [p.name for p in tmp_path.iterdir()] == ["c.pt"], "nothing is left behind"


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_whole(tmp_path, monkeypatch):
    """Its checksum, its end and its contents are of one file."""
    save_checkpoint(tmp_path / "c.pt", CONTENTS)
    checked = checkpoint.checksum_of

    def and_replace(file, **how):
        found = checked(file, **how)
        save_checkpoint(tmp_path / "c.pt", CONTENTS | {"step": 4})
        return found

    monkeypatch.setattr(checkpoint, "checksum_of", and_replace)
    assert load_checkpoint(tmp_path / "c.pt")["step"] == 3
    monkeypatch.undo()
    assert load_checkpoint(tmp_path / "c.pt")["step"] == 4


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


@pytest.mark.parametrize(
    "case", ["missing", "truncated", "empty", "html", "pickle", "foreign", "version", "fields", "bare", "tensor"]
)
def test_other_files_than_checkpoints_are_refused(tmp_path, monkeypatch, case):
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
        save_checkpoint(path, CONTENTS | {"version": 99})
    elif case == "fields":
        save_checkpoint(path, {"step": 3})
    elif case == "bare":
        torch.save({"format": "palimpsest", "version": checkpoint.VERSION} | CONTENTS, path)
    words = {
        "missing": "no checkpoint at",
        "truncated": "truncated",
        "empty": "truncated",
        "html": "not a checkpoint",
        "pickle": "not a checkpoint",
        "foreign": "not a palimpsest",
        "tensor": "not a palimpsest",
        "version": "version 99",
        "fields": "lacks model, ",
        "bare": "its end is not a checksum",
    }[case]
    with pytest.raises(InputError, match=words) as caught:
        load_checkpoint(path)
    assert "\n" not in str(caught.value) and not (tmp_path / "executed").exists()


@pytest.mark.parametrize("part", range(20))
def test_a_flipped_bit_anywhere_is_refused(tmp_path, part):
    """Of a checkpoint and of the checksum at its end: a random bit of each twentieth, and of the last bytes."""
    path, rng = tmp_path / "c.pt", np.random.default_rng(part)
    save_checkpoint(path, CONTENTS)
    content = bytearray(path.read_bytes())
    for first, size in ((len(content) * part // 20, len(content) // 20), (len(content) - 90, 90)):
        damaged = content.copy()
        damaged[first + rng.integers(size)] ^= 1 << rng.integers(8)
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=r"is damaged: its (checksum is wrong|end is not a checksum); remove it and copy"):
            load_checkpoint(path)


@pytest.mark.parametrize(
    "field,value",
    [
        ("model", 3),
        ("model_config", []),
        ("parameters", {"w": 1.0}),
        ("state", (torch.zeros(1), None)),
        ("step", 3.0),
        ("step", True),
        ("random", 1),
        ("corpus", None),
        ("tokenizer", 1),
        ("best", "x"),
        ("validation_due", 1),
        ("lanes", 1),
    ],
)
def test_fields_of_a_wrong_type_are_refused(tmp_path, field, value):
    save_checkpoint(tmp_path / "c.pt", CONTENTS | {field: value})
    with pytest.raises(InputError, match="of a wrong type; it is damaged"):
        load_checkpoint(tmp_path / "c.pt")


def test_a_tokenizer_of_another_run_is_refused():
    class Named:
        name, fingerprint = "learned", "abc"

    check_tokenizer(Named, {"tokenizer": "abc"}, "run")
    check_tokenizer(Named, {"tokenizer": ""}, "run")  # an earlier release did not note it
    with pytest.raises(InputError, match="the tokenizer learned is not the one that run was trained with"):
        check_tokenizer(Named, {"tokenizer": "abd"}, "run")


def test_resuming_an_earlier_checkpoint_drops_the_later_ones(tmp_path):
    for step in (3, 5, 9, 4):
        save_in_run(tmp_path, CONTENTS | {"step": step}, 2)
    assert list(numbered_checkpoints(tmp_path)) == [4]
    save_in_run(tmp_path, CONTENTS | {"step": 6}, 2)
    assert list(numbered_checkpoints(tmp_path)) == [4, 6]


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("links", [True, False])
def test_kept_checkpoints_are_links_or_copies(tmp_path, monkeypatch, keep, links):
    def refuse(*_):
        raise OSError(1, "Operation not permitted")

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    for step in (3, 5, 9):
        save_in_run(tmp_path, CONTENTS | {"step": step}, keep, best=step == 5)
    names = ["best.pt", "checkpoint.pt", *(["step-5.pt", "step-9.pt"] if keep == 2 else [])]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert load_checkpoint(tmp_path / "best.pt")["step"] == 5 and load_checkpoint(checkpoint_path(tmp_path))["step"] == 9


def test_a_link_left_by_a_crash_does_not_damage_its_checkpoint(tmp_path, monkeypatch):
    """The link is where the next copy is written, and leads to a checkpoint that is kept."""
    save_in_run(tmp_path, CONTENTS | {"step": 3}, 2)
    os.link(tmp_path / "step-3.pt", tmp_path / "best.pt.writing")
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(1, "Operation not permitted")))
    save_in_run(tmp_path, CONTENTS | {"step": 5}, 2, best=True)
    assert [load_checkpoint(tmp_path / f"{name}.pt")["step"] for name in ("step-3", "step-5", "best")] == [3, 5, 5]


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
