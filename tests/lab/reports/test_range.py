"""Losses by number of carried segments equal those of each document read alone."""

import dataclasses

import pytest
import torch
from torch.nn import functional

from accelerated.block_recurrent import BlockRecurrent
from accelerated.lab.reports.range import temporal_range
from tests.helpers.texts import BYTES, documents_of
from tests.helpers.variants import PAPERS

CONFIG = dataclasses.replace(PAPERS["block_recurrent"].small, vocabulary=256)


@pytest.mark.parametrize("reach, lanes", [(2, 1), (2, 3), (3, 3)])
def test_a_segment_is_scored_by_what_the_state_has_carried(reach, lanes):
    """Compared with each document read alone: the state is cleared before segment i if reach divides i."""
    documents, model, n = documents_of([70, 9, 45, 88]), BlockRecurrent(CONFIG).eval(), CONFIG.segment
    expected, counts = [0.0] * reach, [0] * reach
    for document in documents:
        state = model.initial_state(1)
        for index, at in enumerate(range(0, len(document.inputs), n)):
            tokens, targets = (torch.tensor(ids[at : at + n].astype(int)) for ids in (document.inputs, document.targets))
            state = model.initial_state(1) if index % reach == 0 else state
            logits, state, _ = model(functional.pad(tokens, (0, n - len(tokens)))[None], state)
            if index >= reach:
                expected[index % reach] += functional.cross_entropy(logits[0, : len(tokens)], targets, reduction="sum").item()
                counts[index % reach] += len(tokens)
    scores = temporal_range(model, documents, BYTES, lanes, reach)
    assert [score.tokens for score in scores] == counts
    assert [score.nats for score in scores] == pytest.approx(expected, rel=1e-10)
