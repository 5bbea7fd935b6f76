"""docs/trust.md: its claims and their tests stand in its tables, in order; claims that nothing shows are found."""

import re

import pytest

from tests.tools import trust
from tests.tools.reach import ROWS

CLAIMS = trust.read_claims()
PAGE = trust.PAGE.read_text()


def test_the_page_has_the_claims_in_order_with_their_tests_and_what_each_loss_trains():
    """That the tests which it names exist, test_docs.py sees."""
    rows = re.findall(r"^\| ([A-Z]\d+) \| (.+?) \| (.+?) \|", PAGE, re.M)
    assert rows == [(claim.name, claim.says, claim.place) for claim in CLAIMS], "run python -m tests.tools.trust"
    tests = re.findall(r"^- ([A-Z]\d+)\s+`(.+)`$", PAGE, re.M)
    assert tests == [(claim.name, claim.test + (f" -k {claim.word}" if claim.word else "")) for claim in CLAIMS]
    assert all(trust.reach_table(paper) in PAGE for paper in ROWS), "a table of what each loss trains is old"


@pytest.mark.parametrize(
    "outcomes,errors,problem",
    [
        ({}, {}, "no such test"),
        ({"[a]": "passed", "[b]": "skipped"}, {"[a]": [(0.1, 1.0)]}, "skipped"),
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
