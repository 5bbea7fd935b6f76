"""The loss and the scores are the same whether logits are made at once or in chunks, and no chunk's logits are kept."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from accelerated import replay
from accelerated.data.lanes import Segment
from accelerated.evaluation.score import evaluate, predictions, token_nats
from tests.helpers.comparison import assert_agree
from tests.helpers.rollouts import gradients, setting
from tests.helpers.texts import BYTES, documents_of
from tests.helpers.variants import ONE_OF_EACH, PAPERS, over, variant

CHUNKS = {"a row": 1, "some rows": 50, "all rows but a few": 120}  # logits; a segment of 2 lanes has 132 to 264


@pytest.fixture(params=[True, False], ids=["host", "device"])
def on_host(request, monkeypatch):
    """Both ways of leaving out what is not scored: a CPU leaves out rows, a GPU ignores targets."""
    if not request.param:
        monkeypatch.setattr(replay, "on_host", lambda tensor: False)


@over(ONE_OF_EACH)
def test_a_loss_in_chunks_is_that_of_all_logits(paper, name, on_host, monkeypatch):
    """With softmax written out on the logits of forward: the sum, and the gradient of every parameter."""
    model, [segment, *_], state = setting(paper, name, dropout=0.0)
    logs = model(*replay.inputs_of(segment, state)).logits.log_softmax(-1)
    expected = -(logs.gather(-1, segment.targets[..., None])[..., 0] * segment.scored).sum()
    (3 * expected).backward()
    expected = {"nats": expected[None]} | gradients(model)
    for chunk, size in CHUNKS.items():
        monkeypatch.setattr(replay, "CHUNK", size)
        model.zero_grad()
        hidden = model.read(*replay.inputs_of(segment, state)).hidden
        nats = replay.summed_nats(hidden, model.output_matrix(), replay.targets_of(segment))
        (3 * nats).backward()
        assert_agree(expected, {"nats": nats[None]} | gradients(model), 1e-11, chunk)


@pytest.mark.parametrize("chunk", [20, 10_000])
def test_without_scored_tokens_loss_and_gradients_are_zero(chunk, on_host, monkeypatch):
    monkeypatch.setattr(replay, "CHUNK", chunk)
    hidden, matrix = torch.randn(2, 5, 3, requires_grad=True), torch.randn(7, 3, requires_grad=True)
    nats = replay.summed_nats(hidden, matrix, torch.full((2, 5), replay.IGNORED))
    nats.backward()
    assert nats == 0 and not hidden.grad.any() and not matrix.grad.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_chunks_agree_in_low_precision(dtype, on_host, monkeypatch):
    """The loss is float32; gradients keep the types of what they are of."""
    torch.set_default_dtype(torch.float32)
    start, weight, targets = torch.randn(4, 50, 32), torch.randn(300, 32) / 6, torch.randint(300, (4, 50))
    found = []
    for chunk in (10**6, 7 * 300 + 5):
        monkeypatch.setattr(replay, "CHUNK", chunk)
        hidden, matrix = start.to(dtype, copy=True).requires_grad_(), weight.to(dtype, copy=True).requires_grad_()
        nats = replay.summed_nats(hidden, matrix, targets)
        (nats / 200).backward()
        assert nats.dtype == torch.float32 and hidden.grad.dtype == matrix.grad.dtype == dtype
        found.append({"nats": nats[None], "hidden": hidden.grad, "matrix": matrix.grad})
    assert_agree(*found, 1e-2 if dtype == torch.bfloat16 else 1e-5)


def saved_bytes(rows, vocabulary):
    """How many bytes the loss keeps for its backward pass."""
    held = {}

    def keep(tensor):
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    hidden, matrix = torch.randn(1, rows, 8, requires_grad=True), torch.randn(vocabulary, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        nats = replay.summed_nats(hidden, matrix, torch.zeros(1, rows, dtype=torch.long))
    nats.backward()
    return sum(held.values())


def test_several_chunks_keep_two_gradients_and_no_logits(on_host, monkeypatch):
    assert saved_bytes(40, 500) > 8 * 40 * 500, "all logits at once are kept"
    monkeypatch.setattr(replay, "CHUNK", 5000)
    for rows, vocabulary in ((40, 500), (400, 500), (40, 4000), (400, 4000)):
        assert saved_bytes(rows, vocabulary) == 8 * 8 * (rows + vocabulary)


class LargestLogits(TorchDispatchMode):
    """Notes the most numbers in any tensor whose last axis is the vocabulary, except the transposed output matrix."""

    def __init__(self, vocabulary):
        super().__init__()
        self.vocabulary, self.most = vocabulary, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, tuple | list) else (found,):
            if isinstance(tensor, torch.Tensor) and tensor.dim() > 1 and tensor.shape[-1] == self.vocabulary:
                self.most = max(self.most, tensor.numel() if tensor.is_contiguous() else 0)
        return found


def test_no_more_logits_than_a_chunk_are_made(on_host, monkeypatch):
    """In training by each method, in validation and for the losses of single tokens."""
    config = dataclasses.replace(variant("compressive", "conv-bptt"), vocabulary=257)
    model, documents = PAPERS["compressive"].model(config), documents_of([40, 30])
    tokens = torch.randint(257, (2, config.segment))
    segment = Segment(tokens, tokens, torch.ones_like(tokens, dtype=torch.bool), torch.ones(2, dtype=torch.bool))
    uses = [lambda way=way: way(model, [segment] * 2, model.initial_state(2)) for way in replay.BACKPROP.values()]
    uses += [lambda: evaluate(model, documents, BYTES, 2), lambda: token_nats(model, documents, 2)]
    for chunk, most in ((10**9, 2 * config.segment * 257), (800, 3 * 257)):
        monkeypatch.setattr(replay, "CHUNK", chunk)
        for use in uses:
            with LargestLogits(257) as largest:
                use()
            assert largest.most == most


@pytest.mark.parametrize("chunk", [7, 10_000])
@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 1e-6)])
def test_predictions_are_those_of_the_logits(dtype, tolerance, chunk, on_host, monkeypatch):
    """Each token's loss, and whether it was the most probable; nothing for tokens that are not scored.

    Losses are float64 on the host in any type, because sums over millions of tokens are made of them.
    """
    monkeypatch.setattr(replay, "CHUNK", chunk)
    logits, targets, scored = torch.randn(2, 90, 3), torch.randint(3, (2, 90)), torch.rand(2, 90) < 0.7
    logits = torch.stack([logits[0], 1e4 * logits[1]]).to(dtype)  # extreme ones, too
    model = SimpleNamespace(output_matrix=lambda: torch.eye(3, dtype=dtype))
    found = predictions(model, logits, Segment(torch.zeros_like(targets), targets, scored, torch.zeros(2, dtype=torch.bool)))
    expected = -logits.double().log_softmax(-1).gather(-1, targets[..., None])[..., 0] * scored
    assert_agree({"nats": expected}, {"nats": found.nats}, tolerance)
    right = (logits.argmax(-1) == targets) & scored
    assert (found.right == right.numpy()).all() and 0 < right.sum() < scored.sum() and found.nats.dtype == np.float64
