"""A training step asks its device for no number.

On a GPU the answer would wait for all work before it.
"""

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import train as training_script
from accelerated import replay
from accelerated.generation.any_model import stepper_of
from accelerated.training import optimization
from tests.helpers.programs import COMPRESSIVE, train
from tests.helpers.rollouts import both_sides, setting
from tests.helpers.variants import ONE_OF_EACH, over, pairs

aten = torch.ops.aten
QUESTIONS = {
    aten._local_scalar_dense,
    aten.nonzero,
    aten.masked_select,
    aten.equal,
    aten.is_nonzero,
    aten._unique2,
}
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
CASES = ONE_OF_EACH + pairs(
    compressive="most_used-none conv-attention_reconstruction adaptive-conv-bptt",
    memformer="encoder-decoder-xl",
    block_recurrent="lstm-dual-feedback",
    pretrained_recurrence="plain",
)


class NoQuestions(TorchDispatchMode):
    """Refuses operations whose result, or its shape, the host must wait for."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kind = function.overloadpacket
        indices = args[1] if kind in INDEXING else []
        types = {index.dtype for index in indices if index is not None}
        if kind in QUESTIONS or types & {torch.bool, torch.uint8}:
            raise AssertionError(f"{function} asks the device")
        return function(*args, **(kwargs or {}))


by_mask = (lambda x: x[x > 0], lambda x: x.index_put_((x > 0,), x))


@pytest.mark.parametrize("ask", [torch.is_nonzero, torch.nonzero, *by_mask])
def test_questions_are_refused(ask):
    with NoQuestions(), pytest.raises(AssertionError, match="asks the device"):
        ask(torch.ones(1))


@over(CASES)
def test_a_step_asks_nothing(paper, name, monkeypatch):
    """Forward and backward by each method, and clipping; a lane ends in padding."""
    monkeypatch.setattr(replay, "on_host", lambda tensor: False)  # a CPU in place of a GPU
    model, segments, state = setting(paper, name)
    for segment in segments:
        segment.scored[1, len(segment.scored[1]) // 2 :] = False
    segments = [segment.keep_lanes(slice(0, 2)) for segment in segments]
    divisor = replay.count_scored(segments)
    segments = [segment.to(torch.device("cpu")) for segment in segments]
    for method, chunk in itertools.product(replay.BACKPROP, [50, replay.CHUNK]):
        monkeypatch.setattr(replay, "CHUNK", chunk)
        model.zero_grad()
        with NoQuestions():
            loss, _, _ = replay.BACKPROP[method](model, segments, state, divisor)
            norm = optimization.average_and_clip(model, 2, 1.0)
        for number in (loss, norm):
            assert number.shape == ()
        gradients = [parameter.grad for parameter in model.parameters()]
        assert any(gradient is not None for gradient in gradients), f"{method} makes no gradient"


@over(ONE_OF_EACH)
def test_a_token_asks_nothing(paper, name):
    """Of two segments that are generated."""
    *_, model, state = both_sides(paper, name)
    token = torch.zeros(2, dtype=torch.long)
    stepper = stepper_of(model)
    with NoQuestions():
        stream = stepper.start(state)
        for _ in range(2 * stepper.length):
            _, stream = stepper.step(token, stream)


def test_train_asks_nothing_before_it_reads_the_numbers(text, tmp_path, monkeypatch):
    """Two updates of two gathered iterations, in groups of lanes."""
    compute = training_script.forward_and_backward

    def watched(*given):
        with NoQuestions():
            return compute(*given)

    monkeypatch.setattr(replay, "on_host", lambda tensor: False)  # a CPU in place of a GPU
    monkeypatch.setattr(training_script, "forward_and_backward", watched)
    options = "--batch 2 --accumulate 2 --update-every 2 --steps 4 --validation-tokens 16"
    train(*COMPRESSIVE, options, f"--data {text} --out {tmp_path}/run")
