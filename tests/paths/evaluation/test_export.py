"""`eval.py export`: the NumPy reference and --init read what it writes; nothing is overwritten."""

import functools
import importlib
import json

import numpy as np
import pytest
import torch

import accelerated
from accelerated.training.checkpoint import load_checkpoint, save_checkpoint
from accelerated.training.folder import checkpoint_path
from tests.helpers import programs
from tests.helpers.programs import ROOT, as_json, evaluate, refused, saved, train

safetensors = pytest.importorskip("safetensors.numpy", reason="exporting needs the extra gpt2: safetensors")

RUNS = {
    "block_recurrent": [*programs.TINY, "--train-bpe", 300],
    "compressive": [*programs.COMPRESSIVE, "--no-carry-over-documents"],
    "memformer": programs.MEMFORMER,
    "memorizing": programs.MEMORIZING,
    "pretrained_recurrence": [*programs.WINDOWED, "--overlap", 3, "--insertion-layers", "1,2"],
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """exported(model) -> (run, folder): a run of two steps and what eval.py export makes of it, made once."""

    @functools.cache
    def make(model):
        if "--train-bpe" in RUNS[model]:
            pytest.importorskip("tokenizers", reason="needs the extra bpe: tokenizers")
        path = tmp_path_factory.mktemp(model)
        (path / "book.txt").write_bytes((ROOT / "reference" / "memorizing.py").read_bytes()[:12_000])
        brief = ["--steps", 2, "--sample", 0, "--validation-segments", 1]
        train("--data", path / "book.txt", *RUNS[model], *brief, "--out", path / "run")
        evaluate("export", path / "run", path / "exported")
        return path / "run", path / "exported"

    return make


@pytest.mark.parametrize("model", RUNS)
def test_the_reference_and_init_read_what_was_exported(model, exported, tmp_path, capsys):
    run, folder = exported(model)
    described, params = json.loads((folder / "config.json").read_text()), safetensors.load_file(folder / "model.safetensors")
    reference = importlib.import_module(f"reference.{model}")
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in described["model_config"].items()}
    config = reference.Config(**fields)
    tokens = np.random.default_rng(1).integers(config.vocabulary, size=(2, config.segment))
    params = {name: value.astype(np.float64) for name, value in params.items()}
    logits, after, _ = reference.forward(params, config, tokens, reference.initial_state(params, config, 2))
    network = accelerated.load(run).model.float()
    output = network(torch.tensor(tokens), network.initial_state(2))
    np.testing.assert_allclose(output.logits.detach().numpy(), logits, atol=2e-5)
    np.testing.assert_allclose(output.state[0].detach().numpy(), after[0], atol=2e-5)
    train("--init", folder, "--steps", 1, "--learning-rate", 1e-12, "--sample", 0, "--out", tmp_path / "next")
    before, begun = saved(run), saved(tmp_path / "next")
    for name in ("model_config", "data_config", "tokenizer"):
        assert before[name] == begun[name]
    for name, value in before["parameters"].items():
        torch.testing.assert_close(begun["parameters"][name], value, atol=1e-9, rtol=1e-6)


@pytest.mark.parametrize("what", ["file", "exported", "run"])
def test_nothing_is_overwritten(what, exported, tmp_path, capsys):
    run, folder = exported("memformer")
    (tmp_path / "file").write_text("mine")
    there = {"file": tmp_path / "file", "exported": folder, "run": run}
    before = {path: path.read_bytes() for at in (tmp_path, run, folder) for path in at.rglob("*") if path.is_file()}
    assert "nothing is overwritten" in refused(capsys, "export", run, there[what])
    assert before == {path: path.read_bytes() for at in (tmp_path, run, folder) for path in at.rglob("*") if path.is_file()}


def test_a_checkpoint_can_be_chosen_and_json_names_the_files(exported, tmp_path, capsys):
    run, _ = exported("block_recurrent")
    contents = load_checkpoint(checkpoint_path(run))
    save_checkpoint(run / "best.pt", contents | {"step": 1})
    record = as_json(capsys, "export", run, tmp_path / "first", "--checkpoint", "best")
    assert record["files"] == ["config.json", "model.safetensors", "tokenizer.tiktoken"]
    assert json.loads((tmp_path / "first" / "config.json").read_text())["step"] == 1
