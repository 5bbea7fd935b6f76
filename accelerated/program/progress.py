"""Progress with the time left: a bar in a terminal, plain lines every few seconds elsewhere."""

import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

SECONDS = 5.0  # between plain lines
LINE = "{desc}: {n_fmt} of {total_fmt}, {elapsed} so far, {remaining} left, {rate_fmt}{postfix}"
INTERVALS = ("delay", "mininterval", "maxinterval")


class Progress(tqdm):
    """A tqdm on stderr that leaves nothing behind.

    If stderr is no terminal it prints a line every few seconds instead, and nothing of work that
    takes less.

    total: how much there is to do, None if that is unknown
    done: how much was done before
    over: an iterable to show
    """

    def __init__(
        self,
        title: str,
        total: int | None = None,
        unit: str = "token",
        done: int = 0,
        over: Iterable | None = None,
        show: bool = True,
    ):
        self.lines = not sys.stderr.isatty()
        given: dict[str, Any] = {"initial": done, "unit": unit, "disable": not show}
        given["unit_scale"] = unit in ("token", "B")
        if self.lines:
            given |= {"bar_format": LINE} | dict.fromkeys(INTERVALS, SECONDS)
        else:
            given["mininterval"] = 0.5
        super().__init__(over, title, total, leave=False, **given)

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        """Show the state, a bar or a line.

        Returns whether a bar was shown: then tqdm moves the cursor back at the end.
        """
        if not self.lines:
            super().display(msg, pos)
            return True
        if msg is None:
            print(self, file=self.fp, flush=True)
        return False

    @staticmethod
    def say(text: str) -> None:
        """Print a line, above the bars if there are some."""
        if sys.stderr.isatty():
            tqdm.write(text, file=sys.stdout)
        else:
            print(text, flush=True)
