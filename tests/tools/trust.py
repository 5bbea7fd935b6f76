"""Runs the tests of what this code claims, and writes docs/trust.md: how far each error is from its
tolerance.

    python -m tests.tools.trust          all rows; the page is written anew
    python -m tests.tools.trust C14 B3   these rows alone; nothing is written

The claims stand in claims.txt, below their chapter and its letter, two lines each. The first is the
claim and its place: in the paper, as the chapter cites it, or of our own design, a heading of
design.md. The second is the test below tests/, with -k WORD for those of its cases that are called
so, and with = HOW if comparison.py does not decide. HOW is exact (equal to the bit, or exactly
zero), yes or no (something changes, or is counted), or a tolerance of the test itself. The errors
that comparison.py measures are gathered. A claim whose test does not exist, is skipped, fails or
compares nothing is an error, and nothing is written. What the page says between its tables stays.
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


def outcome(claim: Claim, record: Record) -> tuple[str, str]:
    """What was measured of a claim, and what its test allows."""
    if claim.how:
        return "–", claim.how
    error, tolerance = record.worst(claim)
    return f"{error:.2g}", f"{tolerance:.2g}"


def test_of(claim: Claim) -> str:
    """The words behind `pytest` that run a claim's test."""
    return f"{claim.test} -k {claim.word}" if claim.word else claim.test


def folded_tests(claims: list[Claim]) -> list[str]:
    """The lines of a folded list of the tests of a table's rows."""
    lines = ["", "<details><summary>The test of each row</summary>", ""]
    for claim in claims:
        line = f"- {claim.name} `{test_of(claim)}`"
        lines.append(line if len(line) <= 120 else line.replace(" `", "\n  `", 1))
    return [*lines, "", "</details>"]


def claim_table(claims: list[Claim], record: Record) -> str:
    """A table of claims, and the folded list of their tests below it."""
    lines = ["| | claim | place | error | tolerance |", "| --- | --- | --- | --- | --- |"]
    for claim in claims:
        error, tolerance = outcome(claim, record)
        cells = [claim.name, claim.says, claim.place, error, tolerance]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, *folded_tests(claims)])


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
    cores = f"on {os.cpu_count()} cores"
    lines = [
        "| | |",
        "| --- | --- |",
        f"| written | {date.today()}, with torch {torch.__version__} |",
        f"| rows | {len(claims)} |",
        f"| tests | {len(record.outcomes):,}, in {seconds / 60:.1f} minutes {cores} |",
    ]
    run = "\n".join(lines)
    return re.sub(r"^\| \| \|\n.*?(?=\n\n)", run, page, count=1, flags=re.M | re.S)


def shown(claims: list[Claim]) -> Record | None:
    """What the claims' tests have measured; None, and a line for each problem, if one fails."""
    record = Record(claims)
    tests = dict.fromkeys(claim.test for claim in claims)
    os.chdir(ROOT)
    status = pytest.main(["-q", "-o", "addopts=--import-mode=importlib", *tests], plugins=[record])
    problems = record.problems() or ([f"pytest ended with status {int(status)}"] if status else [])
    if not problems:
        return record
    print(*problems, f"{len(problems)} problems; nothing is written", sep="\n", file=sys.stderr)
    return None


def main(words: list[str]) -> int:
    """Run the claims' tests and write the page, or print the rows that are named.

    Returns 1 if a claim cannot be shown.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.trust", description=__doc__.partition("\n\n")[0]
    )
    parser.add_argument("rows", nargs="*", metavar="ROW", help="of the page, as C14 (default all)")
    out_help = "where to write it (default docs/trust.md)"
    parser.add_argument("--out", type=Path, default=PAGE, metavar="FILE", help=out_help)
    options = parser.parse_args(words)
    out = options.out.resolve()
    claims = read_claims()
    unknown = set(options.rows) - {claim.name for claim in claims}
    if unknown:
        parser.error(f"no row is called {', '.join(sorted(unknown))}; docs/trust.md has them")
    if options.rows:
        claims = [claim for claim in claims if claim.name in options.rows]

    began = time.monotonic()
    record = shown(claims)
    if record is None:
        return 1
    if options.rows:
        for claim in claims:
            error, tolerance = outcome(claim, record)
            print(f"{claim.name} {claim.says} Error {error}, tolerance {tolerance}.")
        return 0
    out.write_text(measured_anew(PAGE.read_text(), claims, record, time.monotonic() - began))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
