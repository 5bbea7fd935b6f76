"""`eval.py export`: the NumPy reference and --init read what it writes; nothing is overwritten."""

import importlib
import json

import numpy as np
import pytest
import torch

import accelerated
from accelerated.training.checkpoint import save_checkpoint
from tests.helpers import programs
from tests.helpers.programs import as_json, refusal, refused, saved, train

safetensors = pytest.importorskip(
    "safetensors.numpy", reason="exporting needs the extra gpt2: safetensors"
)

RUNS = {
    "block_recurrent": [*programs.TINY, "--train-bpe", 300],
    "compressive": programs.COMPRESSIVE,
    "memformer": [*programs.MEMFORMER, "--dtype", "bfloat16"],
    "memorizing": programs.MEMORIZING,
    "pretrained_recurrence": [*programs.WINDOWED, "--overlap", 3, "--insertion-layers", "1,2"],
}


@pytest.mark.parametrize("model", RUNS)
def test_the_reference_and_init_read_what_was_exported(model, text, tmp_path, capsys):
    """Of a checkpoint that can be chosen. Nothing is overwritten."""
    if "--train-bpe" in RUNS[model]:
        pytest.importorskip("tokenizers", reason="needs the extra bpe: tokenizers")
    run, folder, next_run = tmp_path / "run", tmp_path / "exported", tmp_path / "next"
    train(
        "--data",
        text,
        *RUNS[model],
        "--steps",
        2,
        "--sample",
        0,
        "--validation-segments",
        1,
        "--out",
        run,
    )
    save_checkpoint(run / "best.pt", saved(run) | {"step": 1})
    record = as_json(capsys, "export", run, folder, "--checkpoint", "best")
    learned = ["tokenizer.tiktoken"] if "--train-bpe" in RUNS[model] else []
    assert record["files"] == ["config.json", "model.safetensors", *learned]
    described, params = (
        json.loads((folder / "config.json").read_text()),
        safetensors.load_file(folder / "model.safetensors"),
    )
    assert described["step"] == 1 and described["tokenizer"] == saved(run)["tokenizer"]
    reference = importlib.import_module(f"reference.{model}")
    fields = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in described["model_config"].items()
    }
    config = reference.Config(**fields)
    tokens = np.random.default_rng(1).integers(config.vocabulary, size=(2, config.segment))
    params = {name: value.astype(np.float64) for name, value in params.items()}
    logits, after, _ = reference.forward(
        params, config, tokens, reference.initial_state(params, config, 2)
    )
    network = accelerated.load(run).model.float()
    output = network(torch.tensor(tokens), network.initial_state(2))
    np.testing.assert_allclose(output.logits.detach().numpy(), logits, atol=2e-5)
    np.testing.assert_allclose(output.state[0].detach().numpy(), after[0], atol=2e-5)
    train(
        "--init", folder, "--steps", 1, "--learning-rate", 1e-12, "--sample", 0, "--out", next_run
    )
    before, begun = saved(run), saved(next_run)
    assert all(before[name] == begun[name] for name in ("model_config", "data", "tokenizer"))
    for name, value in before["parameters"].items():
        torch.testing.assert_close(begun["parameters"][name], value, atol=1e-9, rtol=1e-6)
    contents = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for there in (text, folder, run):
        assert "nothing is overwritten" in refused(capsys, "export", run, there)
    assert "already holds a run or weights" in refusal(train, "--init", folder, "--out", folder)
    assert contents == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
