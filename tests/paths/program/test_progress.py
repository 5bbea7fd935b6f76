"""Progress: a bar in a terminal, plain lines elsewhere, nothing for quick work."""

import io
import sys

import pytest

from accelerated.program.progress import Progress


class Screen:
    """A stderr, a terminal or none, and a clock of which time passes only by now += seconds."""

    def __init__(self, monkeypatch):
        self.monkeypatch = monkeypatch
        self.now = 1000.0

    def shown(self, terminal):
        """A new stderr."""
        stream = io.StringIO()
        stream.isatty = lambda: terminal
        self.monkeypatch.setattr(sys, "stderr", stream)
        return stream


@pytest.fixture
def screen(monkeypatch):
    screen = Screen(monkeypatch)
    monkeypatch.setattr("tqdm.std.time", lambda: screen.now)
    return screen


@pytest.mark.parametrize(
    "wait, show, lines",
    [(2, True, 4), (0.4, True, 0), (2, False, 0)],
    ids=["slow", "quick", "hidden"],
)
def test_other_outputs_get_lines_at_intervals(screen, wait, show, lines):
    """Nothing of work that is done in 5 seconds, and nothing of a process that does not show."""
    shown = screen.shown(terminal=False)
    with Progress("tokenising", 16_300_000, "B", 4_000_000, show=show) as bar:
        for _ in range(12):
            screen.now += wait
            bar.update(1_000_000)
    expected = [
        "tokenising: 7.00M of 16.3M, 00:06 so far, 00:18 left, 500kB/s",
        "tokenising: 10.0M of 16.3M, 00:12 so far, 00:12 left, 500kB/s",
        "tokenising: 13.0M of 16.3M, 00:18 so far, 00:06 left, 500kB/s",
        "tokenising: 16.0M of 16.3M, 00:24 so far, 00:00 left, 500kB/s",
    ]
    assert shown.getvalue().splitlines() == expected[:lines]


def train_and_say(screen):
    """Four steps, each with a line; returns those that were done."""
    done = []
    for item in Progress("training", 4, "step", over=range(4)):
        screen.now += 6.0
        Progress.say("the best so far")
        done.append(item)
    return done


@pytest.mark.parametrize("terminal", [True, False])
def test_what_is_said_is_a_line_of_stdout(screen, monkeypatch, terminal):
    """A bar makes room for each line, and disappears at the end."""
    shown = screen.shown(terminal)
    said = io.StringIO()
    monkeypatch.setattr(sys, "stdout", said)
    assert train_and_say(screen) == [0, 1, 2, 3]
    assert said.getvalue() == "the best so far\n" * 4
    cleared = shown.getvalue().count("\r" + 20 * " ")
    assert cleared == (5 if terminal else 0)
