"""The table of overlaps: its rows, and FLOPs per token."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from accelerated.attention.content import content_attention_plain
from accelerated.evaluation.overlap import (
    counted_flops_per_token,
    first_config,
    overlap_table,
    paper_flops,
    report,
    window_flops,
)
from accelerated.evaluation.score import evaluate
from accelerated.pretrained_recurrence import PretrainedRecurrence
from accelerated.training.settings import preset_settings
from tests.helpers.reading import trained_run
from tests.helpers.texts import BYTES, documents_of, whole
from tests.helpers.variants import PAPERS, variant

PAPER = PAPERS["pretrained_recurrence"]
SMALL = PAPER.small
OVERLAPS = [0, 5, 10, 30, 50, 75, 100, 150, 200]
PUBLISHED = "1.75 1.78 1.81 1.94 2.10 2.33 2.62 3.50 5.25"  # x 10^8


@pytest.mark.parametrize("vectors", [0, 1])
def test_the_papers_flops_per_token(vectors):
    """All nine values of Tables 1 and 2; the paper prints the same for its recurrent models."""
    gpt2 = preset_settings("pretrained_recurrence", "gpt2").model_config
    found = []
    for overlap in OVERLAPS:
        config = dataclasses.replace(gpt2, overlap=overlap, vectors=vectors)
        found.append(f"{paper_flops(config):.2e}")
    assert found == [f"{flops}e+08" for flops in PUBLISHED.split()], (
        "the paper's, by overlap: paper_flops"
    )


@pytest.mark.parametrize("name", PAPER.variants)
def test_the_count_is_that_of_torchs_counter(name, monkeypatch):
    """On the plain path, because the counter does not count torch's SDPA on the CPU."""
    plain = "accelerated.pretrained_recurrence.content_attention"
    monkeypatch.setattr(plain, content_attention_plain)
    config = variant("pretrained_recurrence", name)
    model = PretrainedRecurrence(config).eval()
    for length in {min(length, config.segment) for length in (6, 4, 1)}:
        tokens = torch.zeros(1, length, dtype=torch.long)
        state = model.initial_state(1)
        with FlopCounterMode(display=False) as counter:
            model(tokens, state)
        found = window_flops(config, length)
        counted = counter.get_total_flops()
        assert found == counted, f"{found} FLOPs of {length} tokens, torch {counted}: window_flops"


def test_flops_per_token_are_those_of_windows_run_over_tokens_scored():
    """Documents of 15 and 3 tokens at T = 6, o = 2.

    Their windows have 6, 6 and 6 tokens, and 2; 16 tokens are scored.
    """
    expected = (3 * window_flops(SMALL, 6) + window_flops(SMALL, 2)) / 16
    found = counted_flops_per_token(SMALL, documents_of([15, 3, 1]))
    assert found == pytest.approx(expected, rel=1e-15), "of all windows / tokens scored once"


@pytest.mark.parametrize("clear", [False, True], ids=["carried", "cleared"])
def test_the_report_has_a_row_for_each_run_and_overlap_with_the_score_of_its_windows(clear):
    documents = documents_of([15, 3, 1])
    run = trained_run("pretrained_recurrence", "overlapping", documents)
    config = run.model.config
    record, lines = report([run], SimpleNamespace(overlaps=(0, 2, 5, 0), clear_memory=clear))
    for overlap, row, line in zip((0, 2, 5), record["rows"], lines[2:], strict=True):
        assert row["config"]["overlap"] == overlap, "a row is of another overlap"
        other = dataclasses.replace(config, overlap=overlap)
        scores = row["splits"]["valid"]
        expected = evaluate(PAPER.random_model(other), documents, BYTES, 1, clear)
        said = f"overlap {overlap}: its nats are not those of windows that are scored alone"
        assert scores["nats"] == pytest.approx(expected.nats, rel=1e-9), said
        assert scores["tokens"] == 16, "each of 16 tokens is scored once"
        changed = [f"trained with overlap {config.overlap}"] if overlap != config.overlap else []
        assert row["notes"] == changed + ["memory cleared"] * clear, "what differs: notes_of"
        assert f"{-scores['nats']:13,.1f}   {row['flops_per_token']:11.2e}" in line


def test_what_is_read_again_is_the_runs_own_or_the_first_that_is_asked_for():
    for overlaps, sizes, expected in (((), {}, 2), ((), {"overlap": 3}, 3), ((1, 4), {}, 1)):
        config = first_config(SMALL, sizes, SimpleNamespace(overlaps=overlaps))
        assert config.overlap == expected, f"--overlaps {overlaps} of sizes {sizes}"


def test_joined_documents_and_a_part_of_a_split_are_named():
    """With memory carried over documents, windows are of their joined text; here in one lane."""
    documents = documents_of([15, 3, 9])
    read = {"lane_count": 1, "carry_over": True}
    run = trained_run("pretrained_recurrence", "overlapping", documents, **read)
    run.splits["test"] = whole(documents_of([15, 3]))
    run.splits["test"].whole = False
    run.splits["test"].words = np.array([5, 2])
    record, _ = report([run], SimpleNamespace(overlaps=(), clear_memory=False))
    [row] = record["rows"]
    assert row["notes"] == ["documents joined", "a part of test"], "what differs: look at notes_of"
    joined = [*run.to_read("valid"), *run.to_read("test")]
    assert len(joined) == 2, "a text for each split"
    counted = counted_flops_per_token(run.model.config, joined)
    assert row["counted_flops_per_token"] == counted, "FLOPs of all splits: look at row_of"
    scores = row["splits"]["test"] | {"bits_per_byte": 8.125}
    assert scores.get("words") == 7, "per word of another split's words: look at row_of"
    [_, line] = overlap_table([row | {"splits": {"test": scores}}])
    assert " 8.1250 " in line, "bits per byte: look at overlap_table"
