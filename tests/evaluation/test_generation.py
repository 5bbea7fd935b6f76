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
from torch.utils._pytree import tree_leaves

from accelerated.data.windows import cut
from accelerated.evaluation import generation
from accelerated.evaluation.generation import (
    GraphedStep,
    Sampling,
    continue_text,
    read_prompt,
    show_text,
    stream_text,
)
from accelerated.program.errors import InputError
from accelerated.protocol import overlap_of
from tests.helpers.texts import BYTES
from tests.helpers.variants import ONE_OF_EACH, PAPERS, over, variant

GREEDY = Sampling(temperature=0.0)


def random_model(paper, name, **changes):
    """A model with weights so large that every token of a context has an effect."""
    return PAPERS[paper].random_model(dataclasses.replace(variant(paper, name), **changes))


@torch.no_grad()
def logits_after(model, text):
    """The logits after a text (B, n), by whole windows from its beginning; the last one is padded."""
    config, state = model.config, model.initial_state(len(text))
    for window in cut(text.shape[1] + 1, config.segment, overlap_of(config)):
        tokens = torch.nn.functional.pad(
            text[:, window.start : window.stop], (0, config.segment + window.start - window.stop)
        )
        logits, state, _ = model(tokens, state)
    return logits[:, window.stop - 1 - window.start]


@over(ONE_OF_EACH)
def test_a_prompt_and_a_continuation_are_the_whole_text_read(paper, name):
    """Prompts of any length, whose last two windows both have an effect; then each time the most probable token of the text."""
    model = random_model(paper, name)
    n, rng = model.config.segment, np.random.default_rng(0)
    for length in (1, n - 1, n, n + 1, 2 * n, 3 * n + 2):
        prompt = torch.tensor(rng.integers(11, size=(2, length)))
        logits, _ = read_prompt(model, prompt)
        assert torch.allclose(logits, logits_after(model, prompt), rtol=0, atol=1e-12), length
    for place in (
        length - 1,
        length - 2,
        length - n - 1,
    ):  # of the longest prompt's last window, and of the one before
        other = prompt.clone()
        other[:, place] = (other[:, place] + 1) % 11
        assert not torch.allclose(read_prompt(model, other)[0], logits, rtol=0, atol=1e-9), place
    text = prompt[:1, : n + 1]
    for token in continue_text(model, text, n + 1, GREEDY, None):
        assert token.item() == logits_after(model, text).argmax().item(), text.shape[1]
        text = torch.cat([text, token[None]], 1)
    assert text.shape[1] == 2 * n + 2


@pytest.mark.parametrize("training", [True, False])
def test_sampling_has_no_dropout_repeats_with_its_seed_and_keeps_the_training_mode(training):
    model = random_model("block_recurrent", "fixed-skip", dropout=0.5).train(training)
    prompt = torch.randint(11, (1, 3))

    def drawn(sampling, seed=0):
        return [
            t.item()
            for t in continue_text(model, prompt, 30, sampling, torch.Generator().manual_seed(seed))
        ]

    draws, greedy = [drawn(Sampling(), seed) for seed in (1, 1, 2)], drawn(GREEDY)
    assert draws[0] == draws[1] != draws[2] and model.training == training
    without = random_model("block_recurrent", "fixed-skip")
    assert greedy == [t.item() for t in continue_text(without, prompt, 30, GREEDY, None)], (
        "no unit was dropped"
    )


def tensors_in(*fields):
    """All tensors of states and streams, at any depth."""
    return [leaf for leaf in tree_leaves(fields) if isinstance(leaf, torch.Tensor)]


class FakeGraph:
    """torch.cuda's streams and graphs on a CPU: a replay reads what the recorded `read_token` read, and writes where it wrote."""

    def __init__(self, model, monkeypatch):
        self.read_token, self.calls, queue = (
            model.read_token,
            [],
            SimpleNamespace(wait_stream=lambda other: None),
        )
        monkeypatch.setattr(model, "read_token", self.record)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: self)
        for name in ("Stream", "current_stream"):
            monkeypatch.setattr(torch.cuda, name, lambda: queue)
        for name in ("stream", "graph"):
            monkeypatch.setattr(torch.cuda, name, contextlib.nullcontext)

    def record(self, *given):
        self.calls.append((given, self.read_token(*given)))
        return self.calls[-1][1]

    def replay(self):
        given, logits = self.calls[-1]
        logits.copy_(self.read_token(*given))


@over([*ONE_OF_EACH, ("memformer", "decoder-only-xl"), ("compressive", "transformer-xl")])
@torch.no_grad()
def test_a_graphed_step_gives_the_same_logits(paper, name, monkeypatch):
    """From a stream in the middle of a segment, then from other documents' states; nothing that was given is overwritten."""
    config, rng = variant(paper, name), np.random.default_rng(3)
    model, recorded = random_model(paper, name), random_model(paper, name)
    given = PAPERS[paper].to_torch(PAPERS[paper].random_state(config, rng, 2))
    tokens = torch.tensor(rng.integers(11, size=(config.segment + 2, 2)))
    stream, again = (model.step(tokens[0], given)[1] for _ in range(2))
    before = [tensor.clone() for tensor in tensors_in(given, stream)]
    graph, graphed, pairs = FakeGraph(recorded, monkeypatch), GraphedStep(recorded), []
    for state, plain in ((stream, again), (given, given), (model.initial_state(2),) * 2):
        for token in tokens:
            (expected, plain), (logits, state) = model.step(token, plain), graphed(token, state)
            pairs.append((expected, logits))
            assert state.position == plain.position
            assert all(map(torch.equal, tensors_in(state), tensors_in(plain)))
    assert all(torch.equal(*pair) for pair in pairs) and len(graph.calls) == 2, (
        "once to prepare, once to record"
    )
    assert all(map(torch.equal, before, tensors_in(given, stream)))


DRAWN = {  # {sampling: shares of four tokens that have probabilities 0.1, 0.4, 0.2 and 0.3}
    Sampling(): [0.1, 0.4, 0.2, 0.3],
    Sampling(top_p=0.75): [0, 4 / 9, 2 / 9, 3 / 9],
    Sampling(temperature=0.5, top_p=0.5): [0, 1, 0, 0],  # sharpened, the first has 0.53
    Sampling(temperature=2.0, top_p=0.63): [
        0,
        0.4**0.5,
        0.2**0.5,
        0.3**0.5,
    ],  # flattened, two have 0.61
    Sampling(0, 0.9): [0, 1, 0, 0],
}


def test_what_is_drawn():
    """Temperature first, then the nucleus."""
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log().repeat(4000, 1)
    for sampling, expected in DRAWN.items():
        tokens = generation.draw(logits, sampling, torch.Generator().manual_seed(0))
        for token, probability in enumerate(expected):
            share = (tokens == token).double().mean().item()
            assert share == pytest.approx(
                probability / sum(expected), abs=0.03 if probability else 0
            ), sampling


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
        sets = [
            some for count in range(1, size + 1) for some in itertools.combinations(weights, count)
        ]
        fewest = min(len(some) for some in sets if 8 * sum(some) >= share * sum(weights))
        assert len(chosen) == fewest and sum(chosen) == max(
            sum(some) for some in sets if len(some) == fewest
        )


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_numbers_are_refused_with_their_token(value):
    """The first token is drawn from the logits that are given; then there is one step for each."""
    steps = []

    def step(token, state):
        steps.append(token)
        return torch.tensor([[0.0, value]]), state

    drawn = generation.drawn_tokens(torch.zeros(1, 2), (), 9, GREEDY, None, step)
    assert next(drawn).tolist() == [0]
    with pytest.raises(
        InputError, match="prediction of token 2 of the continuation is NaN or infinite"
    ):
        next(drawn)
    assert len(steps) == 1


def test_text_in_and_out(capsys):
    """Bytes that are no whole character are shown as one \ufffd, at the end too, whether text is streamed or shown at once."""
    shown = {
        b"\xc3\xa9": "é",
        b"h\xc3": "h\ufffd",
        b"\xc3h": "\ufffdh",
        b"\xe2\x82": "\ufffd",
        b"": "",
        b"hi\xff": "hi\ufffd",
    }
    for text, expected in shown.items():
        assert "".join(stream_text(BYTES, iter(text))) == show_text(BYTES, list(text)) == expected
    generation.write_continuation(BYTES, [104], iter(()))  # as if no token spelled anything
    assert capsys.readouterr().out == "h\n"
