"""train.py as a user runs it: what it says and keeps, a run stopped and resumed, one shared by several processes."""

import math
import os
import re
import shlex
import signal
from types import SimpleNamespace

import pytest
import torch

import train as training_script
from accelerated.program.errors import InputError
from accelerated.training import optimization
from accelerated.training import run as runs
from accelerated.training.checkpoint import load_checkpoint
from accelerated.training.log import read_metrics
from tests.helpers import programs
from tests.helpers.programs import as_json, differences, ended, saved, start, train

BRIEF = ["--sample", 0, "--validation-segments", 1]
MODELS = {  # {model: (options, way of back-propagation, whether documents are joined when a run is resumed)}
    "block_recurrent": (programs.TINY, "through_time", False),
    "compressive": (programs.COMPRESSIVE, "checkpointed", False),
    "memformer": (
        [*programs.MEMFORMER, "--task-infilling", 0.4, "--task-recall", 0.2],
        "memory_replay",
        True,
    ),
    "decoder-only": ([*programs.MEMFORMER, "--encoder-layers", 0], "memory_replay", False),
    "memorizing": (programs.MEMORIZING, "memory_replay", False),
    "pretrained_recurrence": ([*programs.WINDOWED, "--overlap", 3], "through_time", True),
}


SHARED = (
    "loss",
    "bits_per_byte",
    "validation_loss",
    "layers.0.compression",
)  # what several processes measure together


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
def seen(monkeypatch):
    """A list to which every segment is added that train.py computes."""
    found, compute = [], training_script.forward_and_backward

    def watched(run, segments, scored):
        found.extend(segments)
        return compute(run, segments, scored)

    monkeypatch.setattr(training_script, "forward_and_backward", watched)
    return found


@pytest.fixture
def texts(tmp_path):
    """A folder of 60 short texts of different lengths; one, the first of the validation split, is empty."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number}.txt").write_text(f"text number {number}. " * (number % 7 + 1))
    (folder / "36.txt").write_text("")
    return folder


def test_training_saves_reports_and_samples(text, tmp_path, capsys, stop_at, monkeypatch):
    """Printed commands can be pasted into a shell, and eval.py finds the score that was reported."""
    run, data = tmp_path / "a run; of mine", tmp_path / "the data"
    stop_at(1)
    train(
        "--data",
        text,
        *programs.TINY,
        "--batch",
        24,
        "--steps",
        3,
        "--out",
        run,
        "--data-dir",
        data,
    )
    stop_at(None)
    train("--resume", run, "--data-dir", data)
    printed = capsys.readouterr().out
    assert re.search(r"after ⟫ how the model continues it:\n(.|\n)+⟫", printed)
    for command in ("continue with: python train.py --resume", "evaluate it with: python eval.py"):
        [words] = re.findall(f"{command} (.*)\n", printed)
        assert shlex.split(words) == [str(run), "--data-dir", str(data)]
    reported = re.search(
        r"bits per byte: (\d\.\d{3}) with the memory, (\d\.\d{3}) cleared each segment", printed
    )
    read = [
        as_json(capsys, run, *clear, "--data-dir", tmp_path / "other")
        for clear in ([], ["--clear-memory"])
    ]
    evaluated = [record["bits_per_byte"] for record in read]
    assert [float(bits) for bits in reported.groups()] == pytest.approx(evaluated, abs=6e-4)
    assert evaluated[0] != evaluated[1] and saved(run)["step"] == 3
    assert [record["memory_cleared"] for record in read] == [False, True]
    assert all((folder / "tokens").is_dir() for folder in (data, tmp_path / "other"))


@pytest.mark.parametrize("model", MODELS)
def test_a_stopped_run_resumes_bit_for_bit(text, texts, tmp_path, model, stop_at, capsys):
    """Stopped by a signal in the third of five steps: all that is saved at the end, and every measurement, is a whole run's.

    Twice over joined documents, beyond the first pass. A signal in the last step stops nothing.
    """
    options, method, joined = MODELS[model]
    options = [
        *options,
        "--backprop",
        method,
        "--horizon",
        2,
        "--dropout",
        0.2,
        "--log-every",
        2,
        *BRIEF,
    ]
    options += (
        ["--data", texts, "--carry-over-documents", "--training-documents", 4, "--horizon", 5]
        if joined
        else ["--data", text]
    )
    stop_at(5)
    train(*options, "--steps", 5, "--out", tmp_path / "whole")
    assert f"saved in {tmp_path / 'whole'}" in capsys.readouterr().out
    stop_at(3)
    train(*options, "--steps", 5, "--out", tmp_path / "cut")
    stop_at(None)
    assert saved(tmp_path / "cut")["step"] == 3
    train("--resume", tmp_path / "cut")
    assert not differences(tmp_path / "whole", tmp_path / "cut") and list(
        losses(tmp_path / "cut")
    ) == [2, 4, 5]
    assert not joined or saved(tmp_path / "cut")["lanes"]["passes"] > 0


def test_memory_is_carried_over_documents_in_training_and_validation(texts, tmp_path, seen, capsys):
    """State starts anew once in each lane, segments are full, eval.py gives the same score, and an empty text gives no prompt."""
    options = [
        *programs.COMPRESSIVE,
        "--data",
        texts,
        "--carry-over-documents",
        "--horizon",
        1,
        "--steps",
        5,
        "--sample",
        3,
    ]
    train(*options, "--out", tmp_path / "run")
    printed = capsys.readouterr().out
    assert (
        "training documents, memory carried over them" in printed
        and "how the model continues it:\ntext number" in printed
    )
    assert [segment.starts.tolist() for segment in seen] == [[True] * 3, *[[False] * 3] * 4]
    following = [chr(token) for segment in seen for token in segment.targets[~segment.scored]]
    assert 0 < len(following) < 20 and {*following} == {"t"}, "the first letter of a document alone"
    [reported] = re.findall(r"(\d\.\d{3}) with the memory", printed)
    assert float(reported) == pytest.approx(
        as_json(capsys, tmp_path / "run")["bits_per_byte"], abs=6e-4
    )
    train(*options, "--no-carry-over-documents", "--steps", 12, "--out", tmp_path / "apart")
    assert sum(int(segment.starts.sum()) for segment in seen[5:]) > 3
    train(*options, "--seed", 1, "--out", tmp_path / "shuffled")
    first, other = (sorted(segment.tokens.tolist()) for segment in (seen[0], seen[17]))
    assert first != other, "the seed decides the documents' order, not only the lanes'"
    assert not torch.equal(*(saved(tmp_path / run)["random"] for run in ("run", "shuffled"))), (
        "and what dropout draws"
    )
    train(
        *options, "--batch", 40, "--steps", 1, "--out", tmp_path / "many"
    )  # lanes, of which few have a segment to validate on
    *_, reported = re.findall(r"(\d\.\d{3}) with the memory", capsys.readouterr().out)
    assert float(reported) == pytest.approx(
        as_json(capsys, tmp_path / "many")["bits_per_byte"], abs=6e-4
    )


def test_segments_and_tasks_reach_the_training(text, tmp_path, seen):
    """Overlapping windows score every token once; a segment has a task only if tasks are asked for."""
    options = ["--data", text, "--steps", 2, *BRIEF]
    train(
        *programs.WINDOWED,
        "--overlap",
        3,
        "--batch",
        1,
        "--horizon",
        4,
        *options,
        "--out",
        tmp_path / "overlapping",
    )
    assert [int(segment.scored.sum()) for segment in seen] == [8, *[5] * 7]
    seen.clear()
    train(*programs.MEMFORMER, *options, "--out", tmp_path / "plain")
    assert [segment.task for segment in seen] == [None] * 6
    train(
        *programs.MEMFORMER,
        *options,
        "--task-infilling",
        0.4,
        "--task-recall",
        0.5,
        "--steps",
        6,
        "--out",
        tmp_path / "tasks",
    )
    assert {kind for segment in seen[6:] for kind in segment.task.kind.tolist()} == {0, 1, 2}


def test_between_updates_nothing_is_saved_or_stopped(text, tmp_path, monkeypatch, stop_at):
    """Gathered gradients would be lost: a checkpoint of step 4 comes at 5, and a signal in step 4 ends the run at 5.

    The optimiser sees the mean of the gathered gradients. A validation, which waits as well, asks for a checkpoint.
    """
    steps, gathered, save, prepare = [], [], runs.save_checkpoint, optimization.average_and_clip

    def saving(path, contents):
        if path.name != "best.pt":
            steps.append(contents["step"])
        save(path, contents)

    monkeypatch.setattr(runs, "save_checkpoint", saving)
    monkeypatch.setattr(
        optimization,
        "average_and_clip",
        lambda *given: gathered.append(given[1]) or prepare(*given),
    )
    options = [*programs.COMPRESSIVE, "--data", text, "--clip", 0, *BRIEF]
    gathering = [
        *options,
        "--update-every",
        3,
        "--update-every-from",
        2,
        "--save-every",
        4,
        "--steps",
        7,
    ]
    train(*gathering, "--out", tmp_path / "whole")
    assert steps == [5, 7] and gathered == [1, 1, 3, 2]
    stop_at(4)
    train(*gathering, "--out", tmp_path / "cut")
    stop_at(None)
    train("--resume", tmp_path / "cut")
    assert steps == [5, 7, 5, 7] and not differences(tmp_path / "whole", tmp_path / "cut")
    steps.clear()
    train(
        *options,
        "--validate-every",
        3,
        "--update-every",
        4,
        "--steps",
        6,
        "--out",
        tmp_path / "validating",
    )
    assert steps == [4, 6]


@pytest.mark.parametrize("model", MODELS)
def test_lanes_in_groups_give_the_gradient_of_all_at_once(text, tmp_path, monkeypatch, model):
    """Three lanes at once and one after another: the same losses and, after updates, the same parameters to rounding.

    The groups write into one state: no second one of all lanes exists, which for a long memory may take more than all else.
    """
    options, method, _ = MODELS[model]
    options = [*options, "--data", text, "--backprop", method, "--horizon", 2, "--dtype", "float64"]
    options += ["--steps", 3, "--log-every", 1, "--dropout", 0, "--schedule", "constant", *BRIEF]
    train(*options, "--out", tmp_path / "one")
    in_place, compute = [], training_script.forward_and_backward

    def watched(run, *given):
        before = [field.data_ptr() for field in run.state]
        measured = compute(run, *given)
        in_place.append(before == [field.data_ptr() for field in run.state])
        return measured

    monkeypatch.setattr(training_script, "forward_and_backward", watched)
    train(*options, "--accumulate", 3, "--steps", 2, "--out", tmp_path / "three")
    train("--resume", tmp_path / "three", "--steps", 3)
    assert in_place == [True] * 3
    assert list(losses(tmp_path / "three").values()) == pytest.approx(
        list(losses(tmp_path / "one").values()), rel=1e-12
    )
    one, three = saved(tmp_path / "one"), saved(tmp_path / "three")
    for name, value in one["parameters"].items():
        assert torch.allclose(value, three["parameters"][name], rtol=0, atol=1e-10), name
    assert all(torch.allclose(a, b) for a, b in zip(one["state"], three["state"], strict=True))


@pytest.mark.parametrize("model", ["compressive", "memformer"])
def test_two_processes_are_one(text, tmp_path, model):
    """The same losses, validation and parameters, in float64 to rounding; what one process began, two continue."""
    options, method, _ = MODELS[model]
    options = [
        *options,
        "--batch",
        4,
        "--data",
        text,
        "--backprop",
        method,
        "--horizon",
        2,
        "--dtype",
        "float64",
        *BRIEF,
    ]
    options += [
        "--dropout",
        0,
        "--log-every",
        1,
        "--clip",
        0.5,
        "--validate-every",
        2,
        "--schedule",
        "constant",
    ]
    train(*options, "--steps", 3, "--out", tmp_path / "one")
    train(*options, "--steps", 1, "--out", tmp_path / "two")
    started = start(["--resume", tmp_path / "two", "--steps", 3], tmp_path / "errors", processes=2)
    assert ended(started) == [0, 0], (tmp_path / "errors").read_text()
    one, two = (
        {
            (r["step"], name, "final" in r): r[name]
            for r in read_metrics(tmp_path / run)
            for name in SHARED
            if name in r
        }
        for run in ("one", "two")
    )
    assert len(one) == (12 if model == "compressive" else 9) and {
        key: two[key] for key in one
    } == pytest.approx(one, rel=1e-9)
    assert len(read_metrics(tmp_path / "two")) == 8, "the first process alone writes"
    one, two = saved(tmp_path / "one"), saved(tmp_path / "two")
    assert one["lanes"] == two["lanes"]
    for name, value in one["parameters"].items():
        assert torch.allclose(value, two["parameters"][name], rtol=0, atol=1e-8), name
    assert all(
        torch.allclose(a, b, atol=1e-7) for a, b in zip(one["state"], two["state"], strict=True)
    )


def test_each_process_draws_dropout_of_its_own(text, tmp_path, monkeypatch):
    ranks, compute = [], training_script.forward_and_backward

    def as_the_second(*given):
        with monkeypatch.context() as patch:
            patch.setattr(training_script.process, "rank", lambda: 1)
            return compute(*given)

    monkeypatch.setattr(training_script, "forward_and_backward", as_the_second)
    through_time = training_script.replay.BACKPROP["through_time"]
    watched = {
        "through_time": lambda *given, rank, **others: (
            ranks.append(rank) or through_time(*given, rank=rank, **others)
        )
    }
    monkeypatch.setattr(training_script.replay, "BACKPROP", watched)
    train(*programs.TINY, "--data", text, "--steps", 1, *BRIEF, "--out", tmp_path / "run")
    assert ranks == [1]


def test_two_processes_begin_a_run_with_a_learned_tokenizer_that_another_run_takes_along(
    text, tmp_path
):
    """The first makes the folder, learns and keeps the ranks; the other reads them. torchrun sets the same variables."""
    pytest.importorskip("tokenizers", reason="learning needs the extra bpe: tokenizers")
    options, run = (
        ["--data", text, *programs.TINY, *BRIEF, "--batch", 2, "--train-bpe", 300, "--steps", 1],
        tmp_path / "run",
    )
    assert ended(
        start([*options, "--out", run], tmp_path / "errors", tmp_path / "printed", processes=2)
    ) == [0, 0]
    printed = (tmp_path / "printed").read_text()
    assert "2 processes" in printed and printed.count("saved in") == 1
    assert saved(run)["model_config"]["vocabulary"] == 300
    train(
        "--init", run.rename(tmp_path / "moved"), "--steps", 1, *BRIEF, "--out", tmp_path / "begun"
    )
    kept = [tmp_path / name / "tokenizer.tiktoken" for name in ("moved", "begun")]
    assert kept[0].read_bytes() == kept[1].read_bytes()


def test_the_best_is_kept(text, tmp_path, monkeypatch):
    """A resumed run does not forget it; the last report takes the last validation's score."""
    run, evaluation, bits = (
        tmp_path / "run",
        training_script.score.evaluate,
        [5.0, 3.0, 4.0, 3.5, 6.0, 3.2, 6.0],
    )
    names, save = [], runs.save_checkpoint
    monkeypatch.setattr(
        runs,
        "save_checkpoint",
        lambda path, contents: names.append(path.stem) or save(path, contents),
    )

    def scored(
        *read,
    ):  # bits of steps 2, 4, 6, 8 and of the cleared memory at the end; of step 9, resumed, and cleared
        return evaluation(*read)._replace(nats=bits.pop(0) * math.log(2) * 100, text_bytes=100)

    monkeypatch.setattr(training_script.score, "evaluate", scored)
    train(
        "--data",
        text,
        *programs.TINY,
        "--save-every",
        1,
        "--validate-every",
        2,
        "--steps",
        8,
        *BRIEF,
        "--out",
        run,
    )
    train("--resume", run, "--steps", 9)
    assert load_checkpoint(run / "best.pt")["step"] == 4 and saved(run)["best"] == pytest.approx(
        3.0
    )
    assert names[:3] == ["checkpoint", "best", "checkpoint"], (
        "the best comes first: after it a kill loses nothing"
    )
    steps = [record["step"] for record in read_metrics(run)]
    assert steps == [2, 2, 4, 4, 6, 6, 8, 8, 8, 9, 9, 9] and not bits, (
        "a line before each validation; then the report"
    )


def test_the_log_has_the_loss_of_all_segments_and_what_the_step_had(
    text, tmp_path, monkeypatch, capsys
):
    """A model that learns nothing needs log 256 nats a byte, 8 bits. A step has 3 x 2 x 8 = 48 tokens; --epochs says how many."""
    read, bar = SimpleNamespace(tokens=600), SimpleNamespace(format_dict={"elapsed": 2.0})
    assert runs.Run.tokens_per_second(read, bar) == 300
    monkeypatch.setattr(runs.Run, "tokens_per_second", lambda run, steps: run.tokens)
    monkeypatch.setattr("accelerated.program.progress.SECONDS", 0.0)
    options = [
        *programs.COMPRESSIVE,
        "--data",
        text,
        "--horizon",
        2,
        "--learning-rate",
        1e-9,
        "--final-fraction",
        0.25,
        *BRIEF,
    ]
    train(
        *options, "--epochs", 0.0265, "--log-every", 4, "--out", tmp_path / "run"
    )  # of 1,350 segments, 6 a step: 6 steps
    *logged, last = read_metrics(tmp_path / "run")
    assert [(record["step"], record["tokens_per_second"]) for record in logged] == [
        (4, 48 * 4),
        (6, 48 * 6),
    ] and last["final"]
    assert logged[-1]["learning_rate"] == pytest.approx(0.25e-9), "the schedule ends there"
    for record in logged:
        assert record["loss"] == pytest.approx(math.log(256), rel=0.1) and record[
            "bits_per_byte"
        ] == pytest.approx(8, rel=0.1)
        assert record["gradient_norm"] > 0 and record["layers.1.compression"] >= 0
    [*_, shown] = re.findall(r"(\S+) bits/byte, compression loss \d", capsys.readouterr().err)
    assert float(shown) == pytest.approx(8, rel=0.1)


def set_nan(optimizer, rate):
    optimizer.param_groups[0]["params"][0].data.view(-1)[3] = NAN


NAN = torch.tensor(float("nan"))
BROKEN = {  # {what becomes NaN: (function, what takes its place)}
    "loss": (
        "accelerated.replay.BACKPROP",
        {"through_time": lambda model, segments, state, **_: (NAN, {}, state)},
    ),
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
    with pytest.raises(
        InputError, match=f"the {what} is nan at step 3; what was saved before stays; try a lower"
    ):
        train("--resume", run, "--steps", 3)
    assert {path: path.read_bytes() for path in run.glob("*.pt*")} == before


def test_recurrence_is_added_to_a_plain_run_and_left_out_again(text, tmp_path):
    """As in docs/pretrained_recurrence.md; the recurrence module comes whole or not at all."""
    base, recurrent, without = (tmp_path / name for name in ("base", "recurrent", "without"))
    brief = ["--steps", 1, *BRIEF]
    train(*programs.WINDOWED, "--vectors", 0, "--horizon", 1, "--data", text, *brief, "--out", base)
    train(
        "--init",
        base,
        "--vectors",
        1,
        "--module-width",
        8,
        "--overlap",
        2,
        *brief,
        "--out",
        recurrent,
    )
    contents = saved(recurrent)
    sizes = {"vectors": 1, "overlap": 2, "width": 16, "module_width": 8}
    assert sizes.items() <= contents["model_config"].items() and contents["data_config"][
        "data"
    ] == str(text)
    with pytest.raises(InputError, match=r"module\.hidden_3 should be absent"):
        train("--init", recurrent, "--module-layers", 2, *brief, "--out", tmp_path / "x")
    train("--init", recurrent, "--vectors", 0, *brief, "--out", without)
    for run in (base, recurrent, without):
        assert any(name.startswith("module.") for name in saved(run)["parameters"]) == (
            run == recurrent
        ), run
