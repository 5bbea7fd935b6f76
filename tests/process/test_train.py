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
from accelerated.training import optimization, process
from accelerated.training import run as runs
from accelerated.training.folder import checkpoint_path, numbered_checkpoints
from accelerated.training.log import Log, read_metrics
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
    monkeypatch.setattr(process, "peak_memory", lambda device: "peak memory: much")
    stop_at(1)
    train("--data", text, *TINY, "--batch", 24, "--steps", 3, "--out", run, "--data-dir", data)
    stop_at(None)
    train("--resume", run, "--data-dir", data)
    printed = capsys.readouterr().out
    assert re.search(r"after ⟫ how the model continues it:\n(.|\n)+⟫", printed) and "peak memory: much\n" in printed
    for command in ("continue with: python train.py --resume", "evaluate it with: python eval.py"):
        [words] = re.findall(f"{command} (.*)\n", printed)
        assert shlex.split(words) == [str(run), "--data-dir", str(data)]
    reported = re.search(r"bits per byte: (\d\.\d{3}) with the memory, (\d\.\d{3}) cleared each segment", printed)
    evaluate("score", run)
    evaluate("score", run, "--clear-memory")
    evaluated = re.findall(r"bits per byte +(\S+)", capsys.readouterr().out)
    assert [float(bits) for bits in reported.groups()] == pytest.approx([float(bits) for bits in evaluated], abs=6e-4)
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
    assert not differences(tmp_path / "whole", tmp_path / "cut", ["step-N.pt"]) and list(losses(tmp_path / "cut")) == [2, 4, 5]
    assert not joined or saved(tmp_path / "cut")["lanes"]["passes"] > 0


def test_the_seed_decides_weights_and_shuffles_documents_that_are_joined(texts, tmp_path, watch):
    """One lane reads all of them, so the text's beginning depends only on their order; an empty one is passed over."""
    seen, parameters = watch("through_time"), []
    options = [*COMPRESSIVE, "--batch", 1, "--segment", 16, "--data", texts, "--carry-over-documents", "--steps", 1, *BRIEF]
    for seed in (0, 1):
        train(*options, "--seed", seed, "--out", tmp_path / str(seed))
        parameters.append(saved(tmp_path / str(seed))["parameters"]["embedding"])
    first, second = ("".join(map(chr, segment.tokens[0].tolist())) for segment in seen)
    assert first != second and all(text.startswith("text number ") for text in (first, second))
    assert not torch.equal(*parameters)


@pytest.mark.parametrize("model", ["compressive", "plain"])
def test_memory_is_carried_over_documents_in_training_and_validation(texts, tmp_path, watch, capsys, model):
    """State starts anew once in each lane, segments are full, and eval.py gives the same validation score."""
    seen, options = watch("through_time"), {**MODELS, "plain": [*WINDOWED, "--vectors", 0]}[model]
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


def test_segments_and_tasks_reach_the_training(text, tmp_path, watch):
    """Overlapping windows score every token once; a segment has a task only if tasks are asked for."""
    seen, options = watch("through_time"), ["--data", text, "--steps", 2, *BRIEF]
    train(*WINDOWED, "--overlap", 3, "--batch", 1, "--horizon", 4, *options, "--out", tmp_path / "overlapping")
    assert [int(segment.scored.sum()) for segment in seen] == [8, *[5] * 7]
    seen = watch("memory_replay")
    train(*MEMFORMER, *options, "--out", tmp_path / "plain")
    assert [segment.task for segment in seen] == [None] * 6
    train(*MEMFORMER, *options, "--task-infilling", 0.4, "--task-recall", 0.5, "--steps", 6, "--out", tmp_path / "tasks")
    assert {kind for segment in seen[6:] for kind in segment.task.kind.tolist()} == {0, 1, 2}


def test_between_updates_nothing_is_saved_or_stopped(text, tmp_path, monkeypatch, stop_at):
    """Gathered gradients would be lost: a checkpoint of step 4 comes at 5, and a signal in step 4 ends the run at 5.

    The optimiser sees the mean of the gathered gradients. A validation, which waits as well, asks for a checkpoint.
    """
    steps, seen, keep, prepare = [], [], runs.save_in_run, optimization.average_and_clip
    monkeypatch.setattr(runs, "save_in_run", lambda run, c, *a: steps.append(c["step"]) or keep(run, c, *a))

    def watched(model, iterations, limit):
        before = model.embedding.grad.clone()
        norm = prepare(model, iterations, limit)
        seen.append((iterations, float((before / model.embedding.grad).nanmedian())))
        return norm

    monkeypatch.setattr(optimization, "average_and_clip", watched)
    options = [*COMPRESSIVE, "--data", text, "--clip", 0, *BRIEF]
    gathering = [*options, "--update-every", 3, "--update-every-from", 2, "--save-every", 4, "--steps", 7]
    train(*gathering, "--out", tmp_path / "whole")
    assert steps == [5, 7] and seen == [(count, pytest.approx(count)) for count in (1, 1, 3, 2)]
    stop_at(4)
    train(*gathering, "--out", tmp_path / "cut")
    stop_at(None)
    assert steps == [5, 7, 5]
    train("--resume", tmp_path / "cut")
    whole, cut = saved(tmp_path / "whole"), saved(tmp_path / "cut")
    assert equal(whole["parameters"], cut["parameters"]) and equal(whole["state"], cut["state"])
    steps.clear()
    train(*options, "--validate-every", 3, "--update-every", 4, "--steps", 6, "--out", tmp_path / "validating")
    assert steps == [4, 6]


@pytest.mark.parametrize(
    "model,method",
    [
        ("block_recurrent", "memory_replay"),
        ("compressive", "through_time"),
        ("memformer", "memory_replay"),
        ("memorizing", "through_time"),
        ("pretrained_recurrence", "checkpointed"),
    ],
)
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


def test_two_processes_begin_a_run_with_a_learned_tokenizer(text, tmp_path):
    """The first makes the folder, learns and keeps the ranks; the other reads them. torchrun sets the same variables."""
    pytest.importorskip("tokenizers", reason="learning needs the extra bpe: tokenizers")
    options = ["--data", text, *TINY, *BRIEF, "--batch", 2, "--train-bpe", 300, "--steps", 1, "--out", tmp_path / "run"]
    assert ended(start(options, tmp_path / "errors", tmp_path / "printed", processes=2)) == [0, 0]
    printed = (tmp_path / "printed").read_text()
    assert "2 processes" in printed and printed.count("saved in") == 1
    assert saved(tmp_path / "run")["model_config"]["vocabulary"] == 300


def test_the_last_k_and_the_best_are_kept(text, tmp_path, monkeypatch, capsys):
    """A run that ended without its last report makes it; a resumed run does not forget what was best."""
    run, bits, evaluation = tmp_path / "run", [5.0, 3.0, 4.0, 3.5], training_script.score.evaluate

    def scored(*read):
        return evaluation(*read)._replace(nats=bits.pop(0) * math.log(2) * 100, text_bytes=100)

    def best():
        return torch.load(run / "best.pt", weights_only=True)["step"], round(saved(run)["best"], 6)

    monkeypatch.setattr(training_script.score, "evaluate", scored)
    options = ["--data", text, *TINY, "--save-every", 1, "--keep", 3, "--validate-every", 2, "--steps", 8, *BRIEF]
    with monkeypatch.context() as patch:
        patch.setattr(training_script, "report", lambda run: None)
        train(*options, "--out", run)
    assert list(numbered_checkpoints(run)) == [6, 7, 8] and saved(run)["step"] == 8 and best() == (4, 3.0)
    rows = [r for r in read_metrics(run) if "validation_bits_per_byte" in r]
    assert [(r["step"], round(r["validation_bits_per_byte"], 6)) for r in rows] == [(2, 5.0), (4, 3.0), (6, 4.0), (8, 3.5)]
    assert list(losses(run)) == [2, 4, 6, 8], "a line of the log comes before each validation"
    bits += [5.0, 6.0, 3.2, 6.0]
    capsys.readouterr()
    train("--resume", run)
    assert "5.000 with the memory, 6.000 cleared" in capsys.readouterr().out and saved(run)["step"] == 8
    assert [record["step"] for record in read_metrics(run) if record.get("final")] == [8]
    train("--resume", run, "--steps", 9)
    assert best() == (4, 3.0) and not bits, "the report takes the last validation's score"


def test_epochs_become_steps(texts, tmp_path, capsys):
    """The schedule ends there, and a resumed run keeps the number: 216 segments, of which a step reads 3."""
    run, options = tmp_path / "run", [*TINY, "--data", texts, "--horizon", 1, "--epochs", 0.05, *BRIEF, "--final-fraction", 0.25]
    train(*options, "--learning-rate", 0.01, "--out", run)
    assert saved(run)["step"] == saved(run)["training_config"]["steps"] == 4
    assert [group["lr"] for group in saved(run)["optimizer"]["param_groups"]] == pytest.approx([0.0025, 0.0025])
    assert re.search(r"--epochs 0.05 of 216 segments in 3 x 1 a step: 4 steps\n", capsys.readouterr().out)
    with pytest.raises(InputError, match="is at step 4; give --steps above that"):
        train("--resume", run)
    train("--resume", run, "--epochs", 0.06, "--warmup", 90)
    assert saved(run)["step"] == 5 and "--warmup 90 is longer than --steps 5:" in capsys.readouterr().err
    train("--resume", run, "--steps", 6)
    assert saved(run)["step"] == 6


def test_metrics_are_means_over_the_iterations_between_them(text, tmp_path, monkeypatch):
    """The tokens of all segments are counted. A model that knows nothing has a loss of log 256."""
    added, add = [], Log.add
    monkeypatch.setattr(Log, "add", lambda log, *sums: added.append(sums) or add(log, *sums))
    monkeypatch.setattr(runs.Run, "tokens_per_second", lambda run, steps: run.tokens)
    options = [*COMPRESSIVE, "--data", text, "--horizon", 2, "--steps", 6, "--log-every", 4, "--learning-rate", 1e-9, *BRIEF]
    train(*options, "--out", tmp_path / "run")
    first, second, last = read_metrics(tmp_path / "run")
    names = {"step", "loss", "bits_per_byte", "learning_rate", "gradient_norm", "tokens_per_second"}
    assert names < first.keys() and first["gradient_norm"] > 0 and last["final"]
    for record, sums, step in ((first, added[:4], 4), (second, added[4:], 6)):
        nats, tokens, text_bytes = map(sum, zip(*sums, strict=True))
        assert (record["step"], record["tokens_per_second"]) == (step, 48 * step) and tokens == text_bytes == 48 * len(sums)
        assert record["loss"] == pytest.approx(nats / tokens) == pytest.approx(math.log(256), rel=0.1)
        assert record["bits_per_byte"] == pytest.approx(record["loss"] / math.log(2))


def test_a_run_that_fails_leaves_its_last_checkpoint(text, tmp_path, monkeypatch):
    """A value that is NaN, a full disk, and data that changed since."""
    run, nan, original = tmp_path / "run", torch.tensor(float("nan")), text.read_bytes()
    train("--data", text, *COMPRESSIVE, "--steps", 2, *BRIEF, "--out", run)
    before, update = checkpoint_path(run).read_bytes(), training_script.update

    def broken_update(run):
        update(run)
        next(run.model.parameters()).data.view(-1)[3] = nan

    def full(contents, file):
        raise OSError(28, "No space left on device")

    def refuse(words, *fault):
        with monkeypatch.context() as patch, pytest.raises(InputError, match=words):
            (patch.setitem if len(fault) == 3 else patch.setattr)(*fault)
            train("--resume", run, "--steps", 3)
        assert checkpoint_path(run).read_bytes() == before, words
        assert sorted(p.name for p in run.iterdir()) == [".lock", "checkpoint.pt", "config.json", "metrics.jsonl", "step-2.pt"]

    words = "the {} is nan at step 3; .*checkpoint.pt stays as it was; try a lower"
    refuse(words.format("loss"), replay.BACKPROP, "through_time", lambda model, segments, state, **_: (nan, {}, state))
    refuse(words.format("gradient's norm"), "accelerated.training.optimization.average_and_clip", lambda *_: nan)
    refuse(words.format("parameters"), "train.update", broken_update)
    refuse(words.format("layers.0.compression"), "accelerated.compressive.Layer.compression_loss", lambda *_: nan)
    refuse("No space left on device", "torch.save", full)
    text.write_bytes(original.replace(b"gate", b"gait"))
    refuse(r"does not have the tokens that .* was trained on", "train.END", "")
    text.write_bytes(original)
    train("--resume", run, "--steps", 3)
    assert saved(run)["step"] == 3


def test_a_plain_run_is_fine_tuned_with_and_without_recurrence(text, tmp_path):
    """The command sequence of docs/pretrained_recurrence.md: pretrain, fine-tune twice; a module comes whole or not at all."""
    base, plain, recurrent = (tmp_path / name for name in ("base", "plain", "recurrent"))
    train(*WINDOWED, "--vectors", 0, "--horizon", 1, "--data", text, "--steps", 1, *BRIEF, "--out", base)
    begun = saved(base)["parameters"]
    assert not any(name.startswith("module.") for name in begun)
    train("--init", base, "--steps", 1, "--learning-rate", 1e-12, "--weight-decay", 0, *BRIEF, "--out", plain)
    for name, value in saved(plain)["parameters"].items():
        assert torch.allclose(value, begun[name], rtol=0, atol=1e-9), name
    train("--init", base, "--vectors", 1, "--module-width", 8, "--overlap", 2, "--steps", 1, *BRIEF, "--out", recurrent)
    contents = saved(recurrent)
    config = contents["model_config"]
    assert (config["vectors"], config["overlap"], config["width"], config["module_width"]) == (1, 2, 16, 8)
    assert contents["data_config"]["data"] == str(text) and "module.hidden_1" in contents["parameters"]
    with pytest.raises(InputError, match=r"module\.hidden_3 should be absent"):
        train("--init", recurrent, "--module-layers", 2, "--steps", 1, "--out", tmp_path / "x")
    train("--init", recurrent, "--vectors", 0, "--steps", 1, *BRIEF, "--out", tmp_path / "without")
    assert not any(name.startswith("module.") for name in saved(tmp_path / "without")["parameters"])


@pytest.mark.parametrize("kind", ["--train-bpe", "some.json"])
def test_a_run_keeps_its_tokenizer(text, tmp_path, capsys, kind):
    """Beside its checkpoint: it is resumed, evaluated, exported and begun from without the file that it came from."""
    package = pytest.importorskip("tokenizers", reason="learning needs the extra bpe: tokenizers")
    option, run = ["--tokenizer", tmp_path / kind], tmp_path / "run"
    if kind == "some.json":
        tokenizer = package.ByteLevelBPETokenizer()
        tokenizer.train_from_iterator([text.read_text()], vocab_size=300)
        tokenizer.save(str(tmp_path / kind))
    else:
        option = [kind, 300]
    train("--data", text, *TINY, *option, *BRIEF, "--steps", 1, "--sample", 3, "--out", run)
    (tmp_path / kind).unlink(missing_ok=True)
    assert saved(run)["model_config"]["vocabulary"] == 300
    train("--resume", run, "--steps", 2)
    run = run.rename(tmp_path / "moved")
    capsys.readouterr()
    evaluate("score", run, "--batch", 64)
    printed = capsys.readouterr().out
    per_byte, per_token = (float(re.search(f"{name} +(\\S+)", printed)[1]) for name in ("bits per byte", "bits per token"))
    assert per_byte < per_token
    evaluate("export", run, tmp_path / "exported")
    [kept] = run.glob("tokenizer.*")
    assert kept.name == ("tokenizer.json" if kind == "some.json" else "tokenizer.tiktoken")
    for begins in (run, tmp_path / "exported"):
        train("--init", begins, "--data", text, "--steps", 1, *BRIEF, "--out", tmp_path / f"from {begins.name}")
        assert (tmp_path / f"from {begins.name}" / kept.name).read_bytes() == kept.read_bytes()


def test_recall_reports_right_answers(tmp_path, capsys):
    """Of whole documents, because questions need their document's facts. A plain model carries nothing."""
    options = ["--data", "recall", "--recall-distance", 8, "--steps", 1, "--validation-segments", 1]
    train(*COMPRESSIVE, *options, "--out", tmp_path / "brief")
    printed = capsys.readouterr().out
    assert re.search(r"right answers: \S+% with the memory, \S+% with it cleared \(chance 10%\)", printed)
    assert re.search(r"validation on 16 tokens \(1\.56% of the split\)", printed), "one document of 64"
    train(*WINDOWED, *options, "--vectors", 0, "--horizon", 1, "--validation-segments", 0, "--out", tmp_path / "plain")
    assert re.search(
        r"validation on 1,024 tokens: \d\.\d{3} bits per byte; this model carries no memory", capsys.readouterr().out
    )


def test_documents_without_tokens_are_passed_over(texts, tmp_path, capsys):
    """In training, and for the sample, whose prompt is the opening of the first that has some."""
    for path in sorted(texts.iterdir())[::2]:
        path.write_text("")
    train(*WINDOWED, "--data", texts, "--steps", 1, "--sample", 3, "--out", tmp_path / "run")
    assert "how the model continues it:\ntext number" in capsys.readouterr().out


def test_readme_commands_pin_torch_and_make_their_environment():
    lines = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("python3 -m venv")]
    assert len(lines) == 2 and all("torch==2.13.0" in line for line in lines)
    assert "train.py" in lines[0] and "pytest" in lines[1]
