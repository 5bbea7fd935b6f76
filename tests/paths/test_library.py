"""accelerated.load opens a run and its export alike; a model names what it cannot read."""

import math
from functools import partial

import pytest
import torch

import accelerated
from accelerated.models import NAMES, model_class, presets_of
from tests.helpers.programs import evaluate, refusal

IMPOSSIBLE = [{"temperature": -1}, {"top_p": 0}, {"top_p": 2}, {"top_p": math.nan}]


@pytest.fixture
def run(runs):
    """The folder of a run of two steps."""
    return runs.memformer


def test_a_run_and_its_export_are_the_same_model(run, tmp_path):
    """And the caller's default type stays, though the run's is float32."""
    evaluate("export", run, tmp_path / "export")
    torch.set_default_dtype(torch.float64)
    first = accelerated.load(run)
    assert torch.get_default_dtype() == torch.float64
    other = accelerated.load(tmp_path / "export")
    assert first.settings == other.settings
    assert not first.model.training, "a loaded model drops numbers, as in training"
    for ours, theirs in zip(first.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_continuation_is_drawn_as_asked(run):
    model, tokenizer, _ = accelerated.load(run)
    generate = partial(accelerated.generate, model, tokenizer, "def ", 9)
    drawn = generate()
    greedy = generate(temperature=0)
    assert drawn != generate(seed=1)
    assert drawn != greedy
    assert greedy == generate(top_p=1e-9), "only the most probable token is in the nucleus"


def test_what_generate_and_load_cannot_use_is_refused(run):
    model, tokenizer, _ = accelerated.load(run)
    generate = partial(accelerated.generate, model, tokenizer)
    assert "the prompt is empty" in refusal(generate, "")
    for wrong in IMPOSSIBLE:
        assert "at least 0, and above 0 and at most 1" in refusal(partial(generate, **wrong), "a")
    assert "--checkpoint none" in refusal(accelerated.load, run, "none")


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
