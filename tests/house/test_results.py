"""The results: few pages, short ones, and claims that are decided."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted((DOCS / "results").glob("*.md"))


def test_results_are_few_pages_and_short_ones():
    """A page has at most 400 words, its table's too; bars and rules are not words."""
    assert len(PAGES) <= 12
    for page in PAGES:
        words = re.findall(r"\S*\w\S*", page.read_text())
        assert len(words) <= 400 or page.stem == "log", page.name


def test_every_claim_is_decided():
    rows = [line for line in (DOCS / "claims.md").read_text().splitlines() if line[:3] == '| "']
    assert len(rows) <= 60
    verdicts = ("holds: ", "does not hold: ", "in part: ", "by construction")
    for row in rows:
        here = row.split(" | ")[-1]
        assert here.startswith(verdicts), row


def test_choosing_is_short_and_no_sentence_has_two_numbers():
    text = (DOCS / "choosing.md").read_text()
    assert len(text.split()) <= 900
    prose = re.sub(r"\(.*?\)|`.*?`|^\|.*$", "", text, flags=re.M)
    for sentence in re.split(r"(?<=[.:])\s+", prose):
        numbers = re.findall(r"(?<![\w-])\d[\d.,]*", sentence)
        assert len(numbers) < 2, sentence
