"""Signals: runs that are interrupted or killed end bit for bit where an undisturbed one ends."""

import os
import signal
import time

import pytest

from accelerated.program.interruption import STOPS, Interruption
from accelerated.training.folder import checkpoint_path, is_finished
from tests.helpers import programs
from tests.helpers.programs import (
    differences,
    ended,
    hanging,
    killed,
    measurements,
    saved,
    start,
    train,
    wait_for,
    words,
)

STEPS = 9
BRIEF = "--validation-tokens 120"
OFTEN = f"{BRIEF} --steps {STEPS} --save-every 1 --validate-every 3 --log-every 1 --dropout 0.1"
MOMENTS = {  # what a process is killed in: (owner of a function, the function, the call of it)
    "a validation": ("accelerated.evaluation.score", "predictions_of", 9),
    "writing a checkpoint": ("torch", "save", 4),
    "writing the best one": ("torch", "save", 5),  # its validation is in the log by then
    "tokenising": ("accelerated.data.tokenizers:ByteTokenizer", "encode", 3),
    "writing the manifest": ("accelerated.data.corpus", "open_cache", 1),
} | {
    f"a whole {name} without its name": ("os", "replace", name)
    for name in ("tokens", "documents", "manifest", "checkpoint.pt", "best.pt", "config.json")
}


@pytest.mark.parametrize("number", STOPS)
@pytest.mark.parametrize("told", [True, False])
def test_the_first_signal_asks_for_a_stop_and_a_second_stops_at_once(number, told, capfd):
    """A closed terminal asks as Ctrl-C does. Afterwards the old handlers are there again."""
    before = [signal.getsignal(stop) for stop in STOPS]
    with Interruption(told) as interruption:
        assert interruption.signal is None
        os.kill(os.getpid(), number)
        assert interruption.signal == signal.Signals(number).name
        said = "finishing this step and saving; again to stop now" in capfd.readouterr().err
        assert said is told
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)
    assert [signal.getsignal(stop) for stop in STOPS] == before


def test_what_nohup_started_goes_on_when_the_terminal_is_closed():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Interruption() as interruption:
        os.kill(os.getpid(), signal.SIGHUP)
    signal.signal(signal.SIGHUP, before)
    assert interruption.signal is None


def test_an_interrupted_last_report_is_finished_by_resuming(text, tmp_path, monkeypatch):
    options = words(*programs.COMPRESSIVE, OFTEN, f"--data {text}")
    whole = tmp_path / "whole"
    run = tmp_path / "cut"
    train(*options, "--out", whole)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt) as caught:
        patch.setattr("train.report", lambda run: os.kill(os.getpid(), signal.SIGINT))
        train(*options, "--out", run)
    said = f"the model is saved; for its last report: python train.py --resume {run}"
    assert str(caught.value) == said
    assert not is_finished(run, STEPS), "the run says that it is finished without its last report"
    train("--resume", run)
    assert not differences(whole, run)
    assert measurements(run)[-1]["final"]


def test_a_signal_to_one_of_two_processes_stops_both_and_saves(text, tmp_path):
    """The first has learned a tokenizer and kept it; the other has read it."""
    pytest.importorskip("tokenizers", reason="learning needs the extra bpe: tokenizers")
    run = tmp_path / "run"
    errors = tmp_path / "errors"
    endless = f"--batch 4 --train-bpe 300 --data {text} --steps {10**6} --save-every 1 --out {run}"
    started = start([*programs.COMPRESSIVE, BRIEF, endless], errors, processes=2)
    wait_for(checkpoint_path(run), started, errors)
    os.kill(started[1].pid, signal.SIGTERM)
    assert ended(started) == [0, 0]
    assert saved(run)["step"] < 10**6


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_in_the_middle_of_something_a_run_ends_as_if_undisturbed(text, tmp_path, moment):
    if moment == "tokenising":
        text.write_bytes(text.read_bytes() * 150)
    options = words(*programs.COMPRESSIVE, OFTEN, f"--data {text}")
    whole = tmp_path / "whole"
    run = tmp_path / "cut"
    data = tmp_path / "data"
    begin = [*options, f"--out {run} --data-dir {data}"]
    assert killed(hanging(begin, tmp_path, *MOMENTS[moment]))
    train(*options, f"--out {whole} --data-dir {tmp_path}/other")
    again = ["--resume", run] if checkpoint_path(run).exists() else [*options, "--out", run]
    train(*again, "--data-dir", data)
    assert not differences(whole, run)
    assert not [*run.glob("*.writing"), *data.rglob("*.writing")]
