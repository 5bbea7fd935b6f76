"""Continuing a text equals reading it, sampling draws from the right tokens, and text is written at once."""

import gc
import itertools

import pytest
import torch
from documents import BYTES, MERGED, documents_of
from hypothesis import example, given
from hypothesis import strategies as st
from variants import PAPERS, variant

from accelerated.block_recurrent import BlockRecurrent
from accelerated.evaluation.generation import (
    Sampling,
    continue_text,
    draw,
    most_probable,
    nucleus,
    prompt_from,
    read_prompt,
    show_text,
    stream_text,
)
from accelerated.pretrained_recurrence import PretrainedRecurrence

GREEDY = Sampling(temperature=0.0)
SMALL, WINDOWED = PAPERS["block_recurrent"].small, PAPERS["pretrained_recurrence"].small
WHOLE_SEGMENTS = {
    f"{paper} {name}": (PAPERS[paper].model, variant(paper, name))
    for paper, names in (
        ("compressive", ("conv-attention_reconstruction", "most_used-none", "transformer-xl")),
        ("memformer", ("encoder-decoder", "encoder-decoder-xl", "decoder-only")),
    )
    for name in names
}


@pytest.mark.parametrize("name", WHOLE_SEGMENTS)
@pytest.mark.parametrize("length", [1, 5, 6, 7, 8, 9, 16, 30])
def test_a_prompt_of_any_length_gives_the_logits_of_reading_whole_segments(name, length):
    """For models that read only whole segments: the prompt is padded for the comparison."""
    model_class, config = WHOLE_SEGMENTS[name]
    model, n = model_class(config).eval(), config.segment
    prompt, state = torch.randint(11, (2, length)), model.initial_state(2)
    logits, _ = read_prompt(model, prompt)
    for segment in torch.nn.functional.pad(prompt, (0, -length % n)).split(n, 1):
        whole, state, _ = model(segment, state)
    assert torch.allclose(logits, whole[:, (length - 1) % n], rtol=0, atol=1e-12)


@pytest.mark.parametrize("length", [1, 5, 12, 13, 24, 30])
def test_a_prompt_of_any_length_gives_the_logits_of_reading_it(length):
    model = BlockRecurrent(SMALL).eval()
    prompt = torch.randint(11, (2, length))
    logits, _ = read_prompt(model, prompt)
    padded = torch.nn.functional.pad(prompt, (0, -length % 4))
    expected = model(padded, model.initial_state(2)).logits[:, length - 1]
    assert torch.allclose(logits, expected, rtol=0, atol=1e-12)


def test_greedy_continuation_takes_the_most_probable_token_each_time():
    model = BlockRecurrent(SMALL).eval()
    prompt = torch.randint(11, (1, 7))
    text = prompt
    for token in continue_text(model, prompt, 20, GREEDY):
        padded = torch.nn.functional.pad(text, (0, -text.shape[1] % 4))
        assert token.item() == model(padded, model.initial_state(1)).logits[0, text.shape[1] - 1].argmax().item()
        text = torch.cat([text, token[None]], 1)
    assert text.shape[1] == 27


def test_sampling_repeats_with_its_seed_and_keeps_the_training_mode():
    model = BlockRecurrent(SMALL).train()
    prompt = torch.randint(11, (1, 3))
    draws = [
        [t.item() for t in continue_text(model, prompt, 30, Sampling(), torch.Generator().manual_seed(seed))]
        for seed in (1, 1, 2)
    ]
    assert draws[0] == draws[1] != draws[2] and model.training


def shares_of(probabilities, sampling, draws=4000):
    """How often each token is drawn."""
    logits = torch.tensor(probabilities).log().repeat(draws, 1)
    tokens = draw(logits, sampling, torch.Generator().manual_seed(0))
    return [(tokens == token).double().mean().item() for token in range(len(probabilities))]


def test_temperature_sharpens():
    logits = torch.tensor([[0.0, 1.0, 0.5]]).repeat(4000, 1)
    shares = [(draw(logits, Sampling(t), torch.Generator().manual_seed(0)) == 1).double().mean().item() for t in (0, 0.25, 1.0)]
    assert shares[0] == 1
    for share, temperature in zip(shares[1:], (0.25, 1.0), strict=True):
        assert share == pytest.approx(torch.softmax(logits[0] / temperature, 0)[1].item(), abs=0.03)


@pytest.mark.parametrize(
    "sampling, expected",
    [
        (Sampling(), [0.1, 0.4, 0.2, 0.3]),
        (Sampling(1.0, 4, 1.0), [0.1, 0.4, 0.2, 0.3]),
        (Sampling(1.0, 99, 1.0), [0.1, 0.4, 0.2, 0.3]),
        (Sampling(top_k=2), [0, 4 / 7, 0, 3 / 7]),
        (Sampling(top_k=1), [0, 1, 0, 0]),
        (Sampling(top_p=0.65), [0, 4 / 7, 0, 3 / 7]),
        (Sampling(top_p=0.75), [0, 4 / 9, 2 / 9, 3 / 9]),
        (Sampling(top_p=0.95), [0.1, 0.4, 0.2, 0.3]),
        (Sampling(top_p=0.01), [0, 1, 0, 0]),
        (Sampling(top_p=0.0), [0, 1, 0, 0]),
        (Sampling(top_k=2, top_p=0.55), [0, 1, 0, 0]),  # the first of the two has probability 0.57
        (Sampling(temperature=0.5, top_p=0.5), [0, 1, 0, 0]),  # sharpened, the first has 0.53
        (Sampling(temperature=2.0, top_p=0.63), [0, 0.4**0.5, 0.2**0.5, 0.3**0.5]),  # flattened, two have 0.61
        (Sampling(0, 3, 0.9), [0, 1, 0, 0]),
        (Sampling(temperature=0.5), [1 / 30, 16 / 30, 4 / 30, 9 / 30]),
    ],
)
def test_what_is_drawn(sampling, expected):
    """Temperature first, then the top k, then the nucleus of the renormalised rest."""
    shares, total = shares_of([0.1, 0.4, 0.2, 0.3], sampling), sum(expected)
    for share, probability in zip(shares, expected, strict=True):
        assert share == pytest.approx(probability / total, abs=0.03 if probability else 0)


weights = st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any)


@given(rows=st.lists(st.permutations([0, 1, 1, 3, 5, 9]), min_size=1, max_size=3), count=st.integers(1, 6))
def test_the_top_k_are_the_largest_in_their_places(rows, count):
    kept = most_probable(torch.tensor(rows, dtype=torch.float64), count)
    for row, own in zip(rows, kept.tolist(), strict=True):
        assert all(value in (0, before) for value, before in zip(own, row, strict=True))
        assert sorted(own, reverse=True) == sorted(row, reverse=True)[:count] + [0] * (6 - count)


@example(row=[4, 2, 1, 1], other=[1, 2, 1], share=4)
@given(row=weights, other=weights, share=st.integers(0, 8))
def test_the_nucleus_is_the_smallest_set_that_reaches_the_mass(row, other, share):
    """Compared with all sets of tokens, in exact numbers; rows do not depend on each other."""
    size = max(len(row), len(other))
    rows = [own + [0] * (size - len(own)) for own in (row, other)]
    kept = nucleus(torch.tensor(rows, dtype=torch.float64), share / 8).tolist()
    for weights, own in zip(rows, kept, strict=True):
        chosen = [value for value in own if value]
        assert all(value in (0, before) for value, before in zip(own, weights, strict=True))
        sets = [some for count in range(1, size + 1) for some in itertools.combinations(weights, count)]
        fewest = min(len(some) for some in sets if 8 * sum(some) >= share * sum(weights))
        assert len(chosen) == fewest and sum(chosen) == max(sum(some) for some in sets if len(some) == fewest)


def test_each_row_is_drawn_from_its_own_tokens():
    logits = torch.tensor([[0.0, 5.0, 1.0], [9.0, 0.0, 1.0]]).repeat(500, 1)
    for sampling in (Sampling(top_k=1), Sampling(top_p=0.5), Sampling(0)):
        assert draw(logits, sampling, torch.Generator().manual_seed(0)).view(500, 2).unique(dim=0).tolist() == [[1, 0]]


def test_without_limits_tokens_are_drawn_from_the_whole_softmax():
    logits = torch.randn(50, 300, dtype=torch.float32)
    expected = torch.multinomial(logits.double().softmax(-1), 1, generator=torch.Generator().manual_seed(3)).squeeze(1)
    for sampling in (Sampling(), Sampling(top_k=300), Sampling(top_k=301)):
        assert torch.equal(draw(logits, sampling, torch.Generator().manual_seed(3)), expected)
    assert Sampling() == (1.0, 0, 1.0) and GREEDY.temperature == 0


@pytest.mark.parametrize("new_window", [False, True])
def test_sampling_is_passed_on(new_window):
    """A tiny nucleus is greedy at any temperature."""
    model = PretrainedRecurrence(WINDOWED).eval()
    prompt = torch.randint(11, (1, 9))

    def drawn(sampling):
        return [token.item() for token in continue_text(model, prompt, 20, sampling, new_window=new_window)]

    greedy = drawn(GREEDY)
    assert drawn(Sampling(5.0, 1, 1.0)) == drawn(Sampling(5.0, 0, 1e-9)) == greedy != drawn(Sampling(5.0))


STREAMS = WHOLE_SEGMENTS | {"BlockRecurrent": (BlockRecurrent, SMALL), "PretrainedRecurrence": (PretrainedRecurrence, WINDOWED)}


def tensors_in(field):
    """All tensors of a state or a stream, at any depth."""
    if isinstance(field, tuple):
        return [tensor for part in field for tensor in tensors_in(part)]
    return [field] if isinstance(field, torch.Tensor) else []


def tensors_alive():
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


@pytest.mark.parametrize("name", STREAMS)
def test_a_token_costs_the_same_however_long_the_text(name, monkeypatch):
    """Each token takes one step; the state stops growing; no tensor and no autograd graph stays."""
    model_class, config = STREAMS[name]
    model, sizes, alive, step = model_class(config), [], [], model_class.step

    def watched(token, state):
        logits, after = step(model, token, state)
        tensors = tensors_in(after)
        assert len(token) == 1 and tensors and all(part.grad_fn is None for part in (logits, *tensors))
        sizes.append(sum(part.numel() for part in tensors))
        return logits, after

    monkeypatch.setattr(model, "step", watched)
    period = 2 * config.segment
    for number, token in enumerate(continue_text(model, torch.randint(11, (1, 1)), 4 * period + 1, Sampling(1.0, 5, 0.9))):
        assert not token.requires_grad and len(sizes) == number + 1
        if number and number % period == 0:
            alive.append(tensors_alive())
    assert len(sizes) == 4 * period + 1 and max(sizes[: 2 * period]) == max(sizes[-period:])
    assert len(alive) == 4 and len(set(alive[1:])) == 1


def test_a_very_long_continuation_begins_at_once():
    model, prompt = BlockRecurrent(SMALL), torch.randint(11, (2, 3))
    assert next(continue_text(model, prompt, 10**15, Sampling())).shape == (2,)


@given(text=st.text(max_size=30) | st.binary(max_size=30), tokenizer=st.sampled_from([BYTES, MERGED]))
def test_each_character_is_written_once_complete(text, tokenizer):
    if isinstance(text, bytes):
        tokenizer = BYTES  # the other one can spell only UTF-8
    ids, written = tokenizer.encode(text).tolist(), []

    def arriving():
        for number, token in enumerate(ids):
            yield torch.tensor([token]) if number % 2 else token
            if isinstance(text, str):
                known = tokenizer.decode(ids[: number + 1])
                whole = max(size for size in range(len(text) + 1) if known.startswith(text[:size].encode()))
                assert "".join(written) == text[:whole]

    for piece in stream_text(tokenizer, arriving()):
        written.append(piece)
    assert "".join(written) == show_text(tokenizer, ids) and all(written)


def test_an_unfinished_character_at_the_end_is_shown_as_one():
    for text, expected in ((b"h\xc3", "h\ufffd"), (b"\xc3h", "\ufffdh"), (b"\xe2\x82", "\ufffd"), (b"", "")):
        assert "".join(stream_text(BYTES, iter(text))) == show_text(BYTES, list(text)) == expected


def test_text_in_and_out():
    document = documents_of([50])[0]
    assert prompt_from(document, 8).tolist() == [list(range(1, 9))]
    assert show_text(BYTES, [104, 105, 255]) == "hi\N{REPLACEMENT CHARACTER}"
