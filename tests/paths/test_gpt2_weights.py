"""GPT-2's weights give the logits of the package transformers, its folder the tokens.

Any other file is refused in one line.
"""

from pathlib import Path

import pytest
import torch

import accelerated
from accelerated.pretrained_recurrence import Config, PretrainedRecurrence
from accelerated.training.checkpoint import load_weights
from accelerated.training.settings import preset_settings
from tests.helpers.programs import as_json, evaluate, refusal, train

safetensors = pytest.importorskip(
    "safetensors.torch", reason="reading GPT-2 needs the extra gpt2: safetensors"
)

TEXT = Path(__file__).read_text(encoding="utf-8")[:3000]
SIZES = {"vocab_size": 300, "n_positions": 24, "n_embd": 32, "n_layer": 3, "n_head": 4}


@pytest.fixture(autouse=True)
def single_precision(double_precision):
    torch.set_default_dtype(torch.float32)


def model_of(path):
    """The model of a GPT-2, in evaluation mode."""
    contents = load_weights(path)
    config = Config(**contents["model_config"])
    assert (config.segment, config.vectors, config.dropout) == (24, 0, 0.1)
    model = PretrainedRecurrence(config).eval()
    model.load_state_dict(contents["parameters"])
    return model


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """(A GPT2LMHeadModel with random weights, its folder, tokens).

    Its own save_pretrained wrote the folder, to which a tokenizer was added.
    """
    transformers = pytest.importorskip(
        "transformers", reason="the comparison needs the package transformers: .[all]"
    )
    tokenizers = pytest.importorskip("tokenizers")  # it comes with transformers
    torch.manual_seed(3)
    torch.set_default_dtype(torch.float32)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES, attn_pdrop=0.0)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Biases and norms start at 0 and 1, which would hide a mistake
            parameter.add_(0.2 * torch.randn_like(parameter))
    folder = tmp_path_factory.mktemp("gpt2")
    model.save_pretrained(folder, safe_serialization=True)
    learned = tokenizers.ByteLevelBPETokenizer()
    learned.train_from_iterator([TEXT], 300, special_tokens=["<|endoftext|>"])
    learned.save_model(str(folder))  # vocab.json and merges.txt
    return model, folder, torch.randint(300, (2, 24))


@pytest.fixture
def file(published, tmp_path):
    """Its safetensors with the hub's names, without a prefix, and a config.json of today's."""
    _, folder, _ = published
    tensors = safetensors.load_file(folder / "model.safetensors")
    named = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    safetensors.save_file(named, tmp_path / "model.safetensors")
    described = '{"n_head": 4, "activation_function": "gelu_pytorch_tanh"}'
    (tmp_path / "config.json").write_text(described)
    return tmp_path / "model.safetensors"


def test_logits_are_those_of_transformers(published):
    """In float32, with random weights saved by that package."""
    model, folder, tokens = published
    ours = model_of(folder)
    with torch.no_grad():
        expected = model(tokens).logits
        actual = ours(tokens, ours.initial_state(2)).logits
    assert expected.abs().max() > 3, "large enough to be wrong"
    assert (expected - actual).abs().max() <= 1e-5, "the worst measured is 1.2e-6"


def test_recurrence_is_added_to_the_same_weights(published, tmp_path):
    """With the recurrence module the first window still equals GPT-2."""
    model, folder, tokens = published
    book = tmp_path / "book.txt"
    book.write_text(TEXT)
    begun = f"--init {folder} --data {book} --steps 0 --out {tmp_path}/run --sample 0"
    sizes = "--segment 12 --module-width 16 --insertion-layers 2 --batch 2 --horizon 1"
    train(begun, sizes)
    ours, _, settings = accelerated.load(tmp_path / "run")
    usual = preset_settings("pretrained_recurrence", "gpt2")  # the preset, with the folder's sizes
    assert settings.model_config.vectors == usual.model_config.vectors == 1
    assert settings.model_config.segment == 12
    assert settings.training.learning_rate == usual.training.learning_rate
    assert settings.data.tokenizer.endswith("vocab.json")
    with torch.no_grad():
        first, state, _ = ours(tokens[:, :12], ours.initial_state(2))
        assert (model(tokens[:, :12]).logits - first).abs().max() <= 1e-4
        second = ours(tokens[:, 12:], state).logits
        assert (model(tokens[:, 12:]).logits - second).abs().max() > 1e-2


def test_a_folder_as_it_is_downloaded_is_sampled(published, capsys):
    """With its own tokenizer, whose ids are those of GPT2TokenizerFast.

    It has no text but what --data names.
    """
    import transformers

    _, folder, _ = published
    model, tokenizer, _ = accelerated.load(folder)
    theirs = transformers.GPT2TokenizerFast(str(folder / "vocab.json"), str(folder / "merges.txt"))
    for text in (TEXT, " a\n\n  b\tcé中 <|endoftext|>", ""):
        expected = theirs(text, split_special_tokens=True)["input_ids"]
        assert tokenizer.encode(text).tolist() == expected
    continuation = accelerated.generate(model, tokenizer, "a", tokens=6)
    printed = as_json(capsys, f"sample {folder} --prompt a --tokens 6")
    assert printed["continuation"] == continuation
    assert "has no text of its own; give --data" in refusal(evaluate, "score", folder)


def test_the_forms_that_are_published(file):
    """At once with masks of attention, a copy of the embedding as its head, and half precision."""
    expected = model_of(file).state_dict()
    tensors = safetensors.load_file(file)
    for layer in range(3):
        for name in ("bias", "masked_bias"):
            tensors[f"h.{layer}.attn.{name}"] = torch.ones(1, 1, 24, 24)
    tensors["lm_head.weight"] = tensors["wte.weight"].clone()
    safetensors.save_file({name: tensor.half() for name, tensor in tensors.items()}, file)
    for name, value in model_of(file).state_dict().items():
        assert value.dtype == torch.float32
        assert (expected[name] - value).abs().max() <= 2e-3, name


TENSORS = {  # what: (tensors that are changed, added or, if None, removed; the message)
    "one missing": ({"h.2.mlp.c_fc.bias": None}, "is not a GPT-2: it has no h.2.mlp.c_fc.bias"),
    "untied head": (
        {"lm_head.weight": torch.zeros(300, 32)},
        "lm_head.weight differs from wte.weight",
    ),
    "quantised": (
        {"h.1.mlp.c_fc.weight": torch.zeros(32, 128, dtype=torch.int8)},
        "h.1.mlp.c_fc.weight is stored as torch.int8, and weights are",
    ),
}


@pytest.mark.parametrize("what", TENSORS)
def test_other_tensors_are_refused(file, what):
    changes, message = TENSORS[what]
    changed = safetensors.load_file(file) | changes
    tensors = {name: tensor for name, tensor in changed.items() if tensor is not None}
    safetensors.save_file(tensors, file)
    assert message in refusal(load_weights, file)
