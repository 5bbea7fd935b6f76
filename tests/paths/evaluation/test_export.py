"""`eval.py export`: the NumPy reference and --init read what it writes; damage and other folders are refused."""

import functools
import importlib
import json

import numpy as np
import pytest
import torch

from accelerated.models import model_class
from accelerated.program.errors import InputError
from accelerated.training.checkpoint import load_exported
from accelerated.training.settings import settings_from
from tests.helpers.programs import COMPRESSIVE, MEMFORMER, MEMORIZING, ROOT, TINY, WINDOWED, evaluate, saved, train

safetensors = pytest.importorskip("safetensors.numpy", reason="exporting needs the extra gpt2: safetensors")

RUNS = {
    "block_recurrent": [*TINY, "--train-bpe", 300, "--validate-every", 1],
    "compressive": [*COMPRESSIVE, "--no-carry-over-documents"],
    "memformer": MEMFORMER,
    "memorizing": MEMORIZING,
    "pretrained_recurrence": [*WINDOWED, "--overlap", 3, "--insertion-layers", "1,2"],
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
        brief = ["--steps", 2, "--sample", 0, "--validation-segments", 1, "--data-dir", path / "data"]
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
    before = saved(run)
    network = model_class(model)(settings_from(before, run).model_config).eval().float()
    network.load_state_dict(before["parameters"])
    output = network(torch.tensor(tokens), network.initial_state(2))
    np.testing.assert_allclose(output.logits.detach().numpy(), logits, atol=2e-5)
    np.testing.assert_allclose(output.state[0].detach().numpy(), after[0], atol=2e-5)
    places = ("--out", tmp_path / "next", "--data-dir", tmp_path / "data")
    train("--init", folder, "--steps", 1, "--learning-rate", 1e-12, "--sample", 0, *places)
    assert f"starts with the weights, model and data of {folder}" in capsys.readouterr().out
    begun = saved(tmp_path / "next")
    for name in ("model_config", "data_config", "tokenizer"):
        assert before[name] == begun[name]
    for name, value in before["parameters"].items():
        torch.testing.assert_close(begun["parameters"][name], value, atol=1e-9, rtol=1e-6)


@pytest.mark.parametrize("what", ["file", "full", "itself"])
def test_nothing_is_overwritten(what, exported, tmp_path):
    run, _ = exported("memformer")
    folder = run if what == "itself" else tmp_path / "there"
    if what == "file":
        folder.write_text("mine")
    if what == "full":
        folder.mkdir()
        (folder / "mine").write_text("mine")
    before = {path: path.read_bytes() for at in (tmp_path, run) for path in at.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match="nothing is overwritten"):
        evaluate("export", run, folder)
    assert before == {path: path.read_bytes() for at in (tmp_path, run) for path in at.rglob("*") if path.is_file()}


def test_a_checkpoint_can_be_chosen_and_json_names_the_files(exported, tmp_path, capsys):
    run, folder = exported("block_recurrent")
    evaluate("export", run, tmp_path / "best", "--checkpoint", "best", "--json")
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["files"] == ["config.json", "model.safetensors", "tokenizer.tiktoken"]
    assert (folder / "tokenizer.tiktoken").read_bytes() == (run / "tokenizer.tiktoken").read_bytes()
    assert load_exported(tmp_path / "best")["step"] in (1, 2)
