"""`eval.py export`: the NumPy reference and --init read what it writes; nothing is overwritten."""

import importlib
import json
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import accelerated
from accelerated.models import NAMES
from accelerated.training.checkpoint import save_checkpoint
from tests.helpers import programs
from tests.helpers.programs import as_json, refusal, refused, saved, train

safetensors = pytest.importorskip(
    "safetensors.numpy", reason="exporting needs the extra gpt2: safetensors"
)

OPTIONS = {  # how a model is trained here, if it matters
    "block_recurrent": [*programs.TINY, "--train-bpe", 300],
    "compressive": programs.COMPRESSIVE,
    "memformer": [*programs.MEMFORMER, "--dtype", "bfloat16"],
    "memorizing": programs.MEMORIZING,
    "pretrained_recurrence": [*programs.WINDOWED, "--overlap", 3, "--insertion-layers", "1,2"],
}


def trained(model, text, folder):
    """A run of a model, with a checkpoint best.pt of step 1."""
    options = OPTIONS.get(model, ["--model", model, *programs.LITTLE])
    if "--train-bpe" in options:
        pytest.importorskip("tokenizers", reason="needs the extra bpe: tokenizers")
    brief = ["--steps", 2, "--sample", 0, "--validation-tokens", 24]
    train("--data", text, *options, *brief, "--out", folder)
    save_checkpoint(folder / "best.pt", saved(folder) | {"step": 1})
    return folder


def exported(capsys, run, folder):
    """(The record of exporting best.pt to a folder, its config.json, its parameters in float64)."""
    record = as_json(capsys, "export", run, folder, "--checkpoint", "best")
    described = json.loads((folder / "config.json").read_text())
    params = safetensors.load_file(folder / "model.safetensors")
    return record, described, {name: value.astype(np.float64) for name, value in params.items()}


@pytest.mark.parametrize("model", NAMES)
def test_the_reference_reads_what_was_exported(model, text, tmp_path, capsys):
    """Of a checkpoint that can be chosen."""
    run = trained(model, text, tmp_path / "run")
    record, described, params = exported(capsys, run, tmp_path / "exported")
    learned = ["tokenizer.tiktoken"] if model == "block_recurrent" else []
    assert record["files"] == ["README.md", "config.json", "model.safetensors", *learned]
    assert described["step"] == 1
    assert described["tokenizer"] == saved(run)["tokenizer"]

    reference = importlib.import_module(f"reference.{model}")
    fields = {}
    for name, value in described["model_config"].items():
        fields[name] = tuple(value) if isinstance(value, list) else value
    config = reference.Config(**fields)
    tokens = np.random.default_rng(1).integers(config.vocabulary, size=(2, config.segment))
    state = reference.initial_state(params, config, 2)
    logits, after, _ = reference.forward(params, config, tokens, state)
    network = accelerated.load(run).model.float()
    output = network(torch.tensor(tokens), network.initial_state(2))
    np.testing.assert_allclose(output.logits.detach().numpy(), logits, atol=2e-5)
    np.testing.assert_allclose(output.state[0].detach().numpy(), after[0], atol=2e-5)


def test_transformers_opens_a_plain_gpt2(text, tmp_path, capsys):
    """With all its weights, and the same logits; --init and `load` take it back as it was."""
    transformers = pytest.importorskip("transformers", reason="compares with its GPT-2")
    run, folder = tmp_path / "run", tmp_path / "exported"
    train(*programs.WINDOWED, "--vectors", 0, "--data", text, "--steps", 2, "--out", run)
    as_json(capsys, "export", run, folder)
    theirs, loaded = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert not (loaded["missing_keys"] or loaded["unexpected_keys"])
    ours = accelerated.load(folder).model
    tokens = torch.randint(256, (2, 8))
    expected = theirs(tokens).logits
    logits = ours(tokens, ours.initial_state(2)).logits
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    for name, value in saved(run)["parameters"].items():
        assert torch.equal(ours.state_dict()[name], value), name
    assert "AutoModelForCausalLM" in (folder / "README.md").read_text()


def test_a_disk_that_is_full_leaves_no_export(text, tmp_path, capsys, monkeypatch):
    run = trained("compressive", text, tmp_path / "run")
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(Path, "write_bytes", Mock(side_effect=full))
    line = refused(capsys, "export", run, tmp_path / "exported")
    words = "model.safetensors: No space left on device; free some space, or give another FOLDER"
    assert line.endswith(words)
    assert not [*(tmp_path / "exported").iterdir()]


@pytest.mark.parametrize("model", NAMES)
def test_training_begins_from_what_was_exported(model, text, tmp_path, capsys):
    run = trained(model, text, tmp_path / "run")
    exported(capsys, run, tmp_path / "exported")
    brief = ["--steps", 1, "--learning-rate", 1e-12, "--sample", 0]
    train("--init", tmp_path / "exported", *brief, "--out", tmp_path / "next")
    before = saved(run)
    begun = saved(tmp_path / "next")
    for name in ("model_config", "data", "tokenizer"):
        assert before[name] == begun[name]
    for name, value in before["parameters"].items():
        torch.testing.assert_close(begun["parameters"][name], value, atol=1e-9, rtol=1e-6)


def test_nothing_is_overwritten(text, tmp_path, capsys):
    run = trained("compressive", text, tmp_path / "run")
    folder = tmp_path / "exported"
    exported(capsys, run, folder)
    contents = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for there in (text, folder, run):
        assert "nothing is overwritten" in refused(capsys, "export", run, there)
    assert "already holds README.md, and nothing is replaced" in refusal(
        train, "--init", folder, "--out", folder
    )
    assert contents == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
