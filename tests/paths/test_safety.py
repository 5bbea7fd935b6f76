"""A night's work is safe: nothing damaged is used, one process writes a run, results are kept, data may move."""

import json
import math
import os
import shutil

import pytest
import torch

import train as training_script
from accelerated.data.corpus import TOKENS
from accelerated.data.windows import lengths_of
from accelerated.training import opening
from accelerated.training.checkpoint import save_checkpoint
from accelerated.training.folder import checkpoint_path
from accelerated.training.log import read_metrics
from accelerated.training.options import parse as parse_training
from tests.helpers.programs import COMPRESSIVE, ROOT, differences, ended, evaluate, hanging, killed, refusal, saved, start, train
from tests.helpers.texts import show_ranks

SAFE = [*COMPRESSIVE, "--sample", 0, "--validation-segments", 2, "--log-every", 1, "--save-every", 1]


@pytest.fixture
def trained(text, tmp_path):
    """The folder of a run of two steps."""
    train(*SAFE, "--data", text, "--steps", 2, "--out", tmp_path / "run")
    return tmp_path / "run"


# Nothing damaged is used


def test_what_is_damaged_is_refused_and_an_earlier_checkpoint_serves(text, tmp_path):
    """To resume, to begin from and to evaluate. Flipped bits of each file: the tests of their modules."""
    ranks, run, data_dir = tmp_path / "ranks", tmp_path / "run", ["--data-dir", tmp_path / "data"]
    single = [bytes([byte]) for byte in range(256)]
    ranks.write_bytes(show_ranks([*single, b"th", b"he"]))
    options = [*SAFE, "--data", text, "--tokenizer", ranks, "--validate-every", 1, *data_dir]
    train(*options, "--steps", 1, "--out", run)
    checkpoint, tokenizer = checkpoint_path(run), run / "tokenizer.tiktoken"
    [tokens] = (path for path in (tmp_path / "data").rglob(TOKENS) if path.is_file())
    resume, begin = ["--resume", run, "--steps", 4, *data_dir], ["--init", run, "--out", tmp_path / "begun", *data_dir]
    for path, damaged, words in (
        (tokens, tokens.read_bytes()[:-1] + b"x", f"{tokens.parent} is damaged"),
        (tokenizer, b"", f"{tokenizer}"),
        (tokenizer, show_ranks([*single, b"th", b"an"]), "is not the one that"),
        (checkpoint, checkpoint.read_bytes()[:5_000], "copy best.pt to its name"),
    ):
        right = path.read_bytes()
        path.write_bytes(damaged)
        for call in ((train, *resume), (train, *begin), (evaluate, "score", run, *data_dir)):
            assert words in refusal(*call), (path, call)
        path.write_bytes(right)
    shutil.copyfile(run / "best.pt", checkpoint)
    train(*resume)
    train(*options, "--steps", 4, "--out", tmp_path / "whole")
    assert not differences(tmp_path / "whole", run, besides=["metrics.jsonl"])


# One process, one folder


def test_a_run_that_another_process_writes_is_refused_and_free_when_that_is_killed(text, tmp_path):
    """Its half-written files are not touched before, and it can be evaluated."""
    run = tmp_path / "run"
    writing = hanging([*SAFE, "--data", text, "--steps", 3, "--out", run], tmp_path, "train", "next_segments", call=2)
    stale = run / "best.pt.writing"
    stale.write_text("half")
    assert refusal(train, "--resume", run).startswith(
        f"another train.py is writing to {run}; wait until it ends, or give another"
    )
    evaluate("score", run)
    assert stale.exists() and saved(run)["step"] == 1 and killed(writing)
    train("--resume", run)
    assert saved(run)["step"] == 3 and not stale.exists()


def test_what_is_refused_leaves_a_run_as_it_was(trained, text, monkeypatch):
    """A disk that may not be written is not said to be full."""
    before, original = {path: path.read_bytes() for path in trained.iterdir()}, text.read_text()
    text.write_text("another text " * 900)
    assert "does not have the tokens" in refusal(train, "--resume", trained, "--steps", 3)
    assert {path: path.read_bytes() for path in trained.iterdir()} == before
    text.write_text(original)

    def denied(contents, file):
        file.write(b"half")
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(torch, "save", denied)
    line = refusal(train, "--resume", trained, "--steps", 3)
    assert line == f"cannot write {checkpoint_path(trained)}: Permission denied; an earlier checkpoint there stays as it was"
    assert checkpoint_path(trained).read_bytes() == before[checkpoint_path(trained)]


def test_settings_are_renewed_when_a_run_is_resumed(trained, text):
    train("--resume", trained, "--steps", 3, "--learning-rate", 0.5)
    settings, contents = json.loads((trained / "config.json").read_text()), saved(trained)
    assert settings == json.loads(json.dumps({name: contents[name] for name in settings}))
    assert settings["training_config"]["learning_rate"] == 0.5 and settings["data_config"]["data"] == str(text)


def test_what_another_process_wrote_meanwhile_is_not_overwritten(trained, text):
    """It has trained on, or into the same new folder, after this one's options were read."""
    later = parse_training(["--resume", str(trained), "--steps", "5"])
    train("--resume", trained, "--steps", 3)
    begun = parse_training([str(word) for word in [*SAFE, "--data", text, "--steps", 1, "--out", trained.parent / "new"]])
    train(*SAFE, "--data", text, "--steps", 2, "--out", trained.parent / "new")
    for read, step in ((later, 3), (begun, 2)):
        line, run = refusal(training_script.main, *read), read[1].folder
        assert line.startswith(f"another train.py has written {checkpoint_path(run)} meanwhile; give the command again")
        assert saved(run)["step"] == step


def test_settings_say_which_weights_a_run_began_with_also_after_it_was_resumed(trained):
    begun = trained.parent / "begun"
    train("--init", trained, "--steps", 1, "--out", begun)
    train("--resume", begun, "--steps", 2)
    assert [json.loads((run / "config.json").read_text()).get("init") for run in (trained, begun)] == [None, str(trained)]


# What stops a run


def test_a_full_output_is_answered_in_one_line_before_the_work(text, tmp_path):
    options = [*SAFE, "--data", text, "--steps", 2, "--out", tmp_path / "run"]
    assert ended(start(options, tmp_path / "errors", output="/dev/full")) == [2]
    line = "train.py: cannot write the output: No space left on device; send it elsewhere\n"
    assert (tmp_path / "errors").read_text() == line and not checkpoint_path(tmp_path / "run").exists()


# Results


def test_each_validation_says_whether_it_is_the_best_and_the_final_figures_are_kept(text, tmp_path, monkeypatch, capsys):
    bits, validate = iter([5.0, 3.0, 4.0]), training_script.validation_score

    def scored(run, clear_memory=False):
        found = validate(run, clear_memory)
        return found if clear_memory else found._replace(nats=next(bits) * math.log(2) * found.text_bytes)

    monkeypatch.setattr(training_script, "validation_score", scored)
    train(*SAFE, "--data", text, "--steps", 3, "--validate-every", 1, "--out", tmp_path / "run")
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
    train("--resume", tmp_path / "run", "--steps", 2)
    [(documents, read), (_, again)] = found
    tokens, whole = lengths_of(read).sum(), lengths_of(documents).sum()
    assert f"validation on {tokens} tokens ({tokens / whole:.1%} of the split), " in capsys.readouterr().out
    assert read.spans == again.spans and len(read) == 4 and 150 < tokens <= 160
    assert read.spans[-1][1] > whole / 2, "not the first tokens alone"
    evaluate("score", tmp_path / "run", "--json")
    assert json.loads(capsys.readouterr().out)["tokens"] == whole
    train(*SAFE, "--data", "recall", "--recall-distance", 40, "--steps", 1, "--out", tmp_path / "recall")
    documents, read = found[-1]
    assert 0 < len(read) < len(documents) and set(lengths_of(read)) == set(lengths_of(documents))


# Data that moves


def test_a_run_whose_data_has_moved_continues_with_its_new_place(tmp_path, monkeypatch):
    """A relative path is kept as an absolute one."""
    old, run, other = tmp_path / "here", tmp_path / "run", tmp_path / "other.txt"
    old.mkdir()
    (old / "book.txt").write_bytes((ROOT / "reference" / "memformer.py").read_bytes())
    monkeypatch.chdir(tmp_path)
    for steps, out in ((4, "whole"), (1, "run")):
        train(*SAFE, "--data", "here", "--steps", steps, "--out", tmp_path / out)
    os.chdir("/")
    train("--resume", run, "--steps", 2)
    assert saved(run)["data_config"]["data"] == str(old) and saved(run)["step"] == 2
    new = old.rename(tmp_path / "new")
    line = refusal(train, "--resume", run, "--steps", 4)
    assert line.startswith(f"--data {old}: no such file or folder")
    other.write_text("another text " * 900)
    assert "does not have the tokens that" in refusal(train, "--resume", run, "--steps", 4, "--data", other)
    train("--resume", run, "--steps", 4, "--data", new)
    assert not differences(tmp_path / "whole", run, besides=["data_config", "metrics.jsonl"])
    assert read_metrics(run)[-2]["loss"] == read_metrics(tmp_path / "whole")[-2]["loss"]
    assert saved(run)["data_config"]["data"] == str(new) == json.loads((run / "config.json").read_text())["data_config"]["data"]


# A checkpoint that lies
LIES = {  # {field: values of the right type that do not fit the run; a function makes one of the saved value}
    "random": (torch.zeros(3), torch.zeros(8, dtype=torch.uint8)),
    "state": (
        *(lambda fields: fields[:-1], lambda fields: (*fields[:-1], fields[-1][1:]), lambda fields: (fields[0], *fields)),
        lambda fields: tuple(field.long() for field in fields),
    ),
    "lanes": (
        *({}, {"passes": 0, "dealt": 0, "reading": 3}),
        *(
            lambda lanes, change=change: lanes | change
            for change in ({"dealt": 10**9}, {"reading": []}, {"reading": [(0, 10**9)] * 3}, {"reading": [(0, -1)] * 3})
        ),
    ),
    "optimizer": (
        *({}, {"state": {}, "param_groups": []}, {"state": [], "param_groups": [1]}),
        lambda saved: saved | {"state": saved["state"] | {0: saved["state"][0] | {"exp_avg": torch.zeros(1)}}},
    ),
}


def test_a_checkpoint_that_lies_is_refused(trained):
    """Its checksum is right, and its contents have the right types, but they do not fit the run."""
    path, right = checkpoint_path(trained), saved(trained)
    for field, values in LIES.items():
        for value in values:
            wrong = value(right[field]) if callable(value) else value
            save_checkpoint(path, right | {field: wrong})
            before, line = path.read_bytes(), refusal(train, "--resume", trained, "--steps", 3)
            assert "holds what does not fit this run (" in line and "it is damaged; remove it" in line, (field, wrong)
            assert path.read_bytes() == before, (field, wrong)
    groups = [group | {"betas": None} for group in right["optimizer"]["param_groups"]]  # the settings decide these
    save_checkpoint(path, right | {"optimizer": right["optimizer"] | {"param_groups": groups}})
    train("--resume", trained, "--steps", 3)
    assert saved(trained)["step"] == 3 and saved(trained)["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.99)
