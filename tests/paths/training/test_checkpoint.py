"""Checkpoints are complete, safe to load, and refused in one line if they do not fit."""

import io
import json
import os
import pickle

import numpy as np
import pytest
import torch

from accelerated.program.errors import InputError
from accelerated.program.files import file_checksum
from accelerated.training import checkpoint
from accelerated.training.checkpoint import (
    check_tokenizer,
    load_checkpoint,
    load_exported,
    load_parameters,
    save_checkpoint,
    save_in_run,
)
from accelerated.training.folder import EXPORT, SETTINGS, WEIGHTS, checkpoint_path, numbered_checkpoints
from accelerated.training.settings import preset_settings, settings_contents, settings_from
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


def bare(contents):
    """What torch.save writes of contents, without a checksum."""
    torch.save(contents, file := io.BytesIO())
    return file.getvalue()


@pytest.mark.parametrize(
    "change,words",
    [
        (lambda path: path.unlink(), "no checkpoint at"),
        (lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]), "truncated"),
        (lambda path: path.write_bytes(b""), "truncated"),
        (lambda path: path.write_bytes(b"<html>"), "not a checkpoint"),
        (lambda path: path.write_bytes(pickle.dumps(Malicious())), "not a checkpoint"),
        (lambda path: path.write_bytes(bare(Malicious())), "not a checkpoint"),
        (lambda path: path.write_bytes(bare({"model_state_dict": {}})), "not a palimpsest"),
        (lambda path: path.write_bytes(bare(torch.zeros(2))), "not a palimpsest"),
        (lambda path: save_checkpoint(path, CONTENTS | {"version": 99}), "version 99"),
        (lambda path: save_checkpoint(path, {"step": 3}), "lacks model, "),
        (
            lambda path: path.write_bytes(bare({"format": "palimpsest", "version": checkpoint.VERSION} | CONTENTS)),
            "its end is not a checksum",
        ),
    ],
    ids=["missing", "truncated", "empty", "html", "pickle", "code", "foreign", "tensor", "version", "fields", "bare"],
)
def test_other_files_than_checkpoints_are_refused(tmp_path, monkeypatch, change, words):
    monkeypatch.chdir(tmp_path)
    save_checkpoint(tmp_path / "c.pt", CONTENTS)
    change(tmp_path / "c.pt")
    with pytest.raises(InputError, match=words) as caught:
        load_checkpoint(tmp_path / "c.pt")
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


WRONG = {
    **dict.fromkeys(("model", "step"), (3.0, True, None)),
    **dict.fromkeys(("model_config", "training_config", "data_config", "parameters", "optimizer", "lanes"), ([], 1)),
    **{"state": ([], (torch.zeros(1), None)), "random": (1,), "corpus": (None,), "tokenizer": (1,), "best": ("x", True)},
    **{"pending": ([0.0, 0, 0],), "validation_due": (1,)},
}


@pytest.mark.parametrize("field", [*WRONG, "a parameter"])
def test_fields_of_a_wrong_type_are_refused(tmp_path, field):
    assert EMPTY_CHECKPOINT.keys() == WRONG.keys(), "every field has a type"
    field, values = ("parameters", ({"w": 1.0},)) if field == "a parameter" else (field, WRONG[field])
    for value in values:
        save_checkpoint(tmp_path / "c.pt", CONTENTS | {field: value})
        with pytest.raises(InputError, match="of a wrong type; it is damaged"):
            load_checkpoint(tmp_path / "c.pt")


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The config of a folder with an export's weights, as a dict."""
    save_file = pytest.importorskip("safetensors.torch", reason="an exported run needs the extra gpt2: safetensors").save_file
    folder = tmp_path_factory.mktemp("exported")
    save_file({"w": torch.zeros(2)}, folder / WEIGHTS)
    about = {"format": EXPORT, "step": 1, "tokenizer": "", "sha256": file_checksum(folder / WEIGHTS)}
    return folder, about | settings_contents(preset_settings("memformer", "tiny"))


@pytest.mark.parametrize(
    "change,words",
    [
        ({}, None),
        ({"model": 3}, "holds model of a wrong type"),
        ({"model": ["memformer"]}, "holds model of a wrong type"),
        ({"step": "1"}, "holds step of a wrong type"),
        ({"tokenizer": None}, "holds tokenizer of a wrong type"),
        ({"model_config": []}, "holds model_config of a wrong type"),
        ({"data_config": "text"}, "holds data_config of a wrong type"),
        ({"model_config": {"width": "16"}}, "cannot use: width is '16', expected int"),
        ({"model_config": {"dropout": True}}, "cannot use: dropout is True, expected float"),
        ({"training_config": {"batch": 2.0}}, "cannot use: batch is 2.0, expected int"),
        ({"training_config": {"seed": {}}}, "that this program cannot use"),
        ({"data_config": {"recall": {"pairs": [4]}}}, r"cannot use: pairs is \(4,\), expected int"),
        ({"data_config": {"recall": 4}}, "that this program cannot use"),
        ({"format": "another"}, "none"),
    ],
)
def test_wrong_types_in_an_exported_config_are_refused(exported, change, words):
    """JSON's numbers are taken as they are: a whole number for a float, nothing else."""
    folder, contents = exported
    (folder / SETTINGS).write_text(json.dumps(contents | change))
    if words in (None, "none"):
        assert (load_exported(folder) is None) is (words == "none")
        return
    with pytest.raises(InputError, match=words) as caught:
        settings_from(load_exported(folder), folder)
    assert "\n" not in str(caught.value)


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
