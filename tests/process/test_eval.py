"""eval.py's reports, run as a user runs them: printed text, --json, and error messages."""

import json
import math
import re
import shlex
import shutil
import sys

import pytest

import eval as evaluation_script
from accelerated.data.config import DataConfig
from accelerated.evaluation.options import EXAMPLES, REPORTS, report_parser
from accelerated.generation.pretrained_recurrence import Steps
from accelerated.program import progress
from accelerated.training.checkpoint import save_checkpoint
from accelerated.training.folder import checkpoint_path
from tests.helpers import programs
from tests.helpers.programs import (
    BRIEF,
    COMPRESSIVE,
    WINDOWED,
    as_json,
    evaluate,
    printed,
    refused,
    saved,
    train,
)

RUN_OF = {
    None: "recurrent",
    "pretrained_recurrence": "windowed",
    "compressive": "compressive",
    "memformer": "memformer",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return programs.trained_runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def joined(tmp_path_factory):
    return programs.joined_runs(tmp_path_factory.mktemp("joined"))


@pytest.mark.parametrize("name", list(REPORTS))
def test_the_example_runs_and_prints_json_alone(name, runs, capsys, tmp_path, monkeypatch):
    """Progress goes to stderr, and no file is written that was not asked for."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    monkeypatch.setattr("accelerated.lab.reports.topics.FITTED", 100)
    example = (
        EXAMPLES[name][0]
        .replace("--contexts 1000", "--contexts 9")
        .replace("'def '", f"'{'def ' * 9}'")
    )
    run = getattr(runs, RUN_OF[REPORTS[name].model])
    record = as_json(
        capsys, name, *(run if word == "RUN" else word for word in shlex.split(example)[3:])
    )
    files = [tmp_path / word for word in shlex.split(example) if word.endswith((".png", ".html"))]
    assert record and [path.name for path in tmp_path.iterdir() if path.is_file()] == [
        path.name for path in files
    ]
    if name == "view":
        assert (
            record["bytes"] == files[0].stat().st_size
            and record["tokens"] == as_json(capsys, run)["tokens"]
        )


def test_help_says_the_defaults():
    for name in REPORTS:
        for action in report_parser(name)._actions:
            said = re.search(r"\(default ([\d.]+)[),;]", action.help or "")
            assert not said or float(said[1]) == action.default, (name, action.dest)


# What is refused, in one line, before data is touched

RECURRENT = [
    ("RUN RUN2", "2 runs were given; only eval.py overlap and curves take more than one"),
    ("RUN --checkpoint best", "--checkpoint best: .* has no best.pt; give last"),
    ("score RUN --batch 0", "argument --batch: 0 was given; it must be at least 1"),
    (
        "dynamic RUN --learning-rate nan",
        "--learning-rate: nan was given; it must be positive and finite",
    ),
    ("positions RUN --plot a.xyz", r"cannot draw a.xyz: give a name that ends in one of .*\.png"),
    (
        "positions RUN --plot nowhere/a.png",
        "cannot write nowhere/a.png: No such file or directory; give another path",
    ),
    ("sample RUN --top-p 0", "--top-p: 0 was given; it must be above 0"),
    (
        "sample RUN --temperature 0 --top-p 0.5",
        "--temperature 0 takes the most probable token; leave",
    ),
    (
        f"sample RUN --prompt a --prompt-file {__file__}",
        "--prompt and --prompt-file are two prompts; give one of them",
    ),
    (
        "view RUN --out link.html",
        "--out link.html exists, and nothing is overwritten; give another --out",
    ),
    (
        "view RUN --out nowhere/a.html",
        "cannot write nowhere/a.html: No such file or directory; give another --out",
    ),
    ("overlap RUN", "overlap is for pretrained_recurrence models, this is block_recurrent"),
    (
        "score RUN --memory 4",
        "--memory is for compressive and memorizing models, this is block_recurrent; leave it out",
    ),
    (
        "sample RUN --new-window",
        "--new-window is for models that read windows, this is block_recurrent; leave it out",
    ),
]
REFUSED = [("recurrent", *row) for row in RECURRENT] + [
    ("recurrent", "positions RUN --clear-memory", "unknown option --clear-memory; did you mean"),
    ("recurrent", "export RUN folder --memory 4", "unknown option --memory"),
    (
        "windowed",
        "overlap RUN --overlaps 0,9",
        r"--overlap is 9; it must lie in 0..7 for segment 8",
    ),
]


@pytest.mark.parametrize(
    "kind,argv,words", REFUSED, ids=[f"{kind} {argv}" for kind, argv, _ in REFUSED]
)
def test_what_cannot_work_is_refused_before_data_is_touched(
    kind, argv, words, runs, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link.html").symlink_to("nowhere")
    monkeypatch.setattr(
        evaluation_script, "load_corpus", lambda *_: pytest.fail("data was touched")
    )
    run = {"RUN": getattr(runs, kind), "RUN2": runs.windowed}
    assert re.search(words, refused(capsys, *(run.get(word, word) for word in shlex.split(argv))))
    assert [path.name for path in tmp_path.iterdir()] == ["link.html"]


def test_a_checkpoint_whose_numbers_are_no_use_is_refused(runs, tmp_path, capsys):
    """By the parameter's name if one is NaN. Finite ones may overflow."""
    run, large = (
        shutil.copytree(getattr(runs, kind), tmp_path / kind) for kind in ("recurrent", "windowed")
    )
    contents = saved(run)
    name = list(contents["parameters"])[-1]
    contents["parameters"][name].view(-1)[-1] = math.nan
    save_checkpoint(checkpoint_path(run), contents)
    assert f"{name} has NaN or infinite values; give another --checkpoint" in refused(
        capsys, "score", run
    )
    contents = saved(large)
    for parameter in contents["parameters"].values():
        parameter.fill_(3e38)  # products of two are infinite
    save_checkpoint(checkpoint_path(large), contents)
    for argv in (
        "score",
        "overlap",
        "dynamic --learning-rate 1e-4",
        "positions",
        f"view --out {tmp_path / 'page'}",
    ):
        report, *options = argv.split()
        assert "the model's predictions are NaN: its numbers overflow" in refused(
            capsys, report, large, *options
        )
    assert "prediction of token 1 of the continuation is NaN or infinite" in refused(
        capsys, "sample", large
    )


# score


def test_json_holds_what_is_printed_and_large_counts_have_commas_in_text_alone(
    runs, tmp_path, capsys
):
    long = tmp_path / "long.txt"
    long.write_text("some words " * 300)
    read = (
        runs.recurrent,
        "--data",
        long,
        "--split",
        "train",
        "--carry-over-documents",
        "--batch",
        16,
    )
    lines, record = printed(capsys, *read), as_json(capsys, *read)
    tokens, words, nats = 11 * 300 * 90 // 100 - 1, record["words"], record["nats"]
    about = {
        "run": str(runs.recurrent),
        "step": 2,
        "memory_cleared": False,
        "split": "train",
        "data": str(long),
    }
    assert about.items() <= record.items() and record["config"]["width"] == 16
    assert record["tokens"] == record["split_tokens"] == tokens and record[
        "word_perplexity"
    ] == math.exp(nats / words)
    assert f"bits per byte       {record['bits_per_byte']:.4f}\n" in lines
    assert (
        f"per word            {math.exp(nats / words):,.5g} ({words:,} words of the original text, counted"
        in lines
    )
    assert (
        f"log-probability     {-nats:,.2f} nats\ntokens scored       {tokens:,} of {tokens:,} in the split\n"
        in lines
    )


def test_other_data_splits_and_checkpoints_are_read(runs, tmp_path, capsys, monkeypatch):
    """JSON has no infinity: a text of one word has all its losses, and a perplexity that no double holds."""
    monkeypatch.chdir(tmp_path)
    for name, content in (
        ("other", "another text entirely " * 60),
        ("word", "x" * 4000),
        ("nothing", "x"),
    ):
        (tmp_path / name).write_text(content)
    lines = printed(capsys, runs.recurrent, "--data", "other", "--split", "test", "--batch", 2)
    assert (
        f"test split of {tmp_path / 'other'}" in lines
        and "tokens scored       65 of 65 in the split\n" in lines
    )
    assert "has nothing to predict" in refused(capsys, runs.recurrent, "--data", "nothing")
    record = as_json(capsys, runs.recurrent, "--data", "word")
    assert record["words"] == 1 and record["word_perplexity"] is None
    run = shutil.copytree(runs.recurrent, tmp_path / "run")
    contents = saved(run)
    parameters = {name: value / 2 for name, value in contents["parameters"].items()}
    save_checkpoint(run / "best.pt", contents | {"step": 1, "parameters": parameters})
    first, last = (
        as_json(capsys, run, "--data", "other", "--checkpoint", name) for name in ("best", "last")
    )
    assert (first["step"], last["step"]) == (1, 2) and first["nats"] != last["nats"]


def test_what_a_run_was_trained_on_is_read_as_then(runs, tmp_path, capsys):
    """A part of a split is called so; a change of the data is told."""
    text, run = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("some words of a text " * 60)
    train(*WINDOWED, "--data", text, "--training-documents", 1, *BRIEF, "--out", run)
    for split, which in (("train", "a part of train"), ("test", "step 2, test")):
        assert f"{which} split of {text}" in printed(capsys, run, "--split", split)
        assert as_json(capsys, run, "--split", split)["whole_split"] is (split == "test")
    assert not capsys.readouterr().err
    text.write_text("another text " * 90)
    evaluate(run)
    assert f"warning: {text} is no longer what the run was trained on" in capsys.readouterr().err


def test_other_data_is_read_whole_and_joined_as_in_training():
    trained, read_as = (
        DataConfig("other", carry_over_documents=True, training_documents=1),
        evaluation_script.data_config,
    )
    assert read_as(trained, "other") == trained
    assert all(
        read_as(trained, other) == DataConfig(other, carry_over_documents=True)
        for other in ("book.txt", "pg19")
    )


def test_what_differs_from_training_is_named(runs, tmp_path, capsys):
    """Sizes of memories and windows, which may change; one for which nothing was trained, or that is too large, is refused."""
    for kind, options, words in (
        ("plain", "", ", no memory\n"),
        ("windowed", "--segment 9 --pool advance", "\ntrained with segment 8, pool all\n"),
        (
            "compressive",
            "--memory 5 --compressed-memory 9",
            "\ntrained with memory 8, compressed_memory 4\n",
        ),
    ):
        lines = printed(capsys, getattr(runs, kind), *options.split())
        assert words in lines and ("trained with" in lines) is ("trained with" in words), (
            kind,
            options,
        )
    train(
        *COMPRESSIVE,
        "--compressed-memory",
        0,
        "--data",
        runs.book,
        *BRIEF,
        "--out",
        tmp_path / "xl",
    )
    line = refused(capsys, tmp_path / "xl", "--compressed-memory", 4)
    assert re.search(
        "sizes the model needs layers.0.compression.weight, which .*xl does not have; leave", line
    )


# Memory carried over documents


def test_documents_are_joined_as_in_training_or_as_asked(joined, runs, capsys):
    """The heading and --json say which; the same tokens are scored and the same words counted, whatever the lanes."""
    apart, other = ["--no-carry-over-documents"], ["--data", joined.texts]
    for run, argv, how in (
        (joined.compressive, [], "memory carried over documents"),
        (joined.compressive, apart, "memory carried through each document"),
        (joined.plain, [], "no memory, documents joined"),
        (runs.compressive, other, "memory carried through each document"),
        (runs.compressive, [*other, "--carry-over-documents"], "memory carried over documents"),
        (joined.compressive, ["--data", "recall"], "memory carried through each document"),
    ):
        assert f", {how}\n" in printed(capsys, run, *argv)
    default, alone, many = (
        as_json(capsys, joined.compressive, *argv) for argv in ([], apart, ["--batch", 10**15])
    )
    assert default["carry_over_documents"] is True and alone["carry_over_documents"] is False
    assert default["nats"] != alone["nats"]
    assert all(default[key] == alone[key] == many[key] for key in ("tokens", "words", "text_bytes"))


def test_every_report_reads_joined_documents(joined, capsys):
    """The scoring reports give the same sum over the same tokens; no single document is long enough for range."""
    run, reach, apart = (
        joined.compressive,
        ["--segments", 14, "--batch", 1],
        "--no-carry-over-documents",
    )
    rows, own = (
        as_json(capsys, "positions", run, *way)["by_position"]["memory_carried"]
        for way in ([], [apart])
    )
    assert [row["tokens"] for row in rows] == [row["tokens"] for row in own], (
        "at the same positions"
    )
    dynamic, score = as_json(capsys, "dynamic", run, "--learning-rate", 1e-4), as_json(capsys, run)
    assert sum(row["tokens"] for row in rows) == score["tokens"] == dynamic["dynamic"]["tokens"]
    for nats in (sum(row["nats"] for row in rows), dynamic["static"]["nats"]):
        assert nats == pytest.approx(score["nats"], rel=1e-6)
    assert all(
        as_json(capsys, *argv)["carry_over_documents"]
        for argv in (["attention", run], ["range", run, *reach])
    )
    assert "give longer documents" in refused(capsys, "range", run, *reach, apart)


def test_the_table_of_overlaps(runs, joined, capsys):
    """Each run once, with its windows' own pooling; notes say how evaluation differs from training."""
    test, twice = ["--split", "test"], [runs.plain, runs.windowed, runs.plain]
    rows = as_json(capsys, "overlap", *twice, "--overlaps", "0,2", *test, "--clear-memory")["rows"]
    assert [(row["run"], row["config"]["overlap"]) for row in rows] == [
        (str(run), o) for run in twice[:2] for o in (0, 2)
    ]
    assert rows[2]["notes"] == ["trained with overlap 2", "memory cleared"]
    assert (
        rows[3]["splits"]["test"]["nats"]
        == as_json(capsys, runs.windowed, *test, "--clear-memory")["nats"]
    )
    zero, two = as_json(
        capsys, "overlap", runs.windowed, *test, "--overlaps", "0,2", "--pool", "advance"
    )["rows"]
    assert zero["notes"] == ["trained with overlap 2", "trained with pool all"] and two[
        "notes"
    ] == ["trained with pool all"]
    assert (
        two["splits"]["test"]["nats"]
        == as_json(capsys, runs.windowed, *test, "--pool", "advance")["nats"]
    )
    [row] = as_json(capsys, "overlap", joined.plain, "--overlaps", "0")["rows"]
    assert row["notes"] == ["documents joined"] and row["splits"].keys() == {"valid", "test"}
    assert "the runs read different data" in refused(
        capsys, "overlap", runs.windowed, joined.windowed
    )


# Data that is no text


def test_recall_is_asked_as_trained_or_at_another_distance_and_of_other_facts(tmp_path, capsys):
    """It has no words; segments may have no question. Training and evaluation report right answers."""
    task = (
        "--recall-distance",
        8,
        "--recall-pairs",
        4,
        "--recall-questions",
        3,
        "--recall-rewrites",
        2,
    )
    train(
        *WINDOWED,
        "--overlap",
        2,
        "--data",
        "recall",
        *task,
        "--steps",
        1,
        "--out",
        run := tmp_path / "run",
    )
    right = r"right answers: \S+% with the memory, \S+% with it cleared \(chance 10%\)"
    assert re.search(right, capsys.readouterr().out)
    near, same, again = (
        as_json(capsys, run, *argv)
        for argv in ([], ["--recall-distance", 8], ["--recall-pairs", 4])
    )
    far, fewer = (
        as_json(capsys, run, *argv) for argv in (["--recall-distance", 99], ["--recall-pairs", 2])
    )
    assert near == same == again and far["tokens"] == fewer["tokens"] == near["tokens"] == 3 * 64
    assert far["nats"] != near["nats"] != fewer["nats"] and "(chance 10%)" in printed(capsys, run)
    for argv, words in (
        (["frequency", run], "frequency: recall has no words"),
        (
            [run, "--data", "stdlib", "--recall-pairs", 2],
            "--recall-pairs needs --data recall, and the data is stdlib",
        ),
        ([run, "--carry-over-documents"], "--carry-over-documents is for texts"),
        (
            [run, "--recall-distance", 3],
            "--recall-distance is 3; what stands in the filler needs 4 tokens",
        ),
    ):
        assert words in refused(capsys, *argv)


def test_a_run_that_learned_words_reads_only_words(runs, tmp_path, capsys):
    train(*COMPRESSIVE, "--data", runs.book, "--train-words", 20, *BRIEF, "--out", tmp_path / "run")
    assert as_json(capsys, tmp_path / "run")["config"]["vocabulary"] == 20
    assert "--data recall is made of bytes" in refused(capsys, tmp_path / "run", "--data", "recall")
    line = refused(capsys, "sample", tmp_path / "run", "--prompt", " ")
    assert "has no token for the run's tokenizer; give another --prompt" in line


# sample and curves


def test_a_sample_streams_and_its_prompt_comes_from_a_file(runs, tmp_path, capsys, monkeypatch):
    shown, out, argv = [], sys.stdout, ["sample", runs.recurrent, "--tokens", 5, "--temperature", 0]
    monkeypatch.setattr(out, "flush", lambda: shown.append(1))
    streamed = printed(capsys, *argv, "--prompt", "def ").rstrip("\n")
    monkeypatch.undo()
    whole = as_json(capsys, *argv, "--prompt", "def ")
    assert len(shown) >= 5 and whole["prompt"] + whole["continuation"] == streamed, (
        "a token at a time"
    )
    prompt = tmp_path / "prompt.txt"
    for content, text in (("def é".encode()[:-1], "def "), (b"word " * 100, "word " * 100)):
        prompt.write_bytes(content)
        assert as_json(capsys, *argv, "--prompt-file", prompt)["prompt"].startswith(text)


def test_a_seed_and_a_new_window_reach_the_sample(runs, capsys, monkeypatch):
    argv = ["sample", runs.recurrent, "--tokens", 20]
    drawn = [as_json(capsys, *argv, "--seed", seed) for seed in (3, 3, 4)]
    greedy = [
        as_json(capsys, *argv, *sampling)
        for sampling in (["--temperature", 0], ["--temperature", 1, "--top-p", 1e-9])
    ]
    assert drawn[0] == drawn[1] != drawn[2] and greedy[0] == greedy[1] != drawn[0]
    steps = []
    read_token = Steps.read_token

    def counted(*given):
        steps.append(1)
        return read_token(*given)

    monkeypatch.setattr(Steps, "read_token", counted)
    prompt = "def forward("  # 12 tokens: windows of 8 that share 2 begin at 0 and 6
    argv = ["sample", runs.windowed, "--tokens", 1, "--prompt", prompt]
    for option, count in (([], 6), (["--new-window"], 2)):
        steps.clear()
        assert printed(capsys, *argv, *option).startswith(prompt)
        assert len(steps) == count, "tokens of the prompt that are read one by one"


def test_curves_come_from_the_logs_alone(runs, tmp_path, capsys, monkeypatch):
    """No model is opened. One run is not validated yet; each is shown once; what has no log is refused."""
    validated, new = (
        shutil.copytree(getattr(runs, name), tmp_path / name) for name in ("recurrent", "windowed")
    )
    log = new / "metrics.jsonl"
    training, final = (json.loads(line) for line in log.read_text().splitlines())
    log.write_text(json.dumps(training) + "\n")
    with open(validated / "metrics.jsonl", "a") as other:
        for step, bits in ((3, 0.5), (4, 0.75)):
            other.write(json.dumps({"step": step, "validation_bits_per_byte": bits}) + "\n")
    monkeypatch.setattr(
        evaluation_script, "open_trained_run", lambda *_: pytest.fail("a model was loaded")
    )
    first, second = as_json(capsys, "curves", validated, new, validated)["runs"]
    assert (second["step"], second["bits_per_byte"]) == (2, training["bits_per_byte"])
    assert (
        second["best_step"]
        is second["validation_bits_per_byte"]
        is second["best_validation_bits_per_byte"]
        is None
    )
    assert (
        first["best_validation_bits_per_byte"],
        first["best_step"],
        first["validation_bits_per_byte"],
    ) == (0.5, 3, 0.75)
    log.write_text(json.dumps(final) + "\n")
    assert "windowed has no line of training in its metrics.jsonl yet; wait for it" in refused(
        capsys, "curves", validated, new
    )
