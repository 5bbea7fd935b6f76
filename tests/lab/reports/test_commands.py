"""The laboratory's reports, run by eval.py as a user runs them."""

from unittest.mock import Mock

import pytest
import torch

from accelerated import compressive
from accelerated.lab.reports import dynamic
from tests.helpers.programs import (
    BRIEF,
    COMPRESSIVE,
    as_json,
    evaluate,
    printed,
    refusal,
    saved,
    train,
)


def test_documents_add_up_to_the_score_of_their_split(runs, capsys):
    """The same documents are listed if all are read as one text."""
    read = [runs.compressive, "--data", runs.texts]
    rows = as_json(capsys, "documents", *read, "--clear-memory")["documents"]
    score = as_json(capsys, *read, "--clear-memory")
    for total in ("nats", "text_bytes"):
        assert sum(row[total] for row in rows) == pytest.approx(score[total], rel=1e-6)
    joined = as_json(capsys, "documents", *read, "--carry-over-documents")["documents"]
    assert [row["name"] for row in joined] == [row["name"] for row in rows]
    assert [row["text_bytes"] for row in joined] == [row["text_bytes"] for row in rows]


def test_small_differences_are_not_measured_in_bfloat16(runs, capsys, tmp_path, monkeypatch):
    train(*COMPRESSIVE, *BRIEF, f"--data {runs.book} --dtype bfloat16 --out {tmp_path}")
    embed = Mock(wraps=compressive.embed)
    monkeypatch.setattr(compressive, "embed", embed)
    for report, dtype in (
        ("score", torch.bfloat16),
        ("compression", torch.float32),
        ("dynamic --learning-rate 1e-4", torch.float32),
    ):
        printed(capsys, report, tmp_path)
        assert {matrix.dtype for (_, matrix), _ in embed.call_args_list} == {dtype}, report
        embed.reset_mock()


def test_the_report_of_attention_says_what_was_averaged(runs, capsys):
    assert "of 3 segments" in printed(capsys, "attention", runs.compressive, "--sequences 3")


def test_dynamic_evaluation_continues_with_the_runs_optimiser(runs, capsys, monkeypatch):
    """A rate whose first steps leave nothing but NaN is refused."""
    seen = []
    evaluate_dynamically = dynamic.evaluate_dynamically

    def watch(*given):
        optimizer, clip = given[-2:]
        first = next(iter(optimizer.state.values()))
        rate = optimizer.param_groups[0]["lr"]
        seen.append((rate, len(optimizer.state), clip, first["step"].item()))
        return evaluate_dynamically(*given)

    monkeypatch.setattr(dynamic, "evaluate_dynamically", watch)
    command = ["dynamic", runs.recurrent, "--data", runs.texts, "--learning-rate"]
    record = as_json(capsys, *command, 0.002)
    learns = "a model that has hardly been trained learns on the way"
    static = as_json(capsys, "score", runs.recurrent, "--data", runs.texts)
    assert record["dynamic"]["nats"] < static["nats"], learns
    parameters = len(saved(runs.recurrent)["parameters"])
    assert seen == [(0.002, parameters, 1.0, 2)]
    line = refusal(evaluate, *command, 1e30)
    assert "the predictions become NaN while training continues" in line
