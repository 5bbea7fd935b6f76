"""Continuing a text equals reading it, sampling draws from the right tokens, and text is written at once."""

import contextlib
import dataclasses
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from accelerated.block_recurrent import BlockRecurrent
from accelerated.data.windows import cut
from accelerated.evaluation import generation
from accelerated.evaluation.generation import GraphedStep, Sampling, continue_text, read_prompt, show_text, stream_text
from accelerated.program.errors import InputError
from accelerated.protocol import overlap_of
from tests.helpers.texts import BYTES
from tests.helpers.variants import ONE_OF_EACH, PAPERS, over, variant

GREEDY = Sampling(temperature=0.0)
SMALL = PAPERS["block_recurrent"].small
STREAMS = [
    *ONE_OF_EACH,
    *(("compressive", name) for name in ("conv-attention_reconstruction", "most_used-none", "transformer-xl")),
    ("memformer", "encoder-decoder-xl"),
]


def random_model(paper, name, **changes):
    """A model with weights so large that every token of a context has an effect."""
    return PAPERS[paper].random_model(dataclasses.replace(variant(paper, name), **changes))


@torch.no_grad()
def logits_after(model, text):
    """The logits after a text (B, n), by whole windows from its beginning; the last one is padded."""
    config, state = model.config, model.initial_state(len(text))
    for window in cut(text.shape[1] + 1, config.segment, overlap_of(config)):
        tokens = torch.nn.functional.pad(text[:, window.start : window.stop], (0, config.segment + window.start - window.stop))
        logits, state, _ = model(tokens, state)
    return logits[:, window.stop - 1 - window.start]


@over(STREAMS)
def test_a_prompt_and_a_continuation_are_the_whole_text_read(paper, name):
    """Prompts of any length, of which the last two windows count; then each time the most probable token of the text."""
    model = random_model(paper, name)
    n, rng = model.config.segment, np.random.default_rng(0)
    for length in (1, n - 1, n, n + 1, 2 * n, 3 * n + 2):
        prompt = torch.tensor(rng.integers(11, size=(2, length)))
        logits, _ = read_prompt(model, prompt)
        assert torch.allclose(logits, logits_after(model, prompt), rtol=0, atol=1e-12), length
    for place in (length - 1, length - 2, length - n - 1):  # of the last window, and of the one before
        other = prompt.clone()
        other[:, place] = (other[:, place] + 1) % 11
        assert not torch.allclose(read_prompt(model, other)[0], logits, rtol=0, atol=1e-9), place
    text = prompt[:1, : n + 1]
    for token in continue_text(model, text, n + 1, GREEDY):
        assert token.item() == logits_after(model, text).argmax().item(), text.shape[1]
        text = torch.cat([text, token[None]], 1)
    assert text.shape[1] == 2 * n + 2


@pytest.mark.parametrize("training", [True, False])
def test_sampling_has_no_dropout_repeats_with_its_seed_and_keeps_the_training_mode(training):
    model = random_model("block_recurrent", "fixed-skip", dropout=0.5).train(training)
    prompt = torch.randint(11, (1, 3))

    def drawn(sampling, seed=0):
        return [t.item() for t in continue_text(model, prompt, 30, sampling, torch.Generator().manual_seed(seed))]

    draws, greedy = [drawn(Sampling(), seed) for seed in (1, 1, 2)], drawn(GREEDY)
    assert draws[0] == draws[1] != draws[2] and model.training == training
    without = random_model("block_recurrent", "fixed-skip")
    assert greedy == [t.item() for t in continue_text(without, prompt, 30, GREEDY)], "no unit was dropped"


class FakeGraph(TorchDispatchMode):
    """A CUDA graph on a CPU: records operations with their tensors, and replays them at the same addresses."""

    made: list = []  # noqa: RUF012

    def __init__(self):
        super().__init__()
        self.recorded, self.replays = [], 0
        FakeGraph.made.append(self)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.recorded.append((function, args, kwargs or {}, out))
        return out

    def replay(self):
        self.replays += 1
        for function, args, kwargs, out in self.recorded:
            again = function(*args, **kwargs)
            if not any(result.alias_info for result in function._schema.returns):  # neither a view nor in place
                for old, new in zip(tensors_in((out,)), tensors_in((again,)), strict=True):
                    old.copy_(new)


@pytest.fixture
def fake_cuda(monkeypatch):
    """torch.cuda's graphs, recorded on a CPU; generation takes them."""
    queue = SimpleNamespace(wait_stream=lambda other: None)
    fakes = {"Stream": lambda: queue, "current_stream": lambda: queue, "stream": lambda stream: contextlib.nullcontext()}
    for name, fake in (fakes | {"CUDAGraph": FakeGraph, "graph": lambda graph: graph}).items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(generation, "step_of", GraphedStep)
    monkeypatch.setattr(FakeGraph, "made", [])


@over([*ONE_OF_EACH, ("memformer", "decoder-only-xl"), ("compressive", "transformer-xl")])
def test_a_graphed_step_gives_the_same_logits(paper, name, fake_cuda):
    """From a stream in the middle of a segment, then from other documents' states; nothing that was given is overwritten."""
    config, rng = variant(paper, name), np.random.default_rng(3)
    model = random_model(paper, name)
    given = PAPERS[paper].to_torch(PAPERS[paper].random_state(config, rng, 2))
    tokens = torch.tensor(rng.integers(11, size=(config.segment + 2, 2)))
    stream, again = (model.step(tokens[0], given)[1] for _ in range(2))
    before = [tensor.clone() for tensor in tensors_in((given, stream))]
    graphed, pairs = GraphedStep(model), []
    for state, plain in ((stream, again), (given, given), (model.initial_state(2),) * 2):
        for token in tokens:
            (expected, plain), (logits, state) = model.step(token, plain), graphed(token, state)
            pairs.append((expected, logits))
            assert state.read == plain.read
            assert all(map(torch.equal, tensors_in(state), tensors_in(plain)))
    assert all(torch.equal(*pair) for pair in pairs) and len(FakeGraph.made) == 1
    assert all(map(torch.equal, before, tensors_in((given, stream))))


DRAWN = {  # {sampling: shares of four tokens that have probabilities 0.1, 0.4, 0.2 and 0.3}
    Sampling(): [0.1, 0.4, 0.2, 0.3],
    Sampling(top_p=0.65): [0, 4 / 7, 0, 3 / 7],
    Sampling(top_p=0.75): [0, 4 / 9, 2 / 9, 3 / 9],
    Sampling(top_p=0.95): [0.1, 0.4, 0.2, 0.3],
    Sampling(top_p=0.01): [0, 1, 0, 0],
    Sampling(top_p=0.0): [0, 1, 0, 0],
    Sampling(temperature=0.5, top_p=0.5): [0, 1, 0, 0],  # sharpened, the first has 0.53
    Sampling(temperature=2.0, top_p=0.63): [0, 0.4**0.5, 0.2**0.5, 0.3**0.5],  # flattened, two have 0.61
    Sampling(0, 0.9): [0, 1, 0, 0],
    Sampling(temperature=0.5): [1 / 30, 16 / 30, 4 / 30, 9 / 30],
}


def test_what_is_drawn():
    """Temperature first, then the nucleus."""
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log().repeat(4000, 1)
    for sampling, expected in DRAWN.items():
        tokens = generation.draw(logits, sampling, torch.Generator().manual_seed(0))
        for token, probability in enumerate(expected):
            share = (tokens == token).double().mean().item()
            assert share == pytest.approx(probability / sum(expected), abs=0.03 if probability else 0), sampling


weights = st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any)


@example(row=[4, 2, 1, 1], other=[1, 2, 1], share=4)
@given(row=weights, other=weights, share=st.integers(0, 8))
def test_the_nucleus_is_the_smallest_set_that_reaches_the_mass(row, other, share):
    """Compared with all sets of tokens, in exact numbers; rows do not depend on each other."""
    size = max(len(row), len(other))
    rows = [some + [0] * (size - len(some)) for some in (row, other)]
    kept = generation.nucleus(torch.tensor(rows, dtype=torch.float64), share / 8).tolist()
    for weights, row in zip(rows, kept, strict=True):
        chosen = [value for value in row if value]
        assert all(value in (0, before) for value, before in zip(row, weights, strict=True))
        sets = [some for count in range(1, size + 1) for some in itertools.combinations(weights, count)]
        fewest = min(len(some) for some in sets if 8 * sum(some) >= share * sum(weights))
        assert len(chosen) == fewest and sum(chosen) == max(sum(some) for some in sets if len(some) == fewest)


def tensors_in(field):
    """All tensors of a state or a stream, at any depth."""
    if isinstance(field, tuple):
        return [tensor for part in field for tensor in tensors_in(part)]
    return [field] if isinstance(field, torch.Tensor) else []


@over(ONE_OF_EACH)
def test_a_token_costs_the_same_however_long_the_text(paper, name, monkeypatch):
    """Each token takes one step; the state stops growing, and no autograd graph stays."""
    model, sizes = random_model(paper, name), []
    step, period = model.step, 2 * model.config.segment

    def watched(token, state):
        logits, after = step(token, state)
        tensors = tensors_in(after)
        assert len(token) == 1 and tensors and all(part.grad_fn is None for part in (logits, *tensors))
        sizes.append(sum(part.numel() for part in tensors))
        return logits, after

    monkeypatch.setattr(model, "step", watched)
    for number, token in enumerate(continue_text(model, torch.randint(11, (1, 1)), 3 * period + 1, Sampling(1.0, 0.9))):
        assert not token.requires_grad and len(sizes) == number + 1
    assert len(sizes) == 3 * period + 1 and max(sizes[: 2 * period]) == max(sizes[-period:])


def test_a_very_long_continuation_begins_at_once_and_without_a_gpu_no_graph_is_made():
    model, prompt = BlockRecurrent(SMALL), torch.randint(11, (2, 3))
    assert generation.step_of(model) == model.step and next(continue_text(model, prompt, 10**15, Sampling())).shape == (2,)


@pytest.mark.parametrize("sampling,value", [(Sampling(), math.nan), (GREEDY, math.inf), (Sampling(top_p=0.5), math.nan)])
def test_logits_that_are_not_numbers_are_refused_with_their_token(sampling, value, monkeypatch):
    model, steps = BlockRecurrent(SMALL).eval(), []

    def step(token, state):
        logits, state = BlockRecurrent.step(model, token, state)
        steps.append(1)
        return (logits.index_fill(1, torch.tensor([4]), value) if len(steps) == 3 + 2 else logits), state

    monkeypatch.setattr(model, "step", step)
    drawn = continue_text(model, torch.randint(11, (1, 3)), 9, sampling)
    assert [len(next(drawn)) for _ in range(2)] == [1, 1]
    with pytest.raises(InputError, match="prediction of token 3 of the continuation is NaN or infinite"):
        next(drawn)


def test_text_in_and_out():
    """A character that is not complete at the end is shown as one."""
    shown = {b"\xc3\xa9": "é", b"h\xc3": "h\ufffd", b"\xc3h": "\ufffdh", b"\xe2\x82": "\ufffd", b"": "", b"hi\xff": "hi\ufffd"}
    for text, expected in shown.items():
        assert "".join(stream_text(BYTES, iter(text))) == show_text(BYTES, list(text)) == expected
