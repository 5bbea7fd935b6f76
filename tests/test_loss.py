"""The loss and the scores are the same if logits are made in chunks, and no chunk's are kept."""

from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from torch.nn import functional

from accelerated import replay
from accelerated.data.lanes import Segment
from accelerated.evaluation.score import predictions_of
from tests.helpers.comparison import assert_agree
from tests.helpers.rollouts import gradients, setting
from tests.helpers.variants import ONE_OF_EACH, over, pairs

# Logits at a time; a segment of 2 lanes has 132 to 264
CHUNKS = {"a row": 1, "some rows": 50, "all rows but a few": 120}


@pytest.fixture(params=[True, False], ids=["host", "device"])
def on_host(request, monkeypatch):
    """Both ways of leaving out what is not scored: a CPU leaves out rows, a GPU ignores targets."""
    if not request.param:
        monkeypatch.setattr(replay, "on_host", lambda tensor: False)


@over(ONE_OF_EACH + pairs(compressive="adaptive-conv-bptt"))
def test_a_loss_in_chunks_is_that_of_all_logits(paper, name, on_host, monkeypatch):
    """With softmax written out on the logits of forward: the sum, and every gradient."""
    model, [segment, *_], state = setting(paper, name, dropout=0.0)
    logs = model(segment.tokens, state, *replay.task_of(segment)).logits.log_softmax(-1)
    of_targets = logs.gather(-1, segment.targets[..., None])[..., 0]
    nats = -(of_targets * segment.scored).sum()
    (3 * nats).backward()
    expected = {"nats": nats} | gradients(model)
    for chunk, size in CHUNKS.items():
        monkeypatch.setattr(replay, "CHUNK", size)
        model.zero_grad()
        hidden = model.read(segment.tokens, state, *replay.task_of(segment)).hidden
        nats = replay.segment_cross_entropy(hidden, model.output_matrix(), segment)
        (3 * nats).backward()
        assert_agree(expected, {"nats": nats} | gradients(model), 1e-11, chunk)


def test_in_bfloat16_a_loss_and_the_matrixs_gradient_are_added_up_in_float32(monkeypatch):
    """Of 900 chunks that are equal: in bfloat16 the sums would stop at about 400 of them."""
    monkeypatch.setattr(replay, "CHUNK", 3)
    hidden = torch.ones(1, 900, 4, dtype=torch.bfloat16)
    matrix = torch.zeros(3, 4, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(1, 900, dtype=torch.long)
    nats = replay.target_cross_entropy(hidden, matrix, targets)
    nats.backward()
    assert nats.dtype == torch.float32
    assert_agree(900 * np.log(3), nats, 1e-5, "nats")
    expected = 900 * torch.tensor([-2.0, 1.0, 1.0])[:, None].expand(3, 4) / 3
    assert_agree(expected, matrix.grad, 2e-2, "the matrix's gradient")


@pytest.mark.parametrize("chunk", [7, 10_000])
@pytest.mark.parametrize(
    "dtype,tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 1e-6)]
)
def test_predictions_are_those_of_the_logits(dtype, tolerance, chunk, monkeypatch):
    """Each token's loss, and whether it was the most probable; nothing if it is not scored.

    Logits come in chunks. Losses are float64 on the host in any type, because sums over millions of
    tokens are made of them.
    """
    monkeypatch.setattr(replay, "CHUNK", chunk)
    logits = torch.randn(2, 90, 3)
    logits[1] *= 1e4  # extreme ones, too
    logits = logits.to(dtype)
    targets = torch.randint(3, (2, 90))
    scored = torch.rand(2, 90) < 0.7
    model = SimpleNamespace(output_matrix=lambda: torch.eye(3, dtype=dtype))
    segment = Segment(torch.zeros_like(targets), targets, scored, torch.zeros(2, dtype=torch.bool))
    with mock.patch.object(functional, "cross_entropy", wraps=functional.cross_entropy) as of_chunk:
        found = predictions_of(model, logits, segment)
    rows = [len(call.args[0]) for call in of_chunk.call_args_list]
    assert max(rows) == min(180, chunk // 3), "not the rows that a chunk has"
    logs = logits.double().log_softmax(-1)
    expected = -logs.gather(-1, targets[..., None])[..., 0] * scored
    assert_agree(expected, found.nats, tolerance, "nats")
    right = (logits.argmax(-1) == targets) & scored
    assert 0 < right.sum() < scored.sum()
    assert_agree(right.numpy(), found.right, 0, "whether the target was the most probable")
    assert found.nats.dtype == np.float64
