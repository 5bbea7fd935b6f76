"""Progress: a bar in a terminal, plain lines elsewhere, nothing for quick work, and no harm by an output that is gone."""

import io
import sys

import pytest

from accelerated.program import progress
from accelerated.program.progress import Progress


@pytest.fixture
def screen(monkeypatch):
    """screen(terminal) is a new stderr, a terminal or none; its time passes only by screen.now += seconds."""

    def choose(terminal):
        monkeypatch.setattr(sys, "stderr", shown := io.StringIO())
        shown.isatty = lambda: terminal
        return shown

    choose.now = 1000.0
    choose.time = lambda: choose.now
    monkeypatch.setattr(progress, "time", choose)
    monkeypatch.setattr("tqdm.std.time", choose.time)
    return choose


@pytest.mark.parametrize(
    "wait, show, lines",
    [(2, True, 4), (0.4, True, 0), (2, False, 0)],
    ids=["slow", "quick", "hidden"],
)
def test_other_outputs_get_lines_at_intervals(screen, wait, show, lines):
    """Nothing of work that is done in 5 seconds, and nothing of a process that does not show; a pause does not count."""
    shown = screen(terminal=False)
    with Progress("tokenising", 16_300_000, "B", 4_000_000, show=show) as bar:
        for _ in range(12):
            screen.now += wait
            bar.update(1_000_000)
            with bar.paused():
                screen.now += 100.0
    done = {3: "7.00M", 6: "10.0M", 9: "13.0M", 12: "16.0M"}  # after so many updates
    said = [
        f"{done[n]} of 16.3M, 00:{2 * n:02} so far, 00:{24 - 2 * n:02} left, 500kB/s" for n in done
    ]
    assert shown.getvalue().splitlines() == [f"tokenising: {line}" for line in said[:lines]]


@pytest.mark.parametrize("broken", [False, True], ids=["whole", "full"])
@pytest.mark.parametrize("terminal", [True, False])
def test_what_is_said_is_a_line_of_stdout_and_an_output_that_is_gone_stops_no_work(
    screen, monkeypatch, broken, terminal
):
    shown, done = screen(terminal), []

    def refuse(text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys, "stdout", said := io.StringIO())
    if broken:
        shown.write = said.write = refuse
    for item in Progress("training", 4, "step", over=range(4)):
        screen.now += 6.0
        Progress.say("the best so far")
        done.append(item)
    assert done == [0, 1, 2, 3] and said.getvalue() == "the best so far\n" * 4 * (not broken)
    cleared = shown.getvalue().count("\r" + 20 * " ")
    assert broken or cleared == 5 * terminal, (
        "a bar makes room for each line, and disappears at the end"
    )
