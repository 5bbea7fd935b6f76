"""A parser of options whose errors are one line. train.py, eval.py and lab/ use it."""

import argparse
import difflib
import shlex
import sys
from collections.abc import Callable
from typing import NoReturn


def nowhere(option: str) -> str:
    """The place of an option that no other model or data has."""
    return ""


class OptionParser(argparse.ArgumentParser):
    """An ArgumentParser with errors of one line, which for an unknown option name the nearest."""

    def error(self, message: str) -> NoReturn:
        sys.stderr.write(f"{self.prog}: {' '.join(message.split())}\n")
        raise SystemExit(2)

    def parse(
        self, argv: list[str], place_of: Callable[[str], str] = nowhere
    ) -> argparse.Namespace:
        """Read the options of argv.

        place_of names the model or data of an option that is unknown here, or returns "".
        """
        options, unknown = self.parse_known_args(argv)
        if unknown:
            self.error(self.about_unknown(unknown[0].split("=")[0], place_of))
        return options

    def about_unknown(self, option: str, place_of: Callable[[str], str]) -> str:
        """The message about an option that this parser does not have."""
        known = list(self._option_string_actions)
        is_misspelt = difflib.get_close_matches(option, known, cutoff=0.85)
        place = "" if is_misspelt else place_of(option)
        if place:
            return f"{option} is an option of {place}; leave it out or choose that"
        if "--data" in known and not option.startswith("-"):  # a file alone
            nearest = f"--data {shlex.quote(option)}"
        else:
            [nearest] = difflib.get_close_matches(option, known, n=1, cutoff=0.0)
        return f"unknown option {option}; did you mean {nearest}? --help lists all"


def whole_numbers(text: str) -> tuple[int, ...]:
    """Convert '4,10' to (4, 10) and 'none' to (): layers, cutoffs, dilations or overlaps."""
    if text == "none":
        return ()
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        what = f"{text!r}; give numbers joined by commas, like 4,10, or none"
        raise argparse.ArgumentTypeError(what) from None
