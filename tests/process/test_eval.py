"""eval.py's reports, run as a user runs them: printed text, --json, and error messages."""

import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import eval as evaluation_script
from accelerated.data import named_sets
from accelerated.data.config import DataConfig
from accelerated.evaluation.options import EXAMPLES, REPORTS
from accelerated.pretrained_recurrence import PretrainedRecurrence
from accelerated.program import progress
from accelerated.program.errors import InputError, run_program
from accelerated.training.checkpoint import load_checkpoint, save_checkpoint
from accelerated.training.folder import checkpoint_path
from tests.helpers.programs import (
    BRIEF,
    COMPRESSIVE,
    ROOT,
    TINY,
    WINDOWED,
    as_json,
    evaluate,
    joined_runs,
    printed,
    refused,
    train,
    trained_runs,
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return trained_runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def joined(tmp_path_factory):
    return joined_runs(tmp_path_factory.mktemp("joined"))


@pytest.fixture
def own_run(runs, tmp_path):
    """A copy of the block_recurrent run, which a test may damage."""
    return shutil.copytree(runs.recurrent, tmp_path / "run")


# What --help says


def test_help_shows_every_report_in_one_line_with_an_example(capsys):
    with pytest.raises(SystemExit) as caught:
        evaluate("--help")
    lines = capsys.readouterr().out.splitlines()
    assert not caught.value.code and EXAMPLES.keys() == REPORTS.keys()
    for name in REPORTS:
        assert sum(line.startswith(f"  python eval.py {name} RUN") for line in lines) == 1, name


@pytest.mark.parametrize("name", list(REPORTS))
def test_a_reports_help_lists_what_it_takes_and_nothing_else(name, capsys):
    with pytest.raises(SystemExit):
        evaluate(name, "--help")
    shown = set(re.findall(r"^  (--[a-z-]+)", capsys.readouterr().out, re.M))
    takers = {
        "--tokens": "sample topics",
        "--contexts": "topics",
        "--top-p": "sample",
        "--new-window": "sample",
        "--plot": "positions curves",
        "--clear-memory": "score overlap",
        "--overlaps": "overlap",
        "--segments": "range view",
        "--learning-rate": "dynamic",
        "--sequences": "attention compression",
        "--against": "curves",
        "--json": name,
        **dict.fromkeys(("--checkpoint", "--device"), name if name != "curves" else ""),
        "--pool": "score sample positions frequency overlap range dynamic",
        "--memory": "score sample positions frequency range attention compression dynamic",
        "--split": "score positions frequency overlap range attention compression topics dynamic view",
        "--carry-over-documents": "score positions frequency overlap range attention compression topics dynamic view",
        "--out": "view",
        "--from": "view",
    }
    for option, reports in takers.items():
        assert (option in shown) == (name in reports.split()), option


@pytest.mark.parametrize("name", list(REPORTS))
def test_the_examples_run(name, runs, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    special = {"overlap": "windowed", "topics": "windowed", "attention": "compressive", "compression": "compressive"}
    folder = special.get(name, "recurrent")
    monkeypatch.setattr("accelerated.lab.reports.topics.FITTED", 100)
    words = shlex.split(EXAMPLES[name][0].removeprefix(f"python eval.py {name} ").replace("--contexts 1000", "--contexts 20"))
    assert printed(capsys, name, *(getattr(runs, folder) if word == "RUN" else word for word in words)).strip()


# Which report, which run


@pytest.mark.parametrize(
    "argv,words",
    [
        (["positons", "RUN"], r"this is no run's folder, and the report is 'positons'; .* \(nearest: positions\)"),
        (["nowhere"], "the report is 'nowhere'; it must be one of score, sample, "),
        (["score", "nowhere"], "no checkpoint at nowhere"),
        ([], "the following arguments are required: RUN"),
        (["RUN", "--colour"], "unknown option --colour; did you mean --pool"),
        (["RUN", "--top-p", 0.5], "unknown option --top-p; did you mean"),
        (["positions", "RUN", "--clear-memory"], "unknown option --clear-memory; did you mean"),
        (["RUN", "RUN"], "2 runs were given; only eval.py overlap and curves take more than one"),
        (["RUN", "--checkpoint", "best"], "--checkpoint best: .* has last, step-1, step-2"),
    ],
)
def test_wrong_command_lines_are_refused_in_one_line(argv, words, runs, capsys, monkeypatch):
    monkeypatch.setattr(evaluation_script, "load_corpus", lambda *_: pytest.fail("data was touched"))
    assert re.search(words, refused(capsys, *(runs.recurrent if word == "RUN" else word for word in argv)))


@pytest.mark.parametrize(
    "argv,words",
    [
        (["score", "--batch", 0], "argument --batch: 0 was given; it must be at least 1"),
        (["score", "--batch", "x"], "argument --batch: invalid int value: 'x'"),
        (["score", "--data", "recall", "--carry-over-documents"], "recall has questions of its own; leave one of them out"),
        (["score", "--data", "nowhere"], "--data nowhere: no such file or folder"),
        (["range", "--segments", 1], "--segments: 1 was given; it must be at least 2"),
        (["range"], "required: --segments"),
        (["attention", "--sequences", 1], "--sequences: 1 was given; it must be at least 2"),
        (["dynamic", "--learning-rate", 0], "--learning-rate: 0 was given; it must be positive and finite"),
        (["dynamic", "--learning-rate", "nan"], "it must be positive and finite"),
        (["positions", "--plot", "a.xyz"], r"cannot draw a.xyz: give a name that ends in one of .*\.png"),
        (["positions", "--plot", "nowhere/a.png"], "cannot write nowhere/a.png: No such file or directory; give another path"),
        (["sample", "--tokens", -1], "--tokens: -1 was given; it must be at least 1"),
        (["sample", "--temperature", 1e-320], "must be 0 for the most probable token, or at least 0.001"),
        (["sample", "--temperature", "nan"], "--temperature: nan was given"),
        (["sample", "--temperature", 0, "--top-p", 0.5], "--temperature 0 takes the most probable token; leave"),
        (["sample", "--top-p", 0], "--top-p: 0 was given; it must be above 0 and at most 1"),
        (["sample", "--top-p", 1.5], "above 0 and at most 1"),
        (["sample", "--seed", 2**32], f"--seed: {2**32} was given; it must be at least 0 and below 2.32"),
        (["sample", "--prompt", "a", "--prompt-file", __file__], "--prompt and --prompt-file are two prompts; give one of them"),
        (["sample", "--prompt", ""], "the prompt is empty, or has no token for the run's tokenizer; give another"),
        (["sample", "--prompt-file", os.devnull], "the prompt is empty, or has no token for the run's tokenizer; give another"),
        (["overlap", "--overlaps", "1,x"], "argument --overlaps: '1,x'; give numbers joined by commas"),
        (["view"], "the following arguments are required: --out"),
        (["view", "--out", "folder.png"], "--out folder.png exists, and nothing is overwritten; give another --out"),
        (["view", "--out", "nowhere/a.html"], "cannot write nowhere/a.html: No such file or directory; give another --out"),
        (["view", "--out", "a.html", "--from", 0], "argument --from: 0 was given; it must be at least 1"),
        (["view", "--out", "a.html", "--memory", 4], "unknown option --memory; did you mean"),
        (["overlap"], "overlap is for pretrained_recurrence models, this is block_recurrent"),
        (["attention"], "attention is for compressive models, this is block_recurrent"),
        (["compression"], "compression is for compressive models, this is block_recurrent"),
        (["score", "--memory", 4], "--memory is for compressive and memorizing models, this is block_recurrent; leave it out"),
        (["score", "--segment", 8], "--segment is for pretrained_recurrence models, this is block_recurrent"),
        (["score", "--pool", "advance"], "--pool is for pretrained_recurrence models, this is block_recurrent"),
        (["sample", "--new-window"], "--new-window is for models that read windows, this is block_recurrent; leave it out"),
    ],
)
def test_values_that_cannot_work_are_refused_before_data_is_touched(argv, words, runs, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.png").mkdir()
    monkeypatch.setattr(evaluation_script, "load_corpus", lambda *_: pytest.fail("data was touched"))
    assert re.search(words, refused(capsys, argv[0], runs.recurrent, *argv[1:]))


@pytest.mark.parametrize(
    "kind,argv,words",
    [
        ("compressive", ["score", "--memory", -1], "--memory is -1"),
        ("compressive", ["compression", "--compressed-memory", 0], "compressed_memory is 0, so nothing is compressed"),
        ("compressive", ["overlap"], "overlap is for pretrained_recurrence models"),
        ("windowed", ["overlap", "--overlaps", "8"], r"--overlap is 8; it must lie in 0..7 for segment 8"),
        ("windowed", ["overlap", "--overlaps", "0,9"], r"--overlap is 9; it must lie in 0..7"),
        ("windowed", ["score", "--segment", 13], "--segment 13 is longer than the position table; max_positions is 12"),
        ("windowed", ["score", "--segment", 0], "--segment is 0; it must be at least 1"),
        ("windowed", ["score", "--segment", 2], "--overlap is 2; it must lie in 0..1 for segment 2"),
        ("windowed", ["overlap", "--segment", 2], "--overlap is 2; it must lie in 0..1 for segment 2"),
        (
            "windowed",
            ["score", "--memory", 3],
            "--memory is for compressive and memorizing models, this is pretrained_recurrence",
        ),
    ],
)
def test_sizes_that_cannot_work_are_refused_before_data_is_touched(kind, argv, words, runs, capsys, monkeypatch):
    monkeypatch.setattr(evaluation_script, "load_corpus", lambda *_: pytest.fail("data was touched"))
    assert re.search(words, refused(capsys, argv[0], getattr(runs, kind), *argv[1:]))


def test_checkpoints_that_do_not_fit_are_refused(own_run, capsys):
    path = checkpoint_path(own_run)
    contents = load_checkpoint(path)
    contents["model_config"]["width"] = 24
    save_checkpoint(path, contents)
    assert "does not fit" in refused(capsys, own_run)
    path.write_bytes(path.read_bytes()[:-2000])
    assert "truncated" in refused(capsys, own_run)
    path.unlink()
    assert "no checkpoint" in refused(capsys, own_run)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("report", ["score", "sample"])
def test_parameters_that_are_not_numbers_are_refused_by_name(own_run, report, value, capsys):
    contents = load_checkpoint(checkpoint_path(own_run))
    name = list(contents["parameters"])[-1]
    contents["parameters"][name].view(-1)[-1] = value
    save_checkpoint(checkpoint_path(own_run), contents)
    assert re.search(
        rf"checkpoint.pt: {name} has NaN or infinite values; give another --checkpoint", refused(capsys, report, own_run)
    )
    assert printed(capsys, report, own_run, "--checkpoint", "step-1")


@pytest.mark.parametrize("argv", [["score"], ["overlap"], ["dynamic", "--learning-rate", 1e-4]])
def test_a_score_that_overflows_is_refused(argv, runs, tmp_path, capsys):
    shutil.copytree(runs.windowed, tmp_path / "run")
    contents = load_checkpoint(checkpoint_path(tmp_path / "run"))
    for parameter in contents["parameters"].values():
        parameter.fill_(3e38)  # finite; products of two are not
    save_checkpoint(checkpoint_path(tmp_path / "run"), contents)
    assert "the model's predictions are NaN: its numbers overflow" in refused(capsys, argv[0], tmp_path / "run", *argv[1:])
    line = refused(capsys, "sample", tmp_path / "run")
    assert "prediction of token 1 of the continuation is NaN or infinite" in line


def test_another_runs_tokenizer_is_refused(runs, tmp_path, capsys):
    pytest.importorskip("tokenizers", reason="learning needs the extra bpe: pip install tokenizers")
    train("--data", runs.book, *TINY, *BRIEF, "--train-bpe", 300, "--out", tmp_path / "run")
    assert "bits per byte" in printed(capsys, tmp_path / "run")
    ranks = tmp_path / "run" / "tokenizer.tiktoken"
    first, *rest = ranks.read_text().splitlines()
    swapped = [line.split()[0] for line in (*rest[::-1], first)]
    ranks.write_text("".join(f"{token} {rank}\n" for rank, token in enumerate(swapped)))
    for report in ("score", "sample"):
        assert re.search(r"tokenizer.tiktoken is not the one .* trained with", refused(capsys, report, tmp_path / "run"))


def test_the_script_exits_with_2_and_one_line():
    done = subprocess.run([sys.executable, "eval.py", "nowhere"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and done.stderr.startswith("eval.py: "), done.stderr


def test_running_out_of_memory_is_one_line(capsys):
    def fill(argv):
        torch.empty(2**50, dtype=torch.float32)

    with pytest.raises(SystemExit) as caught:
        run_program("eval.py", fill, [])
    line = capsys.readouterr().err
    assert caught.value.code == 2 and line.startswith("eval.py: out of memory; give a smaller --batch") and line.count("\n") == 1
    with pytest.raises(RuntimeError, match="other"):
        run_program("eval.py", lambda argv: (_ for _ in ()).throw(RuntimeError("other")), [])


# While it works

# Runs eval.py with these arguments, and plain lines of progress every tenth of a second
SCRIPT = """
import runpy, sys
from accelerated.program import progress
progress.SECONDS = 0.1
sys.argv = ["eval.py", *sys.argv[1:]]
runpy.run_path("eval.py", run_name="__main__")
"""


def started(*command, **how):
    command = [sys.executable, *map(str, command)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **how)


def interrupted_at(process, pattern):
    """Send SIGINT when a line of stderr matches; returns (stdout, the rest of stderr)."""
    assert any(re.search(pattern, line) for line in process.stderr), "it never came so far"
    process.send_signal(signal.SIGINT)
    return process.communicate(timeout=60)


def test_ctrl_c_ends_a_long_evaluation_with_one_line(runs, tmp_path):
    """Progress with the time left comes on stderr before; stdout stays empty."""
    long = tmp_path / "long.txt"
    long.write_text("a long text " * 100_000)
    process = started("-c", SCRIPT, runs.recurrent, "--data", long, "--split", "train", "--batch", 1, "--json")
    out, err = interrupted_at(process, r"evaluating: \d+ of 67\d+, .* so far, .* left")
    assert process.returncode == 130 and out == ""
    assert err.endswith("\neval.py: interrupted\n") and "Traceback" not in err


def test_ctrl_c_while_torch_is_imported_is_one_line(runs):
    process = started("-X", "importtime", "eval.py", runs.recurrent)
    out, err = interrupted_at(process, r"\btorch\._utils$")
    assert process.returncode == 130 and out == "" and err.endswith("\neval.py: interrupted\n") and "Traceback" not in err


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a system with /dev/full, such as Linux")
def test_output_that_cannot_be_written_is_one_line(runs):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "eval.py", runs.recurrent], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 2
    assert done.stderr == "eval.py: cannot write the output: No space left on device; send it elsewhere\n"


@pytest.mark.parametrize("name", [name for name in REPORTS if name not in ("export", "curves")])  # which are quick
def test_every_report_shows_its_progress_on_stderr_alone(name, runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    special = {"overlap": "windowed", "topics": "windowed", "attention": "compressive", "compression": "compressive"}
    folder = special.get(name, "recurrent")
    (tmp_path / "prompt.txt").write_text("a prompt " * 30)
    argv = {"sample": ["--prompt-file", tmp_path / "prompt.txt"], "range": ["--segments", 2]}.get(name, [])
    argv += {"dynamic": ["--learning-rate", 1e-6], "view": ["--out", tmp_path / "page.html"]}.get(name, [])
    argv += ["--sequences", 5] if name in ("attention", "compression") else ["--contexts", 20] if name == "topics" else []
    monkeypatch.setattr("accelerated.lab.reports.topics.FITTED", 100)
    capsys.readouterr()
    evaluate(name, getattr(runs, folder), *argv, "--json")
    out, err = capsys.readouterr()
    titles = {
        "sample": ["reading the prompt"],
        "frequency": ["counting words of the training split", "evaluating"],
        "topics": ["continuing contexts"],
    }.get(name, ["evaluating"])
    for title in titles:
        assert re.search(rf"^{title}: \S+ of \S+, \S+ so far, \S+ left, .*(token|segment|context)/?s?", err, re.M), (
            f"{title} in {err}"
        )
    assert json.loads(out) and out.count("\n") == 1


# score


def test_a_million_lanes_are_no_more_than_what_there_is_to_read(joined, capsys):
    few, many = (as_json(capsys, joined.compressive, "--no-carry-over-documents", "--batch", n) for n in (80, 10**15))
    assert many["nats"] == pytest.approx(few["nats"], rel=1e-6) and many["tokens"] == few["tokens"]
    parts = as_json(capsys, "positions", joined.compressive, "--batch", 10**15)["by_position"]["memory_carried"]
    split = as_json(capsys, joined.compressive)["split_tokens"]
    assert parts[0]["documents"] == split // 8 and sum(row["tokens"] for row in parts) == split, "a segment of 8 for each lane"


def test_counts_of_four_digits_have_commas_in_text_and_none_in_json(runs, tmp_path, capsys):
    long = tmp_path / "long.txt"
    long.write_text("some words " * 300)
    read = (runs.recurrent, "--data", long, "--split", "train", "--carry-over-documents", "--batch", 16)
    record, lines = as_json(capsys, *read), printed(capsys, *read)
    tokens = 11 * 300 * 90 // 100 - 1
    assert (
        record["tokens"] == record["split_tokens"] == tokens
        and f"tokens scored       {tokens:,} of {tokens:,} in the split" in lines
    )
    assert f"({record['words']:,} words" in lines and f"log-probability     {-record['nats']:,.2f} nats" in lines
    for name, argv in (
        ("positions", []),
        ("range", ["--segments", 2]),
        ("frequency", []),
        ("dynamic", ["--learning-rate", 1e-5]),
    ):
        shown = printed(capsys, name, *read, *argv).replace(str(long), "").replace(str(runs.recurrent), "")
        assert re.search(r"\d,\d{3}", shown) and not re.search(r"(?<![.\d])\d{4,}", shown), shown


def test_json_holds_what_is_printed(runs, capsys):
    lines, record = printed(capsys, runs.recurrent), as_json(capsys, "score", runs.recurrent)
    for name, key, digits in (
        ("bits per byte", "bits_per_byte", 4),
        ("per word", "word_perplexity", None),
        ("tokens scored", "tokens", 0),
        ("log-probability", "nats", 2),
    ):
        shown = float(re.search(f"^{name} +(\\S+)", lines, re.M)[1].replace(",", ""))
        if digits is None:
            assert float(f"{record[key]:.5g}") == shown
        else:
            assert round(abs(record[key]), digits) == abs(shown)
    assert record["run"] == str(runs.recurrent) and record["step"] == 2
    assert record["split"] == "valid" and record["data"] == str(runs.book)
    assert record["config"]["width"] == 16 and record["words_are"] == "counted between white space"
    assert record["word_perplexity"] == pytest.approx(math.exp(record["nats"] / record["words"]))
    assert record["memory_cleared"] is False


def test_official_word_counts_are_used_and_named(runs, capsys, monkeypatch):
    """If the split has that many words."""
    words = as_json(capsys, runs.recurrent)["words"]
    for official, how in ((words, "official count"), (words + 1, "counted between white space")):
        monkeypatch.setattr(named_sets, "OFFICIAL_WORDS", {str(runs.book): {"valid": official}})
        record = as_json(capsys, runs.recurrent)
        assert record["words"] == words and record["words_are"] == how
        assert record["word_perplexity"] == pytest.approx(math.exp(record["nats"] / words))
        assert f"({words} words of the original text, {how})" in printed(capsys, runs.recurrent)
        title = printed(capsys, "overlap", runs.windowed).splitlines()[0]
        assert f"valid {words} ({how}), test " in title and title.endswith("(counted between white space)")


def test_a_perplexity_that_no_double_holds_is_null_in_json(runs, tmp_path, capsys):
    """JSON has no infinity: a text of one word has all its losses."""
    (tmp_path / "word.txt").write_text("x" * 4000)
    record = as_json(capsys, runs.recurrent, "--data", tmp_path / "word.txt")
    assert record["words"] == 1 and record["word_perplexity"] is None
    splits = as_json(capsys, "overlap", runs.windowed, "--data", tmp_path / "word.txt")["rows"][0]["splits"]
    assert splits["test"]["words"] == 1 and splits["test"]["word_perplexity"] is None


def test_other_data_and_splits_are_read(runs, tmp_path, capsys):
    other = tmp_path / "other.txt"
    other.write_text("another text entirely " * 60)
    lines = printed(capsys, runs.recurrent, "--data", other, "--split", "test", "--batch", 2)
    assert f"test split of {other}" in lines and "tokens scored       65 of 65 in the split\n" in lines
    (tmp_path / "short.txt").write_text("x" * 40)
    assert "tokens scored       1 of 1 in the split\n" in printed(capsys, runs.recurrent, "--data", tmp_path / "short.txt")
    (tmp_path / "nothing.txt").write_text("x")
    assert "has nothing to predict" in refused(capsys, runs.recurrent, "--data", tmp_path / "nothing.txt")


def test_a_part_of_a_split_is_called_a_part(runs, tmp_path, capsys):
    """What a run was trained with, on its own data alone; the test split is never cut."""
    text = tmp_path / "text.txt"
    text.write_text("some words of a text " * 60)
    train(*WINDOWED, "--data", text, "--validation-tokens", 30, "--training-documents", 1, *BRIEF, "--out", tmp_path / "run")
    for options, tokens, part in (([], 29, "a part of valid"), (["--split", "test"], 62, "step 2, test")):
        lines = printed(capsys, tmp_path / "run", *options)
        assert f"{part} split of {text}" in lines and f"tokens scored       {tokens} of {tokens} in" in lines
        assert as_json(capsys, tmp_path / "run", *options)["whole_split"] is (not part.startswith("a part"))
    assert printed(capsys, "overlap", tmp_path / "run").endswith(f"{tmp_path / 'run'} (a part of valid)\n")
    lines = printed(capsys, tmp_path / "run", "--data", runs.book)
    assert f"step 2, valid split of {runs.book}" in lines and "tokens scored       29 of" not in lines


def test_recall_is_read_only_with_byte_tokens(runs, tmp_path, capsys):
    pytest.importorskip("tokenizers", reason="learning needs the extra bpe: tokenizers")
    train("--data", runs.book, *TINY, *BRIEF, "--train-bpe", 300, "--out", tmp_path / "run")
    line = refused(capsys, tmp_path / "run", "--data", "recall")
    assert re.search(r"--data recall is made of bytes, the run's tokenizer is .*; give other --data", line)


def test_a_warning_if_the_text_changed_since_training(runs, text, tmp_path, capsys):
    train("--data", text, *TINY, *BRIEF, "--out", tmp_path / "run")
    capsys.readouterr()
    evaluate(tmp_path / "run")
    assert "warning" not in capsys.readouterr().err
    text.write_bytes(text.read_bytes() + b"more")
    evaluate(tmp_path / "run")
    assert f"warning: {text} is no longer what the run was trained on" in capsys.readouterr().err


def test_a_folder_is_read_in_the_documents_that_the_run_was_trained_on(tmp_path, capsys):
    for folder in range(40):
        (tmp_path / "texts" / str(folder)).mkdir(parents=True)
        for file in "ab":
            (tmp_path / "texts" / str(folder) / f"{file}.txt").write_text(f"some text {file} of number {folder}. " * 9)
    run, counts = tmp_path / "run", {}
    for documents in ("files", "folders"):
        train("--data", tmp_path / "texts", "--documents", documents, *TINY, *BRIEF, "--out", run / documents)
        rows = as_json(capsys, "positions", run / documents)["by_position"]["memory_carried"]
        counts[documents] = rows[0]["documents"]
        as_json(capsys, "frequency", run / documents)
        evaluate(run / documents)
        assert "warning" not in capsys.readouterr().err
    assert counts["files"] != counts["folders"]


def test_the_checkpoint_is_that_of_its_step(runs, capsys):
    first, last = (as_json(capsys, runs.recurrent, "--checkpoint", name) for name in ("step-1", "last"))
    assert (first["step"], last["step"]) == (1, 2) and first["nats"] != last["nats"]


def test_memories_of_other_sizes_are_evaluated(runs, tmp_path, capsys):
    assert "trained with" not in printed(capsys, runs.compressive)
    lines = printed(capsys, runs.compressive, "--memory", 5, "--compressed-memory", 9)
    assert "\ntrained with memory 8, compressed_memory 4\n" in lines
    assert "temporal range 2 layers x (5 + 2 x 9) = 46 tokens" in lines and "bits per byte" in lines
    assert "trained with" in printed(capsys, runs.compressive, "--compressed-memory", 0)
    train(*COMPRESSIVE, "--compressed-memory", 0, "--data", runs.book, *BRIEF, "--out", tmp_path / "xl")
    line = refused(capsys, tmp_path / "xl", "--compressed-memory", 4)
    assert re.search(
        r"of these sizes the model has layers.0.compression.weight, which .*xl has not trained; leave them out", line
    )


def test_a_memorizing_model_is_evaluated_without_its_memory(runs, capsys):
    """As if it were cleared at every segment, which are as long as the window that attention has besides."""
    without, cleared = as_json(capsys, runs.memorizing, "--memory", 0), as_json(capsys, runs.memorizing)
    assert without["tokens"] == cleared["tokens"] and without["nats"] != cleared["nats"]
    assert without["config"]["memory"] == 0


def test_windows_that_differ_from_training_are_named(runs, capsys):
    for options, words in (([], None), (["--segment", 9], "segment 8\n"), (["--pool", "advance"], "pool all\n")):
        lines = printed(capsys, runs.windowed, *options)
        assert f"trained with {words}" in lines if words else "trained with" not in lines
    assert ", no memory\n" in printed(capsys, runs.plain)


# memory carried over documents


def test_documents_are_joined_as_in_training_or_as_asked(joined, runs, capsys):
    """The heading and --json say which; the same tokens are scored and the same words counted."""
    default, apart = (as_json(capsys, joined.compressive, *argv) for argv in ([], ["--no-carry-over-documents"]))
    assert default["carry_over_documents"] is True and apart["carry_over_documents"] is False
    assert default["nats"] != apart["nats"]
    assert all(default[key] == apart[key] for key in ("tokens", "words", "text_bytes"))
    assert ", memory carried over documents\n" in printed(capsys, joined.compressive)
    cleared = printed(capsys, joined.compressive, "--clear-memory")
    assert "memory cleared at every segment, documents joined\n" in cleared
    assert "no memory, documents joined\n" in printed(capsys, joined.plain)
    assert "memory carried through each document\n" in printed(capsys, joined.compressive, "--no-carry-over-documents")
    asked = as_json(capsys, runs.compressive, "--data", joined.texts, "--carry-over-documents")
    trained = as_json(capsys, runs.compressive, "--data", joined.texts)
    assert asked["carry_over_documents"] and not trained["carry_over_documents"] and asked["nats"] != trained["nats"]
    assert asked["tokens"] == trained["tokens"]


def test_every_report_reads_joined_documents(joined, capsys):
    """The scoring reports give the same sum over the same tokens; no single document is long enough for range."""
    score = as_json(capsys, joined.compressive)
    rows = as_json(capsys, "positions", joined.compressive)["by_position"]["memory_carried"]
    assert sum(row["tokens"] for row in rows) == score["tokens"] and rows[0]["documents"] == 3, "parts, as many as lanes"
    assert sum(row["nats"] for row in rows) == pytest.approx(score["nats"], rel=1e-6)
    dynamic = as_json(capsys, "dynamic", joined.compressive, "--learning-rate", 1e-4)
    assert dynamic["carry_over_documents"] and dynamic["static"]["nats"] == pytest.approx(score["nats"], rel=1e-6)
    assert dynamic["dynamic"]["tokens"] == score["tokens"]
    for name in ("attention", "compression"):
        assert as_json(capsys, name, joined.compressive, "--sequences", 20)["carry_over_documents"]
    reach = ["--segments", 14, "--batch", 1]
    assert as_json(capsys, "range", joined.compressive, *reach)["carry_over_documents"]
    assert "give longer documents" in refused(capsys, "range", joined.compressive, *reach, "--no-carry-over-documents")


def test_the_table_of_overlaps_says_that_documents_are_joined(joined, capsys):
    both = [joined.windowed, joined.plain, "--overlaps", "0,3"]
    for row in as_json(capsys, "overlap", *both)["rows"]:
        options = ["--carry-over-documents", "--split", "test"]
        assert row["notes"][-1] == "documents joined"
        if row["config"]["overlap"] == 0 and row["run"] == str(joined.plain):
            expected = as_json(capsys, row["run"], *options)
            assert row["splits"]["test"]["nats"] == pytest.approx(expected["nats"], rel=1e-9)
    assert "documents joined" not in printed(capsys, "overlap", *both, "--no-carry-over-documents")


def test_recall_is_never_joined(joined, tmp_path, capsys):
    """Not by a run that was trained with joined documents; and the option is refused in one line."""
    record = as_json(capsys, joined.compressive, "--data", "recall")
    assert record["carry_over_documents"] is False
    train(*COMPRESSIVE, "--data", "recall", *BRIEF, "--out", tmp_path / "run")
    assert "leave one of them out" in refused(capsys, tmp_path / "run", "--carry-over-documents")


# Recordings


@pytest.fixture(scope="module")
def speech(tmp_path_factory):
    """A run that has learned a recording of 2,000 samples."""
    folder = tmp_path_factory.mktemp("speech")
    samples = np.random.default_rng(0).integers(100, 156, 2000).astype(np.uint8)
    samples[::3] = 32  # a blank, if it were text
    (folder / "a.ulaw").write_bytes(samples.tobytes())
    how = ("--data", folder / "a.ulaw", "--tokenizer", "mu-law", *COMPRESSIVE, "--validation-segments", 2, "--steps", 2)
    train(*how, "--out", folder / "run")
    return SimpleNamespace(ulaw=folder / "a.ulaw", run=folder / "run", samples=samples.tobytes())


def test_a_recording_is_scored_by_the_sample(speech, capsys):
    lines, record = printed(capsys, speech.run), as_json(capsys, speech.run)
    nats = record["nats"] / 99
    assert record["tokens"] == record["text_bytes"] == 99 and "words" not in record, "5% of 2,000, and no words"
    assert f"bits per byte       {nats / math.log(2):.4f}\n" in lines, "a byte is a sample"


def test_a_part_of_a_recording_has_no_words_either(speech, tmp_path, capsys):
    how = ("--data", speech.ulaw, "--tokenizer", "mu-law", *COMPRESSIVE, *BRIEF, "--validation-tokens", 50)
    train(*how, "--out", tmp_path / "run")
    record = as_json(capsys, tmp_path / "run")
    assert record["tokens"] == 49 and "words" not in record


def test_training_shows_no_samples_of_a_recording_as_text(speech, tmp_path, capsys):
    how = ("--data", speech.ulaw, "--tokenizer", "mu-law", *COMPRESSIVE, "--steps", 1, "--sample", 9)
    train(*how, "--out", tmp_path / "run")
    assert "a sample" not in capsys.readouterr().out


def test_a_recording_is_continued_in_bytes_on_stdout(speech, runs, tmp_path, capfdbinary):
    """Prompt and continuation, and nothing else; what is for text is refused or empty."""
    evaluate("sample", speech.run, "--prompt-file", speech.ulaw, "--tokens", 20)
    written = capfdbinary.readouterr().out
    assert written[:2000] == speech.samples and len(written) == 2020 and len(set(written[2000:])) > 3
    for argv, words in (
        (["frequency", speech.run], "has no words; give other --data"),
        ([speech.run, "--data", "stdlib"], r"--data stdlib is text; give a \.ulaw"),
        ([speech.run, "--data", "recall"], "--data recall is made of bytes"),
        ([runs.recurrent, "--data", speech.ulaw], "--tokenizer mu-law|is not UTF-8 text"),
    ):
        with pytest.raises(InputError, match=words):
            evaluate(*argv)


# sample


def test_a_sample_streams_and_its_prompt_comes_from_a_file(runs, tmp_path, capsys, monkeypatch):
    shown, out = [], sys.stdout
    monkeypatch.setattr(out, "flush", lambda: shown.append(1))
    streamed = printed(capsys, "sample", runs.recurrent, "--tokens", 5, "--prompt", "def ", "--temperature", 0).rstrip("\n")
    monkeypatch.undo()
    assert len(shown) >= 5, "a token at a time"
    prompt = tmp_path / "prompt.txt"
    prompt.write_bytes("def é".encode()[:-1])
    whole = as_json(capsys, "sample", runs.recurrent, "--tokens", 5, "--prompt", "def ", "--temperature", 0)
    assert whole["prompt"] + whole["continuation"] == streamed
    assert printed(capsys, "sample", runs.recurrent, "--tokens", 5, "--prompt-file", prompt).startswith("def ")
    prompt.write_bytes(b"word " * 100)
    assert as_json(capsys, "sample", runs.recurrent, "--tokens", 2, "--prompt-file", prompt)["prompt"] == "word " * 100
    invalid = printed(capsys, "sample", runs.recurrent, "--tokens", 2, "--prompt", os.fsdecode(b"caf\xe9"))
    assert invalid.startswith("caf\N{REPLACEMENT CHARACTER}")


def test_a_prompt_without_a_token_is_refused(runs, tmp_path, capsys):
    run = tmp_path / "words"
    train(*COMPRESSIVE, "--data", runs.book, "--train-words", 20, *BRIEF, "--out", run)
    line = refused(capsys, "sample", run, "--prompt", " ")
    assert "has no token for the run's tokenizer; give another --prompt" in line


def test_seed_and_sampling_reach_the_sample(runs, capsys):
    argv = ["sample", runs.recurrent, "--tokens", 20]
    greedy = as_json(capsys, *argv, "--temperature", 0)
    assert as_json(capsys, *argv, "--temperature", 1, "--top-p", 1e-9) == greedy
    drawn = [as_json(capsys, *argv, "--seed", seed) for seed in (3, 3, 4)]
    assert drawn[0] == drawn[1] != drawn[2] and drawn[0] != greedy


def test_a_sample_in_a_new_window(runs, capsys, monkeypatch):
    lengths, prompt = [], "def forward("  # 12 tokens: windows of 8 that share 2 begin at 0 and 6
    step = PretrainedRecurrence.step
    monkeypatch.setattr(PretrainedRecurrence, "step", lambda model, *read: lengths.append(1) or step(model, *read))
    for option, steps in (([], 6), (["--new-window"], 2)):
        lengths.clear()
        assert printed(capsys, "sample", runs.windowed, "--tokens", 1, "--prompt", prompt, *option).startswith(prompt)
        assert len(lengths) == steps, "tokens of the prompt that are read one by one"


# positions


def test_loss_by_position(runs, capsys, tmp_path):
    record, plain = as_json(capsys, "positions", runs.recurrent), as_json(capsys, runs.recurrent)
    carried, cleared = record["by_position"]["memory_carried"], record["by_position"]["cleared"]
    assert [row["start"] for row in carried][:4] == [0, 16, 32, 64] and record["attention_reach"] == 16
    assert sum(row["nats"] for row in carried) == pytest.approx(plain["nats"], rel=1e-6)
    nats = as_json(capsys, runs.recurrent, "--clear-memory")["nats"]
    assert sum(row["nats"] for row in cleared) == pytest.approx(nats, rel=1e-6)
    assert carried[0]["nats"] == pytest.approx(cleared[0]["nats"], rel=1e-6) and carried[1]["nats"] != cleared[1]["nats"]
    assert list(as_json(capsys, "positions", runs.plain)["by_position"]) == ["memory_carried"], "it has nothing to clear"
    pytest.importorskip("matplotlib", reason="plots need the extra plot: matplotlib")
    lines = printed(capsys, "positions", runs.recurrent, "--plot", tmp_path / "a.png")
    assert "attention reaches 16 tokens back" in lines and "memory carried" in lines
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


# view


@pytest.mark.parametrize("kind", ["memformer", "windowed"])
def test_the_page_of_a_document_has_the_sums_of_scoring_it(kind, runs, capsys, tmp_path):
    """The split is one document."""
    run, options = getattr(runs, kind), ["--split", "test"]
    score, cleared = (as_json(capsys, run, *options, *more) for more in ([], ["--clear-memory"]))
    record = as_json(capsys, "view", run, *options, "--out", tmp_path / "page.html", "--segments", 2)
    assert record["model"] == score["model"] and record["split"] == "test" and record["document"] == 1
    for key, expected in (("memory_carried", score), ("cleared", cleared)):
        for name in ("nats", "bits_per_byte"):
            assert record[key][name] == pytest.approx(expected[name], rel=1e-6)
    assert (record["tokens"], record["text_bytes"]) == (score["tokens"], score["text_bytes"])
    page = (tmp_path / "page.html").read_bytes()
    assert len(page) == record["bytes"] and record["page"] == str(tmp_path / "page.html")
    assert "nothing is overwritten" in refused(capsys, "view", run, "--out", tmp_path / "page.html")
    assert (tmp_path / "page.html").read_bytes() == page
    assert "carries no memory" in refused(capsys, "view", runs.plain, "--out", tmp_path / "other.html")


# curves


def test_curves_come_from_the_logs_alone(runs, tmp_path, capsys, monkeypatch):
    """Of runs whose models are gone, and of one that is not validated yet; each once. What has no log is refused."""
    for name in ("recurrent", "windowed"):
        shutil.copytree(getattr(runs, name), tmp_path / name)
        checkpoint_path(tmp_path / name).unlink()
    log = tmp_path / "windowed" / "metrics.jsonl"
    training, final = (json.loads(line) for line in log.read_text().splitlines())
    log.write_text(json.dumps(training) + "\n")
    with open(tmp_path / "recurrent" / "metrics.jsonl", "a") as other:
        for step, bits in ((3, 0.5), (4, 0.75)):
            other.write(json.dumps({"step": step, "validation_bits_per_byte": bits}) + "\n")
    monkeypatch.setattr(evaluation_script, "load_checkpoint", lambda path: pytest.fail("a model was loaded"))
    both = [tmp_path / "recurrent", tmp_path / "windowed"]
    first, second = as_json(capsys, "curves", *both, both[0])["runs"]
    assert (second["step"], second["bits_per_byte"], second["tokens_per_step"]) == (2, training["bits_per_byte"], 3 * 3 * 8)
    assert second["best_step"] is second["validation_bits_per_byte"] is second["best_validation_bits_per_byte"] is None
    assert (first["best_validation_bits_per_byte"], first["best_step"], first["validation_bits_per_byte"]) == (0.5, 3, 0.75)
    lines = printed(capsys, "curves", *both).splitlines()
    assert lines[2].split() == ["2", f"{first['bits_per_byte']:.4f}", "0.7500", "0.5000", "3", str(both[0])]
    assert lines[3].split() == ["2", f"{second['bits_per_byte']:.4f}", "-", "-", "-", str(both[1])]
    log.write_text(json.dumps(final) + "\n")
    assert "windowed has no line of training in its metrics.jsonl yet; wait for it" in refused(capsys, "curves", *both)
    log.write_text("3\n")
    assert "windowed has no log of train.py that can be read" in refused(capsys, "curves", *both)
    assert "texts has no log of train.py that can be read" in refused(capsys, "curves", both[0], tmp_path / "texts")


# overlap


def test_the_table_of_overlaps(runs, capsys):
    lines = printed(capsys, "overlap", runs.plain, runs.windowed, "--overlaps", "0,2,7").splitlines()
    rows = [line.split() for line in lines if line.startswith(("GPT-2", "recurrent"))]
    assert [row[3] for row in rows] == ["0", "2", "7"] * 2 and "words of the original text" in lines[0]
    assert sum(" ".join(row).endswith("(trained with overlap 2)") for row in rows) == 2
    score = printed(capsys, runs.plain)
    assert re.search(r"bits per byte +(\S+)", score)[1] == rows[0][5]
    assert re.search(r"log-probability +(\S+)", score)[1].startswith(rows[0][6][:-2])
    cells = printed(capsys, "overlap", runs.windowed, "--split", "test").splitlines()[-1].split()
    assert cells[3] == "2" and cells[4:6] == rows[4][7:9]
    rows = as_json(capsys, "overlap", runs.windowed, "--overlaps", "0,2,0")["rows"]
    assert [row["config"]["overlap"] for row in rows] == [0, 2] and rows[0]["notes"] == ["trained with overlap 2"]
    assert rows[1]["splits"]["valid"]["nats"] == pytest.approx(as_json(capsys, runs.windowed)["nats"], rel=1e-9)


def test_windows_of_another_length_are_evaluated(runs, capsys):
    """Up to the size of the position table; a window may also be shorter than the run's own overlap."""
    for window, overlaps in ((12, "0,3"), (2, "0,1")):
        lines = printed(capsys, "overlap", runs.windowed, "--segment", window, "--overlaps", overlaps)
        assert lines.count(f"recurrent, window {window}") == 2
    lines = printed(capsys, "overlap", runs.windowed, "--overlaps", "1", "--pool", "advance")
    assert "(trained with overlap 2, trained with pool all)" in lines
    together = as_json(capsys, "overlap", runs.windowed, "--overlaps", "0,2", "--pool", "advance")["rows"]
    alone = [as_json(capsys, "overlap", runs.windowed, "--overlaps", o, "--pool", "advance")["rows"][0] for o in ("0", "2")]
    assert [row["splits"] for row in together] == [row["splits"] for row in alone], "pooled by each one's own overlap"


def test_the_table_refuses_runs_of_different_data_and_counts_a_run_once(runs, tmp_path, capsys):
    other = tmp_path / "other.txt"
    other.write_text("another text entirely " * 60)
    train(*WINDOWED, "--overlap", 2, "--data", other, *BRIEF, "--out", tmp_path / "b")
    assert "the runs read different data" in refused(capsys, "overlap", runs.windowed, tmp_path / "b")
    argv = [runs.windowed, tmp_path / "b", runs.windowed, "--overlaps", "0,0", "--data", other, "--clear-memory"]
    lines = printed(capsys, "overlap", *argv)
    assert lines.count("recurrent, window 8  ") == 2 and lines.count("memory cleared)") == 2


def test_recall_is_asked_at_another_distance_and_of_other_facts(tmp_path, capsys):
    task = ("--recall-distance", 8, "--recall-questions", 3, "--recall-rewrites", 2)
    train(*COMPRESSIVE, "--data", "recall", *task, "--steps", 1, "--out", tmp_path / "run")
    near, same = as_json(capsys, tmp_path / "run"), as_json(capsys, tmp_path / "run", "--recall-distance", 8)
    far = as_json(capsys, tmp_path / "run", "--recall-distance", 99)
    assert near == same and far["tokens"] == near["tokens"] == 3 * 64 and far["nats"] != near["nats"]
    fewer = as_json(capsys, tmp_path / "run", "--recall-pairs", 2)
    assert as_json(capsys, tmp_path / "run", "--recall-pairs", 4) == near and fewer["nats"] != near["nats"] == same["nats"]
    assert fewer["tokens"] == near["tokens"]
    with pytest.raises(InputError, match="--recall-pairs is of --data recall, this is stdlib"):
        evaluate(tmp_path / "run", "--data", "stdlib", "--recall-pairs", 2)
    with pytest.raises(InputError, match="--recall-pairs is 30: with 10 values they need 330 of"):
        evaluate(tmp_path / "run", "--recall-pairs", 30)
    with pytest.raises(InputError, match="--recall-distance is of --data recall, this is stdlib"):
        evaluate(tmp_path / "run", "--data", "stdlib", "--recall-distance", 8)
    with pytest.raises(InputError, match="--recall-distance is 3; what stands in the filler needs 4 tokens"):
        evaluate(tmp_path / "run", "--recall-distance", 3)


def test_a_folder_that_is_called_like_a_named_set_is_not_read_for_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pg19").mkdir()
    assert evaluation_script.data_config(DataConfig("a.txt", documents="folders"), "pg19") == DataConfig("pg19")


def test_recall_has_no_words(tmp_path, capsys):
    """Its segments may also have no question."""
    run = tmp_path / "run"
    train(*WINDOWED, "--data", "recall", "--recall-distance", 8, "--vectors", 0, *BRIEF, "--out", run)
    lines = [line.split() for line in printed(capsys, "overlap", run, "--overlaps", "0,2").splitlines() if "GPT-2" in line]
    assert [line[4] for line in lines] == ["-", "-"]
    assert "frequency: recall has no words" in refused(capsys, "frequency", run)
    assert "(chance 10%)" in printed(capsys, run)
