"""The measurements of a run: metrics.jsonl, one JSON object per line. train.py writes it, and reports read it."""

import json
import math
from pathlib import Path
from typing import Any

from accelerated.program.files import disk_errors, written_whole
from accelerated.training.folder import METRICS

ADVICE = "make it writable, then --resume"


def read_metrics(run: str | Path) -> list[dict]:
    """The records of a run's metrics.jsonl, [] if there is no such file; skips a line that a crash cut off."""
    records = []
    path = Path(run) / METRICS
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return [
        record
        for record in records
        if isinstance(record, dict) and isinstance(record.get("step"), int)
    ]


def is_finished(run: str | Path, step: int) -> bool:
    """Whether a run's log has the last report, made after this step."""
    return any(record.get("final") and record["step"] == step for record in read_metrics(run))


class Log:
    """Writes a run's metrics.jsonl; if the run resumes at `step`, drops the lines of later steps first.

    add() sums losses and record() writes their means. Only the first of several processes is `writing`; the others only sum.
    """

    def __init__(
        self, run: Path, step: int = 0, pending: tuple = (0.0, 0, 0), writing: bool = True
    ):
        self.path, self.writing = run / METRICS, writing
        self.pending = tuple(
            pending
        )  # summed -log p, scored tokens, their bytes, since the last record
        if writing:
            kept = [record for record in read_metrics(run) if record["step"] <= step]
            with written_whole(self.path, ADVICE) as temporary:
                temporary.write_text("".join(json.dumps(record) + "\n" for record in kept))

    def add(self, nats: float, scored: int, text_bytes: int) -> None:
        """Add one iteration's summed -log p, its number of scored tokens, and the bytes of text that these stand for."""
        self.pending = tuple(
            a + b for a, b in zip(self.pending, (nats, scored, text_bytes), strict=True)
        )

    def record(self, step: int, **others: float) -> None:
        """Write the means over what was added since the last record, with other numbers of the last iteration alone."""
        nats, scored, text_bytes = self.pending
        self.write(
            step=step,
            loss=nats / max(1, scored),
            bits_per_byte=nats / math.log(2) / max(1, text_bytes),
            **others,
        )
        self.pending = (0.0, 0, 0)

    def write(self, **record: float) -> None:
        """Write one line."""
        if self.writing:
            with disk_errors(self.path, ADVICE), open(self.path, "a") as file:
                file.write(json.dumps(record) + "\n")

    def validation(self, step: int, carried: Any, cleared: Any = None, final: bool = False) -> None:
        """Write a validation's Score, and the one with the memory cleared at every segment if that was measured."""
        record = {
            "validation_bits_per_byte": carried.bits_per_byte,
            "validation_loss": carried.nats / carried.tokens,
        }
        record |= {"validation_accuracy": carried.accuracy, "validation_tokens": carried.tokens}
        if cleared:
            record |= {
                "cleared_bits_per_byte": cleared.bits_per_byte,
                "cleared_accuracy": cleared.accuracy,
            }
        record |= {"final": True} if final else {}
        self.write(step=step, **record)
