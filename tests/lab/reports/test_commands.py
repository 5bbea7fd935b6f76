"""The laboratory's reports, run by eval.py as a user runs them."""

import re
import shutil

import pytest
import torch

from accelerated import compressive
from accelerated.attention import heads
from accelerated.lab.reports import dynamic
from accelerated.training.checkpoint import load_checkpoint, save_checkpoint
from accelerated.training.folder import checkpoint_path
from tests.helpers.programs import as_json, joined_runs, printed, refused, saved, trained_runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return trained_runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def joined(tmp_path_factory):
    return joined_runs(tmp_path_factory.mktemp("joined"))


def test_perplexity_by_frequency(runs, capsys, tmp_path):
    record, plain = as_json(capsys, "frequency", runs.recurrent), as_json(capsys, runs.recurrent)
    rows = record["by_frequency"]
    assert [row["name"] for row in rows] == ["more than 10,000", "1,000 to 10,000", "100 to 999", "fewer than 100", "all"]
    assert rows[0]["perplexity"] is None, "JSON has no NaN"
    assert rows[-1]["nats"] == pytest.approx(plain["nats"], rel=1e-6) and sum(r["words"] for r in rows[:-1]) == rows[-1]["words"]
    content = runs.book.read_bytes()
    training = content[: len(content) * 90 // 100].split()
    valid = content[len(content) * 90 // 100 : len(content) * 95 // 100].split()
    common = [word for word in valid if training.count(word) >= 100]
    assert abs(rows[2]["words"] - len(common)) <= 1 and common
    other = tmp_path / "other.txt"
    other.write_text("some def words return common " * 99)
    rows = as_json(capsys, "frequency", runs.recurrent, "--data", other)["by_frequency"]
    assert rows[2]["words"] > 0, "how often words stand in what the run was trained on"
    assert "perplexity per word" in printed(capsys, "frequency", runs.recurrent)
    assert b"<svg" in (tmp_path / "a.svg").read_bytes()


def test_words_keep_their_losses_when_documents_are_joined(joined, capsys):
    """The table by frequency has the same words, and adds up to the score."""
    default, apart = (as_json(capsys, "frequency", joined.compressive, *argv) for argv in ([], ["--no-carry-over-documents"]))
    rows, others = default["by_frequency"], apart["by_frequency"]
    assert [(row["words"], row["tokens"]) for row in rows] == [(row["words"], row["tokens"]) for row in others]
    assert rows[-1]["nats"] == pytest.approx(as_json(capsys, joined.compressive)["nats"], rel=1e-6) != others[-1]["nats"]


def test_loss_by_segments_carried(runs, capsys):
    rows = as_json(capsys, "range", runs.memformer, "--segments", 3)["temporal_range"]
    assert [row["segments"] for row in rows] == [0, 1, 2] and all(0 < row["bits_per_byte"] < 20 for row in rows)
    lines = printed(capsys, "range", runs.memformer, "--segments", 3).splitlines()[-3:]
    assert [line.split()[:2] for line in lines] == [[str(row["segments"]), f"{row['bits_per_byte']:.4f}"] for row in rows]
    line = refused(capsys, "range", runs.memformer, "--segments", 9000)
    assert "no document has scored tokens in its segments 9,001 to 18,000" in line
    assert "carries no memory" in refused(capsys, "range", runs.plain, "--segments", 2)


@pytest.mark.parametrize(
    "name,dtype,options",
    [
        ("score", torch.bfloat16, ()),
        ("attention", torch.float32, ()),
        ("compression", torch.float32, ()),
        ("dynamic", torch.float32, ("--learning-rate", 1e-5)),
    ],
)
def test_small_differences_are_not_measured_in_bfloat16(name, dtype, options, runs, capsys, tmp_path, monkeypatch):
    shutil.copytree(runs.compressive, tmp_path / "run")
    path = checkpoint_path(tmp_path / "run")
    contents = load_checkpoint(path)
    contents["training_config"]["dtype"] = "bfloat16"
    save_checkpoint(path, contents)
    seen, look_up = set(), heads.look_up
    monkeypatch.setattr(compressive, "look_up", lambda *given: seen.add(given[1].dtype) or look_up(*given))
    assert printed(capsys, name, tmp_path / "run", *options) and seen == {dtype}


def test_attention_and_compression(runs, capsys):
    lines = printed(capsys, "attention", runs.compressive, "--sequences", 20)
    rows = [line for line in lines.splitlines() if line.startswith(("compressed memory", "memory ", "segment "))]
    assert len(rows) == 3 and "20 segments" in lines
    assert sum(float(row.split("sum")[1]) for row in rows) == pytest.approx(100, abs=0.2)
    record = as_json(capsys, "attention", runs.compressive, "--sequences", 20)["attention"]
    assert {part: len(row["mean"]) for part, row in record.items()} == dict.fromkeys(record, 6)
    assert sum(sum(row["mean"]) for row in record.values()) == pytest.approx(1, abs=1e-3)
    lines = printed(capsys, "compression", runs.compressive, "--sequences", 20)
    assert re.findall(r"layer (\d) +attention-reconstruction loss \d\.\d{3}e", lines) == ["1", "2"]
    losses = as_json(capsys, "compression", runs.compressive, "--sequences", 20)["attention_reconstruction_loss"]
    assert len(losses) == 2 and all(loss > 0 for loss in losses)
    assert "0 segments have full memories" in refused(capsys, "attention", runs.compressive, "--memory", 9000)


def test_dynamic_evaluation_continues_with_the_runs_optimiser(runs, capsys, monkeypatch):
    run, seen, evaluate_dynamically = runs.recurrent, [], dynamic.evaluate_dynamically

    def watch(model, documents, tokenizer, lanes, optimizer, clip):
        steps = next(iter(optimizer.state.values()))["step"].item()
        seen.append((optimizer.param_groups[0]["lr"], len(optimizer.state), clip, steps))
        return evaluate_dynamically(model, documents, tokenizer, lanes, optimizer, clip)

    monkeypatch.setattr(dynamic, "evaluate_dynamically", watch)
    before = checkpoint_path(run).read_bytes()
    record, plain = as_json(capsys, "dynamic", run, "--learning-rate", 0.002), as_json(capsys, run)
    assert record["static"]["nats"] == pytest.approx(plain["nats"], rel=1e-6)
    assert record["dynamic"]["nats"] < record["static"]["nats"], "a model that has hardly been trained learns on the way"
    assert seen == [(0.002, len(saved(run)["parameters"]), 1.0, 2)]
    lines = printed(capsys, "dynamic", run, "--learning-rate", 1e-12)
    static, learning = re.findall(r"log-probability +(\S+)", lines)
    assert (
        float(static.replace(",", "")) == pytest.approx(float(learning.replace(",", "")), rel=1e-4)
        and "with dynamic evaluation at 1e-12:" in lines
    )
    assert checkpoint_path(run).read_bytes() == before


def test_a_dynamic_score_that_is_nan_is_refused(runs, capsys):
    """The first steps of such a rate leave nothing but NaN; with the weights as they are the score is a number."""
    line = refused(capsys, "dynamic", runs.recurrent, "--learning-rate", 1e30)
    assert line == "--learning-rate 1e+30: the predictions become NaN while training continues; give a smaller one"
