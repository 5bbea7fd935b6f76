"""The results: few pages, short ones, and claims that are decided."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted((DOCS / "results").glob("*.md"))


def words(path):
    """How many words a page has, its tables' included."""
    return len(path.read_text().split())


def test_results_are_few_pages():
    assert len(PAGES) <= 12
    assert sum(map(words, PAGES)) <= 12_000


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem != "log"], ids=str)
def test_a_page_has_at_most_400_words(page):
    """Its table's too; bars and rules are not words."""
    found = [word for word in page.read_text().split() if re.search(r"\w", word)]
    assert len(found) <= 400


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
