"""One run from its first step to its export: trained, killed by SIGKILL, resumed, evaluated and exported."""

import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

import eval as evaluation_script
from accelerated.evaluation.options import parse
from accelerated.training.folder import checkpoint_path
from tests.helpers.programs import COMPRESSIVE, PATIENCE, ROOT, differences, evaluate, saved, train

OFTEN = ["--save-every", 1, "--log-every", 1, "--schedule", "constant", "--dropout", 0.1, "--validation-segments", 5]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs of as many steps: `whole`, and `killed`, a process that ended by SIGKILL, resumed in another."""
    folder = tmp_path_factory.mktemp("runs")
    whole, killed, book = folder / "whole", folder / "killed", folder / "book.txt"
    book.write_bytes((ROOT / "reference" / "memorizing.py").read_bytes()[:12_000])
    options = [*COMPRESSIVE, *OFTEN, "--data", book]
    argv = [sys.executable, "train.py", *options, "--steps", 100_000, "--out", killed]
    process = subprocess.Popen([str(word) for word in argv], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
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
    assert not differences(runs.whole, runs.killed) and saved(runs.killed)["step"] == runs.resumed_at + 3


def test_its_score_counts_each_token_once(runs):
    """eval.py's sum of -log p is that of one lane, window by window, with the memory carried on."""
    name, options = parse(["score", str(runs.killed), "--split", "valid"])
    run = evaluation_script.open_trained_run(str(runs.killed), name, options)
    run = evaluation_script.open_documents(run, options, ("valid",))
    record, _ = evaluation_script.function_at("evaluation.score.report")(run, options)
    nats, (document,), segment = 0.0, run.documents, run.model.config.segment
    state, tokens = run.model.initial_state(1), torch.tensor([*document.inputs, document.targets[-1]]).long()
    for first in range(0, len(tokens) - 1, segment):
        read, targets = tokens[first : first + segment], tokens[first + 1 : first + segment + 1]
        with torch.no_grad():
            logits, state, _ = run.model(functional.pad(read, (0, segment - len(read)))[None], state)
        nats += functional.cross_entropy(logits[0, : len(targets)], targets, reduction="sum").item()
    assert record["tokens"] == len(tokens) - 1 == run.count_predictions() > 500
    assert record["nats"] == pytest.approx(nats, rel=1e-5)


def test_its_export_has_the_runs_weights(runs, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch", reason="exporting needs the extra gpt2: safetensors")
    evaluate("export", runs.killed, tmp_path / "exported")
    exported, parameters = safetensors.load_file(tmp_path / "exported" / "model.safetensors"), saved(runs.killed)["parameters"]
    assert exported.keys() == parameters.keys()
    assert all(torch.equal(exported[name], value) for name, value in parameters.items())
