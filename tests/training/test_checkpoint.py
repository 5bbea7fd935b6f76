"""Checkpoints are complete, safe to load, and refused in one line if they do not fit."""

import io
import json
import zipfile

import torch

from accelerated.program.errors import InputError
from accelerated.program.files import file_checksum
from accelerated.training.checkpoint import (
    load_checkpoint,
    load_parameters,
    load_weights,
    save_checkpoint,
)
from accelerated.training.folder import EXPORT, SETTINGS, WEIGHTS
from accelerated.training.settings import preset_settings, settings_contents
from tests.helpers.programs import EMPTY_CHECKPOINT, equal, refusal
from tests.helpers.texts import flipped_bits

CONTENTS = EMPTY_CHECKPOINT | {
    "step": 3,
    "parameters": {"w": torch.arange(6.0).view(2, 3)},
    "lanes": {"reading": [(1, 2)]},
}


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_whole(tmp_path, monkeypatch):
    """Its checksums and its contents are of one file."""
    save_checkpoint(tmp_path / "c.pt", CONTENTS)
    verify = zipfile.ZipFile.testzip

    def and_replace(archive):
        found = verify(archive)
        save_checkpoint(tmp_path / "c.pt", CONTENTS | {"step": 4})
        return found

    monkeypatch.setattr(zipfile.ZipFile, "testzip", and_replace)
    loaded = load_checkpoint(tmp_path / "c.pt")
    assert loaded["step"] == 3, "the checksums are of another file than the contents: unpickled"
    assert torch.equal(loaded["parameters"]["w"], CONTENTS["parameters"]["w"]), "of another file"


def bare(contents):
    """What torch.save writes of contents."""
    file = io.BytesIO()
    torch.save(contents, file)
    return file.getvalue()


WHOLE = bare({"format": "palimpsest"} | CONTENTS)
OTHER_FILES = {  # {words of the refusal: what the file holds}
    "is damaged or not a checkpoint": WHOLE[: len(WHOLE) // 2],
    "not a checkpoint (File is not a zip file)": b"<html>",
    "not a palimpsest": bare({"model_state_dict": {}}),
}


def test_other_files_than_checkpoints_are_refused(tmp_path):
    """That nothing in them is executed: paths/test_foreign_code.py."""
    path = tmp_path / "c.pt"
    assert "no checkpoint at" in refusal(load_checkpoint, path)
    for words, content in OTHER_FILES.items():
        path.write_bytes(content)
        assert words in refusal(load_checkpoint, path)
    save_checkpoint(path, {"step": 3})
    assert "model is absent; another program" in refusal(load_checkpoint, path)


def test_a_flipped_bit_is_refused_or_changes_nothing(tmp_path):
    """Dates of its parts, and zeros between them, have no checksum."""
    path = tmp_path / "c.pt"
    save_checkpoint(path, CONTENTS | {"gradient_norm": 1.0})  # NaN equals no NaN
    whole = load_checkpoint(path)
    refused = 0
    for content in flipped_bits(path.read_bytes(), 60):
        path.write_bytes(content)
        try:
            assert equal(load_checkpoint(path), whole)
        except InputError as error:
            assert "is damaged or not a checkpoint (" in str(error)
            refused += 1
    assert refused > 20, "damage is seldom refused: look at unpickled, which tests checksums"


def test_exported_weights_that_are_damaged_are_refused(tmp_path):
    from safetensors.torch import save_file

    weights = tmp_path / WEIGHTS
    save_file({"w": torch.zeros(2)}, weights)
    about = {"format": EXPORT, "step": 1, "tokenizer": "", "sha256": file_checksum(weights)}
    about |= settings_contents(preset_settings("memformer", "tiny"))

    (tmp_path / SETTINGS).write_text(json.dumps(about))
    assert load_weights(tmp_path)["step"] == 1
    weights.write_bytes(b"")
    words = "model.safetensors is damaged or missing: config.json has another checksum"
    assert words in refusal(load_weights, tmp_path), "not held to its checksum: load_exported"


def test_parameters_of_another_shape_or_with_nan_are_refused():
    model = torch.nn.Linear(3, 2)
    weight = torch.zeros(2, 3)
    bias = torch.zeros(2)
    before = model.weight.clone()
    for parameters, words in (
        ({"weight": torch.zeros(2, 4), "bias": bias}, "weight should be (2, 3), is (2, 4)"),
        ({"weight": weight}, "bias should be (2,), is absent"),
        ({"weight": weight, "bias": bias, "extra": bias}, "extra should be absent"),
        ({"weight": weight, "bias": bias / 0}, "run: bias has NaN or infinite values; give"),
        ({"weight": weight, "bias": 1 / bias}, "run: bias has NaN or infinite values; give"),
    ):
        assert words in refusal(load_parameters, model, parameters, "run")
    assert torch.equal(model.weight, before), "a refusal has changed the model: load_parameters"
