"""Ctrl-C, SIGTERM and SIGHUP in work that can be saved.

The first asks for a stop, a second stops at once.
"""

import contextlib
import os
import signal

STOPS = [signal.SIGINT, signal.SIGTERM]
if hasattr(signal, "SIGHUP"):  # Windows has none
    STOPS.append(signal.SIGHUP)
MESSAGE = b"\nfinishing this step and saving; again to stop now\n"


class Interruption(contextlib.ExitStack):
    """Inside the block, the first of STOPS only sets `signal` to its name and says so.

    A second stops at once.

    told: whether this process says so; one of several is enough
    """

    signal: str | None = None

    def __init__(self, told: bool = True):
        super().__init__()
        self.told = told
        for number in STOPS:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup lets a program ignore SIGHUP
                before = signal.signal(number, self._note)
                self.callback(signal.signal, number, before)

    def _note(self, number, frame):
        if self.signal:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number).name
        if self.told:
            with contextlib.suppress(OSError):
                os.write(2, MESSAGE)  # not print: the signal may have come in the middle of one
