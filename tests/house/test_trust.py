"""docs/trust.md: its claims have tests, stand in its tables in order, and cite what the chapters cite."""

import re

import pytest

from tests.tools import trust
from tests.tools.reach import ROWS

CLAIMS = trust.read_claims()
PAGE = trust.PAGE.read_text()


def test_every_claims_test_exists():
    assert len(CLAIMS) == len({(claim.chapter, claim.says) for claim in CLAIMS}) > 60
    for file, _, name in (claim.test.partition("::") for claim in CLAIMS):
        assert re.search(rf"^def {name}\(" if name else "^def test_", (trust.ROOT / file).read_text(), re.M), f"{file}::{name}"


def test_the_page_has_the_claims_in_order_with_their_tests_and_what_each_loss_trains():
    rows = re.findall(r"^\| ([A-Z]\d+) \| (.+?) \| (.+?) \|", PAGE, re.M)
    assert rows == [(claim.name, claim.says, claim.place) for claim in CLAIMS], "run python -m tests.tools.trust"
    tests = re.findall(r"^- ([A-Z]\d+)\s+`(.+)`$", PAGE, re.M)
    assert tests == [(claim.name, claim.test + (f" -k {claim.word}" if claim.word else "")) for claim in CLAIMS]
    assert all(trust.reach_table(paper) in PAGE for paper in ROWS), "a table of what each loss trains is old"


@pytest.mark.parametrize("chapter", dict.fromkeys(claim.chapter for claim in CLAIMS))
def test_the_places_are_cited_by_the_chapter(chapter):
    """A section as "3.2" behind a bracket, comma or "section"; a decision by its number in the list of decisions."""
    pages = (trust.ROOT / "docs" / folder / f"{chapter}.md" for folder in ("", "decisions"))
    text = "\n".join(page.read_text() for page in pages if page.exists())
    for place in (place for claim in CLAIMS if claim.chapter == chapter for place in claim.place.split(", ")):
        if number := re.fullmatch(r"decision (\d+)", place):
            assert f"\n{number[1]}. **" in text, place
        elif re.fullmatch(r"[\d.]+", place):
            assert re.search(rf"([(|,] ?|  |\bsections? ){re.escape(place)}(?![\w.])", text.replace("\n", " ")), place
        else:
            assert re.search(rf"(?<![\w.]){re.escape(place)}(?!\w)", re.sub(r"\s+", " ", text)), place


@pytest.mark.parametrize(
    "outcomes,errors,problem",
    [
        ({}, {}, "no such test"),
        ({"[a]": "passed", "[b]": "skipped"}, {"[a]": [(0.1, 1.0)]}, "skipped"),
        ({"[a]": "passed", "[b]": "failed"}, {"[a]": [(0.1, 1.0)]}, "failed"),
        ({"_2[a]": "passed", "": "passed"}, {"_2[a]": [(0.1, 1.0)]}, "compares nothing"),
        ({"": "passed"}, {"": [(2.0, 1.0)]}, "compares nothing"),  # it was expected to fail
        ({"[a]": "passed"}, {"[a]": [(0.0, 1.0), (0.1, 1.0)]}, None),
    ],
)
def test_a_claim_without_a_test_that_passes_and_compares_is_a_problem(outcomes, errors, problem):
    [claim] = trust.read_claims("== design D\nAll is well. (Data)\n    test_x.py::test_all\n")
    record = trust.Record([claim])
    record.outcomes, record.errors = ({claim.test + case: found for case, found in each.items()} for each in (outcomes, errors))
    assert [problem in line for line in record.problems()] == ([True] if problem else [])
    assert problem or record.worst(claim) == (0.1, 1.0)
