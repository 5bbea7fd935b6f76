"""Continuing a text equals reading it, and sampling draws from the right tokens."""

import dataclasses
import importlib.util
import itertools
import math
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves

from accelerated.evaluation.sample import show_text, stream_text, write_continuation
from accelerated.fast.generation import token_by_token
from accelerated.fast.generation.token_by_token import Graph
from accelerated.generation import continuation
from accelerated.generation.any_model import AnyModel, stepper_of
from accelerated.generation.continuation import (
    Sampling,
    continue_text,
    read_prompt,
)
from accelerated.program.errors import InputError
from tests.helpers.programs import equal
from tests.helpers.reading import read_alone
from tests.helpers.texts import BYTES
from tests.helpers.variants import ONE_OF_EACH, PAPERS, over, pairs, variant

GREEDY = Sampling(temperature=0.0)


def random_model(paper, name, **changes):
    """A model with weights so large that every token of a context has an effect."""
    return PAPERS[paper].random_model(dataclasses.replace(variant(paper, name), **changes))


@torch.no_grad()
def logits_after(model, text):
    """The logits after a text (B, n)."""
    *_, (_, logits, _) = read_alone(model, text)
    return logits[:, -1]


@over(ONE_OF_EACH)
def test_a_prompt_and_a_continuation_are_the_whole_text_read(paper, name):
    """Prompts of any length.

    Then each time the most probable token of the text.
    """
    model = random_model(paper, name)
    stepper = stepper_of(model)
    n = model.config.segment
    rng = np.random.default_rng(0)
    for length in (1, n - 1, n, n + 1, 2 * n, 3 * n + 2):
        prompt = torch.tensor(rng.integers(11, size=(2, length)))
        logits, _ = read_prompt(stepper, prompt)
        apart = (logits - logits_after(model, prompt)).abs().max()
        assert apart <= 1e-12, f"after {length} tokens read one by one, the logits are {apart} off"
    text = prompt[:1, : n + 1]
    for token in continue_text(model, text, n + 1, GREEDY, None):
        assert token.item() == logits_after(model, text).argmax().item(), text.shape[1]
        text = torch.cat([text, token[None]], 1)
    assert text.shape[1] == 2 * n + 2


class OnAGpu(torch.nn.Parameter):
    """A parameter that only says that it is on a GPU."""

    is_cuda = True


@over(ONE_OF_EACH)
def test_a_models_own_file_is_used_and_captured_only_on_a_gpu(paper, name, monkeypatch):
    monkeypatch.setattr(token_by_token, "Graph", lambda function: "captured")
    model = random_model(paper, name)
    if importlib.util.find_spec(f"accelerated.fast.generation.{paper}") is None:
        assert type(stepper_of(model)) is AnyModel
        return
    assert stepper_of(model).compute != "captured"
    first, _ = next(model.named_parameters())
    setattr(model, first, OnAGpu(model.get_parameter(first)))
    assert stepper_of(model).compute == "captured"
    assert stepper_of(model, capture=False).compute != "captured"


def test_what_is_no_state_of_the_model_or_no_token_is_refused():
    stepper = stepper_of(random_model("block_recurrent", "fixed-skip"))
    other = random_model("compressive", "conv-bptt").initial_state(2)
    with pytest.raises(ValueError, match=r"the state is .*compressive\.State'>, this model takes"):
        stepper.start(other)
    stream = stepper.start(stepper.model.initial_state(2))
    with pytest.raises(ValueError, match="expected a tensor of ids"):
        stepper.step(torch.zeros(2), stream)


@pytest.mark.parametrize("training", [True, False])
def test_sampling_has_no_dropout_repeats_with_its_seed_and_keeps_the_training_mode(training):
    model = random_model("block_recurrent", "fixed-skip", dropout=0.5).train(training)
    prompt = torch.randint(11, (1, 3))

    def drawn(sampling, seed=0):
        generator = torch.Generator().manual_seed(seed)
        tokens = continue_text(model, prompt, 30, sampling, generator)
        return [token.item() for token in tokens]

    first, again, other = (drawn(Sampling(), seed) for seed in (1, 1, 2))
    assert first == again, "a seed draws other tokens again"
    assert first != other, "another seed draws the same tokens"
    without = random_model("block_recurrent", "fixed-skip")
    greedy = [token.item() for token in continue_text(without, prompt, 30, GREEDY, None)]
    assert drawn(GREEDY) == greedy, "a unit was dropped"
    assert model.training == training
    cut_short = continue_text(model, prompt, 30, GREEDY, None)
    next(cut_short)
    cut_short.close()
    assert model.training == training, "a continuation that nobody reads on changes the mode"


def tensors_in(*fields):
    """All tensors of states and streams, at any depth."""
    return [leaf for leaf in tree_leaves(fields) if isinstance(leaf, torch.Tensor)]


class FakeGraph:
    """torch.cuda's streams and graphs on a CPU.

    A replay reads what the recorded function read, and writes where it wrote.
    """

    def __init__(self, function, monkeypatch):
        self.function = function
        self.calls = []  # (what was given, logits)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: self)
        for name in ("Stream", "current_stream", "stream", "graph"):
            monkeypatch.setattr(torch.cuda, name, mock.MagicMock())

    def record(self, *given):
        logits = self.function(*given)
        self.calls.append((given, logits))
        return logits

    def replay(self):
        given, logits = self.calls[-1]
        logits.copy_(self.function(*given))


@over(ONE_OF_EACH + pairs(memformer="decoder-only-xl", compressive="transformer-xl"))
@torch.no_grad()
def test_a_captured_step_gives_the_same_logits(paper, name, monkeypatch):
    """From a stream in the middle of a segment, then from another document's state.

    Nothing that was given is overwritten.
    """
    config = variant(paper, name)
    rng = np.random.default_rng(3)
    plain = stepper_of(random_model(paper, name))
    captured = stepper_of(random_model(paper, name))
    if isinstance(captured, AnyModel):
        pytest.skip("a model without a file in fast/generation/ has no step to capture")
    graph = FakeGraph(captured.logits_after, monkeypatch)
    captured.compute = Graph(graph.record)
    tokens = torch.tensor(rng.integers(11, size=(config.segment + 2, 2)))
    drawn = [PAPERS[paper].random_state(config, rng, 2) for _ in range(2)]
    states = [*map(PAPERS[paper].to_torch, drawn)]
    in_the_middle = [plain.step(tokens[0], plain.start(states[0]))[1] for _ in range(2)]
    streams = [in_the_middle, [captured.start(states[1]), plain.start(states[1])]]
    given = (states, in_the_middle[0].rows)
    before = [tensor.clone() for tensor in tensors_in(*given)]
    for stream, expected_stream in streams:
        for token in tokens:
            logits, stream = captured.step(token, stream)
            expected, expected_stream = plain.step(token, expected_stream)
            assert torch.equal(logits, expected), "a captured step has other logits"
            assert stream.position == expected_stream.position
            is_equal = equal(tensors_in(stream), tensors_in(expected_stream))
            assert is_equal, "a stream of the graph's is another"
    assert len(graph.calls) == 2, "once to prepare, once to record"
    is_equal = equal(before, tensors_in(*given))
    assert is_equal, "a replay writes into a state or rows that it was given"


DRAWN = {  # {sampling: shares of four tokens that have probabilities 0.1, 0.4, 0.2 and 0.3}
    Sampling(): [0.1, 0.4, 0.2, 0.3],
    Sampling(top_p=0.75): [0, 4 / 9, 2 / 9, 3 / 9],
    Sampling(temperature=0.5, top_p=0.5): [0, 1, 0, 0],  # sharpened, the first has 0.53
    # Flattened, two have 0.61
    Sampling(temperature=2.0, top_p=0.63): np.sqrt([0, 0.4, 0.2, 0.3]),
    Sampling(0, 0.9): [0, 1, 0, 0],
}


def test_what_is_drawn():
    """Temperature first, then the nucleus."""
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log().repeat(4000, 1)
    for sampling, expected in DRAWN.items():
        tokens = continuation.draw(logits, sampling, torch.Generator().manual_seed(0))
        shares = tokens.bincount(minlength=4) / 4000
        assert not shares[np.equal(expected, 0)].any(), (
            f"{sampling} draws a token that it rules out"
        )
        assert shares.tolist() == pytest.approx(expected / np.sum(expected), abs=0.03), sampling


def test_probabilities_are_float32():
    """bfloat16 would round each to 8 bits, and the sums of which a nucleus is made."""
    with mock.patch.object(torch, "multinomial", wraps=torch.multinomial) as draw:
        continuation.draw(torch.zeros(2, 9, dtype=torch.bfloat16), Sampling(top_p=0.5), None)
    probabilities, *_ = draw.call_args.args
    assert probabilities.dtype == torch.float32, "probabilities are not float32"


weights = st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any)


@example(row=[4, 2, 1, 1], other=[1, 2, 1], share=4)
@given(row=weights, other=weights, share=st.integers(0, 8))
def test_the_nucleus_is_the_smallest_set_that_reaches_the_mass(row, other, share):
    """Compared with all sets of tokens, in exact numbers; rows do not depend on each other."""
    size = max(len(row), len(other))
    rows = [some + [0] * (size - len(some)) for some in (row, other)]
    kept = continuation.nucleus(torch.tensor(rows, dtype=torch.float64), share / 8).tolist()
    for weights, row in zip(rows, kept, strict=True):
        chosen = [value for value in row if value]
        assert all(value in (0, before) for value, before in zip(row, weights, strict=True))
        sets = []
        for count in range(1, size + 1):
            sets += itertools.combinations(weights, count)
        fewest = min(len(some) for some in sets if 8 * sum(some) >= share * sum(weights))
        assert len(chosen) == fewest, "the nucleus has more tokens than it needs, or fewer"
        assert sum(chosen) == max(sum(some) for some in sets if len(some) == fewest), "the nucleus"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_numbers_are_refused_with_their_token(value):
    """The first token is drawn from the logits that are given; then there is one step for each."""
    steps = []

    def step(token, state):
        steps.append(token)
        return torch.tensor([[0.0, value]]), state

    drawn = continuation.drawn_tokens(torch.zeros(1, 2), (), 9, GREEDY, None, step)
    assert next(drawn).tolist() == [0]
    words = "prediction of token 2 of the continuation is NaN or infinite"
    with pytest.raises(InputError, match=words):
        next(drawn)
    assert len(steps) == 1, "a NaN is drawn from, and stepped on"


def test_text_in_and_out(capsys):
    """Bytes that are no whole character are shown as one \ufffd, at the end too.

    It is the same if text is streamed, and if it is shown at once.
    """
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
    write_continuation(BYTES, [104], iter(()))  # as if no token spelled anything
    assert capsys.readouterr().out == "h\n"
