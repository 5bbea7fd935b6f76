"""docs/ports/mistakes.json: mistakes that were made are caught where their flags say."""

import json
import re

import pytest

from tests.tools.mistakes import CATALOGUE, caught

MISTAKES = json.loads(CATALOGUE.read_text())
PAGE = (CATALOGUE.parents[1] / "mistakes.md").read_text()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of softmax without a key
@pytest.mark.parametrize("mistake", MISTAKES, ids=[mistake["flag"] for mistake in MISTAKES])
def test_a_mistake_is_caught_where_its_flag_says(mistake):
    """In each of its cases, and by the tensor that is next to it."""
    assert mistake["cases"], "no case of docs/vectors catches it"
    assert caught(mistake) == mistake["cases"], "run python -m tests.tools.mistakes"


def test_the_page_has_all_mistakes_in_their_order():
    assert re.findall(r"^- `(.*?)`", PAGE, re.M) == [mistake["flag"] for mistake in MISTAKES]
    assert f"{len(MISTAKES)} mistakes" in PAGE
