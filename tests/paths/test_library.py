"""accelerated.load opens a run and its export alike; a model names what it cannot read."""

import pytest
import torch

import accelerated
from accelerated.models import NAMES, model_class, presets_of
from tests.helpers.programs import MEMFORMER, as_json, evaluate, train


@pytest.fixture
def run(text, tmp_path):
    """The folder of a run of two steps."""
    train(*MEMFORMER, "--data", text, "--steps", 2, "--out", tmp_path / "run")
    return tmp_path / "run"


def test_a_run_and_its_export_are_the_same_model(run, tmp_path, capsys):
    pytest.importorskip("safetensors", reason="an export needs safetensors: pip install -e '.[gpt2]'")
    evaluate("export", run, tmp_path / "export")
    first, other = accelerated.load(run), accelerated.load(tmp_path / "export")
    assert first.settings == other.settings and not first.model.training
    assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), other.model.parameters(), strict=True))
    continuations = [accelerated.generate(model, tokenizer, "def ", tokens=9) for model, tokenizer, _ in (first, other)]
    printed = as_json(capsys, "sample", run, "--prompt", "def ", "--tokens", 9)["continuation"]
    assert continuations == [printed, printed]
    ours, theirs = (as_json(capsys, "score", folder) for folder in (run, tmp_path / "export"))
    assert ours == theirs | {"run": str(run)}


def test_pieces_join_to_the_text_and_a_seed_draws_again(run):
    model, tokenizer, _ = accelerated.load(run)
    text = accelerated.generate(model, tokenizer, "def ", tokens=20, seed=1)
    assert "".join(accelerated.generate(model, tokenizer, "def ", tokens=20, seed=1, stream=True)) == text
    assert accelerated.generate(model, tokenizer, "def ", tokens=20, seed=2) != text
    with pytest.raises(accelerated.program.errors.InputError, match="prompt is empty"):
        accelerated.generate(model, tokenizer, "")


@pytest.mark.parametrize("name", NAMES)
def test_wrong_tokens_are_named(name):
    config = presets_of(name).Config(vocabulary=300)
    model = model_class(name)(config)
    good, state = torch.zeros(2, config.segment, dtype=torch.long), model.initial_state(2)
    for tokens, words in (
        (good[0], r"of shape \(\d+,\), expected a tensor of ids as int64 \(lanes, tokens\)"),
        (good.double(), "tokens are torch.float64"),
        (good.numpy(), "tokens are int64 of shape"),
        (good.tolist(), "tokens are list of shape"),
        (good + 300, "tokens are 300 to 300, expected 0 to 299"),
        (torch.cat([good[:1], good[1:] + 300]), "tokens are 0 to 300, expected 0 to 299"),
        (good - 1, "tokens are -1 to -1, expected 0 to 299"),
    ):
        with pytest.raises(ValueError, match=words):
            model(tokens, state)
    for token in (good, good[:, 0].double(), good[:, 0].tolist()):  # a step does not look at values: a GPU would be waited for
        with pytest.raises(ValueError, match=r"expected a tensor of ids as int64 \(lanes,\)"):
            model.step(token, state)


def test_what_is_printed_of_a_model_and_a_tokenizer_has_sizes(run):
    model, tokenizer, _ = accelerated.load(run)
    assert f"scale ({model.config.width},)" in repr(model) and repr(tokenizer) == "ByteTokenizer(bytes, 256 tokens)"
