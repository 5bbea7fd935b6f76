"""One run from its first step to its export: trained, killed, resumed, evaluated, exported."""

import time
from types import SimpleNamespace

import pytest
import torch

from accelerated.training.folder import read_metrics
from tests.helpers.programs import (
    COMPRESSIVE,
    ROOT,
    as_json,
    differences,
    evaluate,
    killed,
    saved,
    start,
    train,
    wait_for,
)

OFTEN = ["--save-every", 1, "--log-every", 1, "--schedule", "constant", "--dropout", 0.1]


def killed_after_a_checkpoint(options, run):
    """Begin train.py as a program, and end it by SIGKILL when it has trained a step."""
    errors = run.with_suffix(".errors")
    started = start([*options, "--steps", 100_000, "--out", run], errors)
    wait_for(run / "metrics.jsonl", started, errors)
    while saved(run)["step"] == 0:
        assert started[0].is_alive(), errors.read_text()
        time.sleep(0.02)
    assert killed(started)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs of as many steps: `whole`, and `killed`, whose process was killed, resumed."""
    folder = tmp_path_factory.mktemp("runs")
    whole = folder / "whole"
    killed = folder / "killed"
    book = folder / "book.txt"
    book.write_bytes((ROOT / "reference" / "memorizing.py").read_bytes()[:12_000])
    options = [*COMPRESSIVE, *OFTEN, "--data", book]
    killed_after_a_checkpoint(options, killed)
    at = saved(killed)["step"]
    train("--resume", killed, "--steps", at + 3)
    train(*options, "--steps", at + 3, "--out", whole)
    return SimpleNamespace(whole=whole, killed=killed, resumed_at=at)


def test_a_killed_run_ends_bit_for_bit_where_an_undisturbed_one_ends(runs):
    """Parameters, optimiser, memory, place in the text, random numbers, log."""
    assert not differences(runs.whole, runs.killed)
    assert saved(runs.killed)["step"] == runs.resumed_at + 3


def test_its_score_counts_each_token_once(runs, capsys):
    """eval.py's score of the validation split, 5% of 12,000 bytes, is the one after training."""
    score = as_json(capsys, runs.killed, "--split", "valid")
    final = read_metrics(runs.killed)[-1]
    assert score["tokens"] == score["split_tokens"] == 599
    assert score["bits_per_byte"] == pytest.approx(final["validation_bits_per_byte"], rel=1e-6)


def test_its_export_has_the_runs_weights(runs, tmp_path):
    from safetensors.torch import load_file  # without it the test is skipped: conftest.py

    evaluate("export", runs.killed, tmp_path / "exported")
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    parameters = saved(runs.killed)["parameters"]
    assert exported.keys() == parameters.keys()
    for name, value in parameters.items():
        assert torch.equal(exported[name], value), name
