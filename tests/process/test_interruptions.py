"""Signals: runs that are interrupted or killed at any moment end bit for bit where an undisturbed run ends."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from accelerated.program.errors import InputError
from accelerated.program.interruption import STOPS, Interruption
from accelerated.training.folder import checkpoint_path
from accelerated.training.log import is_finished
from tests.helpers import programs
from tests.helpers.programs import ROOT, differences, ended, hanging, killed, measurements, start, train

STEPS = 9
OFTEN = ["--steps", STEPS, "--save-every", 1, "--validate-every", 3, "--log-every", 1, "--dropout", 0.1]
BRIEF = ["--sample", 0, "--validation-segments", 5]
MODELS = {
    "block_recurrent": programs.TINY,
    "compressive": programs.COMPRESSIVE,
    "memformer": [*programs.MEMFORMER, "--task-infilling", 0.4],
    "memorizing": programs.MEMORIZING,
    "pretrained_recurrence": [*programs.WINDOWED, "--overlap", 3],
}
MOMENTS = {  # what a process is killed in: (owner of a function, the function, the call of it)
    "a validation": ("accelerated.evaluation.score", "predictions", 9),
    "the last report": ("train", "report", 1),
    "writing a checkpoint": ("accelerated.training.checkpoint", "file_checksum", 4),
    "tokenising": ("accelerated.data.tokenizers:ByteTokenizer", "encode", 3),
    "writing the manifest": ("accelerated.data.corpus", "open_cache", 1),
    "learning a tokenizer": ("accelerated.data.tokenizers", "learn_ranks", 1),
}
KILLS = max(3, int(os.environ.get("PALIMPSEST_TRIALS", "0")) // 4)  # of each model's runs


@pytest.mark.parametrize("number", STOPS)
@pytest.mark.parametrize("told", [True, False])
def test_the_first_signal_asks_for_a_stop_a_second_stops_at_once_and_the_old_handlers_are_restored(number, told, capfd):
    """A closed terminal asks as Ctrl-C does."""
    before = [signal.getsignal(stop) for stop in STOPS]
    with Interruption(told) as interruption:
        assert interruption.signal is None
        os.kill(os.getpid(), number)
        assert interruption.signal == signal.Signals(number).name
        assert ("finishing this step and saving; again to stop now" in capfd.readouterr().err) is told
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)
    assert [signal.getsignal(stop) for stop in STOPS] == before


def test_what_nohup_started_goes_on_when_the_terminal_is_closed():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interruption() as interruption:
            os.kill(os.getpid(), signal.SIGHUP)
            assert interruption.signal is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_interrupted_last_report_is_finished_by_resuming(text, tmp_path, monkeypatch):
    options, run = [*programs.COMPRESSIVE, *OFTEN, *BRIEF, "--data", text], tmp_path / "cut"
    train(*options, "--out", tmp_path / "whole")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt) as caught:
        patch.setattr("train.report", lambda run: os.kill(os.getpid(), signal.SIGINT))
        train(*options, "--out", run)
    assert str(caught.value) == f"the model is saved; for its last report: python train.py --resume {run}"
    assert not is_finished(run, STEPS)
    train("--resume", run)
    assert not differences(tmp_path / "whole", run) and measurements(run)[-1]["final"]
    with pytest.raises(InputError, match=f"is at step {STEPS}; give --steps above that"):
        train("--resume", run)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The children's server, so that no test's time includes its imports."""
    assert ended(start(["--help"], tmp_path_factory.mktemp("server") / "errors")) == [0]


@pytest.mark.parametrize("model,processes", [*((model, 1) for model in MODELS), ("compressive", 2)])
def test_killed_at_random_moments_a_run_ends_as_if_undisturbed(text, tmp_path, server, model, processes):
    """Run after run until so many processes have been killed."""
    options = [*MODELS[model], *OFTEN, *BRIEF, "--batch", 4, "--data", text, "--data-dir", tmp_path / "data"]
    errors, began, kills, trial = tmp_path / "errors", time.perf_counter(), 0, 0
    assert ended(start([*options, "--out", tmp_path / "whole"], errors, processes=processes)) == [0] * processes
    duration, rng = time.perf_counter() - began, random.Random(f"{model} {processes}")
    while kills < KILLS:
        run, trial = tmp_path / f"cut-{trial}", trial + 1
        while not is_finished(run, STEPS):
            command = ["--resume", run] if checkpoint_path(run).exists() else [*options, "--out", run]
            started = start(command, errors, processes=processes)
            if kills < KILLS:
                time.sleep(rng.uniform(0, duration / 2))
                kills += killed(started)
            else:
                assert ended(started) == [0] * processes, errors.read_text()
        assert not differences(tmp_path / "whole", run)
    assert processes > 1 or "Traceback" not in errors.read_text()


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_in_the_middle_of_something_a_run_ends_as_if_undisturbed(text, tmp_path, server, moment):
    text.write_bytes(text.read_bytes() * (150 if moment == "tokenising" else 1))
    options = [*programs.COMPRESSIVE, *OFTEN, *BRIEF, "--data", text]
    if moment == "learning a tokenizer":
        pytest.importorskip("tokenizers", reason="learning needs the extra bpe: pip install -e '.[bpe]'")
        options += ["--train-bpe", 300]
    run = tmp_path / "cut"
    assert killed(hanging([*options, "--out", run, "--data-dir", tmp_path / "data"], tmp_path, *MOMENTS[moment]))
    train(*options, "--out", tmp_path / "whole", "--data-dir", tmp_path / "other data")
    command = ["--resume", run] if checkpoint_path(run).exists() else [*options, "--out", run]
    train(*command, "--data-dir", tmp_path / "data")
    assert not differences(tmp_path / "whole", run)
    assert not [*run.glob("*.writing"), *(tmp_path / "data").rglob("*.writing")]


# While tokens are waited for

BEGIN = """
from accelerated.program import progress
from accelerated.program.errors import run_program
progress.SECONDS = 0.001
from tests.helpers.texts import small_encoding
from accelerated.data.config import DataConfig
from accelerated.data.corpus import tokenised
from accelerated.data.sources import source_of_path
from accelerated.data.tokenizers import BpeTokenizer, train_bpe
source = source_of_path(DataConfig("book.txt"))
run_program("train.py", lambda: """
CALLS = {
    "learning 20,000 tokens": "train_bpe(source, 20_000))",
    "tokenising": "tokenised(source, BpeTokenizer('small', small_encoding()), 'cache'))",
}


@pytest.mark.parametrize("shown", CALLS)
def test_learning_and_tokenising_show_their_progress_and_end_when_interrupted(tmp_path, monkeypatch, shown):
    """At once, and nothing is half-written. In 12 MB of text every word is another, so that its tokens take a while to learn."""
    pytest.importorskip("tokenizers", reason="learning needs the extra bpe: pip install -e '.[bpe]'")
    letters = random.Random(0).randbytes(5_400_000).hex()
    (tmp_path / "book.txt").write_text(" ".join(letters[i : i + 9] for i in range(0, len(letters), 9)))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    command = [sys.executable, "-c", BEGIN + CALLS[shown]]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        printed = next(line for line in process.stderr if shown in line)
        began = time.perf_counter()
        process.send_signal(signal.SIGINT)
        printed += process.stderr.read()
        code, seconds = process.wait(), time.perf_counter() - began
    assert code == 130 and seconds < 3.0 and printed.endswith("\ntrain.py: interrupted\n") and "Traceback" not in printed
    assert {path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()} <= {".lock"}
