"""One run from its first step to its export: trained, killed by SIGKILL, resumed, evaluated and exported."""

import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from accelerated.training.folder import checkpoint_path
from accelerated.training.log import read_metrics
from tests.helpers.programs import (
    COMPRESSIVE,
    PATIENCE,
    ROOT,
    as_json,
    differences,
    evaluate,
    saved,
    train,
)

OFTEN = ["--save-every", 1, "--log-every", 1, "--schedule", "constant", "--dropout", 0.1]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs of as many steps: `whole`, and `killed`, a process that ended by SIGKILL, resumed in another."""
    folder = tmp_path_factory.mktemp("runs")
    whole, killed, book = folder / "whole", folder / "killed", folder / "book.txt"
    book.write_bytes((ROOT / "reference" / "memorizing.py").read_bytes()[:12_000])
    options = [*COMPRESSIVE, *OFTEN, "--data", book]
    argv = [sys.executable, "train.py", *options, "--steps", 100_000, "--out", killed]
    process = subprocess.Popen(
        [str(word) for word in argv], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    began = time.monotonic()
    while not checkpoint_path(killed).exists():
        assert process.poll() is None and time.monotonic() - began < PATIENCE
        time.sleep(0.02)
    process.kill()
    process.wait()
    at = saved(killed)["step"]
    train("--resume", killed, "--steps", at + 3)
    train(*options, "--steps", at + 3, "--out", whole)
    return SimpleNamespace(whole=whole, killed=killed, resumed_at=at)


def test_a_killed_run_ends_bit_for_bit_where_an_undisturbed_one_ends(runs):
    """Parameters, optimiser, memory, place in the text, random numbers, log."""
    assert (
        not differences(runs.whole, runs.killed)
        and saved(runs.killed)["step"] == runs.resumed_at + 3
    )


def test_its_score_counts_each_token_once(runs, capsys):
    """eval.py's score of the validation split, 5% of 12,000 bytes, is the one at the end of training."""
    score, final = as_json(capsys, runs.killed, "--split", "valid"), read_metrics(runs.killed)[-1]
    assert score["tokens"] == score["split_tokens"] == 599
    assert score["bits_per_byte"] == pytest.approx(final["validation_bits_per_byte"], rel=1e-6)


def test_its_export_has_the_runs_weights(runs, tmp_path):
    safetensors = pytest.importorskip(
        "safetensors.torch", reason="exporting needs the extra gpt2: safetensors"
    )
    evaluate("export", runs.killed, tmp_path / "exported")
    exported, parameters = (
        safetensors.load_file(tmp_path / "exported" / "model.safetensors"),
        saved(runs.killed)["parameters"],
    )
    assert exported.keys() == parameters.keys()
    assert all(torch.equal(exported[name], value) for name, value in parameters.items())
