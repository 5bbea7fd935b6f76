"""A night's work is safe: nothing damaged is used, and one process writes a run.

Results are kept, and data may move.
"""

import json
import os
import shutil

import pytest

import train as training_script
from accelerated.training.folder import checkpoint_path, read_metrics
from accelerated.training.options import parse as parse_training
from tests.helpers.programs import (
    COMPRESSIVE,
    ROOT,
    differences,
    evaluate,
    hanging,
    killed,
    refusal,
    saved,
    train,
    words,
)
from tests.helpers.texts import SINGLE_BYTES, show_ranks

SAFE = words(*COMPRESSIVE, "--validation-tokens 48 --log-every 1 --save-every 1")


# Nothing damaged is used


@pytest.mark.parametrize("what", ["checkpoint", "tokenizer"])
def test_what_is_damaged_is_refused_and_an_earlier_checkpoint_serves(text, tmp_path, what):
    """To resume, to begin from and to evaluate.

    Flipped bits of each file, the tokens' cache too: the tests of their modules.
    """
    ranks = tmp_path / "ranks"
    run = tmp_path / "run"
    ranks.write_bytes(show_ranks([*SINGLE_BYTES, b"th", b"he"]))
    options = words(*SAFE, f"--data {text} --tokenizer {ranks} --validate-every 1")
    train(*options, f"--steps 1 --out {run}")
    checkpoint = checkpoint_path(run)
    resume = f"--resume {run} --steps 4"
    if what == "checkpoint":
        damaged = checkpoint
        content = checkpoint.read_bytes()[:5_000]
        said = "copy the run's other one, best.pt or"
    else:
        damaged = run / "tokenizer.tiktoken"
        content = show_ranks([*SINGLE_BYTES, b"th", b"an"])
        said = "is not the one that"
    right = damaged.read_bytes()
    damaged.write_bytes(content)
    assert said in refusal(train, resume)
    assert said in refusal(train, f"--init {run} --out {tmp_path}/begun")
    assert said in refusal(evaluate, f"score {run} --checkpoint last")

    if what == "checkpoint":
        shutil.copyfile(run / "best.pt", checkpoint)
    else:
        damaged.write_bytes(right)
    train(resume)
    whole = tmp_path / "whole"
    train(*options, f"--steps 4 --out {whole}")
    assert not differences(whole, run, with_log=False)


# One process, one folder


def test_a_run_that_another_process_writes_is_refused_and_free_when_that_is_killed(text, tmp_path):
    """Its half-written files are not touched before, and it can be evaluated."""
    run = tmp_path / "run"
    options = [*SAFE, f"--data {text} --steps 3 --out {run}"]
    writing = hanging(options, tmp_path, "train", "next_segments", call=2)
    stale = run / "best.pt.0123abcd.writing"
    (run / "a novel.writing").write_text("not ours")
    stale.write_text("half")
    said = f"another train.py is writing to {run}; wait until it ends, or give another"
    assert refusal(train, "--resume", run).startswith(said)
    evaluate("score", run)
    assert stale.exists()
    assert saved(run)["step"] == 1
    assert killed(writing)
    train("--resume", run)
    assert saved(run)["step"] == 3
    assert not stale.exists()
    assert (run / "a novel.writing").exists()


def test_a_run_inside_its_own_data_goes_on(tmp_path, monkeypatch):
    """What runs, exports and the cache write there is no part of the text: nor later, nor moved."""
    monkeypatch.chdir(tmp_path)
    for name in ("memformer", "compressive"):
        shutil.copy(ROOT / "reference" / f"{name}.py", f"{name}.txt")
    options = words(*SAFE, "--data . --data-dir cache")
    train(*options, "--steps 2 --out runs/cut")
    train(*options, "--steps 4 --out whole")
    train("--resume runs/cut --steps 4 --data-dir cache")
    assert not differences(tmp_path / "whole", tmp_path / "runs/cut", with_log=False)


def test_what_another_process_wrote_meanwhile_is_not_overwritten(text, tmp_path):
    """It has trained on, or into the same new folder, after this one's options were read."""
    options = words(*SAFE, f"--data {text}")
    run = tmp_path / "run"
    train(*options, f"--steps 2 --out {run}")
    later = parse_training(words(f"--resume {run} --steps 5"))
    train(f"--resume {run} --steps 3")
    new = words(*options, f"--out {tmp_path}/new")
    begun = parse_training(words(*new, "--steps 1"))
    train(*new, "--steps 2")
    for (settings, start), step in ((later, 3), (begun, 2)):
        line = refusal(training_script.main, settings, start)
        path = checkpoint_path(start.folder)
        assert line.startswith(f"another train.py has written {path} meanwhile; give the command")
        assert saved(start.folder)["step"] == step


# Data that moves


def test_a_run_whose_data_has_moved_continues_with_its_new_place(tmp_path, monkeypatch):
    """A relative path is kept as an absolute one. What is refused leaves the run as it was."""
    old = tmp_path / "here"
    run = tmp_path / "run"
    old.mkdir()
    (old / "book.txt").write_bytes((ROOT / "reference" / "memformer.py").read_bytes())
    monkeypatch.chdir(tmp_path)
    whole = tmp_path / "whole"
    train(*SAFE, f"--data here --steps 4 --out {whole}")
    train(*SAFE, f"--data here --steps 2 --out {run}")
    os.chdir("/")
    before = {path: path.read_bytes() for path in run.iterdir()}
    new = old.rename(tmp_path / "new")
    resume = f"--resume {run} --steps 4"
    assert f"--data {old}: no such file or folder" in refusal(train, resume)
    other = tmp_path / "other.txt"
    other.write_text("another text " * 900)
    assert "does not have the tokens that" in refusal(train, resume, f"--data {other}")
    assert {path: path.read_bytes() for path in run.iterdir()} == before
    train(resume, f"--data {new}")
    assert differences(whole, run, with_log=False) == ["data"]
    assert read_metrics(run)[-2]["loss"] == read_metrics(whole)[-2]["loss"]
    settings = json.loads((run / "config.json").read_text())
    assert settings["data"]["data"] == saved(run)["data"]["data"] == str(new)
    assert settings["training"]["steps"] == 4, "config.json is not renewed"
