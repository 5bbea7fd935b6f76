"""A night's work is safe: nothing damaged is used, one process writes a run, results are kept, data may move."""

import json
import math
import os
import shutil

import pytest
import torch

import train as training_script
from accelerated import replay
from accelerated.data.corpus import TOKENS
from accelerated.data.windows import lengths_of
from accelerated.program.errors import InputError
from accelerated.training import opening
from accelerated.training.checkpoint import save_checkpoint
from accelerated.training.folder import checkpoint_path
from accelerated.training.log import read_metrics
from accelerated.training.options import parse as parse_training
from tests.helpers.programs import COMPRESSIVE, ROOT, differences, ended, evaluate, hanging, killed, refusal, saved, start, train
from tests.helpers.texts import show_ranks

QUICK = ["--sample", 0, "--validation-segments", 2, "--log-every", 1]
SAFE = [*COMPRESSIVE, *QUICK, "--save-every", 1]


@pytest.fixture
def trained(text, tmp_path):
    """The folder of a run of two steps."""
    train(*SAFE, "--data", text, "--steps", 2, "--out", tmp_path / "run")
    return tmp_path / "run"


def refusals(run, *options):
    """The lines in which a run is refused to be resumed, to be begun from and to be evaluated."""
    init = ["--init", run, "--steps", 1, "--out", run.parent / "begun"]
    resumed, begun = (refusal(train, *argv, *options) for argv in (["--resume", run, "--steps", 4], init))
    assert not (run.parent / "begun").exists()
    return resumed, begun, refusal(evaluate, "score", run, *options)


def write_ranks(path, *merged):
    """Write a tokenizer of the 256 bytes and some longer tokens, in tiktoken's format."""
    path.write_bytes(show_ranks([*(bytes([byte]) for byte in range(256)), *merged]))
    return path


def losses(run):
    """The losses in a run's log."""
    return [record["loss"] for record in read_metrics(run) if "loss" in record]


# Nothing damaged is used


def test_what_is_damaged_is_refused_and_an_earlier_checkpoint_serves(text, tmp_path):
    """The checkpoint or the tokens; the tokenizer of another run. Flipped bits of each: the tests of their modules."""
    run, data_dir = tmp_path / "run", ["--data-dir", tmp_path / "data"]
    options = [*SAFE, "--data", text, "--tokenizer", write_ranks(tmp_path / "ranks", b"th", b"he"), *data_dir]
    train(*options, "--steps", 2, "--out", run)
    checkpoint, ranks = checkpoint_path(run), run / "tokenizer.tiktoken"
    [tokens] = (path for path in (tmp_path / "data").rglob(TOKENS) if path.is_file())
    for path, damaged, words in (
        (tokens, tokens.read_bytes()[:-1] + b"x", f"{tokens.parent} is damaged"),
        (ranks, b"", f"{ranks}"),
        (ranks, write_ranks(tmp_path / "other", b"th", b"an").read_bytes(), "is not the one that"),
        (checkpoint, checkpoint.read_bytes()[:5_000], "copy an earlier step-N.pt"),
    ):
        right = path.read_bytes()
        path.write_bytes(damaged)
        lines = refusals(run, *data_dir) if path != tokens else [refusal(evaluate, "score", run, *data_dir)]
        assert all(words in line for line in lines), lines
        path.write_bytes(right)
    checkpoint.unlink()
    shutil.copyfile(run / "step-1.pt", checkpoint)
    train("--resume", run, "--steps", 4, *data_dir)
    train(*options, "--steps", 4, "--out", tmp_path / "whole")
    assert not differences(tmp_path / "whole", run, besides=["metrics.jsonl"])


# One process, one folder


def test_a_run_that_another_process_writes_is_refused_and_free_when_that_is_killed(text, tmp_path):
    """Its half-written files are not touched before."""
    run, options = tmp_path / "run", [*COMPRESSIVE, *QUICK, "--data", text, "--steps", 3, "--out", tmp_path / "run"]
    first = hanging(options, tmp_path, "train", "next_segments", call=2)
    stale = run / "step-7.pt.writing"
    stale.write_text("half")
    assert refusal(train, *options).startswith(f"another train.py is writing to {run}; wait until it ends, or give another")
    assert stale.exists() and killed(first)
    train(*options)
    assert saved(run)["step"] == 3 and not stale.exists()
    second = hanging(["--resume", run, "--steps", 9], tmp_path, "train", "log_means", call=2)
    assert refusal(train, "--resume", run, "--steps", 9).startswith(f"another train.py is writing to {run}; wait until")
    evaluate("score", run)
    assert killed(second)
    train("--resume", run, "--steps", 4)
    assert saved(run)["step"] == 4


def test_what_is_refused_leaves_a_run_as_it_was_and_its_settings_are_renewed_when_it_is_resumed(trained, text, monkeypatch):
    """A disk that may not be written is not said to be full. What another process continued meanwhile is read anew."""

    def denied(contents, file):
        raise PermissionError(13, "Permission denied")

    def settings():
        read, contents = json.loads((trained / "config.json").read_text()), saved(trained)
        assert read == json.loads(json.dumps({name: contents[name] for name in read}))
        return read["training_config"]

    assert settings()["steps"] == 2 and json.loads((trained / "config.json").read_text())["data_config"]["data"] == str(text)
    before = {path: path.read_bytes() for path in trained.iterdir()}
    original = text.read_text()
    text.write_text("another text " * 900)
    assert "does not have the tokens" in refusal(train, "--resume", trained, "--steps", 3)
    assert {path: path.read_bytes() for path in trained.iterdir()} == before
    text.write_text(original)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", denied)
        line = refusal(train, "--resume", trained, "--steps", 3)
    assert line == f"cannot write {checkpoint_path(trained)}: Permission denied; an earlier checkpoint there stays as it was"
    assert checkpoint_path(trained).read_bytes() == before[checkpoint_path(trained)]
    read = parse_training(["--resume", str(trained), "--steps", "5"])
    train("--resume", trained, "--steps", 3, "--learning-rate", 0.5)
    line = refusal(training_script.main, *read)
    assert line == f"another process has continued {trained} meanwhile; give the command again"
    assert (settings()["steps"], settings()["learning_rate"], saved(trained)["step"]) == (3, 0.5, 3)


# What stops a run


def test_a_full_output_is_answered_in_one_line_before_the_work(text, tmp_path):
    run, options = tmp_path / "run", [*SAFE, "--data", text, "--steps", 2]
    assert ended(start([*options, "--out", run], tmp_path / "errors", output="/dev/full")) == [2]
    line = "train.py: cannot write the output: No space left on device; send it elsewhere\n"
    assert (tmp_path / "errors").read_text() == line and not checkpoint_path(run).exists()
    train(*options, "--out", run)
    assert saved(run)["step"] == 2


def test_nan_before_the_first_checkpoint_says_that_nothing_was_saved(text, tmp_path, monkeypatch):
    broken = lambda model, segments, state, **_: (torch.tensor(float("nan")), {}, state)  # noqa: E731
    monkeypatch.setitem(replay.BACKPROP, "through_time", broken)
    line = refusal(train, *SAFE, "--data", text, "--steps", 2, "--out", tmp_path / "run")
    assert line == "the loss is nan at step 1; nothing was saved before; try a lower --learning-rate"


# Results


def test_each_validation_says_whether_it_is_the_best_and_the_final_figures_are_kept(text, tmp_path, monkeypatch, capsys):
    bits, validate = iter([5.0, 3.0, 4.0]), training_script.validation_score
    options = [*SAFE, "--data", text, "--steps", 3, "--validate-every", 1, "--out", tmp_path / "run"]

    def scored(run, clear_memory=False):
        found = validate(run, clear_memory)
        return found if clear_memory else found._replace(nats=next(bits) * 0.6931471805599453 * found.text_bytes)

    monkeypatch.setattr(training_script, "validation_score", scored)
    train(*options)
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    last = read_metrics(tmp_path / "run")[-1]
    said = [(1, "5.000", "the best so far"), (2, "3.000", "the best so far"), (3, "4.000", "the best was 3.000")]
    on = f"bits per byte on {last['validation_tokens']} tokens"
    assert printed == [f"step {step}: validation {value} {on}; {best}" for step, value, best in said]
    assert last["final"] is True and last["step"] == 3 and last["validation_bits_per_byte"] == pytest.approx(4.0)
    assert 0 < last["cleared_bits_per_byte"] < 99 and last["cleared_bits_per_byte"] != last["validation_bits_per_byte"]


def test_a_part_of_the_validation_split_is_read_from_all_over_it(text, tmp_path, monkeypatch, capsys):
    """From the same places in every run; recall's documents are read whole. What eval.py reads is the whole split."""
    found, spread = [], opening.spread
    monkeypatch.setattr(opening, "spread", lambda *given: found.append((given[0], spread(*given))) or found[-1][1])
    train(*SAFE, "--data", text, "--batch", 4, "--validation-segments", 5, "--steps", 1, "--out", tmp_path / "run")
    said = capsys.readouterr().out
    train("--resume", tmp_path / "run", "--steps", 2)
    [(documents, read), (_, again)] = found
    tokens, whole = lengths_of(read).sum(), lengths_of(documents).sum()
    assert f"validation reads {tokens / whole:.1%} of its split, from all over it; --validation-segments 0 reads all" in said
    assert f"validation on {tokens} tokens ({tokens / whole:.1%} of the split), " in capsys.readouterr().out
    assert read.spans == again.spans and len(read) == 4 and 150 < tokens <= 160
    assert read.spans[-1][1] > whole / 2, "not the first tokens alone"
    evaluate("score", tmp_path / "run", "--json")
    assert json.loads(capsys.readouterr().out)["tokens"] == whole
    train(*COMPRESSIVE, *QUICK, "--data", "recall", "--recall-distance", 40, "--steps", 1, "--out", tmp_path / "recall")
    documents, read = found[-1]
    assert 0 < len(read) < len(documents) and set(lengths_of(read)) == set(lengths_of(documents))


# Data that moves


@pytest.mark.parametrize("folder", [False, True])
def test_a_run_whose_data_has_moved_continues_with_its_new_place(tmp_path, monkeypatch, folder):
    """A relative path is kept as an absolute one."""
    old, run, other = tmp_path / "here" / "book.txt", tmp_path / "run", tmp_path / "other.txt"
    old.parent.mkdir()
    old.write_bytes((ROOT / "reference" / "memformer.py").read_bytes())
    old = old.parent if folder else old
    monkeypatch.chdir(old.parent)
    for steps, out in ((4, "whole"), (1, "run")):
        train(*SAFE, "--data", old.name, "--steps", steps, "--out", tmp_path / out)
    os.chdir(tmp_path)
    train("--resume", run, "--steps", 2)
    assert saved(run)["data_config"]["data"] == str(old) and saved(run)["step"] == 2
    new = old.rename(tmp_path / "new")
    line = refusal(train, "--resume", run, "--steps", 4)
    assert line == f"{old}, which {run} was trained on, is not there; if it has moved, give --data with its new place"
    other.write_text("another text " * 900)
    assert "does not have the tokens that" in refusal(train, "--resume", run, "--steps", 4, "--data", other)
    train("--resume", run, "--steps", 4, "--data", new)
    assert not differences(tmp_path / "whole", run, besides=["data_config", "metrics.jsonl"])
    assert losses(run)[-1] == losses(tmp_path / "whole")[-1]
    assert saved(run)["data_config"]["data"] == str(new) == json.loads((run / "config.json").read_text())["data_config"]["data"]
    train("--resume", run, "--steps", 5)


# A checkpoint that lies


LIES = {  # {field: values of the right type that do not fit the run; a function makes one of the saved value}
    "step": (-1,),
    "best": (math.nan,),
    "pending": ((0.0, 0), (-1.0, 0, 0), (math.inf, 0, 0), ("x", 0, 0)),
    "random": (torch.zeros(3), torch.zeros(8, dtype=torch.uint8)),
    "state": (lambda fields: fields[:-1], lambda fields: (*fields[:-1], fields[-1][1:]), lambda fields: (fields[0], *fields)),
    "lanes": (
        *({}, {"passes": 0, "dealt": 0, "reading": 3}),
        *(
            lambda lanes, change=change: lanes | change
            for change in (
                *({"passes": -1}, {"passes": None}, {"dealt": 10**9}, {"dealt": "1"}, {"rollouts": -1}, {"history": 1}),
                *({"reading": []}, {"reading": [(0, 10**9)] * 3}, {"reading": [(-1, 0)] * 3}, {"reading": ["no"] * 3}),
            )
        ),
    ),
    "optimizer": (
        *({}, {"state": {}, "param_groups": []}, {"state": [], "param_groups": [1]}),
        lambda saved: saved | {"state": {number: {} for number in saved["state"]}},
        lambda saved: saved | {"state": saved["state"] | {10**6: {}}},
        lambda saved: saved | {"state": saved["state"] | {0: saved["state"][0] | {"exp_avg": torch.zeros(1)}}},
        lambda saved: saved | {"state": saved["state"] | {0: saved["state"][0] | {"step": torch.tensor(math.nan)}}},
        lambda saved: saved | {"param_groups": [group | {"lr": "0.1"} for group in saved["param_groups"]]},
        lambda saved: saved | {"param_groups": [group | {"params": [0]} for group in saved["param_groups"]]},
    ),
}


def test_a_checkpoint_that_lies_is_refused_and_names_the_field(text, tmp_path):
    """Its checksum is right, and its contents have the right types, but they do not fit the run."""
    train(*SAFE, "--data", text, "--steps", 2, "--out", tmp_path / "run")
    path, right = checkpoint_path(tmp_path / "run"), saved(tmp_path / "run")
    for field, values in LIES.items():
        for value in values:
            wrong = value(right[field]) if callable(value) else value
            save_checkpoint(path, right | {field: wrong})
            before = path.read_bytes()
            with pytest.raises(InputError, match=rf"holds {field} that do not fit this run; it is damaged; remove it") as error:
                train("--resume", tmp_path / "run", "--steps", 3)
            assert "\n" not in str(error.value) and path.read_bytes() == before, (field, wrong)
    save_checkpoint(path, right)
    train("--resume", tmp_path / "run", "--steps", 3)
    assert saved(tmp_path / "run")["step"] == 3
