"""Progress with the time left: a bar in a terminal, plain lines every few seconds elsewhere."""

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any

from tqdm import tqdm

SECONDS = 5.0  # between plain lines
LINE = "{desc}: {n_fmt} of {total_fmt}, {elapsed} so far, {remaining} left, {rate_fmt}{postfix}"


class Progress(tqdm):
    """A tqdm on stderr that leaves nothing behind; if stderr is no terminal it prints a line every few seconds instead.

    total: how much there is to do, None if that is unknown. done: how much was done before. over: an iterable to show.
    Work that takes less than a line's seconds prints nothing where there is no terminal. Work goes on if stderr
    cannot be written.
    """

    def __init__(
        self,
        title: str,
        total: int | None = None,
        unit: str = "token",
        done: int = 0,
        over: Any = None,
        show: bool = True,
    ):
        self.lines = not sys.stderr.isatty()
        how = {"mininterval": 0.5}
        if self.lines:
            how = {
                "delay": SECONDS,
                "mininterval": SECONDS,
                "maxinterval": SECONDS,
                "bar_format": LINE,
            }
        how |= {
            "initial": done,
            "unit_scale": unit in ("token", "B"),
            "leave": False,
            "disable": not show,
        }
        super().__init__(over, desc=title, total=total, unit=unit, **how)

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        """Show the state, a bar or a line. Returns whether a bar was shown: then tqdm moves the cursor back at the end."""
        with contextlib.suppress(OSError):
            if not self.lines:
                return super().display(msg, pos)
            if msg is None:
                print(self, file=self.fp, flush=True)
        return False

    def close(self) -> None:
        """End: a bar disappears, lines stay."""
        with contextlib.suppress(OSError):
            super().close()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time inside the block out of the rate and of the time left; not in a loop over the bar, which copies them."""
        began = time.time()
        yield
        if not self.disable:
            elapsed = time.time() - began
            self.start_t, self.last_print_t = self.start_t + elapsed, self.last_print_t + elapsed

    @staticmethod
    def say(text: str) -> None:
        """Print a line, above the bars if there are some; an stdout that is full or gone stops no work."""
        with contextlib.suppress(OSError):
            tqdm.write(text, file=sys.stdout) if sys.stderr.isatty() else print(text)
            sys.stdout.flush()
