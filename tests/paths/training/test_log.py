"""The log of a run: means weighted by tokens; the first process alone writes it."""

import math

import pytest

from accelerated.evaluation.score import Score
from accelerated.training.log import Log, read_metrics


def test_means_are_weighted_by_tokens(tmp_path):
    record = Log(tmp_path)
    record.add(10.0, 5, 20)
    record.add(2.0, 1, 4)
    record.record(2, learning_rate=0.1)
    record.add(3.0, 1, 1)
    record.record(3)
    first, second = read_metrics(tmp_path)
    assert first == {
        "step": 2,
        "loss": 2.0,
        "bits_per_byte": pytest.approx(0.5 / math.log(2)),
        "learning_rate": 0.1,
    }
    assert second["loss"] == 3.0, "each record begins anew"
    record.validation(3, Score(6.0, 3, 2, 12), Score(6.0, 3, 1, 4))
    expected = {
        "step": 3,
        "validation_loss": 2,
        "validation_accuracy": 2 / 3,
        "validation_tokens": 3,
        "cleared_accuracy": 1 / 3,
    }
    expected |= {
        "validation_bits_per_byte": 0.5 / math.log(2),
        "cleared_bits_per_byte": 1.5 / math.log(2),
    }
    assert read_metrics(tmp_path)[-1] == pytest.approx(expected)


def test_a_resumed_run_drops_the_lines_after_its_checkpoint(tmp_path):
    """It also drops a line that a crash cut off, and keeps the sums that were not yet written; another process writes nothing."""
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 6, "loss": 2.0}\n{"step": 7, "loss": 1.0}\n{"step": 8, "lo'
    )
    for writing, expected in ((False, [(6, 2.0), (7, 1.0)]), (True, [(6, 2.0), (7, 2.0)])):
        record = Log(tmp_path, step=6, pending=(10.0, 5, 20), writing=writing)
        record.add(2.0, 1, 4)
        assert record.pending == (12.0, 6, 24)
        record.record(7)
        assert record.pending == (0.0, 0, 0)
        assert [(line["step"], line["loss"]) for line in read_metrics(tmp_path)] == expected
