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

import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import date
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.tools.reach import GROUPS, ROWS, SAME

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
        is_a_case = case[:1] in ("", "[", ":")  # not the rest of a longer name
        return node.startswith(self.test) and is_a_case and self.word in case


def listed(text: str) -> Iterator[tuple[str, int, str, str, str]]:
    """(head of the chapter, number, says, place, second line) of each entry of a list's text."""
    for part in text.split("== ")[1:]:
        head, *lines = part.splitlines()
        entries = zip(lines[::2], lines[1::2], strict=True)
        for number, (first, second) in enumerate(entries, 1):
            says, _, place = first.rpartition(" (")
            yield head, number, says, place, second.strip()


def read_claims() -> list[Claim]:
    """The claims of claims.txt."""
    found = []
    for head, number, says, place, line in listed(CLAIMS.read_text()):
        chapter, letter = head.split()
        line, _, how = line.partition(" = ")
        test, _, word = line.partition(" -k ")
        name = f"{letter}{number}"
        place = place.removesuffix(")")
        found.append(Claim(chapter, name, says, place, f"tests/{test}", word, how))
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

        def measured(error: float, tolerance: float) -> None:
            self.errors[self.now].append((error, tolerance))

        comparison.measured = measured
        items[:] = [each for each in items if any(one.covers(each.nodeid) for one in self.claims)]

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
        pairs = []
        for node, errors in self.errors.items():
            if claim.covers(node):
                pairs += [(error, most) for error, most in errors if error <= most]
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


def by_chapter(claims: list[Claim], written: Callable[[list[Claim]], str]) -> list[str]:
    """What a function writes of the claims of each chapter."""
    chapters = dict.fromkeys(claim.chapter for claim in claims)
    return [written([claim for claim in claims if claim.chapter == each]) for each in chapters]


def in_turn(page: str, first: str, end: str, texts: Iterable[str]) -> str:
    """The page with these texts in place of those that begin and end so, one after another."""
    left = iter(texts)
    return re.sub(rf"^{first}.*?(?={end})", lambda _: next(left), page, flags=re.M | re.S)


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
    groups = GROUPS[paper]
    lines = [f"| loss | {' | '.join(groups)} |", "| --- |" + " :-: |" * len(groups)]
    for label, _, cells in ROWS[paper]:
        shown_cells = [cell.replace(SAME, "") for cell in cells]
        lines.append(f"| {label} | {' | '.join(shown_cells)} |")
    return "\n".join(lines)


def measured_anew(page: str, claims: list[Claim], record: Record, seconds: float) -> str:
    """The page with its tables, lists of tests and line about the run as they are now."""
    tables = by_chapter(claims, lambda own: claim_table(own, record))
    page = in_turn(page, r"\| \| claim ", "\n\n##", tables)
    page = in_turn(page, r"\| loss ", r"\n\n|\n\Z", map(reach_table, ROWS))
    run = f"""| | |
| --- | --- |
| written | {date.today()}, with torch {torch.__version__} |
| rows | {len(claims)} |
| tests | {len(record.outcomes):,}, in {seconds / 60:.1f} minutes on {os.cpu_count()} cores |"""
    return in_turn(page, r"\| \| \|\n", "\n\n", [run])


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
    claims = read_claims()
    unknown = set(words) - {claim.name for claim in claims}
    if unknown:
        print(f"no row is called {', '.join(sorted(unknown))}; docs/trust.md has them")
        return 2
    if words:
        claims = [claim for claim in claims if claim.name in words]
    began = time.monotonic()
    record = shown(claims)
    if record is None:
        return 1
    if not words:
        page = measured_anew(PAGE.read_text(), claims, record, time.monotonic() - began)
        PAGE.write_text(page)
        return 0
    for claim in claims:
        error, tolerance = outcome(claim, record)
        print(f"{claim.name} {claim.says} Error {error}, tolerance {tolerance}.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
