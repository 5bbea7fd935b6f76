"""accelerated.load opens a run and its export alike; a model names what it cannot read."""

import math
from functools import partial

import pytest
import torch

import accelerated
from accelerated.models import NAMES, model_class, presets_of
from tests.helpers.programs import as_json, evaluate, refusal

BELOW_ZERO = "it must be 0 for the most probable token, or at least 0.001"
NO_SHARE = "it must be above 0 and at most 1"
REFUSED = [  # (argument, value, what is said of it)
    ("temperature", -1, f": -1 was given; {BELOW_ZERO}"),
    ("top_p", 0, f": 0 was given; {NO_SHARE}"),
    ("top_p", 2, f": 2 was given; {NO_SHARE}"),
    ("top_p", math.nan, f": nan was given; {NO_SHARE}"),
    ("tokens", -1, ": -1 was given; it must be at least 1"),
    ("tokens", 2.5, ": invalid integer value: '2.5'"),
    ("seed", 2**70, f": {2**70} was given; it must be at least 0 and below 2^32"),
]


@pytest.fixture
def run(runs):
    """The folder of a run of two steps."""
    return runs.memformer


def test_a_run_and_its_export_are_the_same_model(run, tmp_path, capsys):
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
    ours = as_json(capsys, "score", run)
    theirs = as_json(capsys, "score", tmp_path / "export")
    assert ours == theirs | {"run": str(run)}


def test_a_continuation_is_drawn_as_asked(run):
    model, tokenizer, _ = accelerated.load(run)
    generate = partial(accelerated.generate, model, tokenizer, "def ", 9)
    drawn = generate()
    greedy = generate(temperature=0)
    assert drawn != generate(seed=1)
    assert drawn != greedy
    assert greedy == generate(top_p=1e-9), "only the most probable token is in the nucleus"


def test_what_generate_and_load_refuse_is_what_eval_refuses_in_its_words(run):
    model, tokenizer, _ = accelerated.load(run)
    generate = partial(accelerated.generate, model, tokenizer)
    assert "the prompt is empty" in refusal(generate, "")
    for name, value, words in REFUSED:
        assert refusal(partial(generate, **{name: value}), "a") == name + words
        option = f"--{name.replace('_', '-')}"
        said = refusal(evaluate, "sample", run, f"{option}={value}")
        assert said == f"eval.py sample: argument {option}{words}"
    words = "tokens: invalid integer value: '2'"  # of text, which a command line has
    assert refusal(partial(generate, tokens="2"), "a") == words
    both = partial(generate, temperature=0, top_p=0.5)
    line = "--temperature 0 takes the most probable token; leave --top-p out"
    assert refusal(both, "a") == line
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
        (good.tolist(), "tokens are list of shape"),
        (good + 300, "tokens are 300 to 300, expected 0 to 299"),
        (good - 1, "tokens are -1 to -1, expected 0 to 299"),
    ):
        with pytest.raises(ValueError, match=words):
            model(tokens, state)
