"""The results: few pages, short ones, and claims that are decided."""

import re

from tests.conftest import ROOT

DOCS = ROOT / "docs"
PAGES = sorted((DOCS / "results").glob("*.md"))


def test_results_are_few_pages_and_short_ones():
    """A page has at most 400 words, its table's too; bars and rules are not words.

    With the log they have at most 12,000.
    """
    assert len(PAGES) <= 12
    counts = {page.stem: len(re.findall(r"\S*\w\S*", page.read_text())) for page in PAGES}
    assert sum(counts.values()) <= 12_000, f"{sum(counts.values()):,} words; shorten the log"
    counts.pop("log")
    assert {name: count for name, count in counts.items() if count > 400} == {}


def test_every_claim_is_decided():
    rows = [line for line in (DOCS / "claims.md").read_text().splitlines() if line[:3] == '| "']
    assert len(rows) <= 60
    verdicts = ("holds: ", "does not hold: ", "in part: ", "by construction")
    for row in rows:
        here = row.split(" | ")[-1]
        assert here.startswith(verdicts), row
