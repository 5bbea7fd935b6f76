"""`eval.py export`: the NumPy reference and --init read what it writes."""

import importlib
import json

import numpy as np
import pytest
import torch

import accelerated
from accelerated.models import NAMES
from accelerated.training.checkpoint import save_checkpoint
from reference.gradients import fields_of
from tests.helpers import programs
from tests.helpers.programs import as_json, equal, saved, train, words

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


@pytest.mark.parametrize("model", NAMES)
def test_the_reference_reads_what_was_exported_and_training_begins_from_it(
    model, text, tmp_path, capsys
):
    """Of a checkpoint that can be chosen.

    accelerated.load opens run and export alike. The caller's default type stays, though the run's
    is float32.
    """
    run = tmp_path / "run"
    folder = tmp_path / "exported"
    options = OPTIONS.get(model, words(f"--model {model} --width 16 --segment 8 --batch 3"))
    train(*options, f"--data {text} --steps 2 --sample 0 --validation-tokens 24 --out {run}")
    save_checkpoint(run / "best.pt", saved(run) | {"step": 1})
    record = as_json(capsys, f"export {run} {folder} --checkpoint best")
    described = json.loads((folder / "config.json").read_text())
    learned = ["tokenizer.tiktoken"] if model == "block_recurrent" else []
    written = ["README.md", "config.json", "model.safetensors", "modeling_palimpsest.py"]
    assert record["files"] == [*written, *learned]
    assert described["step"] == 1

    reference = importlib.import_module(f"reference.{model}")
    config = reference.Config(**fields_of(json.dumps(described["model_config"])))
    tensors = safetensors.load_file(folder / "model.safetensors")
    params = {name: value.astype(np.float64) for name, value in tensors.items()}
    tokens = np.random.default_rng(1).integers(config.vocabulary, size=(2, config.segment))
    state = reference.initial_state(params, config, 2)
    logits, _, _ = reference.forward(params, config, tokens, state)
    torch.set_default_dtype(torch.float64)
    network, _, settings = accelerated.load(folder)
    assert torch.get_default_dtype() == torch.float64
    assert settings == accelerated.load(run).settings
    assert not network.training, "a loaded model drops numbers, as in training"
    network.float()
    output = network(torch.tensor(tokens), network.initial_state(2))
    np.testing.assert_allclose(output.logits.detach().numpy(), logits, atol=2e-5)

    begun = tmp_path / "next"
    train(f"--init {folder} --steps 0 --out {begun}")
    before = saved(run)
    begun = saved(begun)
    for name in ("model_config", "data", "tokenizer", "parameters"):
        assert equal(before[name], begun[name]), name
