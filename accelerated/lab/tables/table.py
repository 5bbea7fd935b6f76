"""A table as data: its rows as options of train.py, what is measured, and what the paper says.

A paper has a file of tables, such as block_recurrent.ini: a section is a table, its keys are fields
of Table. ${name} stands for another key of the section, or of DEFAULT. A line with {a;b;c} stands
for three lines, one for each of a, b and c; several such groups in a line go together. Cells of a
line are separated by |.
"""

import re
from collections.abc import Sequence
from configparser import ConfigParser, ExtendedInterpolation, SectionProxy
from pathlib import Path
from typing import Any, NamedTuple

from accelerated.lab.harness import HEADLINE_SEEDS, SEEDS
from accelerated.lab.trials import join

SHARED = {  # keys that all files have
    # What rows read and how long they train
    "small": "--data stdlib --width 64 --heads 4 --feed-forward 256 --steps 400 --warmup 40"
    " --validation-tokens 0",
    "carried": "test, bits per byte | score --split test | bits_per_byte",
    "cleared": "cleared | score --split test --clear-memory | bits_per_byte",
    "documents": "documents | documents --split test | documents | hidden",
    "measures": "${carried}\n${cleared}",
    # One pass, in updates of 4,096 tokens; a BPE of 1,024, so that a segment is a sentence or two
    # and not a word
    "epoch": "--data stdlib --train-bpe 1024 --width 64 --heads 4 --feed-forward 256 --dropout 0"
    " --epochs 1 --validate-every 0 --validation-tokens 0",
    "read": "Training reads Python 3.11's library once, 5.1M tokens of a BPE of 1,024. The test"
    " split has 17 documents: packages and modules. The largest is 27% of it.",
    "grid": "--learning-rate {0.006;0.018;0.054}",  # far apart: the best ones differ that much
}


class Row(NamedTuple):
    """A row: a model that is trained, and what eval.py is asked about it."""

    options: str  # of train.py, beside the table's
    paper: str = ""  # what the paper reports for it
    asked: str = ""  # words that each question to eval.py about this row ends with


class Measure(NamedTuple):
    """A number of a trained run, or a list of them, in the JSON of a report of eval.py."""

    title: str
    report: str  # words of eval.py
    path: str  # to the number: keys and places
    form: str = ".3f"  # on the page; "hidden" if the page does not show it

    def words(self, row: Row) -> str:
        """The words of eval.py that ask for it about a row."""
        return join(self.report, row.asked)

    def pick(self, answer: Any) -> Any:
        """The number in an answer."""
        for key in self.path.split("/"):
            answer = answer[int(key)] if isinstance(answer, list) else answer[key]
        return answer


class Table(NamedTuple):
    """All that one command measures."""

    title: str
    about: str  # what was measured
    answer: str  # the sentence that answers the title's question, if a page was published
    takes: str  # how long its command takes
    page: str  # the table whose page shows this one too
    change: str  # what would change that answer
    beside: str  # "record: row": the best row on the same text, which the page shows below its own
    python: str  # the version whose library its text is, and by which it was published; or empty
    options: str  # of every row; FIRST stands for the folder of the first run
    rows: dict[str, Row]
    measures: list[Measure]
    # "better < worse"; a side is "row @ measure", or of the first one "row" or "measure"; or
    # "row - row"
    orderings: list[str]
    headline: list[str]  # rows that are trained with five seeds, the others with three
    grid: list[str]  # the choices of options among which every row is tuned, on seed 0
    first: str  # options of a run that rows begin from, with --init FIRST

    @property
    def seeds(self) -> dict[str, Sequence[int]]:
        """{row: the seeds with which it is trained}."""
        return {row: HEADLINE_SEEDS if row in self.headline else SEEDS for row in self.rows}


PROSE = [field for field, kind in Table.__annotations__.items() if kind is str]


def lines_of(text: str) -> list[str]:
    """The lines that a text stands for."""
    lines = []
    for line in filter(None, map(str.strip, text.splitlines())):
        groups = [group.split(";") for group in re.findall(r"{(.*?)}", line)]
        form = re.sub(r"{.*?}", "{}", line)
        lines += [form.format(*chosen) for chosen in zip(*groups, strict=True)] or [line]
    return lines


def cells(line: str) -> list[str]:
    """The cells of a line."""
    return [cell.strip() for cell in line.split("|")]


def names(text: str) -> list[str]:
    """What stands between semicolons."""
    return [name.strip() for name in text.split(";") if name.strip()]


def table_of(section: SectionProxy) -> Table:
    """The table of a section."""
    rows = {}
    for line in lines_of(section["rows"]):
        name, *fields = cells(line)
        rows[name] = Row(*fields)
    prose = {key: " ".join(section.get(key, "").split()) for key in PROSE}
    return Table(
        **prose,
        rows=rows,
        measures=[Measure(*cells(line)) for line in lines_of(section["measures"])],
        orderings=names(";".join(lines_of(section.get("orderings", "")))),
        headline=names(section.get("headline", "")),
        grid=lines_of(section["grid"]) or [""],
    )


def read_tables() -> dict[str, Table]:
    """{name: table} of all papers."""
    tables = {}
    interpolation = ExtendedInterpolation()
    for path in sorted(Path(__file__).parent.glob("*.ini")):
        parser = ConfigParser(
            SHARED, delimiters=("=",), comment_prefixes=("#",), interpolation=interpolation
        )
        parser.read_string(path.read_text(encoding="utf-8"))
        for name in parser.sections():
            tables[name] = table_of(parser[name])
    return tables


TABLES = read_tables()
