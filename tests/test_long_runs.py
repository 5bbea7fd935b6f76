"""Runs that go on for days: stopped, gone on with, measured, kept, shared by several processes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from test_command_line import COMPRESSIVE, MEMFORMER, ROOT, TINY, WINDOWED, evaluate, saved, text, train  # noqa: F401

import train as training_script
from accelerated.errors import InputError
from accelerated.training import checkpoint as checkpoint
from accelerated.training import log as metrics
from accelerated.training.checkpoint import best_path, checkpoint_path, numbered_checkpoints
from accelerated.training.log import Metrics, read_metrics
from accelerated.training.process import Interruption

BRIEF = ["--sample", 0, "--validation-segments", 2]
MODELS = {
    "block_recurrent": TINY, "compressive": COMPRESSIVE, "memformer": [*MEMFORMER, "--task-infilling", 0.4, "--task-recall", 0.2],
    "pretrained_recurrence": [*WINDOWED, "--overlap", 3],
}  # fmt: skip


def equal(first, second):
    """Whether two saved values are the same to the bit."""
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(equal(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(equal, first, second))
    return first == second


def losses(run):
    return {record["step"]: record["loss"] for record in read_metrics(run) if "loss" in record}


class StopAt:
    """Stands in for Interruption: the signal comes while iteration `step` is under way."""

    def __init__(self, step):
        self.left = step

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    @property
    def signal(self):
        self.left -= 1
        return "SIGTERM" if self.left <= 0 else None


@pytest.mark.parametrize("method", ["through_time", "checkpointed", "memory_replay"])
@pytest.mark.parametrize("model", MODELS)
def test_a_stopped_run_goes_on_bit_for_bit(text, tmp_path, model, method, monkeypatch):  # noqa: F811
    """Stopped by a signal in the fourth of seven steps: all that is saved at the end, and every loss, is that of a whole run."""
    options = [
        *MODELS[model],
        "--data",
        text,
        "--backprop",
        method,
        "--horizon",
        2,
        "--dropout",
        0.2,
        "--steps",
        7,
        "--log-every",
        3,
    ]
    options += BRIEF
    train(*options, "--out", tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(training_script, "Interruption", lambda: StopAt(4))
        train(*options, "--out", tmp_path / "cut")
    assert saved(tmp_path / "cut")["step"] == 4
    train("--resume", tmp_path / "cut")
    whole, cut = saved(tmp_path / "whole"), saved(tmp_path / "cut")
    assert whole.keys() == cut.keys() and not [key for key in whole if not equal(whole[key], cut[key])]
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole") and list(losses(tmp_path / "cut")) == [3, 6, 7]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_exits_cleanly(text, tmp_path, number):  # noqa: F811
    argv = [
        sys.executable,
        "train.py",
        "--data",
        text,
        *TINY,
        "--steps",
        100_000,
        "--save-every",
        100_000,
        "--out",
        tmp_path / "run",
    ]
    process = subprocess.Popen([str(a) for a in argv], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not losses(tmp_path / "run"):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and "Traceback" not in err
    assert f"stopped by {signal.Signals(number).name} and saved; go on with: python train.py --resume {tmp_path / 'run'}" in out
    assert saved(tmp_path / "run")["step"] >= max(losses(tmp_path / "run"))


def test_a_second_signal_stops_at_once_and_the_handlers_come_back():
    before = signal.getsignal(signal.SIGINT)
    with Interruption() as interruption:
        assert interruption.signal is None
        os.kill(os.getpid(), signal.SIGINT)
        assert interruption.signal == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_signal_between_updates_waits_for_the_next(text, tmp_path, monkeypatch):  # noqa: F811
    """--update-every 3: stopped in iteration 4, gathered gradients are used in the sixth and the run ends there."""
    monkeypatch.setattr(training_script, "Interruption", lambda: StopAt(4))
    train(*COMPRESSIVE, "--data", text, "--update-every", 3, "--steps", 9, "--out", tmp_path / "run")
    assert saved(tmp_path / "run")["step"] == 6


def test_the_last_k_and_the_best_are_kept(text, tmp_path, monkeypatch, capsys):  # noqa: F811
    bits = iter([5.0, 3.0, 4.0, 3.5])

    def scored(model, documents, tokenizer, lanes, **_):
        return training_script_evaluate(model, documents, tokenizer, lanes, segments=1)._replace(
            nats=next(bits) * 0.6931471805599453 * 100, text_bytes=100
        )

    training_script_evaluate = training_script.evaluate
    monkeypatch.setattr(training_script, "report", lambda *_: None)
    monkeypatch.setattr(training_script, "evaluate", scored)
    options = ["--data", text, *TINY, "--save-every", 1, "--keep", 3, "--validate-every", 2, "--steps", 8, *BRIEF]
    train(*options, "--out", tmp_path / "run")
    run = tmp_path / "run"
    assert list(numbered_checkpoints(run)) == [6, 7, 8] and saved(run)["step"] == 8
    assert torch.load(best_path(run), weights_only=True)["step"] == 4 and saved(run)["best"] == pytest.approx(3.0)
    rows = [r for r in read_metrics(run) if "validation_bits_per_byte" in r]
    assert [(r["step"], round(r["validation_bits_per_byte"], 6)) for r in rows] == [(2, 5.0), (4, 3.0), (6, 4.0), (8, 3.5)]
    monkeypatch.undo()
    for name, step in (("best", 4), ("step-7", 7), ("last", 8)):
        capsys.readouterr()
        evaluate(run, "--checkpoint", name)
        assert f"step {step}" in capsys.readouterr().out
    with pytest.raises(InputError, match=r"--checkpoint step-2: .*run has last, best, step-6, step-7, step-8"):
        evaluate(run, "--checkpoint", "step-2")


def test_a_best_checkpoint_is_not_forgotten_by_a_resumed_run(text, tmp_path, monkeypatch):  # noqa: F811
    options = ["--data", text, *TINY, "--validate-every", 1, "--validation-segments", 1, *BRIEF]
    train(*options, "--steps", 2, "--out", tmp_path / "run")
    contents = saved(tmp_path / "run")
    checkpoint.save_checkpoint(checkpoint_path(tmp_path / "run"), contents | {"best": 0.5})
    before = best_path(tmp_path / "run").read_bytes()
    train("--resume", tmp_path / "run", "--steps", 3)
    assert best_path(tmp_path / "run").read_bytes() == before and saved(tmp_path / "run")["best"] == 0.5


def test_going_back_to_an_earlier_checkpoint_drops_those_after_it(tmp_path):
    from test_checkpoint import CONTENTS

    for step in (3, 5, 9, 4):
        checkpoint.save_in_run(tmp_path, CONTENTS | {"step": step}, 2)
    assert list(numbered_checkpoints(tmp_path)) == [4]
    checkpoint.save_in_run(tmp_path, CONTENTS | {"step": 6}, 2)
    assert list(numbered_checkpoints(tmp_path)) == [4, 6]


@pytest.mark.parametrize("keep", [1, 2])
def test_kept_checkpoints_are_copies_where_the_disk_has_no_links(tmp_path, monkeypatch, keep):
    from test_checkpoint import CONTENTS

    def refuse(*_):
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    for step in (3, 5, 9):
        checkpoint.save_in_run(tmp_path, CONTENTS | {"step": step}, keep, best=step == 5)
    names = ["best.pt", "checkpoint.pt", *(["step-5.pt", "step-9.pt"] if keep == 2 else [])]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert checkpoint.load_checkpoint(best_path(tmp_path))["step"] == 5 and saved(tmp_path)["step"] == 9


def test_time_makes_checkpoints_too(text, tmp_path, monkeypatch):  # noqa: F811
    steps, save = [], training_script.save_in_run
    monkeypatch.setattr(training_script, "save_in_run", lambda run, c, *a: steps.append(c["step"]) or save(run, c, *a))
    train("--data", text, *TINY, "--steps", 3, "--save-minutes", 1e-9, *BRIEF, "--out", tmp_path / "often")
    train("--data", text, *TINY, "--steps", 3, "--save-minutes", 0, *BRIEF, "--out", tmp_path / "never")
    assert steps == [1, 2, 3, 3]


def test_metrics_are_means_and_go_on_where_a_run_does(text, tmp_path):  # noqa: F811
    options = ["--data", text, *TINY, "--schedule", "constant", *BRIEF]
    train(*options, "--steps", 6, "--log-every", 1, "--out", tmp_path / "each")
    train(*options, "--steps", 6, "--log-every", 4, "--out", tmp_path / "mean")
    each, mean = losses(tmp_path / "each"), losses(tmp_path / "mean")
    assert list(mean) == [4, 6] and mean[4] == pytest.approx(sum(each[s] for s in (1, 2, 3, 4)) / 4, rel=0.02)
    [record] = [r for r in read_metrics(tmp_path / "mean") if r["step"] == 4]
    assert record.keys() == {"step", "loss", "bits_per_byte", "learning_rate", "gradient_norm", "tokens_per_second"}
    assert record["bits_per_byte"] == pytest.approx(record["loss"] / 0.6931471805599453) and record["gradient_norm"] > 0
    with open(metrics.metrics_path(tmp_path / "each"), "a") as file:  # what a crash after the last checkpoint leaves
        file.write('{"step": 7, "loss": 1.0, "bits_per_byte": 1.0}\n{"step": 8, "lo')
    train("--resume", tmp_path / "each", "--steps", 8)
    again = losses(tmp_path / "each")
    steps = [record["step"] for record in read_metrics(tmp_path / "each") if "loss" in record]
    assert steps == [1, 2, 3, 4, 5, 6, 7, 8] and again[7] != 1.0


def test_means_weigh_by_tokens(tmp_path):
    record = Metrics(tmp_path)
    record.add(10.0, 5, 20)
    record.add(2.0, 1, 4)
    record.record(2, learning_rate=0.1)
    record.add(3.0, 1, 1)
    record.record(3)
    first, second = read_metrics(tmp_path)
    assert first == {"step": 2, "loss": 2.0, "bits_per_byte": pytest.approx(0.5 / 0.6931471805599453), "learning_rate": 0.1}
    assert second["loss"] == 3.0, "each record begins anew"


def test_curves_are_drawn_and_refreshed(text, tmp_path, monkeypatch):  # noqa: F811
    pytest.importorskip("matplotlib", reason="curves need the extra plot: matplotlib")
    drawn, draw = [], metrics.draw_curves
    monkeypatch.setattr(metrics, "draw_curves", lambda records, path: drawn.append(len(records)) or draw(records, path))
    monkeypatch.setattr(metrics, "REDRAW", 0.0)
    options = ["--data", text, *TINY, "--steps", 4, "--log-every", 1, "--validate-every", 2, "--plot", *BRIEF]
    train(*options, "--out", tmp_path / "run")
    assert (tmp_path / "run" / "curves.png").read_bytes().startswith(b"\x89PNG") and drawn[:2] == [1, 2] and drawn[-1] == 6
    assert not list((tmp_path / "run").glob("*writing*"))
    monkeypatch.setattr(metrics, "REDRAW", 1e9)
    drawn.clear()
    train(*options, "--out", tmp_path / "later")
    assert drawn == [6], "the whole curves at the end, however short the run"


def test_plots_without_matplotlib_are_refused_before_anything(text, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(InputError, match="plots need the package matplotlib; install the extra"):
        train("--data", text, *TINY, "--plot", "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("method", ["through_time", "checkpointed", "memory_replay"])
def test_lanes_in_groups_give_the_gradient_of_all_at_once(text, tmp_path, model, method):  # noqa: F811
    """Three lanes at once and one after another: the same losses and, after updates, the same parameters to rounding."""
    options = [
        *MODELS[model],
        "--data",
        text,
        "--backprop",
        method,
        "--horizon",
        2,
        "--dtype",
        "float64",
        "--steps",
        3,
        "--log-every",
        1,
    ]
    train(*options, "--dropout", 0, *BRIEF, "--out", tmp_path / "one")
    train(*options, "--dropout", 0, *BRIEF, "--accumulate", 3, "--out", tmp_path / "three")
    assert list(losses(tmp_path / "three").values()) == pytest.approx(list(losses(tmp_path / "one").values()), rel=1e-12)
    one, three = saved(tmp_path / "one"), saved(tmp_path / "three")
    for name, value in one["parameters"].items():
        assert torch.allclose(value, three["parameters"][name], rtol=0, atol=1e-10), name
    assert all(torch.allclose(a, b) for a, b in zip(one["state"], three["state"], strict=True))


def run_together(argv, processes=2):
    """train.py under torchrun, as its help says."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "train.py"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, *map(str, argv)], cwd=ROOT, capture_output=True, text=True, timeout=240, env=environment
    )  # fmt: skip


@pytest.mark.parametrize(
    "model,method",
    [
        ("block_recurrent", "memory_replay"), ("compressive", "through_time"), ("memformer", "memory_replay"),
        ("pretrained_recurrence", "checkpointed"),
    ],
)  # fmt: skip
def test_two_processes_are_one(text, tmp_path, model, method):  # noqa: F811
    """The same global batch: the same losses, validation and parameters, in float64 to rounding; stopped and gone on with too."""
    options = [
        *MODELS[model], "--batch", 4, "--data", text, "--backprop", method, "--horizon", 2, "--dtype", "float64", "--dropout", 0,
        *BRIEF, "--log-every", 1, "--clip", 0.5, "--validate-every", 4, "--schedule", "constant",
    ]  # fmt: skip
    train(*options, "--steps", 8, "--out", tmp_path / "one")
    done = run_together([*options, "--steps", 4, "--out", tmp_path / "two"])
    assert done.returncode == 0, done.stderr
    assert "2 processes" in done.stdout and done.stdout.count("saved in") == 1
    done = run_together(["--resume", tmp_path / "two", "--steps", 8])
    assert done.returncode == 0, done.stderr
    assert list(losses(tmp_path / "two").values()) == pytest.approx(list(losses(tmp_path / "one").values()), rel=1e-9)
    validated = [[r["validation_loss"] for r in read_metrics(tmp_path / run) if "validation_loss" in r] for run in ("one", "two")]
    assert validated[0] == pytest.approx(validated[1], rel=1e-9) and len(validated[0]) == 2
    one, two = saved(tmp_path / "one"), saved(tmp_path / "two")
    assert one["lanes"] == two["lanes"]
    for name, value in one["parameters"].items():
        assert torch.allclose(value, two["parameters"][name], rtol=0, atol=1e-8), name
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(one["state"], two["state"], strict=True))


def test_processes_refuse_a_batch_that_they_cannot_share(text, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="--batch 3 cannot be dealt to 2 processes evenly; give a multiple of 2"):
        train("--data", text, *TINY, "--out", tmp_path / "run")
    with pytest.raises(InputError, match="--accumulate 4 does not divide the 2 lanes a process"):
        train("--data", text, *TINY, "--batch", 4, "--accumulate", 4, "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_processes_draw_different_dropout(monkeypatch):
    from accelerated.replay import segment_seeds

    seeds = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        torch.manual_seed(5)
        seeds.append(segment_seeds([None] * 3))
    assert not set(seeds[0]) & set(seeds[1]) and torch.initial_seed() == 5


def test_data_that_changed_between_stop_and_resume_is_refused(text, tmp_path):  # noqa: F811
    train("--data", text, *TINY, "--steps", 1, *BRIEF, "--out", tmp_path / "run")
    before = checkpoint_path(tmp_path / "run").read_bytes()
    original = text.read_bytes()
    text.write_bytes(original.replace(b"gate", b"gait"))
    with pytest.raises(InputError, match=r"is no longer what .* was trained on; bring it back as it was"):
        train("--resume", tmp_path / "run", "--steps", 2)
    assert checkpoint_path(tmp_path / "run").read_bytes() == before
    text.write_bytes(original)
    train("--resume", tmp_path / "run", "--steps", 2)
    assert saved(tmp_path / "run")["step"] == 2


@pytest.mark.parametrize("option", [["--train-bpe", 300], ["--tokenizer", "ranks"]])
def test_a_run_keeps_its_tokenizer(text, tmp_path, capsys, option, monkeypatch):  # noqa: F811
    """Beside its checkpoint: it is resumed, evaluated, sampled from and begun from without the file that it came from."""
    pytest.importorskip("tokenizers", reason="learning needs the extra bpe: tokenizers")
    if option[1] == "ranks":
        train("--data", text, *TINY, "--train-bpe", 300, "--steps", 1, *BRIEF, "--out", tmp_path / "learned")
        (tmp_path / "ranks").write_bytes((tmp_path / "learned" / "tokenizer.tiktoken").read_bytes())
        option = ["--tokenizer", tmp_path / "ranks"]
    run = tmp_path / "run"
    train("--data", text, *TINY, *option, "--steps", 1, "--sample", 3, "--out", run)
    (tmp_path / "ranks").unlink(missing_ok=True)
    assert saved(run)["model_config"]["vocabulary"] == 300
    train("--resume", run, "--steps", 2)
    run = run.rename(tmp_path / "moved")
    capsys.readouterr()
    evaluate(run)
    printed = capsys.readouterr().out
    per_byte, per_token = (float(re.search(f"{name} +(\\S+)", printed)[1]) for name in ("bits per byte", "bits per token"))
    assert per_byte < per_token
    evaluate(run, "--sample", 3, "--prompt", "def ")
    train("--init", run, "--data", text, "--steps", 1, *BRIEF, "--out", tmp_path / "begun")
    assert (tmp_path / "begun" / "tokenizer.tiktoken").read_bytes() == (run / "tokenizer.tiktoken").read_bytes()
    with pytest.raises(InputError, match="keeps the tokenizer that its weights know; leave --tokenizer and --train-bpe out"):
        train("--init", run, "--tokenizer", "bytes", "--out", tmp_path / "x")


def test_parameters_that_are_no_numbers_are_never_saved(text, tmp_path, monkeypatch):  # noqa: F811
    train("--data", text, *TINY, "--steps", 2, *BRIEF, "--out", tmp_path / "run")
    before, update = checkpoint_path(tmp_path / "run").read_bytes(), training_script.update

    def diverge(model, *others):
        norm = update(model, *others)
        with torch.no_grad():
            next(model.parameters()).view(-1)[3] = float("inf")
        return norm

    monkeypatch.setattr(training_script, "update", diverge)
    with pytest.raises(InputError, match="the parameters is inf at step 3; what was saved before stands"):
        train("--resume", tmp_path / "run", "--steps", 3)
    assert checkpoint_path(tmp_path / "run").read_bytes() == before


def test_runs_that_begin_at_the_same_time_take_different_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings, options, run, _, _ = training_script.open_run(["--data", "recall"])
    first, second = (training_script.make_folder(run, settings, options) for _ in range(2))
    assert (first.name, second.name) == ("block_recurrent-recall-1", "block_recurrent-recall-2")


def test_a_failure_leaves_no_empty_run(text, tmp_path):  # noqa: F811
    text.write_bytes(b"\xff" * 999)
    with pytest.raises(InputError, match="is not UTF-8 text"):
        train("--data", text, *TINY, "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_data_folder_is_named_where_it_must_be_given_again(text, tmp_path, capsys):  # noqa: F811
    train("--data", text, *TINY, "--steps", 1, *BRIEF, "--out", tmp_path / "run", "--data-dir", tmp_path / "data")
    assert f"python eval.py {tmp_path / 'run'} --data-dir {tmp_path / 'data'}\n" in capsys.readouterr().out


def test_a_curve_that_cannot_be_drawn_does_not_end_a_run(text, tmp_path, capsys):  # noqa: F811
    pytest.importorskip("matplotlib", reason="curves need the extra plot: matplotlib")
    (tmp_path / "run" / "curves.png").mkdir(parents=True)
    train("--data", text, *TINY, "--steps", 1, *BRIEF, "--plot", "--out", tmp_path / "run")
    assert "warning: cannot write" in capsys.readouterr().err and saved(tmp_path / "run")["step"] == 1


def test_a_gradient_that_is_not_finite_stops_the_run(text, tmp_path, monkeypatch):  # noqa: F811
    train("--data", text, *TINY, "--steps", 2, *BRIEF, "--out", tmp_path / "run")
    monkeypatch.setattr(training_script, "prepare_gradients", lambda *_: float("inf"))
    with pytest.raises(InputError, match="the gradient's norm is inf at step 3; what was saved before stands"):
        train("--resume", tmp_path / "run", "--steps", 5)
    assert saved(tmp_path / "run")["step"] == 2


@pytest.mark.parametrize("model", MODELS)
def test_a_compiled_forward_computes_the_same(text, tmp_path, model):  # noqa: F811
    """By the backend that needs no C++ compiler; graph breaks are torch.compile's own."""
    options = [
        *MODELS[model],
        "--data",
        text,
        "--horizon",
        2,
        "--dtype",
        "float64",
        "--steps",
        2,
        "--log-every",
        1,
        "--dropout",
        0,
    ]
    options += ["--dropout", 0, *BRIEF]
    train(*options, "--out", tmp_path / "plain")
    train(*options, "--compile", "eager", "--out", tmp_path / "compiled")
    assert list(losses(tmp_path / "compiled").values()) == pytest.approx(list(losses(tmp_path / "plain").values()), rel=1e-9)
    assert saved(tmp_path / "compiled")["parameters"].keys() == saved(tmp_path / "plain")["parameters"].keys()


@pytest.mark.parametrize(
    "argv,words",
    [
        (["--tokenizer", "gpt2", "--train-bpe", 300], "--tokenizer names a tokenizer and --train-bpe learns one"),
        (["--train-bpe", 256], "--train-bpe is 256; it must be 0, or more than the 256 bytes"),
        (["--data", "recall", "--train-bpe", 300], "recall is made of bytes, --train-bpe is 300"),
        (["--optimizer", "adam", "--weight-decay", 0.1], "--weight-decay is 0.1, and adam has none"),
        (["--accumulate", 2], "--accumulate is 2; it must divide the batch of 3 lanes"),
        (["--compile", "fast"], "--compile is 'fast'; it must be one of none, inductor"),
        (["--keep", 0], "--keep is 0; it must be at least 1"),
        (["--save-minutes", -1], "--save-minutes is -1.0; it must be at least 0"),
        (["--learning-rate", "inf"], "must be positive and finite"),
        (["--beta2", 1], "--beta2 is 1.0; it must be at least 0 and below 1"), (["--seed", 2**63], r"it must be below 2\^63"),
        (["--optimizer", "adafactor", "--beta2", 0.9], "--beta2 has no effect: --optimizer adafactor has none"),
        (["--schedule", "constant", "--final-fraction", 0.1], "--final-fraction has no effect: --schedule constant"),
        (["--update-every-from", 3], "--update-every-from has no effect: --update-every is 1"),
        (["--weight-decay", "inf"], "--weight-decay is inf"),
    ],
)  # fmt: skip
def test_options_that_cannot_work_are_refused_before_data_is_touched(text, tmp_path, argv, words, monkeypatch):  # noqa: F811
    monkeypatch.setattr(training_script, "load_corpus", lambda *_: pytest.fail("data was touched"))
    with pytest.raises(InputError, match=words) as caught:
        train("--data", text, *TINY, *argv, "--out", tmp_path / "run")
    assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()


def test_a_compiler_that_is_not_there_is_said(text, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(training_script.shutil, "which", lambda name: None)
    with pytest.raises(InputError, match=r"--compile inductor needs a C\+\+ compiler on a CPU, and there is none"):
        train("--data", text, *TINY, "--compile", "inductor", "--device", "cpu", "--out", tmp_path / "run")


def test_resuming_elsewhere_is_refused(text, tmp_path):  # noqa: F811
    train("--data", text, *TINY, "--steps", 1, *BRIEF, "--out", tmp_path / "run")
    with pytest.raises(InputError, match="goes on in its own folder; leave --out out"):
        train("--resume", tmp_path / "run", "--steps", 2, "--out", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_folders_that_cannot_be_written_to_are_refused_before_data_is_touched(text, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(training_script, "load_corpus", lambda *_: pytest.fail("data was touched"))
    (tmp_path / "file").write_text("")
    for option in ("--out", "--data-dir"):
        with pytest.raises(InputError, match=f"cannot write to .*file; give another {option} than"):
            train("--data", text, *TINY, "--out", tmp_path / "run", option, tmp_path / "file" / "deep")


def test_a_full_disk_keeps_the_last_checkpoint(text, tmp_path, monkeypatch):  # noqa: F811
    train("--data", text, *TINY, "--steps", 2, *BRIEF, "--out", tmp_path / "run")
    before = checkpoint_path(tmp_path / "run").read_bytes()

    def full(contents, file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(InputError, match="No space left on device"):
        train("--resume", tmp_path / "run", "--steps", 3)
    assert checkpoint_path(tmp_path / "run").read_bytes() == before
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["checkpoint.pt", "metrics.jsonl", "step-2.pt"]


def test_metrics_are_json_lines(text, tmp_path):  # noqa: F811
    train("--data", text, *TINY, "--steps", 2, *BRIEF, "--out", tmp_path / "run")
    lines = Path(tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [2]
