"""A workshop that trains nothing, a table of two rows and a record of it, for the tests of experiments."""

import json
from pathlib import Path

from accelerated.lab.tables.table import CARRIED, Ordering, Row, Scale, Table
from accelerated.lab.trials import Workshop


class Rehearsal(Workshop):
    """A workshop whose train.py and eval.py only note their arguments; `loss` is {part of the options: bits}."""

    def __init__(self, runs, jobs=1, loss=(), fails=()):
        super().__init__(runs, jobs, say=lambda line: self.said.append(line))
        self.said, self.calls, self.loss, self.fails = [], [], dict(loss), dict(fails)

    def run(self, command, errors=True):
        words = [str(word) for word in command[1:]]
        self.calls.append(words)
        text = " ".join(words)
        for part, line in self.fails.items():
            if part in text:
                return 2, f"some progress\n{line}\n"
        if words[0].endswith("eval.py"):
            return 0, json.dumps({"asked": words[1:]})
        folder = Path(words[words.index("--out" if "--out" in words else "--resume") + 1])
        folder.mkdir(parents=True, exist_ok=True)
        bits = next((loss for part, loss in self.loss.items() if part in text), 1.0)
        record = {"step": 5, "final": True, "validation_bits_per_byte": bits}
        (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 3.0}) + "\n" + json.dumps(record) + "\n")
        return 0, "trained\n"


TWO = Table(
    "A paper, Table 9", "What is it about? " * 20, (Row("a", "--x 1", "1.5"), Row("b", "--x 2", "2.5")), (CARRIED,),
    (Ordering("a is better", "a", "b"), Ordering("b gains", "b - a", "a")), {"small": Scale("--width 8")},
)  # fmt: skip


def record_of(table, **measured):
    """A record of a table with given measures {row: [values by seed]} of its first measure."""
    title = table.measures[0].title
    rows = [
        {"name": row.name, "paper": row.paper, "options": row.options, "choice": "--rate 1", "tuning": {"--rate 1": 2.0},
         "parameters": 1234, "step_seconds": seconds, "measured": {title: measured[row.name]}}
        for row, seconds in zip(table.rows, ([0.5, 0.5, 0.5], [1.5, 2.5, 2.0]), strict=False)
    ]  # fmt: skip
    return {"name": "a-table", "scale": "small", "date": "2026-01-02", "machine": "2 cores", "torch": "2.13.0", "jobs": 2,
            "options": "--width 8", "first": "", "grid": ["--rate 1", "--rate 2"], "rows": rows}  # fmt: skip
