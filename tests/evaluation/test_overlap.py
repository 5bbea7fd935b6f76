"""The table of overlaps: its rows, and FLOPs per token."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from accelerated.attention.content import content_attention_plain
from accelerated.data.lanes import Parts
from accelerated.evaluation.overlap import (
    counted_flops_per_token,
    paper_flops,
    report,
    window_flops,
)
from accelerated.evaluation.score import TrainedRun, evaluate
from accelerated.presets.pretrained_recurrence import GPT2_SIZES
from accelerated.pretrained_recurrence import PretrainedRecurrence
from accelerated.training.settings import preset_settings
from tests.helpers.texts import BYTES, documents_of
from tests.helpers.variants import PAPERS, variant

SMALL = PAPERS["pretrained_recurrence"].small


TABLES = {
    0: "1.75",
    5: "1.78",
    10: "1.81",
    30: "1.94",
    50: "2.10",
    75: "2.33",
    100: "2.62",
    150: "3.50",
    200: "5.25",
}


def test_the_papers_flops_per_token():
    """All nine values of Tables 1 and 2, x 10^8; the paper prints the same for its recurrent models."""
    gpt2 = preset_settings("pretrained_recurrence", "gpt2").model_config
    for vectors in (0, 1):
        configs = {
            overlap: dataclasses.replace(gpt2, overlap=overlap, vectors=vectors)
            for overlap in TABLES
        }
        assert {o: f"{paper_flops(config):.2e}" for o, config in configs.items()} == {
            o: f"{f}e+08" for o, f in TABLES.items()
        }


@pytest.mark.parametrize("name", PAPERS["pretrained_recurrence"].variants)
def test_the_count_is_that_of_torchs_counter(name, monkeypatch):
    """On the plain path, because the counter does not count torch's SDPA on the CPU."""
    monkeypatch.setattr(
        "accelerated.pretrained_recurrence.content_attention", content_attention_plain
    )
    config = variant("pretrained_recurrence", name)
    model = PretrainedRecurrence(config).eval()
    for length in {min(length, config.segment) for length in (6, 4, 1)}:
        tokens, state = torch.zeros(1, length, dtype=torch.long), model.initial_state(1)
        with FlopCounterMode(display=False) as counter:
            model(tokens, state)
        assert window_flops(config, length) == counter.get_total_flops(), length


def test_flops_per_token_are_those_of_windows_run_over_tokens_scored():
    """Documents of 15 and 3 tokens at T = 6, o = 2: windows of 6, 6 and 6, and of 2; 16 tokens are scored."""
    expected = (3 * window_flops(SMALL, 6) + window_flops(SMALL, 2)) / 16
    assert counted_flops_per_token(SMALL, documents_of([15, 3, 1])) == pytest.approx(
        expected, rel=1e-15
    )


def test_presets_have_the_published_sizes():
    """Parameters of GPT-2: 124, 355, 774 and 1558 million."""
    for name, millions in (
        ("gpt2", 124),
        ("gpt2-medium", 355),
        ("gpt2-large", 774),
        ("gpt2-xl", 1558),
    ):
        c = preset_settings("pretrained_recurrence", name).model_config
        layer = 12 * c.width**2 + 13 * c.width
        size = (50257 + c.max_positions) * c.width + c.layers * layer + 2 * c.width
        assert round(size / 1e6) == millions and (c.layers, c.width) == GPT2_SIZES[name]
        assert (c.heads, c.feed_forward, c.max_positions, c.segment) == (
            c.width // 64,
            4 * c.width,
            1024,
            300,
        )


def test_the_report_has_a_row_for_each_run_and_overlap_with_the_score_of_its_windows():
    config = dataclasses.replace(SMALL, vocabulary=256)
    paper = PAPERS["pretrained_recurrence"]
    listed = documents_of([15, 3, 1])
    documents = Parts(listed, [(number, 0, len(each.inputs)) for number, each in enumerate(listed)])
    model = paper.random_model(config)
    run = TrainedRun(
        "runs/a",
        model,
        SimpleNamespace(model_config=config),
        {},
        BYTES,
        2,
        "data",
        {"test": documents},
    )
    record, lines = report([run], SimpleNamespace(overlaps=(0, 2, 5, 0), clear_memory=False))
    assert [row["config"]["overlap"] for row in record["rows"]] == [0, 2, 5] and len(lines) == 2 + 3
    for row, line in zip(record["rows"], lines[2:], strict=True):
        assert f"{-row['splits']['test']['nats']:13,.1f}   {row['flops_per_token']:11.2e}" in line
        other = dataclasses.replace(config, overlap=row["config"]["overlap"])
        score = evaluate(paper.random_model(other), documents, BYTES, 1)
        assert (
            row["splits"]["test"]["nats"] == pytest.approx(score.nats, rel=1e-9)
            and row["splits"]["test"]["tokens"] == 16
        )
        assert row["counted_flops_per_token"] == counted_flops_per_token(other, documents)
        assert row["notes"] == (
            [f"trained with overlap {config.overlap}"] if other.overlap != config.overlap else []
        )
