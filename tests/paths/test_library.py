"""accelerated.load opens a run and its export alike; a model names what it cannot read."""

import math
from functools import partial

import pytest
import torch

import accelerated
from accelerated.generation.token_by_token import stepper_of
from accelerated.models import NAMES, model_class, presets_of
from tests.helpers.programs import MEMFORMER, as_json, evaluate, refusal, refused, train

REFUSED = [
    ({"temperature": -1}, "temperature: -1 was given; it must be 0 for the most probable token, "
     "or at least 0.001"),
    ({"top_p": 0}, "top_p: 0 was given; it must be above 0 and at most 1"),
    ({"top_p": 2}, "top_p: 2 was given; it must be above 0 and at most 1"),
    ({"top_p": math.nan}, "top_p: nan was given; it must be above 0 and at most 1"),
    ({"tokens": -1}, "tokens: -1 was given; it must be at least 1"),
    ({"tokens": 2.5}, "tokens: invalid integer value: '2.5'"),
    ({"seed": 2**70}, f"seed: {2**70} was given; it must be at least 0 and below 2^32"),
    ({"temperature": 0, "top_p": 0.5}, "--temperature 0 takes the most probable token; "
     "leave --top-p out"),
]  # fmt: skip


def test_a_run_and_its_export_are_the_same_model(text, tmp_path, capsys):
    pytest.importorskip(
        "safetensors", reason="an export needs safetensors: pip install -e '.[gpt2]'"
    )
    train(*MEMFORMER, "--data", text, "--steps", 2, "--out", run := tmp_path / "run")
    evaluate("export", run, tmp_path / "export")
    first, other = accelerated.load(run), accelerated.load(tmp_path / "export")
    assert first.settings == other.settings and not first.model.training
    assert all(
        torch.equal(a, b)
        for a, b in zip(first.model.parameters(), other.model.parameters(), strict=True)
    )
    drawn = [
        accelerated.generate(*first[:2], "def ", 9, **how)
        for how in ({}, {"seed": 1}, {"temperature": 0}, {"top_p": 1e-9})
    ]
    assert drawn[0] != drawn[1] and drawn[0] != drawn[2] == drawn[3]
    assert "the prompt is empty" in refusal(accelerated.generate, *first[:2], "")
    for how, words in REFUSED:
        line = refusal(partial(accelerated.generate, **how), *first[:2], "a")
        assert line == words, how
        [(name, value), *others] = how.items()
        if not others:
            option = f"--{name.replace('_', '-')}={value}"
            said = refused(capsys, "sample", run, option)
            assert said == f"eval.py sample: argument {option.split('=')[0]}{words[len(name) :]}"
    assert "--checkpoint none" in refusal(accelerated.load, run, "none")
    ours, theirs = (as_json(capsys, "score", folder) for folder in (run, tmp_path / "export"))
    assert ours == theirs | {"run": str(run)}


@pytest.mark.parametrize("name", NAMES)
def test_wrong_tokens_are_named(name):
    config = presets_of(name).Config(vocabulary=300)
    model = model_class(name)(config)
    good, state = torch.zeros(2, config.segment, dtype=torch.long), model.initial_state(2)
    for tokens, words in (
        (good[0], r"of shape \(\d+,\), expected a tensor of ids as int64 \(lanes, tokens\)"),
        (good.double(), "tokens are torch.float64"),
        (good.tolist(), "tokens are list of shape"),
        (torch.cat([good[:1], good[1:] + 300]), "tokens are 0 to 300, expected 0 to 299"),
        (good - 1, "tokens are -1 to -1, expected 0 to 299"),
    ):
        with pytest.raises(ValueError, match=words):
            model(tokens, state)
    stepper = stepper_of(model)
    stream = stepper.start(state)
    for token in (
        good,
        good[:, 0].double(),
    ):  # a step does not look at values: a GPU would be waited for
        with pytest.raises(ValueError, match=r"expected a tensor of ids as int64 \(lanes,\)"):
            stepper.step(token, stream)
