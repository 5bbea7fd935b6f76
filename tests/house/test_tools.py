"""The tools: docs/trust.md has the claims and docs/items.md the items, with their tests, in order.

What mutate.py names is there.
"""

import re

from tests.tools import items, trust
from tests.tools.mutants import mutants_of
from tests.tools.mutate import FILES, ROOT, TESTS, read_equivalent
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


def test_what_it_names_is_there():
    """Its files, its tests, and every explained survivor as a fault that can be planted."""
    assert [name for name in (*FILES, *TESTS) if not (ROOT / name).exists()] == []
    found = set()
    for file in FILES:
        found |= {(file, mutant.before, mutant.after) for mutant in mutants_of(ROOT, file)}
    explained = read_equivalent()
    assert not explained.keys() - found, "these explained faults can't be planted any more"
    assert all(explained.values()), "a fault that survives has no explanation"
