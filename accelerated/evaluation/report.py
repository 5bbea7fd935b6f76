"""What a report of eval.py is, and what the reports share: the run that they read, types for argparse, numbers as text."""

import argparse
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch.nn import Module

from accelerated.data.named_sets import words_of_split
from accelerated.training.options import changed
from accelerated.training.settings import Settings


class TrainedRun(NamedTuple):
    """A run that eval.py has opened, and what it reads."""

    path: str
    model: Module  # in evaluation mode
    settings: Settings
    checkpoint: dict
    tokenizer: object
    lane_count: int  # that documents are read in
    data: str = ""  # --data, or what the run was trained on
    splits: dict | None = None  # {split: documents}: one split for most reports, None for sample

    @property
    def documents(self) -> Sequence:
        """The documents of the only split."""
        [documents] = self.splits.values()
        return documents

    def words(self, split: str | None = None) -> tuple[int, str]:
        """(words in the original text of a split, or of the only one; how they were counted)."""
        [split] = self.splits if split is None else [split]
        return words_of_split(self.data, split, self.splits[split])


class Report(NamedTuple):
    """A subcommand of eval.py."""

    help: str  # one line
    example: str  # what follows its name on a command line
    run: Callable  # (run, options) -> (record, lines): plain values for --json, and the text to print
    add_options: Callable = lambda parser: None
    config: Callable = lambda config, sizes, options: changed(config, sizes)  # what models are read with, or InputError
    table: Callable | None = None  # of a report of several runs: (runs, what `run` returned of each) -> (record, lines)
    model: str | None = None  # the only model that it is for
    splits: tuple[str, ...] = ("valid",)  # that it reads unless --split names one
    clears: bool = False  # whether it takes --clear-memory
    plots: bool = False  # whether it takes --plot
    exact: bool = False  # whether it reads without bfloat16: small differences need all their digits


def number(kind: type, fits: Callable, expected: str) -> Callable:
    """A type for argparse: a number for which fits(number) is true."""

    def parse(text: str):
        if not fits(value := kind(text)):
            raise argparse.ArgumentTypeError(f"{text} was given; it must be {expected}")
        return value

    parse.__name__ = kind.__name__
    return parse


def at_least(least: int) -> Callable:
    """A type for argparse: a whole number that is not smaller."""
    return number(int, lambda value: value >= least, f"at least {least}")


def as_cell(value: float, form: str) -> str:
    """A number as text, a dash if it is NaN."""
    return "-" if math.isnan(value) else f"{value:{form}}"
