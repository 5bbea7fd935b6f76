"""Runs that are interrupted at any moment, by a signal or killed, end bit for bit where an undisturbed run ends."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from accelerated.evaluation import score
from accelerated.program.errors import InputError
from accelerated.training import run as runs
from accelerated.training.folder import checkpoint_path
from accelerated.training.log import is_finished
from tests.helpers.programs import (
    COMPRESSIVE,
    MEMFORMER,
    MEMORIZING,
    ROOT,
    TINY,
    WINDOWED,
    differences,
    ended,
    hanging,
    killed,
    measurements,
    saved,
    start,
    train,
)

STEPS = 9
OFTEN = ["--steps", STEPS, "--save-every", 1, "--validate-every", 3, "--keep", 2, "--log-every", 1, "--dropout", 0.1]
BRIEF = ["--sample", 0, "--validation-segments", 5]
MODELS = {
    "block_recurrent": TINY,
    "compressive": COMPRESSIVE,
    "memformer": [*MEMFORMER, "--task-infilling", 0.4],
    "memorizing": MEMORIZING,
    "pretrained_recurrence": [*WINDOWED, "--overlap", 3],
}
MOMENTS = {  # what a process is killed in: (owner of a function, the function, the call of it)
    "a validation": ("accelerated.evaluation.score", "predictions", 9),
    "the last report": ("train", "report", 1),
    "writing a checkpoint": ("accelerated.training.checkpoint", "file_checksum", 4),
    "copying a checkpoint": ("os", "link", 5),
    "tokenising": ("accelerated.data.tokenizers:ByteTokenizer", "encode", 3),
    "writing the manifest": ("accelerated.data.corpus", "manifest_text", 1),
    "learning a tokenizer": ("accelerated.data.tokenizers", "learn_ranks", 1),
}
KILLS = max(3, int(os.environ.get("PALIMPSEST_TRIALS", "0")) // 4)  # of each model's runs


@pytest.fixture
def signal_in(monkeypatch):
    """signal_in(numbers): a real signal comes in the middle of these validations, counted from 1, of the next runs.

    Returns a list with the number of segments that each validation has read.
    """
    evaluate, predictions = score.evaluate, score.predictions

    def choose(numbers=(), kind=signal.SIGINT):
        read = []

        def evaluating(*given):
            read.append(0)
            return evaluate(*given)

        def predicting(*given):
            read[-1] += 1
            if len(read) in numbers and read[-1] == 2:
                os.kill(os.getpid(), kind)
            return predictions(*given)

        monkeypatch.setattr(score, "evaluate", evaluating)
        monkeypatch.setattr(score, "predictions", predicting)
        return read

    return choose


@pytest.fixture
def undisturbed(text, tmp_path):
    """The options of a run, and the folder of one that nothing disturbed."""
    options = [*COMPRESSIVE, *OFTEN, *BRIEF, "--data", text]
    train(*options, "--out", tmp_path / "whole")
    return options, tmp_path / "whole"


@pytest.mark.parametrize("step,kind", [(6, signal.SIGINT), (STEPS, signal.SIGTERM)])
def test_a_signal_leaves_a_validation_at_once_and_the_next_one_that_is_owed(undisturbed, tmp_path, capsys, signal_in, step, kind):
    """Resuming makes it."""
    options, whole = undisturbed
    run = tmp_path / "cut"
    for argv, number in (([*options, "--out", run], step // 3), (["--resume", run], 1)):
        read = signal_in({number}, kind)
        capsys.readouterr()
        train(*argv)
        assert f"stopped by {kind.name} and saved; continue with: python train.py --resume {run}\n" in capsys.readouterr().out
        assert len(read) == number and read[-1] == 2 and all(segments > 2 for segments in read[:-1]), "nothing more is read"
        assert (saved(run)["step"], saved(run)["validation_due"]) == (step, True)
        steps = [record["step"] for record in measurements(run) if "validation_tokens" in record]
        assert steps == [*range(3, step, 3)], "of the validations"
    signal_in()
    train("--resume", run)
    assert not differences(whole, run)


def test_a_second_signal_stops_at_once_and_the_run_continues_from_the_step_before(undisturbed, tmp_path, monkeypatch, signal_in):
    """The first comes in a validation, the second while the run is being saved."""
    options, whole = undisturbed
    run, save = tmp_path / "cut", runs.save_in_run
    signal_in({2})

    def saving(folder, contents, *others):
        if contents["validation_due"]:
            os.kill(os.getpid(), signal.SIGINT)
        save(folder, contents, *others)

    with monkeypatch.context() as patch:
        patch.setattr(runs, "save_in_run", saving)
        with pytest.raises(KeyboardInterrupt):
            train(*options, "--out", run)
    assert saved(run)["step"] == 5
    signal_in()
    train("--resume", run)
    assert not differences(whole, run)


def test_an_interrupted_last_report_is_finished_by_resuming(undisturbed, tmp_path, signal_in):
    options, whole = undisturbed
    run = tmp_path / "cut"
    signal_in({STEPS // 3 + 1})
    with pytest.raises(KeyboardInterrupt) as caught:
        train(*options, "--out", run)
    assert str(caught.value) == f"the model is saved; for its last report: python train.py --resume {run}"
    assert not is_finished(run, STEPS)
    signal_in()
    train("--resume", run)
    assert not differences(whole, run) and measurements(run)[-1]["final"]
    with pytest.raises(InputError, match=f"is at step {STEPS}; give --steps above that"):
        train("--resume", run)


@pytest.mark.parametrize(
    "script,module",
    [("train.py", "numpy"), ("train.py", "accelerated.replay"), ("eval.py", "torch"), ("eval.py", "torch.nn.functional")],
)
def test_an_interrupt_during_the_imports_ends_with_one_line(script, module):
    """A real signal comes at the moment when a module is looked for."""
    program = (
        "import os, runpy, signal, sys\n"
        "class Interrupting:\n"
        f"    find_spec = lambda name, *_: os.kill(os.getpid(), signal.SIGINT) if name == {module!r} else None\n"
        "sys.meta_path.insert(0, Interrupting)\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    argv = [script, "score", "runs/none"] if script == "eval.py" else [script]
    program = program.replace("runpy.run", f"sys.argv = {argv}; runpy.run")
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, f"\n{script}: interrupted\n")


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
    options = [*COMPRESSIVE, *OFTEN, *BRIEF, "--data", text]
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
