"""At the edge: a restart from a broken state, and a long document."""

import dataclasses

import pytest
import torch

from accelerated.evaluation.score import carried_through
from accelerated.lab.speed.timing import peak_memory
from tests.helpers.comparison import assert_agree
from tests.helpers.rollouts import back_propagated, both_sides, random_rows, torch_segments
from tests.helpers.texts import documents_of
from tests.helpers.variants import ONE_OF_EACH, PAPERS, over, variant


@over(ONE_OF_EACH)
def test_a_restart_of_all_lanes_forgets_even_what_is_not_a_number(paper, name):
    """A carried state of NaN, as a broken step would leave it.

    Neither value nor gradient of it is left: zero times NaN would be NaN.
    """
    config, rng, _, _, model, _ = both_sides(paper, name)
    segments = torch_segments(paper, random_rows(config, rng, count=1, begins=[0]))
    fresh = model.initial_state(2)
    broken = fresh._make(x * torch.nan if x.is_floating_point() else x for x in fresh)
    expected = back_propagated("through_time", model, segments, fresh)
    found = back_propagated("through_time", model, segments, broken)
    assert_agree(expected, found, 1e-12)


@pytest.mark.parametrize("scored", [True, False], ids=["scored", "read by advance"])
@over(ONE_OF_EACH)
def test_a_long_document_takes_no_more_memory_than_one_of_a_fifth(paper, name, scored):
    """Neither states nor graphs are kept. Tokens stay on the disk: paths/data/test_corpus.py."""
    model = PAPERS[paper].model(dataclasses.replace(variant(paper, name), vocabulary=256))

    def peak(size):
        """Bytes that reading a document of so many tokens takes."""
        reading = carried_through(model, documents_of([size]), 1, predict=scored)
        return peak_memory(lambda: [None for _ in reading], torch.device("cpu"))

    short = peak(50)
    long = peak(250)
    assert 0 < long <= 1.05 * short
