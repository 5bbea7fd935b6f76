"""Continuing a text equals reading it."""

import pytest
import torch
from test_block_recurrent import SMALL
from test_compressive import variant
from test_corpus import documents_of
from test_memformer import variant as memformer_variant

from accelerated.block_recurrent import BlockRecurrent
from accelerated.compressive import Compressive
from accelerated.generation import continue_text, pick, prompt_from, read_prompt, show_text
from accelerated.memformer import Memformer
from accelerated.tokenizer import ByteTokenizer

WHOLE_SEGMENTS = {
    f"{kind.__name__} {name}": (kind, config_of(name))
    for kind, config_of, names in (
        (Compressive, variant, ("conv-attention_reconstruction", "most_used-none", "transformer-xl")),
        (Memformer, memformer_variant, ("encoder-decoder", "encoder-decoder-xl", "decoder-only")),
    )
    for name in names
}


@pytest.mark.parametrize("name", WHOLE_SEGMENTS)
@pytest.mark.parametrize("length", [1, 5, 6, 7, 8, 9, 16, 30])
def test_a_prompt_of_any_length_gives_the_logits_of_reading_whole_segments(name, length):
    """Of models whose forward takes whole segments alone: the prompt is padded to some for comparison."""
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
    for token in continue_text(model, prompt, 20, temperature=0):
        padded = torch.nn.functional.pad(text, (0, -text.shape[1] % 4))
        assert token.item() == model(padded, model.initial_state(1)).logits[0, text.shape[1] - 1].argmax().item()
        text = torch.cat([text, token[None]], 1)
    assert text.shape[1] == 27


def test_sampling_repeats_with_its_seed_and_leaves_the_mode():
    model = BlockRecurrent(SMALL).train()
    prompt = torch.randint(11, (1, 3))
    draws = [[t.item() for t in continue_text(model, prompt, 30, 1.0, torch.Generator().manual_seed(seed))] for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2] and model.training


def test_temperature_sharpens():
    logits = torch.tensor([[0.0, 1.0, 0.5]]).repeat(4000, 1)
    shares = [(pick(logits, t, torch.Generator().manual_seed(0)) == 1).double().mean().item() for t in (0, 0.25, 1.0)]
    assert shares[0] == 1
    for share, temperature in zip(shares[1:], (0.25, 1.0), strict=True):
        assert share == pytest.approx(torch.softmax(logits[0] / temperature, 0)[1].item(), abs=0.03)


def test_text_in_and_out():
    document = documents_of([50])[0]
    assert prompt_from(document, 8).tolist() == [list(range(1, 9))]
    assert show_text(ByteTokenizer(), [104, 105, 255]) == "hi\N{REPLACEMENT CHARACTER}"
