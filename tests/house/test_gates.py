"""docs.gates, which records what trained gates keep: a record is never lost to a mistake."""

from docs import gates
from tests.helpers.programs import TINY, refusal, train


def test_no_record_is_written_of_no_runs_or_of_others(text, tmp_path, monkeypatch):
    record = tmp_path / "gates.json"
    record.write_text("measured")
    monkeypatch.setattr(gates, "RECORD", record)
    train(*TINY, f"--data {text} --steps 1 --sample 0 --out {tmp_path}/run")
    said = refusal(gates.main, [str(tmp_path / "run")])
    assert "run is no run of --data recall with one gate" in said
    assert record.read_text() == "measured"
