"""Stopping a program between two steps instead of in the middle of one."""

import signal


class Interruption:
    """Inside, SIGINT and SIGTERM only set `signal` to their name; a second one stops at once."""

    def __enter__(self):
        self.signal, self.before = None, {}
        for number in (signal.SIGINT, signal.SIGTERM):
            self.before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_):
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _note(self, number, frame):
        if self.signal:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number).name
