"""docs/trust.md: its claims and their tests stand in its tables, in order."""

import re

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
