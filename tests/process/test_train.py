"""train.py as a user runs it: what it says and keeps, a run stopped and resumed, one shared by several processes."""

import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest
import torch

import train as training_script
from accelerated import replay
from accelerated.data.windows import cut
from accelerated.program.errors import InputError
from accelerated.training import opening, optimization
from accelerated.training import run as runs
from accelerated.training.checkpoint import save_checkpoint
from accelerated.training.folder import checkpoint_path, numbered_checkpoints
from accelerated.training.log import read_metrics
from tests.helpers.programs import (
    COMPRESSIVE,
    MEMFORMER,
    MEMORIZING,
    ROOT,
    TINY,
    WINDOWED,
    differences,
    ended,
    equal,
    evaluate,
    saved,
    start,
    train,
)

BRIEF = ["--sample", 0, "--validation-segments", 1]
MODELS = {
    "block_recurrent": TINY,
    "compressive": COMPRESSIVE,
    "memformer": [*MEMFORMER, "--task-infilling", 0.4, "--task-recall", 0.2],
    "decoder-only": [*MEMFORMER, "--encoder-layers", 0],
    "memorizing": MEMORIZING,
    "pretrained_recurrence": [*WINDOWED, "--overlap", 3],
}


def losses(run):
    """{step: loss} of a run's log."""
    return {record["step"]: record["loss"] for record in read_metrics(run) if "loss" in record}


@pytest.fixture
def stop_at(monkeypatch):
    """stop_at(step): a real SIGTERM comes while iteration `step` of the next runs is under way; stop_at(None): none."""
    read = training_script.next_segments

    def choose(step):
        def reading(run):
            if run.step == step:
                os.kill(os.getpid(), signal.SIGTERM)
            return read(run)

        monkeypatch.setattr(training_script, "next_segments", reading)

    return choose


def test_training_saves_reports_and_samples(text, tmp_path, capsys):
    run = tmp_path / "run"
    train("--data", text, *TINY, "--batch", 24, "--steps", 3, "--out", run, "--data-dir", tmp_path / "data")
    printed = capsys.readouterr().out
    reported = re.search(r"bits per byte: (\d\.\d{3}) with the memory, (\d\.\d{3}) cleared each segment", printed)
    assert re.search(r"after ⟫ how the model continues it:\n(.|\n)+⟫", printed)
    assert f"python eval.py {run} --data-dir {tmp_path / 'data'}\n" in printed, "which must be given again"
    assert saved(run)["step"] == 3
    evaluate("score", run)
    evaluate("score", run, "--clear-memory")
    evaluated = re.findall(r"bits per byte +(\S+)", capsys.readouterr().out)
    assert [float(bits) for bits in reported.groups()] == pytest.approx([float(bits) for bits in evaluated], abs=6e-4)
    assert evaluated[0] != evaluated[1]


def test_printed_commands_can_be_pasted_into_a_shell(tmp_path, capsys, stop_at):
    run, data = tmp_path / "a run; of mine", tmp_path / "the data"
    stop_at(1)
    train(*TINY, "--data", "recall", "--steps", 2, *BRIEF, "--out", run, "--data-dir", data)
    stop_at(None)
    train("--resume", run, "--data-dir", data)
    printed = capsys.readouterr().out
    for command in ("continue with: python train.py --resume", "evaluate it with: python eval.py"):
        [words] = re.findall(f"{command} (.*)\n", printed)
        assert shlex.split(words) == [str(run), "--data-dir", str(data)]


@pytest.mark.parametrize(
    "model,method,joined",
    [
        *((model, "memory_replay", False) for model in MODELS),
        ("block_recurrent", "through_time", False),
        ("compressive", "checkpointed", False),
        ("memformer", "memory_replay", True),
        ("pretrained_recurrence", "through_time", True),
    ],
)
def test_a_stopped_run_resumes_bit_for_bit(text, texts, tmp_path, model, method, joined, stop_at):
    """Stopped by a signal in the third of five steps: all that is saved at the end, and every measurement, is a whole run's.

    Once over joined documents, beyond the first pass.
    """
    options = [*MODELS[model], "--backprop", method, "--horizon", 2, "--dropout", 0.2, "--log-every", 2, *BRIEF]
    options += (
        ["--data", texts, "--carry-over-documents", "--training-documents", 4, "--horizon", 5] if joined else ["--data", text]
    )
    train(*options, "--steps", 5, "--out", tmp_path / "whole")
    stop_at(3)
    train(*options, "--steps", 5, "--out", tmp_path / "cut")
    stop_at(None)
    assert saved(tmp_path / "cut")["step"] == 3
    train("--resume", tmp_path / "cut")
    assert not differences(tmp_path / "whole", tmp_path / "cut", ["step-N.pt"]) and list(losses(tmp_path / "cut")) == [2, 4, 5]
    assert not joined or saved(tmp_path / "cut")["lanes"]["passes"] > 0


@pytest.fixture
def texts(tmp_path):
    """A folder of 60 short texts of different lengths, and one that is empty."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number}.txt").write_text(f"text number {number}. " * (number % 7 + 1))
    (folder / "empty.txt").write_text("")
    return folder


def test_the_seed_shuffles_documents_that_are_joined(texts, tmp_path, monkeypatch):
    """One lane reads all of them, so the text's beginning depends only on the order of the documents."""
    seen = []
    watch(monkeypatch, "through_time", lambda segments: seen.append("".join(map(chr, segments[0].tokens[0].tolist()))))
    options = [*COMPRESSIVE, "--batch", 1, "--segment", 16, "--data", texts, "--carry-over-documents", "--steps", 1, *BRIEF]
    for seed in (0, 1):
        train(*options, "--seed", seed, "--out", tmp_path / str(seed))
    assert seen[0] != seen[1] and all(text.startswith("text number ") for text in seen)


@pytest.mark.parametrize("model", ["compressive", "plain"])
def test_memory_is_carried_over_documents_in_training_and_validation(texts, tmp_path, monkeypatch, capsys, model):
    """State starts anew once in each lane, segments are full, and eval.py gives the same validation score."""
    seen, options = [], {**MODELS, "plain": [*WINDOWED, "--vectors", 0]}[model]
    watch(monkeypatch, "through_time", seen.extend)
    options = [*options, "--data", texts, "--horizon", 1, "--backprop", "through_time", "--steps", 5, "--sample", 0]
    train(*options, "--carry-over-documents", "--out", tmp_path / "run")
    printed = capsys.readouterr().out
    assert "training documents, memory carried over them" in printed
    assert [segment.starts.tolist() for segment in seen] == [[True] * 3, *[[False] * 3] * 4]
    left_out = torch.stack([~segment.scored for segment in seen])
    following = torch.stack([segment.targets for segment in seen])[left_out]
    assert 0 < len(following) < 20 and {chr(token) for token in following} == {"t"}, "the first letter of a document alone"
    evaluate(tmp_path / "run")
    bits = float(re.search(r"bits per byte +(\S+)", capsys.readouterr().out)[1])
    reported = re.search(r"(\d\.\d{3})( with the memory| bits per byte; this model carries)", printed)[1]
    assert float(reported) == pytest.approx(bits, abs=6e-4)
    seen.clear()
    train(*options, "--out", tmp_path / "apart")
    assert "carried over" not in capsys.readouterr().out
    assert sum(int(segment.starts.sum()) for segment in seen) > 3
    assert saved(tmp_path / "apart")["data_config"]["carry_over_documents"] is False


def test_between_updates_nothing_is_saved_or_stopped(text, tmp_path, monkeypatch, stop_at):
    """Gathered gradients would be lost: checkpoints of steps 4 and 8 come at 5 and 8, a signal in step 4 ends the run at 5."""
    steps, keep = [], runs.save_in_run
    monkeypatch.setattr(runs, "save_in_run", lambda run, c, *a: steps.append(c["step"]) or keep(run, c, *a))
    options = [*COMPRESSIVE, "--data", text, "--update-every", 3, "--update-every-from", 2, "--save-every", 4, "--steps", 8]
    train(*options, *BRIEF, "--out", tmp_path / "whole")
    assert steps == [5, 8]
    stop_at(4)
    train(*options, *BRIEF, "--out", tmp_path / "cut")
    stop_at(None)
    assert steps == [5, 8, 5]
    train("--resume", tmp_path / "cut")
    whole, cut = saved(tmp_path / "whole"), saved(tmp_path / "cut")
    assert equal(whole["parameters"], cut["parameters"]) and equal(whole["state"], cut["state"])


def test_gathered_updates_are_the_mean_over_their_iterations(text, tmp_path, monkeypatch):
    """Parameters stand still between updates, and the optimiser sees the mean of the gathered gradients."""
    seen, prepare = [], optimization.average_and_clip

    def watch(model, iterations, limit):
        before = model.embedding.grad.clone()
        norm = prepare(model, iterations, limit)
        seen.append((iterations, float((before / model.embedding.grad).nanmedian())))
        return norm

    monkeypatch.setattr(optimization, "average_and_clip", watch)
    train(*COMPRESSIVE, "--data", text, "--update-every", 3, "--steps", 7, "--clip", 0, *BRIEF, "--out", tmp_path / "run")
    assert [count for count, _ in seen] == [3, 3, 1]
    assert [ratio for _, ratio in seen] == pytest.approx([3, 3, 1])


@pytest.mark.parametrize(
    "model,method",
    [
        ("block_recurrent", "memory_replay"),
        ("compressive", "through_time"),
        ("memformer", "memory_replay"),
        ("pretrained_recurrence", "checkpointed"),
    ],
)
def test_lanes_in_groups_give_the_gradient_of_all_at_once(text, tmp_path, model, method):
    """Three lanes at once and one after another: the same losses and, after updates, the same parameters to rounding."""
    options = [*MODELS[model], "--data", text, "--backprop", method, "--horizon", 2, "--dtype", "float64", "--steps", 3]
    options += ["--log-every", 1, "--dropout", 0, *BRIEF]
    train(*options, "--out", tmp_path / "one")
    train(*options, "--accumulate", 3, "--out", tmp_path / "three")
    assert list(losses(tmp_path / "three").values()) == pytest.approx(list(losses(tmp_path / "one").values()), rel=1e-12)
    one, three = saved(tmp_path / "one"), saved(tmp_path / "three")
    for name, value in one["parameters"].items():
        assert torch.allclose(value, three["parameters"][name], rtol=0, atol=1e-10), name
    assert all(torch.allclose(a, b) for a, b in zip(one["state"], three["state"], strict=True))


def test_two_processes_begin_a_run_with_a_learned_tokenizer_under_torchrun(text, tmp_path):
    """The first makes the folder, learns and keeps the ranks; the other reads them."""
    pytest.importorskip("tokenizers", reason="learning needs the extra bpe: tokenizers")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py", "--data", text]
    command += [*TINY, *BRIEF, "--batch", 2, "--train-bpe", 300, "--steps", 1, "--out", tmp_path / "run"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*map(str, command)], cwd=ROOT, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0 and "2 processes" in done.stdout and done.stdout.count("saved in") == 1, done.stderr
    assert saved(tmp_path / "run")["model_config"]["vocabulary"] == 300


@pytest.mark.parametrize("model,method", [("compressive", "through_time"), ("memformer", "memory_replay")])
def test_two_processes_are_one(text, tmp_path, model, method):
    """The same losses, validation and parameters, in float64 to rounding; what one process began, two continue."""
    options = [*MODELS[model], "--batch", 4, "--data", text, "--backprop", method, "--horizon", 2, "--dtype", "float64", *BRIEF]
    options += ["--dropout", 0, "--log-every", 1, "--clip", 0.5, "--validate-every", 2, "--schedule", "constant"]
    train(*options, "--steps", 4, "--out", tmp_path / "one")
    train(*options, "--steps", 1, "--out", tmp_path / "two")
    started = start(["--resume", tmp_path / "two", "--steps", 4], tmp_path / "errors", processes=2)
    assert ended(started) == [0, 0], (tmp_path / "errors").read_text()
    one, two = (
        {(r["step"], name, "final" in r): r[name] for r in read_metrics(run) for name in ("loss", "validation_loss") if name in r}
        for run in (tmp_path / "one", tmp_path / "two")
    )
    assert len(one) == 7 and {key: two[key] for key in one} == pytest.approx(one, rel=1e-9)
    one, two = saved(tmp_path / "one"), saved(tmp_path / "two")
    assert one["lanes"] == two["lanes"]
    for name, value in one["parameters"].items():
        assert torch.allclose(value, two["parameters"][name], rtol=0, atol=1e-8), name
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(one["state"], two["state"], strict=True))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_exits_cleanly(text, tmp_path, number):
    run = tmp_path / "run"
    argv = ["--data", text, *TINY, "--steps", 100_000, "--save-every", 100_000, "--out", run]
    [process] = started = start(argv, tmp_path / "errors", tmp_path / "printed")
    deadline = time.monotonic() + 60
    while not losses(run):
        assert time.monotonic() < deadline and process.is_alive()
        time.sleep(0.05)
    os.kill(process.pid, number)
    assert ended(started) == [0] and "Traceback" not in (tmp_path / "errors").read_text()
    said = f"stopped by {signal.Signals(number).name} and saved; continue with: python train.py --resume {run}\n"
    assert said in (tmp_path / "printed").read_text() and saved(run)["step"] >= max(losses(run))


@pytest.fixture
def scores(monkeypatch):
    """scores(bits): what the next validations find, in bits per byte; the last report's second one is among them."""
    evaluation = training_script.score.evaluate

    def choose(*bits):
        left = iter(bits)

        def scored(*read):
            return evaluation(*read)._replace(nats=next(left) * 0.6931471805599453 * 100, text_bytes=100)

        monkeypatch.setattr(training_script.score, "evaluate", scored)

    return choose


def test_the_last_k_and_the_best_are_kept(text, tmp_path, monkeypatch, scores):
    monkeypatch.setattr(training_script, "report", lambda *_: None)
    scores(5.0, 3.0, 4.0, 3.5)
    options = ["--data", text, *TINY, "--save-every", 1, "--keep", 3, "--validate-every", 2, "--steps", 8, *BRIEF]
    run = tmp_path / "run"
    train(*options, "--out", run)
    assert list(numbered_checkpoints(run)) == [6, 7, 8] and saved(run)["step"] == 8
    assert torch.load(run / "best.pt", weights_only=True)["step"] == 4 and saved(run)["best"] == pytest.approx(3.0)
    rows = [r for r in read_metrics(run) if "validation_bits_per_byte" in r]
    assert [(r["step"], round(r["validation_bits_per_byte"], 6)) for r in rows] == [(2, 5.0), (4, 3.0), (6, 4.0), (8, 3.5)]


def test_a_run_that_ended_without_its_last_report_makes_it(text, tmp_path, scores, capsys, monkeypatch):
    options = ["--data", text, *TINY, *BRIEF, "--validate-every", 1, "--steps", 2]
    scores(3.0, 4.0)
    with monkeypatch.context() as patch:
        patch.setattr(training_script, "report", lambda run: None)
        train(*options, "--out", tmp_path / "run")
    scores(5.0, 6.0)
    capsys.readouterr()
    train("--resume", tmp_path / "run")
    printed = capsys.readouterr().out
    assert "5.000 with the memory, 6.000 cleared" in printed and saved(tmp_path / "run")["step"] == 2
    assert [record["step"] for record in read_metrics(tmp_path / "run") if record.get("final")] == [2]


@pytest.mark.parametrize(
    "options,epochs,expected",
    [
        # the 60 texts have 234 segments of 16, and 3 are read in a step
        ([*TINY, "--data", "TEXTS", "--horizon", 1], 0.05, 4),
        ([*WINDOWED, "--overlap", 3, "--data", "TEXTS", "--carry-over-documents"], 0.04, None),
    ],
)
def test_epochs_become_steps(texts, tmp_path, capsys, monkeypatch, options, epochs, expected):
    """As many as read that part of all windows; the schedule ends there, and a resumed run keeps the number."""
    read, run, lanes = [], tmp_path / "run", opening.Lanes
    monkeypatch.setattr(opening, "Lanes", lambda documents, *given: read.append(documents) or lanes(documents, *given))
    options = [texts if option == "TEXTS" else option for option in options]
    train(*options, "--epochs", epochs, *BRIEF, "--final-fraction", 0.25, "--learning-rate", 0.01, "--out", run)
    config, training = (saved(run)[part] for part in ("model_config", "training_config"))
    windows = [len(cut(len(d.inputs) + 1, config["segment"], config.get("overlap", 0))) for d in read[0]]
    steps = math.ceil(epochs * sum(windows) / 3 / training["horizon"])
    assert saved(run)["step"] == training["steps"] == steps > 1 and expected in (steps, None)
    assert [group["lr"] for group in saved(run)["optimizer"]["param_groups"]] == pytest.approx([0.0025, 0.0025])
    assert re.search(rf"--epochs {epochs} of {sum(windows):,} segments in .*: {steps} steps\n", capsys.readouterr().out)
    with pytest.raises(InputError, match=f"is at step {steps}; give --steps above that"):
        train("--resume", run)
    with pytest.raises(InputError, match=f"--epochs {epochs} .* are {steps} steps, and .* is at step {steps}; give more"):
        train("--resume", run, "--epochs", epochs)
    train("--resume", run, "--epochs", 2 * epochs, "--warmup", 90)
    more = math.ceil(2 * epochs * sum(windows) / 3 / training["horizon"])
    assert saved(run)["step"] == more > steps and f"--warmup 90 is longer than --steps {more}:" in capsys.readouterr().err
    train("--resume", run, "--steps", more + 1)
    assert saved(run)["step"] == more + 1


def test_a_best_checkpoint_is_not_forgotten_by_a_resumed_run(text, tmp_path):
    run = tmp_path / "run"
    train("--data", text, *TINY, "--validate-every", 1, *BRIEF, "--steps", 2, "--out", run)
    save_checkpoint(checkpoint_path(run), saved(run) | {"best": 0.5})
    before = (run / "best.pt").read_bytes()
    train("--resume", run, "--steps", 3)
    assert (run / "best.pt").read_bytes() == before and saved(run)["best"] == 0.5


@pytest.mark.parametrize(
    "options,expected",
    [
        (["--save-every", 2], [2, 3]),
        ([], [3]),
        (["--validate-every", 2], [2, 3]),
        (["--validate-every", 3, "--update-every", 4, "--steps", 6], [4, 6]),
    ],
)
def test_checkpoints_come_as_often_as_asked(text, tmp_path, monkeypatch, options, expected):
    steps, keep = [], runs.save_in_run
    monkeypatch.setattr(runs, "save_in_run", lambda run, c, *a: steps.append(c["step"]) or keep(run, c, *a))
    train("--data", text, *TINY, "--steps", 3, *options, *BRIEF, "--out", tmp_path / "run")
    assert steps == expected


def test_metrics_are_means_over_the_iterations_between_them(text, tmp_path):
    options = ["--data", text, *TINY, "--schedule", "constant", *BRIEF, "--steps", 6]
    train(*options, "--log-every", 1, "--out", tmp_path / "each")
    train(*options, "--log-every", 4, "--out", tmp_path / "mean")
    each, mean = losses(tmp_path / "each"), losses(tmp_path / "mean")
    assert list(mean) == [4, 6] and mean[4] == pytest.approx(sum(each[s] for s in (1, 2, 3, 4)) / 4, rel=0.02)
    [record] = [r for r in read_metrics(tmp_path / "mean") if r["step"] == 4]
    assert record.keys() == {"step", "loss", "bits_per_byte", "learning_rate", "gradient_norm", "tokens_per_second"}
    assert record["bits_per_byte"] == pytest.approx(record["loss"] / 0.6931471805599453) and record["gradient_norm"] > 0
    assert len((tmp_path / "mean" / "metrics.jsonl").read_text().splitlines()) == 3, "and the last report"


def test_the_tokens_of_all_segments_are_counted(text, tmp_path, monkeypatch):
    monkeypatch.setattr(runs.Run, "tokens_per_second", lambda run, steps: run.tokens)
    train(*COMPRESSIVE, "--data", text, "--horizon", 2, "--steps", 2, "--log-every", 1, *BRIEF, "--out", tmp_path / "run")
    assert [r["tokens_per_second"] for r in read_metrics(tmp_path / "run") if "loss" in r] == [48, 96]


def test_a_signal_in_the_last_step_stops_nothing(text, tmp_path, stop_at, capsys):
    stop_at(2)
    train("--data", text, *TINY, "--steps", 2, *BRIEF, "--out", tmp_path / "run")
    assert f"saved in {tmp_path / 'run'}" in capsys.readouterr().out


def test_the_seed_decides_everything(text, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        train("--data", text, *TINY, "--steps", 2, "--seed", seed, "--dropout", 0.1, *BRIEF, "--out", tmp_path / name)
    a, b, c = (saved(tmp_path / name)["parameters"]["embedding"] for name in "abc")
    assert torch.equal(a, b) and not torch.equal(a, c)


def watch(monkeypatch, method, look):
    """Let look(segments) see every rollout that method is given."""
    backprop = replay.BACKPROP[method]

    def watched(model, segments, state, **others):
        look(segments)
        return backprop(model, segments, state, **others)

    monkeypatch.setitem(replay.BACKPROP, method, watched)


def test_overlapping_windows_score_every_token_once_in_training(text, tmp_path, monkeypatch):
    scored = []
    watch(monkeypatch, "through_time", lambda segments: scored.extend(int(segment.scored.sum()) for segment in segments))
    options = ["--overlap", 3, "--batch", 1, "--horizon", 4, "--data", text, "--steps", 2, *BRIEF]
    train(*WINDOWED, *options, "--out", tmp_path / "run")
    assert scored == [8, *[5] * 7]


def test_tasks_reach_the_training(text, tmp_path, monkeypatch):
    kinds = []
    watch(monkeypatch, "memory_replay", lambda segments: kinds.extend(s.task and s.task.kind.tolist() for s in segments))
    train(*MEMFORMER, "--data", text, "--steps", 2, *BRIEF, "--out", tmp_path / "plain")
    assert kinds == [None] * 6
    kinds.clear()
    tasks = ["--task-infilling", 0.4, "--task-recall", 0.5]
    train(*MEMFORMER, "--data", text, "--steps", 6, *tasks, *BRIEF, "--out", tmp_path / "run")
    assert {kind for lanes in kinds for kind in lanes} == {0, 1, 2}


@pytest.mark.parametrize("broken", ["loss", "gradient's norm", "parameters", "layers.0.compression", "disk"])
def test_a_run_that_fails_leaves_its_last_checkpoint(text, tmp_path, monkeypatch, broken):
    run, nan = tmp_path / "run", torch.tensor(float("nan"))
    train("--data", text, *(COMPRESSIVE if broken.startswith("layers") else TINY), "--steps", 2, *BRIEF, "--out", run)
    before, update = checkpoint_path(run).read_bytes(), training_script.update

    def broken_update(run):
        update(run)
        next(run.model.parameters()).data.view(-1)[3] = nan

    def full(contents, file):
        raise OSError(28, "No space left on device")

    faults = {
        "gradient's norm": ("accelerated.training.optimization.average_and_clip", lambda *_: nan),
        "parameters": ("train.update", broken_update),
        "layers.0.compression": ("accelerated.compressive.Layer.compression_loss", lambda *_: nan),
        "disk": ("torch.save", full),
    }
    if broken == "loss":
        monkeypatch.setitem(replay.BACKPROP, "through_time", lambda model, segments, state, **_: (nan, {}, state))
    else:
        monkeypatch.setattr(*faults[broken])
    words = f"the {broken} is nan at step 3; .*checkpoint.pt stays as it was; try a lower"
    with pytest.raises(InputError, match="No space left on device" if broken == "disk" else words):
        train("--resume", run, "--steps", 3)
    assert checkpoint_path(run).read_bytes() == before
    assert sorted(p.name for p in run.iterdir()) == [".lock", "checkpoint.pt", "config.json", "metrics.jsonl", "step-2.pt"]


def test_a_plain_run_is_fine_tuned_with_and_without_recurrence(text, tmp_path):
    """The command sequence of docs/pretrained_recurrence.md: pretrain, fine-tune twice; a module comes whole or not at all."""
    base, plain, recurrent = (tmp_path / name for name in ("base", "plain", "recurrent"))
    train(*WINDOWED, "--vectors", 0, "--horizon", 1, "--data", text, "--steps", 3, "--out", base)
    begun = saved(base)["parameters"]
    assert not any(name.startswith("module.") for name in begun)
    train("--init", base, "--steps", 1, "--learning-rate", 1e-12, "--weight-decay", 0, "--sample", 0, "--out", plain)
    for name, value in saved(plain)["parameters"].items():
        assert torch.allclose(value, begun[name], rtol=0, atol=1e-9), name
    train("--init", base, "--vectors", 1, "--module-width", 8, "--overlap", 2, "--steps", 2, "--sample", 0, "--out", recurrent)
    contents = saved(recurrent)
    config = contents["model_config"]
    assert (config["vectors"], config["overlap"], config["width"], config["module_width"]) == (1, 2, 16, 8)
    assert contents["data_config"]["data"] == str(text) and "module.hidden_1" in contents["parameters"]
    assert all(torch.isfinite(value).all() for value in contents["parameters"].values())
    with pytest.raises(InputError, match=r"module\.hidden_3 should be absent"):
        train("--init", recurrent, "--module-layers", 2, "--steps", 1, "--out", tmp_path / "x")
    train("--init", recurrent, "--vectors", 0, "--steps", 1, "--sample", 0, "--out", tmp_path / "without")
    assert not any(name.startswith("module.") for name in saved(tmp_path / "without")["parameters"])


def test_a_gpt2_is_fine_tuned(text, tmp_path):
    """--init with a file of another project's weights: they are what training begins with, and recurrence is added."""
    safetensors = pytest.importorskip("safetensors.torch", reason="reading GPT-2 needs the extra gpt2: safetensors")
    torch.set_default_dtype(torch.float32)
    names = {
        "ln_1": (16,),
        "ln_2": (16,),
        "attn.c_attn": (16, 48),
        "attn.c_proj": (16, 16),
        "mlp.c_fc": (16, 32),
        "mlp.c_proj": (32, 16),
    }
    blocks = [
        {f"h.{i}.{name}.weight": shape, f"h.{i}.{name}.bias": shape[-1:]} for i in range(2) for name, shape in names.items()
    ]
    tensors = {"wte.weight": (256, 16), "wpe.weight": (12, 16), "ln_f.weight": (16,), "ln_f.bias": (16,)}
    tensors = {name: torch.randn(shape) * 0.1 for block in (tensors, *blocks) for name, shape in block.items()}
    (tmp_path / "gpt2").mkdir()
    path = tmp_path / "gpt2" / "model.safetensors"
    safetensors.save_file(tensors, path)
    options = [*WINDOWED[2:], "--tokenizer", "bytes", "--data", text, "--steps", 1, "--learning-rate", 1e-12, *BRIEF]
    for init in (path, path.parent):
        train("--init", init, "--preset", "tiny", *options, "--out", tmp_path / f"run of {init.name}")
        learned = saved(tmp_path / f"run of {init.name}")["parameters"]
        assert torch.allclose(learned["layers.1.output"], tensors["h.1.attn.c_proj.weight"].t(), atol=1e-6)
        assert torch.allclose(learned["layers.0.key"], tensors["h.0.attn.c_attn.weight"].t()[16:32], atol=1e-6)
        assert "module.inserted" in learned
    with pytest.raises(InputError, match="has layers 2, the model has layers 3; give --layers 2"):
        train("--init", path, "--preset", "tiny", *options, "--layers", 3, "--out", tmp_path / "deep")
    assert not (tmp_path / "deep").exists()


@pytest.mark.parametrize("option", [["--train-bpe", 300], ["--tokenizer", "ranks"], ["--tokenizer", "some.json"]])
def test_a_run_keeps_its_tokenizer(text, tmp_path, capsys, option):
    """Beside its checkpoint: it is resumed, evaluated, sampled from and begun from without the file that it came from."""
    package = pytest.importorskip("tokenizers", reason="learning needs the extra bpe: tokenizers")
    if option[1] == "ranks":
        train("--data", text, *TINY, "--train-bpe", 300, "--steps", 1, *BRIEF, "--out", tmp_path / "learned")
        (tmp_path / "ranks").write_bytes((tmp_path / "learned" / "tokenizer.tiktoken").read_bytes())
        option = ["--tokenizer", tmp_path / "ranks"]
    if option[1] == "some.json":
        tokenizer = package.ByteLevelBPETokenizer()
        tokenizer.train_from_iterator([text.read_text()], vocab_size=300)
        tokenizer.save(str(tmp_path / "some.json"))
        option = ["--tokenizer", tmp_path / "some.json"]
    run = tmp_path / "run"
    train("--data", text, *TINY, *option, *BRIEF, "--steps", 1, "--sample", 3, "--out", run)
    for name in ("ranks", "some.json"):
        (tmp_path / name).unlink(missing_ok=True)
    assert saved(run)["model_config"]["vocabulary"] == 300
    train("--resume", run, "--steps", 2)
    run = run.rename(tmp_path / "moved")
    capsys.readouterr()
    evaluate("score", run, "--batch", 64)
    printed = capsys.readouterr().out
    per_byte, per_token = (float(re.search(f"{name} +(\\S+)", printed)[1]) for name in ("bits per byte", "bits per token"))
    assert per_byte < per_token
    train("--init", run, "--data", text, "--steps", 1, *BRIEF, "--out", tmp_path / "begun")
    [kept] = run.glob("tokenizer.*")
    assert (tmp_path / "begun" / kept.name).read_bytes() == kept.read_bytes()
    assert kept.name == ("tokenizer.json" if option[1] == tmp_path / "some.json" else "tokenizer.tiktoken")
    evaluate("export", run, tmp_path / "exported")
    train("--init", tmp_path / "exported", "--data", text, "--steps", 1, *BRIEF, "--out", tmp_path / "again")
    assert (tmp_path / "again" / kept.name).read_bytes() == kept.read_bytes()


def test_data_that_changed_between_stop_and_resume_is_refused(text, tmp_path):
    run, original = tmp_path / "run", text.read_bytes()
    train("--data", text, *TINY, "--steps", 1, *BRIEF, "--out", run)
    before = checkpoint_path(run).read_bytes()
    text.write_bytes(original.replace(b"gate", b"gait"))
    with pytest.raises(InputError, match=r"does not have the tokens that .* was trained on"):
        train("--resume", run, "--steps", 2)
    assert checkpoint_path(run).read_bytes() == before
    text.write_bytes(original)
    train("--resume", run, "--steps", 2)
    assert saved(run)["step"] == 2


def test_recall_reports_right_answers(tmp_path, capsys):
    """Of whole documents, because questions need their document's facts. A plain model carries nothing."""
    options = ["--data", "recall", "--recall-distance", 8, "--steps", 1]
    train(*TINY, *options, "--out", tmp_path / "run")
    assert re.search(r"right answers: \S+% with the memory, \S+% with it cleared \(chance 10%\)", capsys.readouterr().out)
    train(*COMPRESSIVE, *options, "--validation-segments", 1, "--out", tmp_path / "brief")
    assert re.search(r"validation on 16 tokens \(1\.6% of the split\)", capsys.readouterr().out), "one document of 64"
    train(*WINDOWED, *options, "--vectors", 0, "--horizon", 1, "--out", tmp_path / "plain")
    assert re.search(
        r"validation on 1,024 tokens: \d\.\d{3} bits per byte; this model carries no memory", capsys.readouterr().out
    )


def test_scripts_exit_with_2_and_one_line():
    done = subprocess.run([sys.executable, "train.py", "--data", "nowhere"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and done.stderr.startswith("train.py: "), done.stderr


def test_documents_without_tokens_are_passed_over(tmp_path, capsys):
    """In training, and for the sample, whose prompt is the opening of the first that has some."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(60):
        (folder / f"{i}.txt").write_text("" if i % 2 else f"some text number {i}. " * 40)
    train(*WINDOWED, "--data", folder, "--steps", 1, "--sample", 3, "--out", tmp_path / "run")
    assert "how the model continues it:\nsome text number" in capsys.readouterr().out


def test_readme_commands_pin_torch_and_make_their_environment():
    lines = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("python3 -m venv")]
    assert len(lines) == 2 and all("torch==2.13.0" in line for line in lines)
    assert "train.py" in lines[0] and "pytest" in lines[1]
