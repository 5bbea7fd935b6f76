"""A workshop that trains nothing, a table of two rows and a record of it, for the tests of tables."""

import json
from pathlib import Path

from accelerated.lab.tables.table import Measure, Row, Table
from accelerated.lab.trials import Workshop


class Rehearsal(Workshop):
    """A workshop whose train.py and eval.py only note their arguments; `loss` is {part of the options: bits}."""

    def __init__(self, runs, jobs=1, loss=(), fails=()):
        super().__init__(runs, jobs, say=lambda line: self.said.append(line))
        self.said, self.calls, self.loss, self.fails = [], [], dict(loss), dict(fails)

    def run(self, command):
        words = [str(word) for word in command[1:]]
        self.calls.append(words)
        text = " ".join(words)
        for part, line in self.fails.items():
            if part in text:
                return 2, "some progress\n", line
        if words[0].endswith("eval.py"):
            return 0, json.dumps({"asked": words[1:]}), "a warning"
        folder = Path(words[words.index("--out" if "--out" in words else "--resume") + 1])
        folder.mkdir(parents=True, exist_ok=True)
        bits = next((loss for part, loss in self.loss.items() if part in text), 1.0)
        records = [{"step": 1, "loss": 3.0, "bits_per_byte": -bits}]
        records.append({"step": 5, "final": True, "validation_bits_per_byte": bits})
        (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return 0, "trained\n", "trained"


CARRIED = Measure("test, bits per byte", "score --split test", "bits_per_byte")
TWO = Table(
    title="A paper, Table 9",
    about="What is it about? " * 20,
    options="--width 8",
    rows={"a": Row("--x 1", "1.5"), "b": Row("--x 2", "2.5")},
    measures=[CARRIED],
    orderings=["a < b", "b - a < a"],
    grid=["--rate 1", "--rate 2"],
    first="",
    tuned_by=["validation", "its last validation"],
    timed=True,
    prepare="",
    notes="",
    picture=[],
)


def record_of(table, **measured):
    """A record of a table with given measures {row: [values by seed]} of its first measure."""
    common = {"choice": "--rate 1", "tuning": {"--rate 1": 2.0}, "parameters": 1234}
    rows = [
        {"name": name, **row._asdict(), **common, "step_seconds": seconds, "measured": {table.measures[0].title: measured[name]}}
        for (name, row), seconds in zip(table.rows.items(), ([0.5, 0.5, 0.5], [1.5, 2.5, 2.0]), strict=False)
    ]
    record = {"name": "a-table", "date": "2026-01-02", "machine": "2 cores", "torch": "2.13.0", "jobs": 2, "rows": rows}
    return record | {"options": "--width 8", "first": "", "grid": ["--rate 1", "--rate 2"]}
