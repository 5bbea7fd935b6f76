"""Losses by number of carried segments equal those of each document read alone."""

import dataclasses

import pytest
import torch

from accelerated.block_recurrent import BlockRecurrent
from accelerated.lab.reports.range import temporal_range
from tests.helpers.texts import BYTES, documents_of
from tests.helpers.variants import PAPERS

CONFIG = dataclasses.replace(PAPERS["block_recurrent"].small, vocabulary=256)


@pytest.mark.parametrize("reach", [2, 3])
def test_temporal_range_scores_each_segment_by_what_the_state_has_carried(reach):
    """Compared with each document read alone: the state is cleared before segment i if reach divides i."""
    documents, model, n = documents_of([70, 9, 45, 88]), BlockRecurrent(CONFIG).eval(), CONFIG.segment
    expected, counts = [0.0] * reach, [0] * reach
    for document in documents:
        state = model.initial_state(1)
        for index, at in enumerate(range(0, len(document.inputs), n)):
            piece = torch.tensor(document.inputs[at : at + n].astype(int))
            if index % reach == 0:
                state = model.initial_state(1)
            logits, state, _ = model(torch.nn.functional.pad(piece, (0, n - len(piece)))[None], state)
            if index >= reach:
                targets = torch.tensor(document.targets[at : at + n].astype(int))
                expected[index % reach] -= logits[0, : len(piece)].log_softmax(-1).gather(1, targets[:, None]).sum().item()
                counts[index % reach] += len(piece)
    for lanes in (1, 3):
        scores = temporal_range(model, documents, BYTES, lanes, reach)
        assert [score.tokens for score in scores] == counts
        assert [score.nats for score in scores] == pytest.approx(expected, rel=1e-10)
