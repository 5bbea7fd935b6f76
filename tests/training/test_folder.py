"""The measurements of a run: their units, and lines that a resumed run drops."""

import json
import math
from types import SimpleNamespace

import pytest

from accelerated.evaluation.score import Score
from accelerated.training.folder import Log, read_metrics
from accelerated.training.run import Run


def test_a_validation_has_its_units(tmp_path):
    run = SimpleNamespace(step=2, log=Log(tmp_path))
    Run.log_validation(run, Score(6.0, 3, 2, 12), Score(6.0, 3, 1, 4), final=True)
    [found] = read_metrics(tmp_path)
    assert found == pytest.approx(
        {
            "step": 2,
            "validation_loss": 2,
            "validation_bits_per_byte": 0.5 / math.log(2),
            "validation_accuracy": 2 / 3,
            "validation_tokens": 3,
            "cleared_bits_per_byte": 1.5 / math.log(2),
            "cleared_accuracy": 1 / 3,
            "final": True,
        }
    )


NO_RECORDS = ["null", "5", "[1]", '{"loss": 3}', '{"step": "x"}', "[" * 100_000]


@pytest.mark.parametrize("line", NO_RECORDS, ids=lambda line: line[:9])
def test_a_line_that_is_no_record_of_a_step_is_left_out(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text(f'{line}\n{{"step": 1}}\n')
    assert read_metrics(tmp_path) == [{"step": 1}]


@pytest.mark.parametrize("validated", [True, False])
def test_a_resumed_run_drops_the_lines_after_its_checkpoint(tmp_path, validated):
    """It also drops a line that a crash cut off; another process than the first writes nothing.

    A validation that comes again is logged once.
    """
    records = [{"step": 6, "loss": 2.0}, {"step": 6, "validation_loss": 1.5}]
    lines = "".join(json.dumps(record) + "\n" for record in [*records, {"step": 7, "loss": 1.0}])
    (tmp_path / "metrics.jsonl").write_text(f'{lines}{{"step": 8, "lo')
    for writing in (False, True):
        log = Log(tmp_path, writing)
        log.drop_after(6, validated)
        log.write(step=7, loss=3.0)
        later = {"step": 7, "loss": 3.0 if writing else 1.0}
        kept = records if validated or not writing else records[:1]
        assert read_metrics(tmp_path) == [*kept, later]
