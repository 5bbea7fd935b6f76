"""A table of a paper: its rows as options of train.py, what is measured of them, and what the paper says of the order.

A row is tuned on seed 0 (every row by the same grid), then trained with seeds 0, 1 and 2: measure.py does it, page.py writes what
came out.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from accelerated.lab.trials import LOG, join, last_validation

# What rows read and how long they train. Bytes and small windows: docs/results/text.md shows what context is worth there
SMALL = "--data stdlib --width 64 --heads 4 --feed-forward 256 --steps 400 --warmup 40"
GPU = "--data stdlib --dtype bfloat16 --width 512 --heads 8 --feed-forward 2048 --steps 500 --warmup 50"
RATES = ("--learning-rate 0.006", "--learning-rate 0.018", "--learning-rate 0.054")  # far apart: the best ones differ that much
NO_SIZES = MappingProxyType({})


class Row(NamedTuple):
    """A row: options of train.py beside the table's; {names} stand for the scale's sizes and the row's own."""

    name: str
    options: str = ""
    paper: str = ""  # what the paper reports for it
    sizes: Mapping[str, str] = NO_SIZES


class Measure(NamedTuple):
    """A number of a trained run: taken from the JSON of a report of eval.py, or of all records of its log."""

    title: str
    pick: Callable[[dict], float]
    report: str = LOG  # words of eval.py; {names} as in a row's options
    form: str = ".3f"


class Ordering(NamedTuple):
    """What the paper says: `better` is below `worse`. Each side is a row, "row | measure", or the difference "row - row"."""

    claim: str
    better: str
    worse: str


class Scale(NamedTuple):
    """The sizes of a table on two cores or on a GPU."""

    options: str  # of every row
    sizes: Mapping[str, Any] = NO_SIZES
    grid: tuple[str, ...] = ()  # the choices of options among which every row is tuned, on seed 0
    first: str = ""  # options of a run that rows begin from, as --init {first}


LAST_VALIDATION = "its last validation", last_validation


class Table(NamedTuple):
    """All that one command measures."""

    title: str
    about: str
    rows: tuple[Row, ...]
    measures: tuple[Measure, ...]
    orderings: tuple[Ordering, ...]
    scales: dict[str, Scale]
    prepare: Callable[[], None] | None = None  # makes the data that rows read
    timed: bool = True  # whether the rows' training steps are timed in turn
    draw: Callable[[dict, Path], None] | None = None  # draws the page's picture from its record
    picture: str = ""  # what it is called, if not as the table
    results: Callable[["Table", dict], str] | None = None  # the page's numbers, if they are laid out in another way
    tuned_by: tuple[str, Callable[[list[dict]], float]] = LAST_VALIDATION  # in words, and in bits per byte of a run's log


def of_test(name: str = "bits_per_byte", options: str = "") -> tuple[Callable, str]:
    """The pick and the report of a Measure: a number of `eval.py score` on the test split."""
    return lambda answer: answer[name], join("score --split test", options)


CARRIED = Measure("test, bits per byte", *of_test())
CLEARED = Measure("cleared", *of_test(options="--clear-memory"))


def shown(scale: Scale) -> Scale:
    """The scale as a page has it: its sizes filled in, and FIRST for the folder of the run that rows begin from."""
    sizes = scale.sizes | {"first": "FIRST"}
    return scale._replace(options=scale.options.format_map(sizes), first=scale.first.format_map(sizes), sizes=sizes)


def filled(text: str, row: Row, scale: Scale) -> str:
    """Options or words of eval.py, with the sizes of the row and the scale."""
    return text.format_map(scale.sizes | {name: value.format_map(scale.sizes) for name, value in row.sizes.items()})
