"""Measures docs/trust.md anew: of every claim that this code makes executable, how far the error is
from its tolerance.

    python -m tests.tools.trust --out docs/trust.md

The claims stand in claims.txt, below their chapter and its letter, two lines each: the claim and
its place (in the paper, as the chapter cites it; of our own design, a heading of design.md), then
the test below tests/, -k WORD for those of its cases that are called so, and = HOW if comparison.py
does not decide: exact (equal to the bit, or exactly zero), yes or no (something changes, or is
counted), or a tolerance of the test itself. The named tests run, and the errors that comparison.py
measures are gathered. A claim whose test does not exist, is skipped, fails or compares nothing is
an error, and nothing is written. What the page says between its tables stays.
"""

import argparse
import os
import re
import sys
import time
from datetime import date
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.tools.reach import COLUMNS, ROWS, SAME

CLAIMS = Path(__file__).with_name("claims.txt")
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "trust.md"


class Claim(NamedTuple):
    """One row of the page."""

    chapter: str  # the page of docs/ that it belongs to
    name: str  # C1
    says: str
    place: str
    test: str  # node id
    word: str  # in the names of the cases that count; "" for all
    how: str  # "" if the errors are measured

    def covers(self, node: str) -> bool:
        """Whether a case of a test belongs to this claim."""
        case = node.removeprefix(self.test)
        return node.startswith(self.test) and case[:1] in ("", "[", ":") and self.word in case


def read_claims(text: str = CLAIMS.read_text()) -> list[Claim]:
    """The claims of a text in the form of claims.txt."""
    found = []
    for part in text.split("== ")[1:]:
        head, *lines = part.splitlines()
        chapter, letter = head.split()
        for number, (claim, test) in enumerate(zip(lines[::2], lines[1::2], strict=True), 1):
            says, _, place = claim.rpartition(" (")
            test, _, how = test.partition(" = ")
            test, _, word = test.partition(" -k ")
            test = f"tests/{test.strip()}"
            found.append(
                Claim(chapter, f"{letter}{number}", says, place.removesuffix(")"), test, word, how)
            )
    return found


class Record:
    """A pytest plugin: runs only the cases of claims, and keeps their outcomes and the errors that
    they measure.
    """

    def __init__(self, claims: list[Claim]):
        self.claims = claims
        self.outcomes = {}
        self.errors = {}
        self.now = None

    def pytest_collection_modifyitems(self, items: list) -> None:
        """Leave out other cases; have tests/helpers/comparison.py report here."""
        from tests.helpers import comparison  # not before pytest has begun: it imports Hypothesis

        items[:] = [
            item for item in items if any(claim.covers(item.nodeid) for claim in self.claims)
        ]
        comparison.measured = lambda error, tolerance: self.errors[self.now].append(
            (error, tolerance)
        )

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Errors belong to this case from here on."""
        self.now = nodeid
        self.errors[nodeid] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the worst outcome of set-up, call and tear-down."""
        if self.outcomes.get(report.nodeid, "passed") == "passed":
            self.outcomes[report.nodeid] = report.outcome

    def problems(self) -> list[str]:
        """A line for each claim that cannot be shown."""
        lines = []
        for claim in self.claims:
            cases = {node: outcome for node, outcome in self.outcomes.items() if claim.covers(node)}
            bad = [f"{outcome}: {node}" for node, outcome in cases.items() if outcome != "passed"]
            if not cases:
                bad = [f"no such test: {claim.test} {claim.word}"]
            elif not claim.how and not self.worst(claim):
                bad = bad or [f"it compares nothing: {claim.test}"]
            lines += [f"{claim.name} {line}" for line in bad]
        return lines

    def worst(self, claim: Claim) -> tuple[float, float] | None:
        """The (error, tolerance) that is nearest to failing.

        What a test expects to fail does not count.
        """
        pairs = [
            pair
            for node, errors in self.errors.items()
            if claim.covers(node)
            for pair in errors
            if pair[0] <= pair[1]
        ]
        return max(pairs, key=lambda pair: pair[0] / pair[1], default=None)


def claim_table(claims: list[Claim], record: Record) -> str:
    """A table of claims, and the list of their tests below it."""
    lines = [
        "| | claim | place | error | tolerance | times |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for claim in claims:
        cells = f"– | {claim.how} | –"
        if not claim.how:
            error, tolerance = record.worst(claim)
            cells = (
                f"{error:.2g} | {tolerance:.2g} | {f'{tolerance / error:,.0f}' if error else '–'}"
            )
        lines.append(f"| {claim.name} | {claim.says} | {claim.place} | {cells} |")
    named = [
        f"- {claim.name} `{claim.test}{f' -k {claim.word}' if claim.word else ''}`"
        for claim in claims
    ]
    return "\n".join(
        [
            *lines,
            "",
            *(line if len(line) <= 120 else line.replace(" `", "\n  `", 1) for line in named),
        ]
    )


def reach_table(paper: str) -> str:
    """The table of what each loss of a paper trains."""
    lines = [f"| loss | {' | '.join(COLUMNS[paper])} |", "| --- |" + " :-: |" * len(COLUMNS[paper])]
    lines += [
        f"| {label} | {' | '.join(cell.replace(SAME, '') for cell in cells)} |"
        for label, _, cells in ROWS[paper]
    ]
    return "\n".join(lines)


def measured_anew(page: str, claims: list[Claim], record: Record, seconds: float) -> str:
    """The page with its tables, lists of tests and line about the run as they are now."""
    chapters = dict.fromkeys(claim.chapter for claim in claims)
    tables = (
        claim_table([claim for claim in claims if claim.chapter == chapter], record)
        for chapter in chapters
    )
    page = re.sub(r"^\| \| claim .*?(?=\n\n##)", lambda _: next(tables), page, flags=re.M | re.S)
    losses = map(reach_table, ROWS)
    page = re.sub(r"^\| loss .*?(?=\n\n|\n\Z)", lambda _: next(losses), page, flags=re.M | re.S)
    machine = f"with torch {torch.__version__} on {os.cpu_count()} shared cores"
    cases = f"{len(record.outcomes):,} cases of the {len(claims)} claims' tests"
    run = f"On {date.today()}, {machine}, it ran {cases} in {seconds / 60:.1f}\nminutes."
    return re.sub(r"^On .*?\nminutes\.", run, page, count=1, flags=re.M | re.S)


def main(words: list[str]) -> int:
    """Run the claims' tests and write the page; 1 if a claim cannot be shown."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.trust", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "--out", type=Path, default=PAGE, help="where to write it (default docs/trust.md)"
    )
    out = parser.parse_args(words).out.resolve()
    claims = read_claims()
    record = Record(claims)
    began = time.monotonic()
    tests = dict.fromkeys(claim.test for claim in claims)
    os.chdir(ROOT)
    status = pytest.main(["-q", "-o", "addopts=--import-mode=importlib", *tests], plugins=[record])
    problems = record.problems() or ([f"pytest ended with status {int(status)}"] if status else [])
    if problems:
        print(*problems, f"{len(problems)} problems; nothing is written", sep="\n", file=sys.stderr)
        return 1
    out.write_text(measured_anew(PAGE.read_text(), claims, record, time.monotonic() - began))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
