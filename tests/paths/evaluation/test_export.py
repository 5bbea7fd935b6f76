"""`eval.py export`: the NumPy reference and --init read what it writes; nothing is overwritten."""

import importlib
import json

import numpy as np
import pytest
import torch

import accelerated
from accelerated.models import NAMES
from accelerated.training.checkpoint import save_checkpoint
from tests.helpers import programs
from tests.helpers.programs import as_json, equal, evaluate, refusal, saved, train, words

safetensors = pytest.importorskip(
    "safetensors.numpy", reason="exporting needs the extra gpt2: safetensors"
)

OPTIONS = {  # how a model is trained here, if it matters
    "block_recurrent": words(*programs.TINY, "--train-bpe 300"),
    "compressive": programs.COMPRESSIVE,
    "memformer": words(*programs.MEMFORMER, "--dtype bfloat16"),
    "memorizing": programs.MEMORIZING,
    "pretrained_recurrence": words(*programs.WINDOWED, "--overlap 3 --insertion-layers 1,2"),
}


def trained(model, text, folder):
    """A run of a model, with a checkpoint best.pt of step 1."""
    options = OPTIONS.get(model, words(f"--model {model} --width 16 --segment 8 --batch 3"))
    brief = f"--data {text} --steps 2 --sample 0 --validation-tokens 24 --out {folder}"
    train(*options, brief)
    save_checkpoint(folder / "best.pt", saved(folder) | {"step": 1})
    return folder


def exported(capsys, run, folder):
    """(The record of exporting best.pt to a folder, its config.json, its parameters in float64)."""
    record = as_json(capsys, f"export {run} {folder} --checkpoint best")
    described = json.loads((folder / "config.json").read_text())
    params = safetensors.load_file(folder / "model.safetensors")
    return record, described, {name: value.astype(np.float64) for name, value in params.items()}


@pytest.mark.parametrize("model", NAMES)
def test_the_reference_reads_what_was_exported_and_training_begins_from_it(
    model, text, tmp_path, capsys
):
    """Of a checkpoint that can be chosen."""
    run = trained(model, text, tmp_path / "run")
    record, described, params = exported(capsys, run, tmp_path / "exported")
    learned = ["tokenizer.tiktoken"] if model == "block_recurrent" else []
    written = ["README.md", "config.json", "model.safetensors", "modeling_palimpsest.py"]
    assert record["files"] == [*written, *learned]
    assert described["step"] == 1

    reference = importlib.import_module(f"reference.{model}")
    fields = {}
    for name, value in described["model_config"].items():
        fields[name] = tuple(value) if isinstance(value, list) else value
    config = reference.Config(**fields)
    tokens = np.random.default_rng(1).integers(config.vocabulary, size=(2, config.segment))
    state = reference.initial_state(params, config, 2)
    logits, _, _ = reference.forward(params, config, tokens, state)
    network = accelerated.load(run).model.float()
    output = network(torch.tensor(tokens), network.initial_state(2))
    np.testing.assert_allclose(output.logits.detach().numpy(), logits, atol=2e-5)

    begun = tmp_path / "next"
    train(f"--init {tmp_path}/exported --steps 0 --out {begun}")
    before = saved(run)
    begun = saved(begun)
    for name in ("model_config", "data", "tokenizer", "parameters"):
        assert equal(before[name], begun[name]), name


def test_nothing_is_overwritten(text, tmp_path, capsys):
    run = trained("compressive", text, tmp_path / "run")
    folder = tmp_path / "exported"
    exported(capsys, run, folder)
    contents = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for there in (text, folder, run):
        assert "nothing is overwritten" in refusal(evaluate, "export", run, there)
    said = refusal(train, f"--init {folder} --out {folder}")
    assert "already holds README.md, and nothing is replaced" in said
    assert contents == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
