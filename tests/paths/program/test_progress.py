"""Progress: a bar in a terminal, plain lines elsewhere, nothing for quick work."""

import io
import sys
from types import SimpleNamespace

import pytest

from accelerated.program.progress import Progress


@pytest.mark.parametrize(
    "wait, show, lines",
    [(2, True, 4), (0.4, True, 0), (2, False, 0)],
    ids=["slow", "quick", "hidden"],
)
def test_other_outputs_get_lines_at_intervals(monkeypatch, wait, show, lines):
    """Nothing of work that is done in 5 seconds, and nothing of a process that does not show."""
    clock = SimpleNamespace(now=1000.0)
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr("tqdm.std.time", lambda: clock.now)
    with Progress("tokenising", 16_300_000, "B", 4_000_000, show=show) as bar:
        for _ in range(12):
            clock.now += wait
            bar.update(1_000_000)
    expected = [
        "tokenising: 7.00M of 16.3M, 00:06 so far, 00:18 left, 500kB/s",
        "tokenising: 10.0M of 16.3M, 00:12 so far, 00:12 left, 500kB/s",
        "tokenising: 13.0M of 16.3M, 00:18 so far, 00:06 left, 500kB/s",
        "tokenising: 16.0M of 16.3M, 00:24 so far, 00:00 left, 500kB/s",
    ]
    assert shown.getvalue().splitlines() == expected[:lines]
