"""Progress: a bar in a terminal, plain lines elsewhere, nothing for quick work, and no harm by an output that is gone."""

import io
import re
import sys
import time
from pathlib import Path

import pytest

from accelerated.program import progress
from accelerated.program.progress import Progress


class Screen(io.StringIO):
    """An stderr that says whether it is a terminal."""

    def __init__(self, terminal):
        super().__init__()
        self.terminal = terminal

    def isatty(self):
        return self.terminal


class Clock:
    """Stands for the module time: it passes only when it is told to."""

    def __init__(self):
        self.now = 1000.0

    def time(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def screen(monkeypatch):
    """screen(terminal): a new stderr."""

    def choose(terminal):
        monkeypatch.setattr(sys, "stderr", shown := Screen(terminal))
        return shown

    return choose


@pytest.fixture
def clock(monkeypatch):
    """The clock that Progress and tqdm read."""
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    monkeypatch.setattr("tqdm.std.time", clock.time)
    return clock


def test_a_terminal_gets_a_bar_that_disappears(screen, clock):
    shown = screen(terminal=True)
    with Progress("reading", 10, "step") as bar:
        for _ in range(10):
            clock.sleep(1.0)
            bar.update()
    written = shown.getvalue()
    assert "\n" not in written and re.search(r"\rreading:  50%\|.+\| 5/10 \[00:05<00:05, +1.00step/s\]", written)
    assert re.search(r"\r +\r?$", written), "the end wipes the line"


def test_other_outputs_get_lines_at_intervals(screen, clock):
    shown = screen(terminal=False)
    with Progress("training", 12, "step") as bar:
        for _ in range(12):
            clock.sleep(2.0)
            bar.set_postfix_str("1.234 bits/byte", refresh=False)
            bar.update()
    lines = shown.getvalue().splitlines()
    assert lines == [
        f"training: {done} of 12, 00:{2 * done:02} so far, 00:{24 - 2 * done:02} left,  2.00s/step, 1.234 bits/byte"
        for done in (3, 6, 9, 12)
    ]


def test_lines_have_the_time_since_the_beginning_alone_for_what_is_not_known(screen, clock):
    shown = screen(terminal=False)
    with Progress("merging") as bar:
        clock.sleep(6.0)
        bar.update(0)
        clock.sleep(60.0)
        bar.update(2_500_000)
    first, second = shown.getvalue().splitlines()
    assert first.startswith("merging: 0.00 of ?, 00:06 so far, ? left") and second.startswith("merging: 2.50M of ?, 01:06 so far")


def test_what_was_done_before_counts_but_took_no_time(screen, clock):
    shown = screen(terminal=False)
    with Progress("training", 100, "step", done=80) as bar:
        clock.sleep(10.0)
        bar.update(5)
    assert shown.getvalue() == "training: 85 of 100, 00:10 so far, 00:30 left,  2.00s/step\n"


def test_bytes_are_counted_in_bytes(screen, clock):
    shown = screen(terminal=False)
    with Progress("tokenising", 3_000_000, "B") as bar:
        clock.sleep(5.5)
        bar.update(1_500_000)
    assert shown.getvalue() == "tokenising: 1.50M of 3.00M, 00:05 so far, 00:05 left, 273kB/s\n"


@pytest.mark.parametrize("show", [True, False])
def test_quick_work_and_processes_that_do_not_show_print_nothing(screen, clock, show):
    for terminal in {False, not show}:
        shown = screen(terminal)
        seconds = progress.SECONDS / 11 if show else progress.SECONDS
        with Progress("reading", 10, show=show) as bar:
            for _ in range(10):
                clock.sleep(seconds)
                bar.update()
                with bar.paused():
                    bar.set_postfix_str("x", refresh=False)
        assert shown.getvalue() == ""


def test_what_is_iterated_over_is_counted(screen, clock):
    shown, seen = screen(terminal=False), []
    for item in Progress("reading", 3, "file", over=iter("abc")):
        clock.sleep(6.0)
        seen.append(item)
    assert seen == ["a", "b", "c"]
    assert re.fullmatch(r"reading: 1 of 3, 00:06 so far, 00:1[12] left,  6.00s/file", shown.getvalue().splitlines()[0])


@pytest.mark.parametrize("terminal", [True, False])
def test_a_pause_takes_no_time(screen, clock, terminal):
    shown = screen(terminal)
    with Progress("training", 4, "step") as bar:
        for _ in range(2):
            clock.sleep(6.0)
            bar.update()
        with bar.paused():
            clock.sleep(1000.0)
        clock.sleep(6.0)
        bar.update()
    last = r"3/4 \[00:18<00:0[56], +6.00s/step\]" if terminal else r"training: 3 of 4, 00:18 so far, 00:0[56] left,  6.00s/step\n$"
    assert re.search(last, shown.getvalue())


def test_a_pause_ends_with_an_error_inside(screen, clock):
    screen(terminal=False)
    with Progress("training", 4, "step") as bar:
        with pytest.raises(ZeroDivisionError), bar.paused():
            clock.sleep(100.0)
            raise ZeroDivisionError
        assert bar.format_dict["elapsed"] == 0.0


@pytest.mark.parametrize("terminal", [True, False])
def test_what_is_said_is_a_line_of_stdout_above_the_bar(screen, clock, capsys, monkeypatch, terminal):
    shown = screen(terminal)
    monkeypatch.setattr(sys, "stdout", said := io.StringIO())
    with Progress("training", 4, "step") as bar:
        clock.sleep(6.0)
        bar.update()
        before = shown.getvalue()
        bar.say("step 1: the best so far")
        after = shown.getvalue().removeprefix(before)
    assert said.getvalue() == "step 1: the best so far\n"
    assert re.fullmatch(r"\r +\r\rtraining:  25%.+", after) if terminal else not after


@pytest.mark.parametrize("terminal", [True, False])
def test_closing_twice_is_harmless(screen, clock, terminal):
    shown = screen(terminal)
    bar = Progress("training", 4, "step")
    bar.close()
    written = shown.getvalue()
    bar.close()
    assert shown.getvalue() == written and not Progress._instances


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), BrokenPipeError(32, "Broken pipe")])
def test_an_output_that_cannot_be_written_does_not_stop_the_work(screen, clock, error):
    shown, done = screen(terminal=False), 0

    def refuse(text):
        raise error

    shown.write = refuse
    for _ in Progress("training", 4, "step", over=range(4)):
        clock.sleep(6.0)
        done += 1
    assert done == 4


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a full output needs /dev/full; run it on Linux")
def test_what_is_said_to_a_full_output_stops_no_work(screen, monkeypatch):
    screen(terminal=False)
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        Progress.say("step 1: the best so far")
        monkeypatch.undo()
        with pytest.raises(OSError, match="No space left"):
            full.close()


def test_the_clock_is_the_real_one(screen, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS", 0.01)
    shown = screen(terminal=False)
    with Progress("reading", 2, "step") as bar:
        for _ in range(2):
            time.sleep(0.02)
            bar.update()
    assert shown.getvalue().count("\n") == 2


def test_the_line_after_a_bar_begins_at_the_left_edge(screen, clock):
    """tqdm wipes a bar with blanks, and then moves the cursor back if `display` says that something was shown."""
    shown = screen(terminal=True)
    with Progress("reading", 3, "step") as bar:
        for _ in range(3):
            clock.sleep(1.0)
            bar.update()
    assert shown.getvalue().endswith("\r")
