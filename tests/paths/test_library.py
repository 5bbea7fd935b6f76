"""accelerated.generate draws as it is asked to; a model names what it cannot read."""

from functools import partial

import pytest
import torch

import accelerated
from accelerated.models import NAMES, model_class, presets_of


def test_a_continuation_is_drawn_as_asked(runs):
    model, tokenizer, _ = accelerated.load(runs.memformer)
    generate = partial(accelerated.generate, model, tokenizer, "def ", 9)
    greedy = generate(temperature=0)
    assert len({greedy, generate(), generate(seed=1)}) == 3, "seed or temperature is not used"
    assert greedy == generate(top_p=1e-9), "only the most probable token is in the nucleus"


@pytest.mark.parametrize("name", NAMES)
def test_wrong_tokens_are_named(name):
    config = presets_of(name).Config(vocabulary=300)
    model = model_class(name)(config)
    good = torch.zeros(2, config.segment, dtype=torch.long)
    state = model.initial_state(2)
    for tokens, words in (
        (good[0], r"of shape \(\d+,\), expected a tensor of ids as int64 \(lanes, tokens\)"),
        (good.double(), "tokens are torch.float64"),
        (good + 300, "tokens are 300 to 300, expected 0 to 299"),
        (good - 1, "tokens are -1 to -1, expected 0 to 299"),
    ):
        with pytest.raises(ValueError, match=words):
            model(tokens, state)
