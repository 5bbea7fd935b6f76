"""train.py as a user runs it: what it says and keeps, a run stopped and resumed, one shared by several processes."""

import math
import os
import re
import shlex
import signal

import pytest
import torch

import train as training_script
from accelerated import replay
from accelerated.program.errors import InputError
from accelerated.training import optimization
from accelerated.training import run as runs
from accelerated.training.checkpoint import load_checkpoint
from accelerated.training.log import Log, read_metrics
from tests.helpers import programs
from tests.helpers.programs import ROOT, as_json, differences, ended, saved, start, train

BRIEF = ["--sample", 0, "--validation-segments", 1]
MODELS = {
    "block_recurrent": programs.TINY,
    "compressive": programs.COMPRESSIVE,
    "memformer": [*programs.MEMFORMER, "--task-infilling", 0.4, "--task-recall", 0.2],
    "decoder-only": [*programs.MEMFORMER, "--encoder-layers", 0],
    "memorizing": programs.MEMORIZING,
    "pretrained_recurrence": [*programs.WINDOWED, "--overlap", 3],
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


@pytest.fixture
def watch(monkeypatch):
    """watch(method): a list to which every segment is added that this way of back-propagation is given."""

    def choose(method):
        seen, backprop = [], replay.BACKPROP[method]

        def watched(model, segments, state, **others):
            seen.extend(segments)
            return backprop(model, segments, state, **others)

        monkeypatch.setitem(replay.BACKPROP, method, watched)
        return seen

    return choose


@pytest.fixture
def texts(tmp_path):
    """A folder of 60 short texts of different lengths, and one that is empty."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number}.txt").write_text(f"text number {number}. " * (number % 7 + 1))
    (folder / "empty.txt").write_text("")
    return folder


def test_training_saves_reports_and_samples(text, tmp_path, capsys, stop_at, monkeypatch):
    """Printed commands can be pasted into a shell, and eval.py finds the score that was reported."""
    run, data = tmp_path / "a run; of mine", tmp_path / "the data"
    stop_at(1)
    train("--data", text, *programs.TINY, "--batch", 24, "--steps", 3, "--out", run, "--data-dir", data)
    stop_at(None)
    train("--resume", run, "--data-dir", data)
    printed = capsys.readouterr().out
    assert re.search(r"after ⟫ how the model continues it:\n(.|\n)+⟫", printed)
    for command in ("continue with: python train.py --resume", "evaluate it with: python eval.py"):
        [words] = re.findall(f"{command} (.*)\n", printed)
        assert shlex.split(words) == [str(run), "--data-dir", str(data)]
    reported = re.search(r"bits per byte: (\d\.\d{3}) with the memory, (\d\.\d{3}) cleared each segment", printed)
    evaluated = [as_json(capsys, run, *clear)["bits_per_byte"] for clear in ([], ["--clear-memory"])]
    assert [float(bits) for bits in reported.groups()] == pytest.approx(evaluated, abs=6e-4)
    assert evaluated[0] != evaluated[1] and saved(run)["step"] == 3


RESUMED = {  # {model: (way of back-propagation, whether documents are joined)}
    "block_recurrent": ("through_time", False),
    "compressive": ("checkpointed", False),
    "memformer": ("memory_replay", True),
    "decoder-only": ("memory_replay", False),
    "memorizing": ("memory_replay", False),
    "pretrained_recurrence": ("through_time", True),
}


@pytest.mark.parametrize("model", RESUMED)
def test_a_stopped_run_resumes_bit_for_bit(text, texts, tmp_path, model, stop_at, capsys):
    """Stopped by a signal in the third of five steps: all that is saved at the end, and every measurement, is a whole run's.

    Twice over joined documents, beyond the first pass. A signal in the last step stops nothing.
    """
    method, joined = RESUMED[model]
    options = [*MODELS[model], "--backprop", method, "--horizon", 2, "--dropout", 0.2, "--log-every", 2, *BRIEF]
    options += (
        ["--data", texts, "--carry-over-documents", "--training-documents", 4, "--horizon", 5] if joined else ["--data", text]
    )
    stop_at(5)
    train(*options, "--steps", 5, "--out", tmp_path / "whole")
    assert f"saved in {tmp_path / 'whole'}" in capsys.readouterr().out
    stop_at(3)
    train(*options, "--steps", 5, "--out", tmp_path / "cut")
    stop_at(None)
    assert saved(tmp_path / "cut")["step"] == 3
    train("--resume", tmp_path / "cut")
    assert not differences(tmp_path / "whole", tmp_path / "cut") and list(losses(tmp_path / "cut")) == [2, 4, 5]
    assert not joined or saved(tmp_path / "cut")["lanes"]["passes"] > 0


@pytest.mark.parametrize("model", ["compressive", "plain"])
def test_memory_is_carried_over_documents_in_training_and_validation(texts, tmp_path, watch, capsys, model):
    """State starts anew once in each lane, segments are full, and eval.py gives the same validation score."""
    seen, options = watch("through_time"), {**MODELS, "plain": [*programs.WINDOWED, "--vectors", 0]}[model]
    options = [*options, "--data", texts, "--horizon", 1, "--backprop", "through_time", "--steps", 5, "--sample", 0]
    train(*options, "--carry-over-documents", "--out", tmp_path / "run")
    printed = capsys.readouterr().out
    assert "training documents, memory carried over them" in printed
    assert [segment.starts.tolist() for segment in seen] == [[True] * 3, *[[False] * 3] * 4]
    following = [chr(token) for segment in seen for token in segment.targets[~segment.scored]]
    assert 0 < len(following) < 20 and {*following} == {"t"}, "the first letter of a document alone"
    reported = re.search(r"(\d\.\d{3})( with the memory| bits per byte; this model carries)", printed)[1]
    assert float(reported) == pytest.approx(as_json(capsys, tmp_path / "run")["bits_per_byte"], abs=6e-4)
    first = sorted(seen[0].tokens.tolist())
    seen.clear()
    train(*options, "--out", tmp_path / "apart")
    assert "carried over" not in capsys.readouterr().out and sum(int(segment.starts.sum()) for segment in seen) > 3
    seen.clear()
    train(*options, "--carry-over-documents", "--seed", 1, "--out", tmp_path / "shuffled")
    assert sorted(seen[0].tokens.tolist()) != first, "the seed decides the documents' order, not only the lanes'"


def test_segments_and_tasks_reach_the_training(text, tmp_path, watch):
    """Overlapping windows score every token once; a segment has a task only if tasks are asked for."""
    seen, options = watch("through_time"), ["--data", text, "--steps", 2, *BRIEF]
    train(*programs.WINDOWED, "--overlap", 3, "--batch", 1, "--horizon", 4, *options, "--out", tmp_path / "overlapping")
    assert [int(segment.scored.sum()) for segment in seen] == [8, *[5] * 7]
    seen = watch("memory_replay")
    train(*programs.MEMFORMER, *options, "--out", tmp_path / "plain")
    assert [segment.task for segment in seen] == [None] * 6
    train(*programs.MEMFORMER, *options, "--task-infilling", 0.4, "--task-recall", 0.5, "--steps", 6, "--out", tmp_path / "tasks")
    assert {kind for segment in seen[6:] for kind in segment.task.kind.tolist()} == {0, 1, 2}


def test_between_updates_nothing_is_saved_or_stopped(text, tmp_path, monkeypatch, stop_at):
    """Gathered gradients would be lost: a checkpoint of step 4 comes at 5, and a signal in step 4 ends the run at 5.

    The optimiser sees the mean of the gathered gradients. A validation, which waits as well, asks for a checkpoint.
    """
    steps, seen, save, prepare = [], [], runs.save_checkpoint, optimization.average_and_clip
    saving = lambda path, contents: (steps.append(contents["step"]) if path.name != "best.pt" else None, save(path, contents))  # noqa: E731
    monkeypatch.setattr(runs, "save_checkpoint", saving)

    def watched(model, iterations, limit):
        before = model.embedding.grad.clone()
        norm = prepare(model, iterations, limit)
        seen.append((iterations, float((before / model.embedding.grad).nanmedian())))
        return norm

    monkeypatch.setattr(optimization, "average_and_clip", watched)
    options = [*programs.COMPRESSIVE, "--data", text, "--clip", 0, *BRIEF]
    gathering = [*options, "--update-every", 3, "--update-every-from", 2, "--save-every", 4, "--steps", 7]
    train(*gathering, "--out", tmp_path / "whole")
    assert steps == [5, 7] and seen == [(count, pytest.approx(count)) for count in (1, 1, 3, 2)]
    stop_at(4)
    train(*gathering, "--out", tmp_path / "cut")
    stop_at(None)
    train("--resume", tmp_path / "cut")
    assert steps == [5, 7, 5, 7] and not differences(tmp_path / "whole", tmp_path / "cut")
    steps.clear()
    validating = [*options, "--validate-every", 3, "--update-every", 4, "--steps", 6]
    train(*validating, "--out", tmp_path / "validating")
    assert steps == [4, 6]


GROUPED = {
    "block_recurrent": "memory_replay",
    "compressive": "through_time",
    "memformer": "memory_replay",
    "memorizing": "through_time",
    "pretrained_recurrence": "checkpointed",
}


@pytest.mark.parametrize("model,method", GROUPED.items())
def test_lanes_in_groups_give_the_gradient_of_all_at_once(text, tmp_path, monkeypatch, model, method):
    """Three lanes at once and one after another: the same losses and, after updates, the same parameters to rounding.

    The groups write into one state: no second one of all lanes exists, which for a long memory may take more than all else.
    """
    options = [*MODELS[model], "--data", text, "--backprop", method, "--horizon", 2, "--dtype", "float64", "--steps", 3]
    options += ["--log-every", 1, "--dropout", 0, "--schedule", "constant", *BRIEF]
    train(*options, "--out", tmp_path / "one")
    places, compute = [], training_script.forward_and_backward

    def watched(run, *given):
        for moment in ("before", "after"):
            measured = compute(run, *given) if moment == "after" else None
            places.append([field.untyped_storage().data_ptr() for field in run.state if field.numel()])
        return measured

    monkeypatch.setattr(training_script, "forward_and_backward", watched)
    train(*options, "--accumulate", 3, "--steps", 2, "--out", tmp_path / "three")
    train("--resume", tmp_path / "three", "--steps", 3)
    assert len(places) == 6 and places[0] == places[3] and places[4] == places[5] and len(set(places[5])) == len(places[5])
    assert list(losses(tmp_path / "three").values()) == pytest.approx(list(losses(tmp_path / "one").values()), rel=1e-12)
    one, three = saved(tmp_path / "one"), saved(tmp_path / "three")
    for name, value in one["parameters"].items():
        assert torch.allclose(value, three["parameters"][name], rtol=0, atol=1e-10), name
    assert all(torch.allclose(a, b) for a, b in zip(one["state"], three["state"], strict=True))


@pytest.mark.parametrize("model,method", [("compressive", "through_time"), ("memformer", "memory_replay")])
def test_two_processes_are_one(text, tmp_path, model, method):
    """The same losses, validation and parameters, in float64 to rounding; what one process began, two continue."""
    options = [*MODELS[model], "--batch", 4, "--data", text, "--backprop", method, "--horizon", 2, "--dtype", "float64", *BRIEF]
    options += ["--dropout", 0, "--log-every", 1, "--clip", 0.5, "--validate-every", 2, "--schedule", "constant"]
    train(*options, "--steps", 3, "--out", tmp_path / "one")
    train(*options, "--steps", 1, "--out", tmp_path / "two")
    started = start(["--resume", tmp_path / "two", "--steps", 3], tmp_path / "errors", processes=2)
    assert ended(started) == [0, 0], (tmp_path / "errors").read_text()
    one, two = (
        {(r["step"], name, "final" in r): r[name] for r in read_metrics(run) for name in ("loss", "validation_loss") if name in r}
        for run in (tmp_path / "one", tmp_path / "two")
    )
    assert len(one) == 6 and {key: two[key] for key in one} == pytest.approx(one, rel=1e-9)
    one, two = saved(tmp_path / "one"), saved(tmp_path / "two")
    assert one["lanes"] == two["lanes"]
    for name, value in one["parameters"].items():
        assert torch.allclose(value, two["parameters"][name], rtol=0, atol=1e-8), name
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(one["state"], two["state"], strict=True))


def test_two_processes_begin_a_run_with_a_learned_tokenizer_that_another_run_takes_along(text, tmp_path):
    """The first makes the folder, learns and keeps the ranks; the other reads them. torchrun sets the same variables."""
    pytest.importorskip("tokenizers", reason="learning needs the extra bpe: tokenizers")
    options, run = ["--data", text, *programs.TINY, *BRIEF, "--batch", 2, "--train-bpe", 300, "--steps", 1], tmp_path / "run"
    assert ended(start([*options, "--out", run], tmp_path / "errors", tmp_path / "printed", processes=2)) == [0, 0]
    printed = (tmp_path / "printed").read_text()
    assert "2 processes" in printed and printed.count("saved in") == 1
    assert saved(run)["model_config"]["vocabulary"] == 300
    train("--init", run.rename(tmp_path / "moved"), "--steps", 1, *BRIEF, "--out", tmp_path / "begun")
    kept = [tmp_path / name / "tokenizer.tiktoken" for name in ("moved", "begun")]
    assert kept[0].read_bytes() == kept[1].read_bytes()


def test_the_last_and_the_best_are_kept(text, tmp_path, monkeypatch):
    """A run that ended without its last report makes it; a resumed run does not forget what was best."""
    run, evaluation, bits = tmp_path / "run", training_script.score.evaluate, [5.0, 3.0, 4.0, 3.5]

    def scored(*read):
        return evaluation(*read)._replace(nats=bits.pop(0) * math.log(2) * 100, text_bytes=100)

    monkeypatch.setattr(training_script.score, "evaluate", scored)
    options = ["--data", text, *programs.TINY, "--save-every", 1, "--validate-every", 2, "--steps", 8, *BRIEF]
    with monkeypatch.context() as patch:
        patch.setattr(training_script, "report", lambda run: None)
        train(*options, "--out", run)
    assert list(losses(run)) == [2, 4, 6, 8]
    steps = [record["step"] for record in read_metrics(run)]
    assert steps == [2, 2, 4, 4, 6, 6, 8, 8], "a line of the log comes before each validation"
    bits += [5.0, 6.0, 3.2, 6.0]
    train("--resume", run)
    assert [record["step"] for record in read_metrics(run) if record.get("final")] == [8]
    train("--resume", run, "--steps", 9)
    assert load_checkpoint(run / "best.pt")["step"] == 4 and saved(run)["best"] == pytest.approx(3.0)
    validated = [record["step"] for record in read_metrics(run) if "validation_tokens" in record and "final" not in record]
    assert validated == [2, 4, 6, 8, 9], "and after the last step"
    assert not bits, "the report takes the last validation's score"


def test_epochs_become_steps(texts, tmp_path):
    """The schedule ends there, and more epochs continue it: 216 segments, of which a step reads 3."""
    options = [*programs.TINY, "--data", texts, "--horizon", 1, "--epochs", 0.05, *BRIEF]
    train(*options, "--final-fraction", 0.25, "--learning-rate", 0.01, "--out", tmp_path / "run")
    contents = saved(tmp_path / "run")
    assert contents["step"] == contents["training_config"]["steps"] == 4
    assert [group["lr"] for group in contents["optimizer"]["param_groups"]] == pytest.approx([0.0025, 0.0025])
    train("--resume", tmp_path / "run", "--epochs", 0.06)
    assert saved(tmp_path / "run")["step"] == 5


def test_the_log_has_the_loss_of_all_segments_and_what_the_step_had(text, tmp_path, monkeypatch):
    """A model that knows nothing has a loss of log 256: one bit for each of a byte's."""
    added, add = [], Log.add
    monkeypatch.setattr(Log, "add", lambda log, *sums: added.append(sums[1:]) or add(log, *sums))
    monkeypatch.setattr(runs.Run, "tokens_per_second", lambda run, steps: run.tokens)
    options = [*programs.COMPRESSIVE, "--data", text, "--horizon", 2, "--learning-rate", 1e-9, "--steps", 6, *BRIEF]
    train(*options, "--log-every", 4, "--out", tmp_path / "run")
    assert added == [(48, 48)] * 6, "tokens of two segments of three lanes, and their bytes"
    *logged, last = read_metrics(tmp_path / "run")
    assert [(record["step"], record["tokens_per_second"]) for record in logged] == [(4, 48 * 4), (6, 48 * 6)] and last["final"]
    for record in logged:
        assert record["loss"] == pytest.approx(math.log(256), rel=0.1) and record["bits_per_byte"] == pytest.approx(8, rel=0.1)
        assert 0 < record["learning_rate"] <= 1e-9 and record["gradient_norm"] > 0


def set_nan(optimizer, rate):
    optimizer.param_groups[0]["params"][0].data.view(-1)[3] = NAN


NAN = torch.tensor(float("nan"))
BROKEN = {  # {what becomes NaN: (function, what takes its place)}
    "loss": ("accelerated.replay.BACKPROP", {"through_time": lambda model, segments, state, **_: (NAN, {}, state)}),
    "gradient's norm": ("accelerated.training.optimization.average_and_clip", lambda *_: NAN),
    "parameters": ("accelerated.training.optimization.set_learning_rate", set_nan),
    "layers.0.compression": ("accelerated.compressive.Layer.compression_loss", lambda *_: NAN),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_run_that_finds_a_nan_leaves_its_last_checkpoint(text, tmp_path, monkeypatch, what):
    run = tmp_path / "run"
    train("--data", text, *programs.COMPRESSIVE, "--steps", 2, *BRIEF, "--out", run)
    before = {path: path.read_bytes() for path in run.glob("*.pt")}
    monkeypatch.setattr(*BROKEN[what])
    with pytest.raises(InputError, match=f"the {what} is nan at step 3; what was saved before stays; try a lower"):
        train("--resume", run, "--steps", 3)
    assert {path: path.read_bytes() for path in run.glob("*.pt*")} == before
    with pytest.raises(InputError, match=f"the {what} is nan at step 1; what was saved before stays; try a lower"):
        train("--data", text, *programs.COMPRESSIVE, "--steps", 1, *BRIEF, "--out", tmp_path / "new")


def test_a_plain_run_is_fine_tuned_with_and_without_recurrence(text, tmp_path):
    """The command sequence of docs/pretrained_recurrence.md: pretrain, fine-tune twice; a module comes whole or not at all."""
    base, plain, recurrent, without = (tmp_path / name for name in ("base", "plain", "recurrent", "without"))
    brief = ["--steps", 1, *BRIEF]
    train(*programs.WINDOWED, "--vectors", 0, "--horizon", 1, "--data", text, *brief, "--out", base)
    train("--init", base, "--learning-rate", 1e-12, "--weight-decay", 0, *brief, "--out", plain)
    for name, value in saved(plain)["parameters"].items():
        assert torch.allclose(value, saved(base)["parameters"][name], rtol=0, atol=1e-9), name
    train("--init", base, "--vectors", 1, "--module-width", 8, "--overlap", 2, *brief, "--out", recurrent)
    contents = saved(recurrent)
    sizes = {"vectors": 1, "overlap": 2, "width": 16, "module_width": 8}
    assert sizes.items() <= contents["model_config"].items() and contents["data_config"]["data"] == str(text)
    with pytest.raises(InputError, match=r"module\.hidden_3 should be absent"):
        train("--init", recurrent, "--module-layers", 2, *brief, "--out", tmp_path / "x")
    train("--init", recurrent, "--vectors", 0, *brief, "--out", without)
    for run in (base, plain, recurrent, without):
        assert any(name.startswith("module.") for name in saved(run)["parameters"]) == (run == recurrent), run


def test_recall_reports_right_answers(tmp_path, capsys):
    """A plain model carries nothing."""
    options = ["--data", "recall", "--recall-distance", 8, "--steps", 1]
    train(*programs.COMPRESSIVE, *options, "--validation-segments", 1, "--out", tmp_path / "brief")
    right = r"right answers: \S+% with the memory, \S+% with it cleared \(chance 10%\)"
    assert re.search(right, capsys.readouterr().out)
    train(*programs.WINDOWED, *options, "--vectors", 0, "--horizon", 1, "--out", tmp_path / "plain")
    no_memory = r"validation on 1,024 tokens: \d\.\d{3} bits per byte; this model carries no memory"
    assert re.search(no_memory, capsys.readouterr().out)


def test_documents_without_tokens_are_passed_over(texts, tmp_path, capsys):
    """In training, and for the sample, whose prompt is the opening of the first that has some."""
    for path in sorted(texts.iterdir())[::2]:
        path.write_text("")
    train(*programs.WINDOWED, "--data", texts, "--steps", 1, "--sample", 3, "--out", tmp_path / "run")
    assert "how the model continues it:\ntext number" in capsys.readouterr().out


def test_readme_commands_pin_torch_and_make_their_environment():
    lines = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("python3 -m venv")]
    assert len(lines) == 2 and all("torch==2.13.0" in line for line in lines)
    assert "train.py" in lines[0] and "pytest" in lines[1]
