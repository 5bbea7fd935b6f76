"""Progress: a bar in a terminal, plain lines elsewhere, nothing for quick work, and no harm by an output that is gone."""

import io
import re
import sys
from types import SimpleNamespace

import pytest

from accelerated.program import progress
from accelerated.program.progress import Progress


@pytest.fixture
def screen(monkeypatch):
    """screen(terminal): a new stderr, which says whether it is a terminal."""

    def choose(terminal):
        monkeypatch.setattr(sys, "stderr", shown := io.StringIO())
        shown.isatty = lambda: terminal
        return shown

    return choose


@pytest.fixture
def clock(monkeypatch):
    """The clock that Progress and tqdm read; its time passes only by clock.now += seconds."""
    clock = SimpleNamespace(now=1000.0)
    clock.time = lambda: clock.now
    monkeypatch.setattr(progress, "time", clock)
    monkeypatch.setattr("tqdm.std.time", clock.time)
    return clock


LINES = [  # (what Progress is given, the seconds and the progress of each update, how the lines begin)
    (
        ("training", 12, "step"),
        [(2.0, 1)] * 12,
        [f"training: {n} of 12, 00:{2 * n:02} so far, 00:{24 - 2 * n:02} left,  2.00s/step, 1 bit" for n in (3, 6, 9, 12)],
    ),
    (("merging",), [(6.0, 0), (60.0, 2_500_000)], ["merging: 0.00 of ?, 00:06 so far, ? left", "merging: 2.50M of ?, 01:06"]),
    (("training", 100, "step", 80), [(10.0, 5)], ["training: 85 of 100, 00:10 so far, 00:30 left,  2.00s/step, 1 bit"]),
    (("tokenising", 3_000_000, "B"), [(5.5, 1_500_000)], ["tokenising: 1.50M of 3.00M, 00:05 so far, 00:05 left, 273kB/s"]),
    (("reading", 10), [(progress.SECONDS / 11, 1)] * 10, []),  # quick work
    (("reading", 10, "step", 0, None, False), [(progress.SECONDS, 1)] * 10, []),  # a process that does not show
]


@pytest.mark.parametrize("given,updates,lines", LINES, ids=["all", "unknown", "done before", "bytes", "quick", "not shown"])
def test_other_outputs_get_lines_at_intervals(screen, clock, given, updates, lines):
    shown = screen(terminal=False)
    with Progress(*given) as bar:
        for seconds, done in updates:
            clock.now += seconds
            bar.set_postfix_str("1 bit", refresh=False)
            bar.update(done)
            with bar.paused():
                clock.now += 100.0
    written = shown.getvalue().splitlines()
    assert len(written) == len(lines) and all(map(str.startswith, written, lines)), written


@pytest.mark.parametrize("terminal", [True, False])
def test_what_is_said_is_a_line_of_stdout_above_the_bar(screen, clock, monkeypatch, terminal):
    shown = screen(terminal)
    monkeypatch.setattr(sys, "stdout", said := io.StringIO())
    with Progress("training", 4, "step") as bar:
        for _ in range(3):
            clock.now += 6.0
            bar.update()
        before = shown.getvalue()
        bar.say("step 3: the best so far")
        after = shown.getvalue().removeprefix(before)
    last = r"3/4 \[00:18<00:0[56], +6.00s/step\]" if terminal else r"training: 3 of 4, 00:18 so far, .*step\n$"
    assert re.search(last, before) and said.getvalue() == "step 3: the best so far\n"
    assert re.fullmatch(r"\r +\r\rtraining:  75%.+", after) if terminal else not after
    assert not terminal or re.search(r"\r {20,}\r$", shown.getvalue()), "the next line begins at the left edge"


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), BrokenPipeError(32, "Broken pipe")])
@pytest.mark.parametrize("terminal", [True, False])
def test_an_output_that_cannot_be_written_does_not_stop_the_work(screen, clock, monkeypatch, error, terminal):
    shown, done = screen(terminal), []

    def refuse(text):
        raise error

    shown.write = refuse
    monkeypatch.setattr(sys, "stdout", shown)
    for item in Progress("training", 4, "step", over=range(4)):
        clock.now += 6.0
        Progress.say("the best so far")
        done.append(item)
    assert done == [0, 1, 2, 3]
