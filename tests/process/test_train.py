"""train.py as a user runs it: what it says and keeps, and a run stopped and resumed.

Also a run that several processes share.
"""

import os
import re
import shlex
import signal
from unittest.mock import Mock

import pytest

import train as training_script
from accelerated.data.sources import split_of
from accelerated.training.folder import read_metrics
from tests.helpers import programs
from tests.helpers.comparison import assert_agree
from tests.helpers.programs import (
    as_json,
    differences,
    ended,
    measurements,
    saved,
    start,
    train,
    words,
)

BRIEF = words("--sample 0 --validation-tokens 24")
TASKS = words("--task-infilling 0.4 --task-recall 0.2")
OPTIONS = {  # of each model, and of Memformer's two forms
    "block_recurrent": programs.TINY,
    "compressive": words(*programs.COMPRESSIVE, "--backprop checkpointed"),
    "memformer": words(*programs.MEMFORMER, *TASKS, "--backprop memory_replay"),
    "decoder-only": words(*programs.MEMFORMER, "--encoder-layers 0 --backprop memory_replay"),
    "memorizing": words(*programs.MEMORIZING, "--backprop memory_replay"),
    "pretrained_recurrence": words(*programs.WINDOWED, "--overlap 3"),
}
JOINED = ("memformer", "pretrained_recurrence")  # documents are joined when a run is resumed


@pytest.fixture
def stop_at(monkeypatch):
    """stop_at(step): a real SIGTERM comes while the next runs read for that iteration.

    stop_at(None): none comes.
    """
    read = training_script.next_segments

    def choose(step):
        def reading(run):
            if run.step == step:
                os.kill(os.getpid(), signal.SIGTERM)
            return read(run)

        monkeypatch.setattr(training_script, "next_segments", reading)

    return choose


@pytest.fixture
def texts(tmp_path):
    """A folder of short texts; one, the first of the validation split, is empty."""
    folder = programs.write_texts(tmp_path / "texts")
    (folder / "36.txt").write_text("")
    return folder


def test_training_saves_reports_and_samples(text, tmp_path, capsys, stop_at):
    """Printed commands can be pasted into a shell, and eval.py finds the score that was printed."""
    run = tmp_path / "a run; of mine"
    data = tmp_path / "the data"
    other = tmp_path / "other"
    stop_at(1)
    begun = f"--data {text} --batch 24 --steps 3 --out '{run}'"
    train(*programs.TINY, begun, "--data-dir", data)
    stop_at(None)
    train("--resume", run, "--data-dir", data)
    assert saved(run)["step"] == 3
    printed = capsys.readouterr().out
    assert re.search(r"after ⟫ how the model continues it:\n(.|\n)+⟫", printed)
    for command in ("continue with: python train.py --resume", "  python eval.py positions"):
        [words] = re.findall(f"{command} (.*)\n", printed)
        assert shlex.split(words) == [str(run), "--data-dir", str(data)]

    [cleared] = re.findall("with the memory, (.*) cleared each segment", printed)
    record = as_json(capsys, run, "--clear-memory --data-dir", other)
    assert record["memory_cleared"]
    assert record["bits_per_byte"] == pytest.approx(float(cleared), abs=6e-4)
    assert (data / "tokens").is_dir()
    assert (other / "tokens").is_dir()


@pytest.mark.parametrize("model", OPTIONS)
def test_a_stopped_run_resumes_bit_for_bit(text, texts, tmp_path, model, stop_at, capsys):
    """Stopped by a signal in the third of five steps, it ends with all that a whole run saves.

    It has the same measurements, too. Two models read joined documents, beyond the first pass. A
    signal in the last step stops nothing.
    """
    options = words(*OPTIONS[model], *BRIEF, "--dropout 0.2 --log-every 2 --steps 5")
    if model in JOINED:
        of_data = f"--data {texts} --carry-over-documents --training-documents 4 --horizon 5"
    else:
        of_data = f"--data {text} --horizon 2"
    options += words(of_data)
    whole = tmp_path / "whole"
    cut = tmp_path / "cut"
    stop_at(5)
    train(*options, "--out", whole)
    assert f"saved in {whole}" in capsys.readouterr().out
    stop_at(3)
    train(*options, "--out", cut)
    stop_at(None)
    assert saved(cut)["step"] == 3
    train("--resume", cut)
    assert not differences(whole, cut)
    assert [line["step"] for line in read_metrics(cut) if "loss" in line] == [2, 4, 5]
    assert model not in JOINED or saved(cut)["lanes"]["passes"] > 0


def test_a_sample_continues_a_validation_document_by_the_seed(texts, tmp_path, monkeypatch, capsys):
    """The seed is of the weights too, so the generator that draws the sample is looked at.

    An empty text gives no prompt. That memory is carried over documents is said, and how it is
    then read: training/test_loop.py.
    """
    drawn = Mock(wraps=training_script.continuation.continue_text)
    monkeypatch.setattr(training_script.continuation, "continue_text", drawn)
    run = tmp_path / "run"
    options = f"--data {texts} --carry-over-documents --sample 3 --steps 5 --seed 7 --out {run}"
    train(*programs.COMPRESSIVE, options)
    printed = capsys.readouterr().out
    assert "training documents, memory carried over them" in printed
    assert "how the model continues it:\ntext number" in printed
    [call] = drawn.call_args_list
    assert call.args[-1].initial_seed() == 7
    paths = sorted(texts.iterdir())
    valid = [path.read_bytes() for path in paths if split_of(path.name) == "valid"]
    first = next(filter(None, valid))
    assert bytes(call.args[1][0].tolist()) == first[:-1][:32]


def test_epochs_say_how_many_steps_and_no_gradient_has_a_norm_before_the_first_update(
    text, tmp_path
):
    """There are 1,350 segments, and a step reads 6. The rest: training/test_run.py."""
    options = f"--horizon 2 --update-every 3 --log-every 1 --epochs {6 * 6 / 1350}"
    options += f" --learning-rate 0.1 --final-fraction 0.25 --data {text} --out {tmp_path}/run"
    train(*programs.COMPRESSIVE, *BRIEF, options)
    logged = [record for record in read_metrics(tmp_path / "run") if "loss" in record]
    assert len(logged) == 6, "it has other steps than its epochs"
    assert logged[-1]["learning_rate"] == pytest.approx(0.025), "the schedule ends there"
    first, second, *norms = (record.get("gradient_norm", 0.0) for record in logged)
    assert first == second == 0.0, "a norm of no update is logged"
    assert all(norm > 0 for norm in norms), norms


@pytest.mark.parametrize("model", ["compressive", "memformer"])
def test_two_processes_are_one(text, tmp_path, model):
    """The same log, parameters and state, in float64 to rounding.

    What one process began, two continue. The first process alone writes.
    """
    options = words(*OPTIONS[model], *BRIEF, f"--data {text}")
    options += words("--horizon 2 --batch 4 --dtype float64 --dropout 0 --clip 0.5")
    options += words("--log-every 1 --validate-every 2 --schedule constant")
    one = tmp_path / "one"
    two = tmp_path / "two"
    train(*options, f"--steps 3 --out {one}")
    train(*options, f"--steps 1 --out {two}")
    errors = tmp_path / "errors"
    started = start([f"--resume {two} --steps 3"], errors, processes=2)
    assert ended(started) == [0, 0], errors.read_text()
    logged = [line for line in measurements(two) if line["step"] > 1 or "loss" in line]
    for line, expected in zip(logged, measurements(one), strict=True):
        assert line == pytest.approx(expected, rel=1e-9)
    expected = saved(one)
    found = saved(two)
    assert expected["lanes"] == found["lanes"]
    assert_agree(expected["parameters"], found["parameters"], 1e-8)
    for field, other in zip(expected["state"], found["state"], strict=True):
        assert_agree(field, other, 1e-8)
