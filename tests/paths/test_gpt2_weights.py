"""GPT-2's weights give the logits of the package transformers, its folder the tokens.

Any other file is refused in one line.
"""

import json
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
CONFIG = Config(
    vocabulary=300,
    width=32,
    layers=3,
    heads=4,
    feed_forward=128,
    max_positions=24,
    segment=24,
    vectors=0,
    dropout=0.1,
)


def gpt2_tensors():
    """Random weights under GPT-2's names, with its shapes, (in, out)."""
    transformers = pytest.importorskip("transformers", reason="it has GPT-2's names: .[all]")
    with torch.device("meta"):
        model = transformers.GPT2Model(transformers.GPT2Config(**SIZES))
    torch.manual_seed(0)
    return {name: 0.2 * torch.randn(tensor.shape) for name, tensor in model.state_dict().items()}


@pytest.fixture(autouse=True)
def single_precision(double_precision):
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def file(tmp_path):
    """A GPT-2 in safetensors, and its config.json."""
    safetensors.save_file(gpt2_tensors(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"n_head": 4}')
    return tmp_path / "model.safetensors"


def model_of(path, config=CONFIG):
    """The model of a GPT-2, in evaluation mode."""
    contents = load_weights(path)
    assert Config(**contents["model_config"]) == config
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
    tokenizers = pytest.importorskip(
        "tokenizers", reason="the folder's tokenizer needs the package tokenizers: .[bpe]"
    )
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
    tensors = gpt2_tensors()
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
    changed = gpt2_tensors() | changes
    tensors = {name: tensor for name, tensor in changed.items() if tensor is not None}
    safetensors.save_file(tensors, file)
    assert message in refusal(load_weights, file)


def test_other_files_are_refused(file):
    file.write_bytes(file.read_bytes()[:-1])
    message = refusal(load_weights, file)
    assert f"{file} is not a whole safetensors file (Error while" in message
    assert "expected GPT-2 in safetensors" in message
    assert "No such file" in refusal(load_weights, file.with_name("absent.safetensors"))


USUAL = {
    "n_head": 4,
    "activation_function": "gelu_pytorch_tanh",
    "layer_norm_epsilon": 1e-05,
    "scale_attn_weights": True,
}
OTHER = {  # {field of config.json: a value with which GPT-2 computes something else}
    "activation_function": "relu",
    "layer_norm_epsilon": 1e-6,
    "scale_attn_by_inverse_layer_idx": True,
    "scale_attn_weights": False,
    "add_cross_attention": True,
}


def test_a_config_json_says_the_heads_and_whether_another_function_is_computed(file):
    """Without it heads would be 64 wide, so there is none of 32."""
    described = file.parent / "config.json"
    for content in ("no json", '{"n_head": 5}'):
        described.write_text(content)
        assert "is not a GPT-2 that fits our model: " in refusal(load_weights, file), content[:14]
    described.write_text(json.dumps(USUAL))
    model_of(file)
    for field, value in OTHER.items():
        described.write_text(json.dumps(USUAL | {field: value}))
        assert f"its config.json has {field} {value!r}, our model has " in refusal(
            load_weights, file
        )
