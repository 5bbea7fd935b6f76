"""docs.gates, which records what trained gates keep: a record is never lost to a mistake."""

from docs import gates
from tests.helpers.programs import refusal


def test_no_record_is_written_of_other_runs(runs, tmp_path, monkeypatch):
    record = tmp_path / "gates.json"
    record.write_text("measured")
    monkeypatch.setattr(gates, "RECORD", record)
    said = refusal(gates.main, [str(runs.recurrent)])
    assert "recurrent is no run of --data recall with one gate" in said
    assert record.read_text() == "measured"
