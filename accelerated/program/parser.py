"""A parser of options whose errors are one line. train.py, eval.py and lab/ use it."""

import argparse
import difflib
import re
from itertools import pairwise
from typing import NoReturn

SHORT = {"--lr": "--learning-rate"}  # what other programs call an option


class OptionParser(argparse.ArgumentParser):
    """An ArgumentParser with errors of one line, which for an unknown option name the nearest."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {' '.join(message.split())}\n")

    def parse_known_args(self, args=None, namespace=None):  # pyright: ignore
        """As in argparse, but an empty argument, such as an unset shell variable, is an error."""
        words = list(args or ())
        for before, word in pairwise(["a word", *words]):
            if re.fullmatch(r"|--[\w-]+=", word):
                option = word.removesuffix("=") or before
                self.error(f"{option} is empty; give a value, or leave it out")
        return super().parse_known_args(words, namespace)

    def parse(self, argv: list[str]) -> argparse.Namespace:
        """Read the options of argv; an unknown one is answered with the nearest."""
        options, unknown = self.parse_known_args(argv)
        if unknown:
            given = unknown[0].partition("=")[0]
            option = SHORT.get(given, given)
            [nearest] = difflib.get_close_matches(option, self._option_string_actions, 1, 0)
            self.error(f"unknown option {given}; did you mean {nearest}? --help lists all")
        return options


def whole_numbers(text: str) -> tuple[int, ...]:
    """Convert '4,10' to (4, 10) and 'none' to (): layers, cutoffs, dilations or overlaps."""
    if text == "none":
        return ()
    try:
        return tuple(map(int, text.split(",")))
    except ValueError:
        advice = "give numbers joined by commas, like 4,10, or none"
        raise argparse.ArgumentTypeError(f"{text!r}; {advice}") from None
