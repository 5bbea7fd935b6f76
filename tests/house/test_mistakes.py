"""docs/ports/mistakes.json: mistakes that were made are caught where their flags say."""

import json
import re

import pytest

from reference import check
from tests.tools.mistakes import CATALOGUE, rows_with, shown
from tests.tools.vectors import FOLDER

MISTAKES = json.loads(CATALOGUE.read_text())
PAGE = (CATALOGUE.parents[1] / "mistakes.md").read_text()

BEGINS = dict(re.findall(r"^- `(.*?)`.*?`(\S+)`\s+begins\s+with", PAGE, re.M | re.S))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of softmax without a key
@pytest.mark.parametrize("mistake", MISTAKES, ids=[mistake["flag"] for mistake in MISTAKES])
def test_a_mistake_is_caught_where_its_flag_says(mistake):
    """In each of its cases, and by the tensor that is next to it.

    What the checker says of it fits, in the case that the page names.
    """
    assert mistake["cases"], "no case of docs/vectors catches it"
    begins = rows_with(mistake)
    assert shown(begins) == mistake["cases"], "run python -m tests.tools.mistakes"
    flag = mistake["flag"]
    path = FOLDER / mistake["paper"] / f"{BEGINS[flag]}.safetensors"
    rows = begins[BEGINS[flag]]
    said = check.hint_of(path, check.first_wrong(rows))
    assert mistake["hint"] in said, f"of {flag} the checker says: {said}"
    assert flag in check.flags_of(path, rows)


def test_the_page_has_all_mistakes_in_their_order():
    assert re.findall(r"^- `(.*?)`", PAGE, re.M) == [mistake["flag"] for mistake in MISTAKES]
    assert f"{len(MISTAKES)} mistakes" in PAGE
