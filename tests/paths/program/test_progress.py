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


LINES = {  # {case: (what Progress is given, the seconds and the progress of each update, how the lines begin)}
    "all": (
        ("training", 12, "step"),
        [(2.0, 1)] * 12,
        [f"training: {n} of 12, 00:{2 * n:02} so far, 00:{24 - 2 * n:02} left,  2.00s/step" for n in (3, 6, 9, 12)],
    ),
    "bytes, some done before": (
        ("tokenising", 3_000_000, "B", 1_000_000),
        [(5.0, 1_000_000)],
        ["tokenising: 2.00M of 3.00M, 00:05 so far, 00:05 left, 200kB/s"],
    ),
    "quick": (("reading", 10), [(progress.SECONDS / 11, 1)] * 10, []),
    "a process that does not show": (("reading", 10, "step", 0, None, False), [(progress.SECONDS, 1)] * 10, []),
}


@pytest.mark.parametrize("case", LINES)
def test_other_outputs_get_lines_at_intervals(screen, case):
    given, updates, lines = LINES[case]
    shown = screen(terminal=False)
    with Progress(*given) as bar:
        for seconds, done in updates:
            screen.now += seconds
            bar.update(done)
            with bar.paused():
                screen.now += 100.0
    written = shown.getvalue().splitlines()
    assert len(written) == len(lines) and all(map(str.startswith, written, lines)), written


@pytest.mark.parametrize("broken", [False, True], ids=["whole", "full"])
@pytest.mark.parametrize("terminal", [True, False])
def test_what_is_said_is_a_line_of_stdout_and_an_output_that_is_gone_stops_no_work(screen, monkeypatch, broken, terminal):
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
    assert broken or cleared == 5 * terminal, "a bar makes room for each line, and disappears at the end"
