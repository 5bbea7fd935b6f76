"""docs/ports/mistakes.json: mistakes that were made are caught where their flags say."""

import json
import re

import pytest

from reference import check
from tests.tools.mistakes import CATALOGUE, first_wrong_of, shown

MISTAKES = json.loads(CATALOGUE.read_text())
PAGE = (CATALOGUE.parents[1] / "mistakes.md").read_text()

BEGINS = dict(re.findall(r"^- `(.*?)`.*?`(\S+)`\s+begins\s+with", PAGE, re.M | re.S))
HINTS = {  # {mistake: what the checker must say of it}
    "state-keys-of-initial-state": "which states",
    "states-read-own-block": "which keys",
    "states-dropped-between-segments": "the raw state is carried",
    "scale-computed-and-not-used": "the learned scale",
    "token-sees-itself": "the mask",
    "blocks-called-sliding": "the mask",
    "one-head-of-keys": "heads side by side",
    "gate-the-other-way-round": "whose share is g",
    "gate-input-by-head": "heads side by side",
    "candidate-without-bias": "a bias",
    "candidate-through-tanh": "tanh",
    "logits-over-root-of-vocabulary": "1 / sqrt(D)",
    "zeros-before-a-document-hidden": "lane 2 alone is wrong",
    "memory-written-before-it-is-read": "the state before its update",
    "loss-over-all-memory": "which rows",
    "keys-frozen-for-good": "the stops",
    "compression-not-trained": "its own loss",
    "auxiliary-mean-over-layers": "one for each layer",
    "memory-of-the-layer-above": "which layer's rows",
    "pre-norm": "a norm before",
    "shift-cut-at-the-other-end": "the shift",
    "causal-mask-inverted": "inverted",
    "mask-made-and-not-applied": "the mask",
    "epsilon-of-the-framework": "epsilon",
    "direction-of-distance": "positions",
    "slot-value-projected": "the raw state",
    "decoder-not-masked": "masks",
    "logits-off-by-one": "which row predicts",
    "cache-not-counted-in-distances": "buckets of the distance",
    "rows-of-another-place": "which rows are kept",
    "memory-never-written": "which rows are kept",
    "padding-scored": "what is scored",
    "square-matrix-not-transposed": "(out, in)",
    "norm-without-mean": "mean",
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of softmax without a key
@pytest.mark.parametrize("mistake", MISTAKES, ids=[mistake["flag"] for mistake in MISTAKES])
def test_a_mistake_is_caught_where_its_flag_says(mistake):
    """In each of its cases, and by the tensor that is next to it.

    What the checker says of it fits, in the case that the page names.
    """
    assert mistake["cases"], "no case of docs/vectors catches it"
    begins = first_wrong_of(mistake)
    assert shown(begins) == mistake["cases"], "run python -m tests.tools.mistakes"
    flag = mistake["flag"]
    said = check.hint_of(begins[BEGINS[flag]])
    assert HINTS[flag] in said, f"of {flag} the checker says: {said}"


def test_the_page_has_all_mistakes_in_their_order():
    assert re.findall(r"^- `(.*?)`", PAGE, re.M) == [mistake["flag"] for mistake in MISTAKES]
    assert f"{len(MISTAKES)} mistakes" in PAGE
