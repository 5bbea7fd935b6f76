"""eval.py's reports, run as a user runs them: printed text, --json, and error messages."""

import json
import re
import shutil

import pytest

from accelerated.evaluation.options import REPORTS, report_parser
from accelerated.program import progress
from accelerated.training.checkpoint import save_checkpoint
from accelerated.training.folder import checkpoint_path
from tests.helpers import programs
from tests.helpers.programs import (
    BRIEF,
    COMPRESSIVE,
    OVERLAPPING,
    WINDOWED,
    as_json,
    evaluate,
    printed,
    refusal,
    saved,
    train,
    words,
)

RUN_OF = {
    None: "recurrent",
    "pretrained_recurrence": "windowed",
    "compressive": "compressive",
    "memformer": "memformer",
}


@pytest.fixture(scope="module")
def joined(tmp_path_factory):
    return programs.joined_runs(tmp_path_factory.mktemp("joined"))


def example_of(name, run):
    """A report's example, in the small."""
    example = REPORTS[name].example.replace("'def '", f"'{'def ' * 9}'")
    return example.replace("RUN", str(run))


@pytest.mark.parametrize("name", REPORTS)
def test_the_example_runs_and_prints_json_alone(name, runs, capsys, tmp_path, monkeypatch):
    """Progress goes to stderr, and no file is written that was not asked for."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    run = getattr(runs, RUN_OF[REPORTS[name].model])
    example = example_of(name, run)
    capsys.readouterr()
    evaluate(example, "--json")
    out, err = capsys.readouterr()
    record = json.loads(out)
    assert record
    asked = [word for word in words(example) if word.endswith((".png", ".html"))]
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == asked
    if "--plot" in example:
        assert f"saved {asked[0]}\n" in err
    if name == "view":
        assert record["bytes"] == (tmp_path / "page.html").stat().st_size
        assert record["tokens"] == as_json(capsys, run)["tokens"]


@pytest.mark.parametrize("name", list(REPORTS))
def test_help_says_the_defaults(name):
    for action in report_parser(name)._actions:
        said = re.search(r"\(default ([\d.]+)[),;]", action.help or "")
        assert said is None or float(said[1]) == action.default, action.dest


# score


def test_other_data_is_read(runs, tmp_path, capsys, monkeypatch):
    """JSON has no infinity: a text of one word has a perplexity that no double holds."""
    monkeypatch.chdir(tmp_path)
    texts = {"other": "another text entirely " * 60, "word": "x" * 4000, "nothing": "x"}
    for name, content in texts.items():
        (tmp_path / name).write_text(content)
    shown = printed(capsys, runs.recurrent, "--data other --split test --batch 2")
    assert f"test split of {tmp_path / 'other'}" in shown
    assert "tokens scored       65 of 65 in the split\n" in shown
    assert "has nothing to predict" in refusal(evaluate, runs.recurrent, "--data nothing")
    record = as_json(capsys, runs.recurrent, "--data word")
    assert record["words"] == 1
    assert record["word_perplexity"] is None


def test_the_best_checkpoint_is_read_if_it_is_asked_for(runs, tmp_path, capsys):
    run = shutil.copytree(runs.recurrent, tmp_path / "run")
    contents = saved(run)
    parameters = {name: value / 2 for name, value in contents["parameters"].items()}
    save_checkpoint(run / "best.pt", contents | {"step": 1, "parameters": parameters})
    best = as_json(capsys, run, "--checkpoint best")
    last = as_json(capsys, run, "--checkpoint last")
    assert as_json(capsys, run) == best, "the best is not what is read by default"
    assert "best.pt of step 1, " in printed(capsys, run)
    assert best["step"] == 1
    assert last["step"] == 2
    assert best["nats"] != last["nats"]


def test_what_a_run_was_trained_on_is_read_as_then(runs, tmp_path, capsys):
    """A part of a split is called so; a change of the data is told."""
    text = tmp_path / "text.txt"
    run = tmp_path / "run"
    text.write_text("some words of a text " * 60)
    train(*WINDOWED, *BRIEF, f"--data {text} --training-documents 1 --out {run}")
    for split, which in (("train", "a part of train"), ("test", "step 2, test")):
        assert f"{which} split of {text}" in printed(capsys, run, f"--split {split}")
        assert as_json(capsys, run, f"--split {split}")["whole_split"] is (split == "test")
    assert not capsys.readouterr().err
    other = as_json(capsys, run, f"--split train --data {runs.book}")
    assert other["whole_split"], "other data is read whole"
    text.write_text("another text " * 90)
    evaluate(run)
    words = f"warning: {text} is no longer what the run was trained on"
    assert words in capsys.readouterr().err


SIZES = "--memory 5 --compressed-memory 9"
DIFFERENCES = [  # (kind of run, options, what the title says)
    ("plain", "", ", no memory\n"),
    ("windowed", "--segment 9 --overlap 1", "\ntrained with segment 8, overlap 2\n"),
    ("windowed", "--pool advance", "\ntrained with pool all\n"),
    ("compressive", SIZES, "\ntrained with memory 8, compressed_memory 4\n"),
]


@pytest.mark.parametrize("kind, options, words", DIFFERENCES, ids=[row[0] for row in DIFFERENCES])
def test_what_differs_from_training_is_named(runs, capsys, kind, options, words):
    """Sizes of memories and windows, which may change."""
    shown = printed(capsys, getattr(runs, kind), options)
    assert words in shown
    assert ("trained with" in shown) == bool(options)


# Memory carried over documents


def test_every_report_reads_joined_documents(joined, capsys):
    """The scoring reports give the same sum over the same tokens, whatever the lanes.

    Dynamic evaluation moves weights between them, so it gives another sum.
    """
    run = joined.compressive
    assert ", no memory, documents joined\n" in printed(capsys, joined.plain)
    assert ", memory carried over documents\n" in printed(capsys, run)
    score = as_json(capsys, run)
    assert score["carry_over_documents"]
    rows = as_json(capsys, "positions", run)["by_position"]["memory_carried"]
    assert sum(row["nats"] for row in rows) == pytest.approx(score["nats"], rel=1e-6)
    dynamic = as_json(capsys, "dynamic", run, "--learning-rate 1e-4")["dynamic"]
    for tokens in (sum(row["tokens"] for row in rows), dynamic["tokens"]):
        assert tokens == score["tokens"]
    apart = as_json(capsys, run, "--no-carry-over-documents")
    assert apart["nats"] != score["nats"]
    for other in (apart, as_json(capsys, run, f"--batch {10**15}")):
        assert other["tokens"] == score["tokens"]
    assert as_json(capsys, "attention", run)["carry_over_documents"]


def test_the_table_of_overlaps_has_each_run_once_and_one_text(runs, joined, capsys):
    """With its windows' own pooling. Overlaps, notes and scores: evaluation/test_overlap.py."""
    given = f"{runs.plain} {runs.windowed} {runs.plain} --split test --pool advance"
    plain, windowed = as_json(capsys, "overlap", given)["rows"]
    assert [plain["run"], windowed["run"]] == [str(runs.plain), str(runs.windowed)]
    assert plain["notes"] == [], "pooling does not change how plain GPT-2 is trained"
    assert windowed["notes"] == ["trained with pool all"]

    [row] = as_json(capsys, "overlap", joined.plain, "--overlaps 0")["rows"]
    assert row["notes"] == ["documents joined"]
    assert row["splits"].keys() == {"valid", "test"}
    line = refusal(evaluate, "overlap", runs.windowed, joined.windowed)
    assert "the runs read different data" in line


# Data that is no text


OF_FACTS = ["--recall-distance 99", "--recall-pairs 2"]
OF_FACTS_ANEW = ["--recall-begin 9", "--recall-rewrites 2", "--recall-distractors 0.5"]


@pytest.mark.parametrize(
    "kind, asked", [("--recall-pairs 4", OF_FACTS), ("--recall-anew", OF_FACTS_ANEW)]
)
def test_recall_is_asked_as_trained_or_otherwise(kind, asked, tmp_path, capsys):
    """Segments may have no question. Right answers stand beside chance."""
    run = tmp_path / "run"
    task = "--data recall --recall-distance 8 --recall-questions 3"
    train(*OVERLAPPING, task, kind, f"--steps 1 --out {run}")
    assert "(a guess 10%)" in printed(capsys, run)
    trained = as_json(capsys, run)
    for other in asked:
        answer = as_json(capsys, run, other)
        assert answer["tokens"] == trained["tokens"] == 3 * 64
        assert answer["nats"] != trained["nats"], other


def test_a_run_that_learned_words_reads_only_words(runs, tmp_path, capsys):
    run = tmp_path / "run"
    train(*COMPRESSIVE, *BRIEF, f"--data {runs.book} --train-words 20 --out {run}")
    assert as_json(capsys, run)["config"]["vocabulary"] == 20
    assert "--data recall is made of bytes" in refusal(evaluate, run, "--data recall")
    line = refusal(evaluate, "sample", run, "--prompt ' '")
    assert "has no token for the tokenizer; give another" in line


# sample


@pytest.mark.parametrize(
    "content, text", [("def é".encode()[:-1], "def "), (b"word " * 100, "word " * 100)]
)
def test_the_prompt_of_a_sample_may_come_from_a_file(runs, tmp_path, capsys, content, text):
    """Of any length; what is not UTF-8 is shown by replacement characters."""
    prompt = tmp_path / "prompt.txt"
    prompt.write_bytes(content)
    record = as_json(capsys, f"sample {runs.recurrent} --tokens 5 --prompt-file {prompt}")
    assert record["prompt"].startswith(text)


def test_predictions_that_are_nan_are_refused(runs, tmp_path):
    """Finite parameters may overflow."""
    run = shutil.copytree(runs.windowed, tmp_path / "run")
    contents = saved(run)
    for parameter in contents["parameters"].values():
        parameter.fill_(3e38)  # products of two are infinite
    save_checkpoint(checkpoint_path(run), contents)
    for report in ("score", f"view --out {tmp_path}/page"):
        line = refusal(evaluate, report, run)
        assert "the model's predictions are NaN: its numbers overflow" in line
