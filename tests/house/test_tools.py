"""docs/trust.md has the claims and docs/items.md the items, with their tests, in order."""

import re

from tests.tools import items, trust
from tests.tools.reach import ROWS

CLAIMS = trust.read_claims()
PAGE = trust.PAGE.read_text()


def test_the_page_has_the_claims_in_order_with_their_tests_and_what_each_loss_trains():
    """That the tests which it names exist, test_docs.py sees."""
    rows = re.findall(r"^\| ([A-Z]\d+) \| (.+?) \| (.+?) \|", PAGE, re.M)
    tests = re.findall(r"^- ([A-Z]\d+)\s+`(.+)`$", PAGE, re.M)
    anew = "run python -m tests.tools.trust"
    assert rows == [(claim.name, claim.says, claim.place) for claim in CLAIMS], anew
    assert tests == [(claim.name, trust.test_of(claim)) for claim in CLAIMS], anew
    assert all(trust.reach_table(paper) in PAGE for paper in ROWS), anew


def test_the_page_of_items_is_that_of_its_list_and_every_item_runs_or_says_why_not():
    """That its tests, options and commands exist, test_docs.py sees."""
    listed = items.read_items()
    page = items.PAGE.read_text()
    assert page == items.with_items(page, listed), "run python -m tests.tools.items"
    assert len(listed) > 80
    for item in listed:
        assert item.says and item.place, item
        says_why_not = item.test.endswith(".") and len(item.test) > 20
        assert item.how or says_why_not, item
