"""Writes docs/trust.md: every claim that this code makes executable, its test, and how far the error is from its tolerance.

    python -m tests.tools.trust --out docs/trust.md

The claims stand in claims.txt, two lines each: the claim and its place (in the paper, as the chapter cites it; of our own design,
a heading of design.md), then the test below tests/, -k WORD for those of its cases that are called so, and = HOW if comparison.py
does not decide: exact (equal to the bit, or exactly zero), yes or no (something changes, or is counted), or a tolerance of the
test itself. The named tests run, and the errors that helpers/comparison.py measures in them are gathered. A
claim whose test does not exist, is skipped, fails or compares nothing is an error, and nothing is written.
"""

import argparse
import os
import sys
import textwrap
import time
from datetime import date
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.tools.reach import COLUMNS, NOTES, ROWS, SAME

CLAIMS = Path(__file__).with_name("claims.txt")
TITLES = {
    "compressive": ("C", "Compressive Transformer"),
    "block_recurrent": ("B", "Block-Recurrent Transformer"),
    "memformer": ("M", "Memformer"),
    "memorizing": ("R", "Memorizing Transformer"),
    "pretrained_recurrence": ("P", "Recurrence added to GPT-2"),
    "design": ("D", "Our own design"),
}
HEAD = """# Trust, row by row

Each row is something that a paper says, or that we say of our own code, and a test that fails if it is false. The
numbers are measured, not typed. This page is written by the command

```bash
python -m tests.tools.trust --out docs/trust.md
```

On {date}, with torch {torch} on {cores} shared cores, it ran {cases} cases of the {claims} claims' tests in {minutes}
minutes. If a test is missing, is skipped or fails, nothing is written.

The proof (`pytest`) passes on the lowest and on the newest torch that pyproject allows here: on 2026-11-25 with torch
2.6.0, Python 3.10.13 and NumPy 2.2.6, and with torch 2.14.1, Python 3.13.0 and NumPy 2.5.5.

- **error** is the worst of all tensors that the test compares: the largest difference, divided by the largest number
  of the expected tensor. **times** says how many such errors fit into the tolerance.
- Where no error is given, **tolerance** says how the test decides. *exact* is equality to the bit, or exactly zero.
  *yes or no* says that something changes, or is counted. A number is the tolerance in the test itself.
- To check a row, run its test, which stands below the table: `pytest` and what the list says.
"""
INTRODUCTIONS = {"design": "The places are headings of [design.md](design.md)."}
REACH = """
## Which loss trains what

Every loss against every group of parameters, over the variants that differ in what trains what: ● all parameters of
the group get gradient, ◐ some do, 0 is exactly zero in all. Reference and model agree on each parameter. The table is
`tests/tools/reach.py`, and what measures it is
`tests/test_reach.py::test_each_loss_reaches_what_the_paper_says_and_nothing_else`.

A loss of "the next segment" is what arrives through the state alone, in the pass over the segment before it. A row that
begins with dots has only the cells that differ from those above it.
"""
ROOT = Path(__file__).parents[2]


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
    found: list[Claim] = []
    for part in text.split("== ")[1:]:
        chapter, *lines = part.splitlines()
        for number, (claim, test) in enumerate(zip(lines[::2], lines[1::2], strict=True), 1):
            says, _, place = claim.rpartition(" (")
            test, _, how = test.partition(" = ")
            test, _, word = test.partition(" -k ")
            name = f"{TITLES[chapter][0]}{number}"
            found.append(Claim(chapter, name, says, place.removesuffix(")"), f"tests/{test.strip()}", word, how))
    return found


class Record:
    """A pytest plugin: runs only the cases of claims, and keeps their outcomes and the errors that they measure."""

    def __init__(self, claims: list[Claim]):
        self.claims, self.outcomes, self.errors, self.now = claims, {}, {}, None

    def pytest_collection_modifyitems(self, items: list) -> None:
        """Leave out other cases; have tests/helpers/comparison.py report here."""
        from tests.helpers import comparison

        items[:] = [item for item in items if any(claim.covers(item.nodeid) for claim in self.claims)]
        comparison.measured = lambda error, tolerance: self.errors[self.now].append((error, tolerance))

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
        """The (error, tolerance) that is nearest to failing; what a test expects to fail does not count."""
        pairs = [pair for node, errors in self.errors.items() if claim.covers(node) for pair in errors if pair[0] <= pair[1]]
        return max(pairs, key=lambda pair: pair[0] / pair[1], default=None)


def number(value: float) -> str:
    """3e-12 and 1.2e-09 in few letters."""
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return "0" if value == 0 else f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def margin(error: float, tolerance: float) -> str:
    """How many times the error fits into the tolerance, in two digits; a dash if there is no error."""
    ratio = float(f"{tolerance / error:.1e}") if error else 0.0
    return number(ratio) if ratio >= 1e6 else f"{ratio:,.0f}" if ratio >= 10 else f"{ratio:.1f}" if ratio else "–"


def claim_lines(claims: list[Claim], record: Record) -> list[str]:
    """A table of claims, and the list of their tests below it."""
    lines = ["| | claim | place | error | tolerance | times |", "| --- | --- | --- | --- | --- | --- |"]
    for claim in claims:
        pair = record.worst(claim)
        cells = ("–", claim.how, "–") if claim.how else (number(pair[0]), number(pair[1]), margin(*pair))
        lines.append(f"| {claim.name} | {claim.says} | {claim.place} | {' | '.join(cells)} |")
    named = [f"- {claim.name} `{claim.test}{f' -k {claim.word}' if claim.word else ''}`" for claim in claims]
    return [*lines, "", *(line if len(line) <= 120 else line.replace(" `", "\n  `", 1) for line in named), ""]


def reach_lines(paper: str) -> list[str]:
    """The table of what each loss of a paper trains."""
    lines = [f"| loss | {' | '.join(COLUMNS[paper])} |", "| --- |" + " :-: |" * len(COLUMNS[paper])]
    lines += [f"| {label} | {' | '.join(cell.replace(SAME, '') for cell in cells)} |" for label, _, cells in ROWS[paper]]
    return [*lines, ""]


def page(claims: list[Claim], record: Record, seconds: float) -> str:
    """The text of docs/trust.md."""
    counts = {
        "claims": len(claims),
        "cases": f"{len(record.outcomes):,}",
        "minutes": f"{seconds / 60:.1f}",
        "cores": os.cpu_count(),
    }
    lines = HEAD.format(**counts, torch=torch.__version__, date=date.today()).splitlines()
    for chapter, (_, title) in TITLES.items():
        lines += ["", f"## {title}", "", INTRODUCTIONS.get(chapter, f"The chapter: [{chapter}.md]({chapter}.md)."), ""]
        lines += claim_lines([claim for claim in claims if claim.chapter == chapter], record)[:-1]
    lines += REACH.splitlines()
    for paper in ROWS:
        lines += ["", f"### {TITLES[paper][1]}", "", *textwrap.wrap(NOTES[paper], 120), "", *reach_lines(paper)[:-1]]
    return "\n".join(lines) + "\n"


def main(words: list[str]) -> int:
    """Run the claims' tests and write the page; 1 if a claim cannot be shown."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.trust", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "trust.md", help="the page")
    out = parser.parse_args(words).out.resolve()
    claims = read_claims()
    record, began = Record(claims), time.monotonic()
    tests = dict.fromkeys(claim.test for claim in claims)
    os.chdir(ROOT)
    status = pytest.main(["-q", "-o", "addopts=--import-mode=importlib", *tests], plugins=[record])
    problems = record.problems() or ([f"pytest ended with status {int(status)}"] if status else [])
    if problems:
        print(*problems, f"{len(problems)} problems; nothing is written", sep="\n", file=sys.stderr)
        return 1
    out.write_text(page(claims, record, time.monotonic() - began))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
