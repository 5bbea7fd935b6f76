"""train.py as a user runs it: what it says and keeps, and a run stopped and resumed.

Also a run that several processes share.
"""

import math
import os
import re
import shlex
import signal
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

import train as training_script
from accelerated.data.lanes import Lanes
from accelerated.data.sources import split_of
from accelerated.training import run as runs
from accelerated.training.checkpoint import load_checkpoint, save_checkpoint
from accelerated.training.folder import read_metrics
from accelerated.training.options import parse
from tests.helpers import programs
from tests.helpers.comparison import assert_agree
from tests.helpers.programs import (
    as_json,
    differences,
    ended,
    measurements,
    refusal,
    saved,
    start,
    train,
    words,
)
from tests.helpers.texts import BYTES, documents_of

BRIEF = words("--sample 0 --validation-tokens 24")
TASKS = words("--task-infilling 0.4 --task-recall 0.2")
OPTIONS = {  # of each model, and of Memformer's two forms
    "block_recurrent": programs.TINY,
    "compressive": programs.COMPRESSIVE,
    "memformer": [*programs.MEMFORMER, *TASKS],
    "decoder-only": words(*programs.MEMFORMER, "--encoder-layers 0"),
    "memorizing": programs.MEMORIZING,
    "pretrained_recurrence": words(*programs.WINDOWED, "--overlap 3"),
}
METHODS = {  # --backprop
    "block_recurrent": "through_time",
    "compressive": "checkpointed",
    "memformer": "memory_replay",
    "decoder-only": "memory_replay",
    "memorizing": "memory_replay",
    "pretrained_recurrence": "through_time",
}
JOINED = ("memformer", "pretrained_recurrence")  # documents are joined when a run is resumed


def losses(run):
    """{step: loss} of a run's log."""
    return {record["step"]: record["loss"] for record in read_metrics(run) if "loss" in record}


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

    [both] = re.findall(r"bits per byte: (.*) with the memory, (.*) cleared each segment", printed)
    evaluated = []
    for clear in (False, True):
        record = as_json(capsys, run, "--clear-memory" if clear else "", "--data-dir", other)
        assert record["memory_cleared"] is clear
        evaluated.append(record["bits_per_byte"])
    assert [float(bits) for bits in both] == pytest.approx(evaluated, abs=6e-4)
    assert evaluated[0] != evaluated[1]
    assert (data / "tokens").is_dir()
    assert (other / "tokens").is_dir()


@pytest.mark.parametrize("model", OPTIONS)
def test_a_stopped_run_resumes_bit_for_bit(text, texts, tmp_path, model, stop_at, capsys):
    """Stopped by a signal in the third of five steps, it ends with all that a whole run saves.

    It has the same measurements, too. Two models read joined documents, beyond the first pass. A
    signal in the last step stops nothing.
    """
    options = words(*OPTIONS[model], *BRIEF, "--dropout 0.2 --log-every 2 --steps 5")
    options += words(f"--backprop {METHODS[model]}")
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
    assert list(losses(cut)) == [2, 4, 5]
    assert model not in JOINED or saved(cut)["lanes"]["passes"] > 0


def test_the_seed_decides_what_is_dropped(text, tmp_path):
    """The order of documents too: training/test_loop.py."""
    states = []
    for seed in (0, 1):
        run = tmp_path / str(seed)
        train(*programs.COMPRESSIVE, f"--data {text} --steps 1 --seed {seed} --out {run}")
        states.append(saved(run)["random"])
    assert not torch.equal(*states), "both seeds leave the same state of the generator"


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


@pytest.fixture
def compressive(text, tmp_path):
    """A function that trains a small Compressive Transformer into the folder of that name."""

    def run(name, options):
        folder = tmp_path / name
        train(*programs.COMPRESSIVE, *BRIEF, f"--data {text} --out {folder}", options)
        return folder

    return run


@pytest.fixture
def saves(monkeypatch):
    """A list to which the step of every last checkpoint is added."""
    steps = []
    save = runs.save_checkpoint

    def saving(path, contents):
        if path.name == "checkpoint.pt":
            steps.append(contents["step"])
        save(path, contents)

    monkeypatch.setattr(runs, "save_checkpoint", saving)
    return steps


def test_between_updates_nothing_is_saved_or_stopped(compressive, saves, stop_at):
    """Gathered gradients would be lost: a checkpoint of step 4 comes at 5.

    A signal in step 4 ends the run at 5, and what is logged then does not change.
    """
    options = "--update-every 3 --update-every-from 2 --save-every 4 --steps 7 --log-every 1"
    whole = compressive("whole", options)
    assert saves == [0, 5, 7]
    saves.clear()
    stop_at(4)
    cut = compressive("cut", options)
    stop_at(None)
    train("--resume", cut)
    assert saves == [0, 5, 7]
    assert not differences(whole, cut)


def test_before_the_first_update_there_is_no_gradients_norm(compressive):
    run = compressive("run", "--update-every 3 --steps 4 --log-every 1")
    logged = [record for record in read_metrics(run) if "loss" in record]
    assert ["gradient_norm" in record for record in logged] == [False, False, True, True]
    norms = [record["gradient_norm"] for record in logged if "gradient_norm" in record]
    assert all(norm > 0 for norm in norms), norms


def test_a_validation_asks_for_a_checkpoint_and_waits_for_the_update(compressive, saves):
    run = compressive("run", "--update-every 4 --steps 6 --validate-every 3")
    assert saves == [0, 4, 4, 6, 6], "before each validation and after it"
    validated = [record["step"] for record in read_metrics(run) if "validation_loss" in record]
    assert validated == [4, 6, 6], "and the last report"
    assert list(losses(run)) == [4, 6], "a line before each validation, none without"


def assert_same_model(first, second, tolerance):
    """Assert that the last checkpoints of two runs have the same weights and state, to rounding."""
    rows = []
    for run in (first, second):
        contents = saved(run)
        state = {f"state {place}": field for place, field in enumerate(contents["state"])}
        rows.append(contents["parameters"] | state)
    assert_agree(*rows, tolerance)


@pytest.mark.parametrize("model", ["compressive", "memformer"])
def test_two_processes_are_one(text, tmp_path, model):
    """The same log, parameters and state, in float64 to rounding.

    What one process began, two continue. The first process alone writes.
    """
    options = words(*OPTIONS[model], *BRIEF, f"--data {text} --backprop {METHODS[model]}")
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
    assert saved(one)["lanes"] == saved(two)["lanes"]
    assert_same_model(one, two, 1e-8)


def test_a_resumed_run_does_not_forget_its_best(text, tmp_path, monkeypatch):
    """The best is written first: after it a kill loses nothing. The last report measures no more.

    It takes the last validation's score, and measures it with the memory cleared alone.
    """
    evaluation = training_script.score.evaluate
    bits = []
    names = []
    save = runs.save_checkpoint

    def scored(*read):
        return evaluation(*read)._replace(nats=bits.pop(0) * math.log(2) * 100, text_bytes=100)

    def saving(path, contents):
        names.append(path.stem)
        save(path, contents)

    monkeypatch.setattr(runs, "save_checkpoint", saving)
    monkeypatch.setattr(training_script.score, "evaluate", scored)
    run = tmp_path / "run"
    bits += [5.0, 3.0, 4.0, 6.0]  # after steps 2, 4, 6, and with the memory cleared
    options = "--save-every 1 --validate-every 2 --steps 6"
    train(*programs.TINY, *BRIEF, f"--data {text} --out {run}", options)
    bits += [3.2, 6.0]  # after step 7, and with the memory cleared
    train("--resume", run, "--steps 7")
    assert not bits, f"these validations were not made: {bits}"
    assert load_checkpoint(run / "best.pt")["step"] == 4
    assert saved(run)["best"] == pytest.approx(3.0)
    assert names[:5] == [*["checkpoint"] * 3, "best", "checkpoint"]


OTHER_MEASURES = ["--validation-tokens 48", "--validation-prefix 99", "--clear-memory"]


@pytest.mark.parametrize("changed", ["", *OTHER_MEASURES])
def test_the_best_of_another_measurement_is_no_rival(compressive, changed):
    """Options that change what a validation measures; without one the best stays."""
    run = compressive("run", "--steps 1")
    save_checkpoint(run / "checkpoint.pt", saved(run) | {"best": 0.0})
    train("--resume", run, "--steps 2 --validate-every 1", changed)
    is_cleared = "cleared_bits_per_byte" in read_metrics(run)[-1]
    assert is_cleared == (changed != "--clear-memory"), "a control has no other measurement"
    assert (saved(run)["best"] > 0) == bool(changed)
    assert (run / "best.pt").exists() == bool(changed)


def test_tokens_are_those_that_all_processes_read(monkeypatch):
    """Each of two has one of two lanes; speed is that of both."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    settings, _ = parse(words(*programs.COMPRESSIVE, "--batch 2"))
    documents = documents_of([30, 30])
    run = SimpleNamespace(
        settings=settings, reader=Lanes(documents, 2, 8, 0), tokenizer=BYTES, tokens=0
    )
    [segment], scored, _ = training_script.next_segments(run)
    assert len(segment.tokens) == 1
    assert run.tokens == scored == 2 * 8, "tokens of this process alone: look at next_segments"


def test_epochs_say_how_many_steps(compressive):
    """There are 1,350 segments, and a step reads 6. The rest: training/test_run.py."""
    options = f"--horizon 2 --log-every 4 --epochs {6 * 6 / 1350}"
    run = compressive("run", f"{options} --learning-rate 0.1 --final-fraction 0.25")
    _, second, last = read_metrics(run)
    assert second["step"] == last["step"] == 6
    assert second["learning_rate"] == pytest.approx(0.025), "the schedule ends there"


NAN = torch.tensor(math.nan)


def without_loss(model, segments, state, **_):
    """A way of back-propagation whose loss is NaN."""
    return NAN, {}, state


def set_nan(optimizer, rate):
    """Instead of a rate set a parameter."""
    optimizer.param_groups[0]["params"][0].data.view(-1)[3] = NAN


BROKEN = {  # {what becomes NaN: (function, what takes its place)}
    "loss": ("accelerated.training.optimization.BACKPROP", {"through_time": without_loss}),
    "gradient's norm": ("accelerated.training.optimization.average_and_clip", lambda *_: NAN),
    "parameters": ("accelerated.training.optimization.set_learning_rate", set_nan),
    "layers.0.compression": ("accelerated.compressive.Layer.compression_loss", lambda *_: NAN),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_run_that_finds_a_nan_leaves_its_last_checkpoint(compressive, monkeypatch, what):
    run = compressive("run", "--steps 2")
    before = {path: path.read_bytes() for path in run.glob("*.pt")}
    monkeypatch.setattr(*BROKEN[what])
    said = f"the {what} is nan at step 3; what was saved before stays; try a lower"
    assert said in refusal(train, f"--resume {run} --steps 3")
    assert {path: path.read_bytes() for path in run.glob("*.pt*")} == before
