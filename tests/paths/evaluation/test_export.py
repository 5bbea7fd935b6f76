"""`eval.py export`: the NumPy reference and --init read what it writes; damage and other folders are refused."""

import argparse
import functools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from accelerated.models import model_class
from accelerated.program.errors import InputError
from accelerated.training.checkpoint import load_exported
from accelerated.training.settings import settings_from
from reference import block_recurrent, compressive, memformer, memorizing, pretrained_recurrence
from tests.helpers.programs import COMPRESSIVE, MEMFORMER, MEMORIZING, TINY, WINDOWED, evaluate, saved, train

safetensors = pytest.importorskip("safetensors.numpy", reason="exporting needs the extra gpt2: safetensors")

REFERENCES = {
    module.__name__.split(".")[1]: module
    for module in (block_recurrent, compressive, memformer, memorizing, pretrained_recurrence)
}
RUNS = {
    "block_recurrent": TINY,
    "compressive": [*COMPRESSIVE, "--no-carry-over-documents"],
    "memformer": MEMFORMER,
    "memorizing": MEMORIZING,
    "pretrained_recurrence": [*WINDOWED, "--overlap", 3, "--insertion-layers", "1,2"],
}
SOURCE = Path(argparse.__file__).read_bytes()[:12_000]
BRIEF = ["--steps", 2, "--sample", 0, "--validation-segments", 1]


@pytest.fixture
def exported(text, tmp_path):
    """exported(*options) -> (run, folder): a run of two steps and what eval.py export makes of it."""

    def make(*options):
        run, folder = tmp_path / "run", tmp_path / "exported"
        train("--data", text, *options, *BRIEF, "--out", run, "--data-dir", tmp_path / "data")
        evaluate("export", run, folder)
        return run, folder

    return make


@pytest.fixture(scope="module")
def of_model(tmp_path_factory):
    """of_model(model) -> (run, folder), made once for the tests that only read them."""

    @functools.cache
    def make(model):
        path = tmp_path_factory.mktemp(model)
        (path / "book.txt").write_bytes(SOURCE)
        train("--data", path / "book.txt", *RUNS[model], *BRIEF, "--out", path / "run", "--data-dir", path / "data")
        evaluate("export", path / "run", path / "exported")
        return path / "run", path / "exported"

    return make


@pytest.mark.parametrize("model", RUNS)
def test_the_reference_gives_the_models_logits(model, of_model):
    run, folder = of_model(model)
    described, params = json.loads((folder / "config.json").read_text()), safetensors.load_file(folder / "model.safetensors")
    reference = REFERENCES[model]
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in described["model_config"].items()}
    config = reference.Config(**fields)
    tokens = np.random.default_rng(1).integers(config.vocabulary, size=(2, config.segment))
    params = {name: value.astype(np.float64) for name, value in params.items()}
    logits, after, _ = reference.forward(params, config, tokens, reference.initial_state(params, config, 2))
    network = model_class(model)(settings_from(saved(run), run).model_config).eval().float()
    network.load_state_dict(saved(run)["parameters"])
    output = network(torch.tensor(tokens), network.initial_state(2))
    np.testing.assert_allclose(output.logits.detach().numpy(), logits, atol=2e-5)
    np.testing.assert_allclose(output.state[0].detach().numpy(), after[0], atol=2e-5)


@pytest.mark.parametrize("model", RUNS)
def test_init_begins_with_what_was_exported(model, of_model, tmp_path, capsys):
    run, folder = of_model(model)
    places = ("--out", tmp_path / "next", "--data-dir", tmp_path / "data")
    train("--init", folder, "--steps", 1, "--learning-rate", 1e-12, "--sample", 0, *places)
    assert f"starts with the weights, model and data of {folder}" in capsys.readouterr().out
    before, after = saved(run), saved(tmp_path / "next")
    assert before["model_config"] == after["model_config"] and before["data_config"] == after["data_config"]
    for name, value in before["parameters"].items():
        torch.testing.assert_close(after["parameters"][name], value, atol=1e-9, rtol=1e-6)


def test_a_learned_tokenizer_comes_along(exported, tmp_path):
    pytest.importorskip("tokenizers", reason="needs the extra bpe: tokenizers")
    run, folder = exported(*TINY, "--train-bpe", 300)
    assert (folder / "tokenizer.tiktoken").read_bytes() == (run / "tokenizer.tiktoken").read_bytes()
    train("--init", folder, "--steps", 1, "--sample", 0, "--out", tmp_path / "next", "--data-dir", tmp_path / "data")
    assert saved(tmp_path / "next")["tokenizer"] == saved(run)["tokenizer"]


@pytest.mark.parametrize("what", ["file", "full", "itself"])
def test_nothing_is_overwritten(what, exported, tmp_path):
    run, _ = exported(*TINY)
    folder = run if what == "itself" else tmp_path / "there"
    if what == "file":
        folder.write_text("mine")
    if what == "full":
        folder.mkdir()
        (folder / "mine").write_text("mine")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match="nothing is overwritten"):
        evaluate("export", run, folder)
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def flip(path, at):
    """Flip a bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("what", ["weights", "no weights", "types", "model", "ranks"])
def test_a_damaged_export_is_refused_in_one_line(what, exported, tmp_path):
    _, folder = exported(*TINY, *(("--train-bpe", 300) if what == "ranks" else ()))
    described = json.loads((folder / "config.json").read_text())
    if what == "weights":
        flip(folder / "model.safetensors", -9)
    if what == "no weights":
        (folder / "model.safetensors").unlink()
    if what == "types":
        (folder / "config.json").write_text(json.dumps(described | {"step": "two"}))
    if what == "model":
        (folder / "config.json").write_text(json.dumps(described | {"model": "rnn"}))
    if what == "ranks":
        (folder / "tokenizer.tiktoken").write_bytes((folder / "tokenizer.tiktoken").read_bytes()[:-8])
    with pytest.raises(InputError) as refusal:
        train("--init", folder, "--steps", 1, "--out", tmp_path / "next", "--data-dir", tmp_path / "data")
    assert "\n" not in str(refusal.value) and not (tmp_path / "next" / "checkpoint.pt").exists()


def test_a_checkpoint_can_be_chosen_and_json_names_the_files(exported, tmp_path, capsys):
    run, _ = exported(*TINY, "--validate-every", 1)
    evaluate("export", run, tmp_path / "best", "--checkpoint", "best", "--json")
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["files"] == ["config.json", "model.safetensors"]
    assert load_exported(tmp_path / "best")["step"] in (1, 2)
