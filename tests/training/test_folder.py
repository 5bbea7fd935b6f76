"""The measurements of a run: their units, and lines that are none.

Which lines a resumed run drops: tests/test_one_run.py.
"""

import math
from types import SimpleNamespace

import pytest

from accelerated.evaluation.score import Score
from accelerated.training.folder import Log, read_metrics
from accelerated.training.run import Run


def test_a_validation_has_its_units(tmp_path):
    Log(tmp_path, writing=False).write(step=1)  # another process than the first
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


def test_a_validation_that_comes_again_is_logged_once(tmp_path):
    """A resumed run drops that of its step, unless the checkpoint is of after it."""
    record = {"step": 6, "validation_loss": 1.5}
    log = Log(tmp_path)
    log.write(**record)
    for validated, kept in ((True, [record]), (False, [])):
        log.drop_after(6, validated)
        assert read_metrics(tmp_path) == kept, f"drop_after, validated {validated}"
