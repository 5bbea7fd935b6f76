"""Signals: runs that are interrupted or killed at any moment end bit for bit where an undisturbed run ends."""

import os
import random
import signal
import time

import pytest

from accelerated.program.interruption import STOPS, Interruption
from accelerated.training.folder import checkpoint_path
from accelerated.training.log import is_finished
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
)

STEPS = 9
OFTEN = [
    "--steps",
    STEPS,
    "--save-every",
    1,
    "--validate-every",
    3,
    "--log-every",
    1,
    "--dropout",
    0.1,
]
BRIEF = ["--sample", 0, "--validation-segments", 5]
MOMENTS = {  # what a process is killed in: (owner of a function, the function, the call of it)
    "a validation": ("accelerated.evaluation.score", "predictions", 9),
    "writing a checkpoint": ("accelerated.training.checkpoint", "file_checksum", 4),
    "tokenising": ("accelerated.data.tokenizers:ByteTokenizer", "encode", 3),
    "writing the manifest": ("accelerated.data.corpus", "open_cache", 1),
}
KILLS = max(5, int(os.environ.get("PALIMPSEST_TRIALS", "0")) // 2)  # by one process, and by two


@pytest.mark.parametrize("number", STOPS)
@pytest.mark.parametrize("told", [True, False])
def test_the_first_signal_asks_for_a_stop_a_second_stops_at_once_and_the_old_handlers_are_restored(
    number, told, capfd
):
    """A closed terminal asks as Ctrl-C does."""
    before = [signal.getsignal(stop) for stop in STOPS]
    with Interruption(told) as interruption:
        assert interruption.signal is None
        os.kill(os.getpid(), number)
        assert interruption.signal == signal.Signals(number).name
        assert (
            "finishing this step and saving; again to stop now" in capfd.readouterr().err
        ) is told
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
    options, run = [*programs.COMPRESSIVE, *OFTEN, *BRIEF, "--data", text], tmp_path / "cut"
    train(*options, "--out", tmp_path / "whole")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt) as caught:
        patch.setattr("train.report", lambda run: os.kill(os.getpid(), signal.SIGINT))
        train(*options, "--out", run)
    assert (
        str(caught.value)
        == f"the model is saved; for its last report: python train.py --resume {run}"
    )
    assert not is_finished(run, STEPS)
    train("--resume", run)
    assert not differences(tmp_path / "whole", run) and measurements(run)[-1]["final"]


def test_a_signal_to_one_of_two_processes_stops_both_and_saves(text, tmp_path):
    options = [
        *programs.COMPRESSIVE,
        *BRIEF,
        "--batch",
        4,
        "--data",
        text,
        "--steps",
        10**6,
        "--save-every",
        1,
    ]
    started = start(
        [*options, "--out", run := tmp_path / "run"], errors := tmp_path / "errors", processes=2
    )
    wait_for(checkpoint_path(run), started, errors)
    os.kill(started[1].pid, signal.SIGTERM)
    assert ended(started) == [0, 0] and saved(run)["step"] < 10**6


@pytest.mark.parametrize("processes", [1, 2])
def test_killed_at_random_moments_a_run_ends_as_if_undisturbed(text, tmp_path, processes):
    """Run after run until so many processes have been killed. What each model keeps: test_a_stopped_run_resumes_bit_for_bit."""
    options = [
        *programs.COMPRESSIVE,
        *OFTEN,
        *BRIEF,
        "--batch",
        4,
        "--data",
        text,
        "--data-dir",
        tmp_path / "data",
    ]
    errors, kills, trial = tmp_path / "errors", 0, 0
    assert ended(start(["--help"], errors)) == [
        0
    ]  # begins the children's server, so that no time includes its imports
    began = time.perf_counter()
    assert (
        ended(start([*options, "--out", tmp_path / "whole"], errors, processes=processes))
        == [0] * processes
    )
    duration, rng = time.perf_counter() - began, random.Random(processes)
    while kills < KILLS:
        run, trial = tmp_path / f"cut-{trial}", trial + 1
        while not is_finished(run, STEPS):
            command = (
                ["--resume", run] if checkpoint_path(run).exists() else [*options, "--out", run]
            )
            started = start(command, errors, processes=processes)
            if kills < KILLS:
                time.sleep(rng.uniform(0, duration / 2))
                kills += killed(started)
            else:
                assert ended(started) == [0] * processes, errors.read_text()
        assert not differences(tmp_path / "whole", run)
    assert processes > 1 or "Traceback" not in errors.read_text()


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_in_the_middle_of_something_a_run_ends_as_if_undisturbed(text, tmp_path, moment):
    text.write_bytes(text.read_bytes() * (150 if moment == "tokenising" else 1))
    options = [*programs.COMPRESSIVE, *OFTEN, *BRIEF, "--data", text]
    run = tmp_path / "cut"
    assert killed(
        hanging(
            [*options, "--out", run, "--data-dir", tmp_path / "data"], tmp_path, *MOMENTS[moment]
        )
    )
    train(*options, "--out", tmp_path / "whole", "--data-dir", tmp_path / "other data")
    command = ["--resume", run] if checkpoint_path(run).exists() else [*options, "--out", run]
    train(*command, "--data-dir", tmp_path / "data")
    assert not differences(tmp_path / "whole", run)
    assert not [*run.glob("*.writing"), *(tmp_path / "data").rglob("*.writing")]
