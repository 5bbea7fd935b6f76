"""A training step asks its device for no number: on a GPU the answer would wait for all work before it."""

import dataclasses

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import train as training_script
from accelerated import replay
from accelerated.training import optimization
from tests.helpers.programs import COMPRESSIVE, MEMFORMER, MEMORIZING, TINY, WINDOWED, train
from tests.helpers.rollouts import random_segments, torch_segments
from tests.helpers.variants import ONE_OF_EACH, PAPERS, variant

aten = torch.ops.aten
QUESTIONS = {aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten.is_nonzero, aten._unique2}
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
CASES = [
    *ONE_OF_EACH,
    ("compressive", "most_used-none"),
    ("compressive", "conv-attention_reconstruction"),
    ("memformer", "encoder-decoder-xl"),
    ("block_recurrent", "lstm-dual-feedback"),
    ("pretrained_recurrence", "plain"),
]
SCRIPTS = {"tiny": TINY, "compressive": COMPRESSIVE, "memformer": MEMFORMER, "memorizing": MEMORIZING, "windowed": WINDOWED}


class NoQuestions(TorchDispatchMode):
    """Refuses operations whose result, or its shape, the host must wait for."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kind = function.overloadpacket
        by_mask = kind in INDEXING and any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        if kind in QUESTIONS or by_mask:
            raise AssertionError(f"{function} asks the device")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: bool((x > 0).any()),
        lambda x: x.sum().item(),
        lambda x: float(x[0]),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x.masked_select(x > 0),
        lambda x: torch.equal(x, x),
        lambda x: x.unique(),
        lambda x: 1 if x.sum() > 0 else 0,
        lambda x: x.index_put_((x > 0,), torch.zeros(())),
    ],
)
def test_questions_are_refused(ask):
    with NoQuestions(), pytest.raises(AssertionError, match="asks the device"):
        ask(torch.randn(4))


def setting(paper, name):
    """(model in training mode with dropout, segments, state): a document starts in the middle, a lane ends in padding."""
    rng, config = np.random.default_rng(5), dataclasses.replace(variant(paper, name), dropout=0.3)
    model = PAPERS[paper].model_with(PAPERS[paper].random_params(config, rng), config).train()
    state, segments = PAPERS[paper].to_torch(PAPERS[paper].random_state(config, rng, 2)), random_segments(paper, name, rng)
    for _, _, scored, *_ in segments:
        scored[1, len(scored[1]) // 2 :] = False
    starts = [np.array([False, number == 1]) for number in range(len(segments))]
    return model, torch_segments(paper, segments, starts), state


STEPS = [(*case, method, "cpu", chunk) for case in CASES for method in replay.BACKPROP for chunk in (replay.CHUNK, 50)]
# meta operations are slow: of every model the method that calls all of it, and all methods of one
STEPS += [(*case, "memory_replay", "meta", 50) for case in CASES]
STEPS += [(*CASES[1], method, "meta", 50) for method in replay.BACKPROP if method != "memory_replay"]


@pytest.mark.parametrize("paper,name,method,device,chunk", STEPS)
def test_a_step_asks_nothing(paper, name, method, device, chunk, monkeypatch):
    """Forward and backward, in lanes of two groups, and clipping. A meta tensor has no numbers that could be asked for."""
    monkeypatch.setattr(replay, "CHUNK", chunk)
    monkeypatch.setattr(replay, "on_host", lambda tensor: False)  # a CPU in place of a GPU
    model, segments, state = setting(paper, name)
    model, segments = model.to(device), [segment.to(torch.device(device)) for segment in segments]
    state = type(state)(*(field.to(device) for field in state))
    segments = [segment.keep_lanes(slice(0, 2)) for segment in segments[: 2 if device == "meta" else None]]
    with NoQuestions():
        loss, _, _ = replay.BACKPROP[method](model, segments, state)
        norm = optimization.average_and_clip(model, 2, 1.0)
    assert loss.device.type == norm.device.type == device and loss.shape == norm.shape == ()
    assert any(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("model", SCRIPTS.values(), ids=SCRIPTS)
def test_train_asks_nothing_before_it_reads_the_numbers(text, tmp_path, monkeypatch, model):
    """Two updates of two gathered iterations, in groups of lanes."""
    calls = []

    def watch(owner, name):
        function = getattr(owner, name)

        def watched(*given):
            calls.append(name)
            with NoQuestions():
                return function(*given)

        monkeypatch.setattr(owner, name, watched)

    monkeypatch.setattr(replay, "on_host", lambda tensor: False)  # a CPU in place of a GPU
    watch(training_script, "forward_and_backward")
    watch(optimization, "average_and_clip")
    options = ["--batch", 2, "--accumulate", 2, "--update-every", 2, "--steps", 4, "--sample", 0, "--validation-segments", 1]
    train(*model, "--data", text, *options, "--out", tmp_path / "run")
    assert calls == (["forward_and_backward"] * 2 + ["average_and_clip"]) * 2
