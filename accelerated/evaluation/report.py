"""The Report class of eval.py, and what reports share: the run that they read, types for argparse, numbers as text."""

import argparse
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch.nn import Module

from accelerated.data.lanes import joined_for_lanes
from accelerated.data.named_sets import words_of_split
from accelerated.training.options import changed
from accelerated.training.settings import Settings


class TrainedRun(NamedTuple):
    """A run that eval.py has opened, and the documents to read."""

    path: str
    model: Module  # in evaluation mode
    settings: Settings
    checkpoint: dict
    tokenizer: object
    lane_count: int  # lanes (rows of a batch) that read documents
    data: str = ""  # --data, or what the run was trained on
    splits: dict | None = None  # {split: documents}: one split for most reports, None for sample
    carry_over: bool = False  # whether memory is carried over documents

    def to_read(self, split: str) -> Sequence:
        """What is read of a split: its documents, or parts of their joined text if memory is carried over documents."""
        return joined_for_lanes(self.lane_count, self.splits[split]) if self.carry_over else self.splits[split]

    @property
    def documents(self) -> Sequence:
        """What is read of the only split."""
        [split] = self.splits
        return self.to_read(split)

    def words(self, split: str | None = None) -> tuple[int, str]:
        """Return (words in the original text of a split, how they were counted); without `split`, of the only split."""
        [split] = self.splits if split is None else [split]
        return words_of_split(self.data, split, self.splits[split])


class Report(NamedTuple):
    """A subcommand of eval.py."""

    help: str  # one line
    example: str  # example arguments
    run: Callable  # (run, options) -> (record, lines): plain values for --json, and the text to print
    add_options: Callable = lambda parser: None
    config: Callable = lambda config, sizes, options: changed(config, sizes)  # the config to evaluate with, or InputError
    table: Callable | None = None  # for several runs: (runs, results of `run`) -> (record, lines)
    model: str | None = None  # the only model that has this report
    splits: tuple[str, ...] = ("valid",)  # read if --split is not given
    clears: bool = False  # whether it takes --clear-memory
    plots: bool = False  # whether it takes --plot
    exact: bool = False  # whether bfloat16 is off, because small differences matter


def number(kind: type, fits: Callable, expected: str) -> Callable:
    """A type for argparse: a number for which fits(number) is true."""

    def parse(text: str):
        if not fits(value := kind(text)):
            raise argparse.ArgumentTypeError(f"{text} was given; it must be {expected}")
        return value

    parse.__name__ = kind.__name__
    return parse


def at_least(least: int) -> Callable:
    """A type for argparse: a whole number that is at least `least`."""
    return number(int, lambda value: value >= least, f"at least {least}")


def as_cell(value: float, form: str) -> str:
    """A number as text, a dash if it is NaN."""
    return "-" if math.isnan(value) else f"{value:{form}}"
