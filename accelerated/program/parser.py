"""A parser of options whose errors are one line. train.py, eval.py and lab/ use it."""

import argparse
import difflib
import re
import shlex
from collections.abc import Callable
from itertools import pairwise
from typing import NoReturn

MOST = 1 << 63
SHORT = {"--lr": "--learning-rate"}  # what other programs call an option


class OptionParser(argparse.ArgumentParser):
    """An ArgumentParser with errors of one line, which for an unknown option name the nearest."""

    @property
    def known(self) -> list[str]:
        """The options of this parser."""
        return list(self._option_string_actions)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {' '.join(message.split())}\n")

    def parse_known_args(self, args=None, namespace=None):  # pyright: ignore
        """As of argparse; an empty word, such as an unset variable, stands for no default."""
        words = list(args or ())
        for before, word in pairwise(["a word", *words]):
            if re.fullmatch(r"|--[\w-]+=", word):
                option = word.removesuffix("=") or before
                self.error(f"{option} is empty; give a value, or leave it out")
        return super().parse_known_args(words, namespace)

    def parse(
        self, argv: list[str], place_of: Callable[[str], str] = lambda option: ""
    ) -> argparse.Namespace:
        """Read the options of argv.

        place_of names the model or data of an option that is unknown here, or returns "".
        """
        options, unknown = self.parse_known_args(argv)
        if unknown:
            option = unknown[0].split("=")[0]
            self.error(self.about_unknown(option, place_of(option)))
        return options

    def about_unknown(self, option: str, place: str) -> str:
        """The message about an option that this parser does not have."""
        known = self.known
        if place and not difflib.get_close_matches(option, known, cutoff=0.85):
            return f"{option} is an option of {place}; leave it out or choose that"
        if "--data" in known and not option.startswith("-"):  # a file alone
            nearest = f"--data {shlex.quote(option)}"
        else:
            [nearest] = difflib.get_close_matches(SHORT.get(option, option), known, 1, 0)
        return f"unknown option {option}; did you mean {nearest}? --help lists all"


def integer(text: str) -> int:
    """Convert text to a whole number that fits into 64 bits."""
    value = int(text)
    if not -MOST <= value < MOST:
        raise argparse.ArgumentTypeError(f"{text} was given; it must be below 2^63")
    return value


def whole_numbers(text: str) -> tuple[int, ...]:
    """Convert '4,10' to (4, 10) and 'none' to (): layers, cutoffs, dilations or overlaps."""
    if text == "none":
        return ()
    try:
        return tuple(map(integer, text.split(",")))
    except ValueError:
        advice = "give numbers joined by commas, like 4,10, or none"
        raise argparse.ArgumentTypeError(f"{text!r}; {advice}") from None
