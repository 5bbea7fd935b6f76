"""GPT-2's weights give the logits of the `transformers` package; any other file is refused in one clear line."""

import contextlib
import dataclasses
import json
import pickle
import struct
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelerated.presets.gpt2_weights import check_described, check_gpt2, load_gpt2, renamed
from accelerated.pretrained_recurrence import Config, PretrainedRecurrence
from accelerated.program.errors import InputError
from reference import pretrained_recurrence as ref
from tests.conftest import examples

safetensors = pytest.importorskip("safetensors.torch", reason="reading GPT-2 needs the extra gpt2: safetensors")

SIZES = {"vocab_size": 97, "n_positions": 24, "n_embd": 32, "n_layer": 3, "n_head": 4}
CONFIG = Config(
    vocabulary=97, width=32, layers=3, heads=4, feed_forward=128, max_positions=24, segment=24, vectors=0, module_width=16
)


def gpt2_tensors(rng, layers=3, width=32, prefix=""):
    """Random weights under GPT-2's names and shapes, (in, out)."""
    shapes = {"wte.weight": (97, width), "wpe.weight": (24, width), "ln_f.weight": (width,), "ln_f.bias": (width,)}
    for i in range(layers):
        for name, size in (("attn.c_attn", (1, 3)), ("attn.c_proj", (1, 1)), ("mlp.c_fc", (1, 4)), ("mlp.c_proj", (4, 1))):
            shapes[f"h.{i}.{name}.weight"] = tuple(width * part for part in size)
            shapes[f"h.{i}.{name}.bias"] = (width * size[1],)
        shapes |= {f"h.{i}.{norm}.{kind}": (width,) for norm in ("ln_1", "ln_2") for kind in ("weight", "bias")}
    return {prefix + name: torch.tensor(0.2 * rng.standard_normal(shape), dtype=torch.float32) for name, shape in shapes.items()}


@pytest.fixture
def tensors():
    return gpt2_tensors(np.random.default_rng(0))


@pytest.fixture
def single_precision():
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The bytes of a GPT-2 in safetensors, and a file for damaged copies."""
    file = saved(tmp_path_factory.mktemp("whole") / "model.safetensors", gpt2_tensors(np.random.default_rng(0)))
    return file.read_bytes(), file


def saved(path, tensors):
    safetensors.save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return path


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A GPT2LMHeadModel with random weights and the folder that its own save_pretrained wrote."""
    transformers = pytest.importorskip("transformers", reason="the comparison needs the package transformers (extra test)")
    torch.manual_seed(3)
    torch.set_default_dtype(torch.float32)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES, attn_pdrop=0.0)).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms start at 0 and 1, which would hide a mistake
            parameter.add_(0.2 * torch.randn_like(parameter))
    folder = tmp_path_factory.mktemp("gpt2")
    model.save_pretrained(folder, safe_serialization=True)
    return model, folder


NESTED = {"lists": b"[" * 10**5, "objects": b'{"a":' * 10**5 + b"1" + b"}" * 10**5}
HEADERS = NESTED | {
    "nested in metadata": b'{"__metadata__":' + NESTED["objects"] + b"}",
    "not UTF-8": b"\xff" * 64,
    "a number": b"1",
    "nothing": b"{}",
    "no tensors": b'{"__metadata__":{"format":"pt"}}',
    "a size that overflows": b'{"wte.weight":{"dtype":"F32","shape":[97,4611686018427387904],"data_offsets":[0,0]}}',
    "a tensor without axes": b'{"wte.weight":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}',
    "a negative offset": b'{"wte.weight":{"dtype":"F32","shape":[1],"data_offsets":[-4,0]}}',
    "an unknown type": b'{"wte.weight":{"dtype":"F1","shape":[1],"data_offsets":[0,4]}}',
}


@pytest.mark.parametrize("name", HEADERS)
def test_hostile_headers_are_refused(name, tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(HEADERS[name])) + HEADERS[name] + bytes(4))
    with pytest.raises(InputError, match="expected GPT-2 in safetensors"):
        check_gpt2(file, CONFIG)


@examples(100)
@given(data=st.data())
def test_a_damaged_header_is_refused_or_describes_the_same_gpt2(data, whole):
    content, file = whole
    (length,) = struct.unpack("<Q", content[:8])
    at, byte = data.draw(st.integers(0, 8 + length - 1)), data.draw(st.integers(0, 255))
    file.write_bytes(content[:at] + bytes([byte]) + content[at + 1 :])
    with contextlib.suppress(InputError):
        assert check_gpt2(file, CONFIG) == file


@pytest.mark.parametrize("described", [*NESTED.values(), b"[[1, 2]]", b'{"n_head": [], "activation_function": {}}', b"\xff"])
def test_a_hostile_description_is_refused_or_passed_over(described, whole):
    content, file = whole
    file.write_bytes(content)
    file.with_name("config.json").write_bytes(described)
    with contextlib.suppress(InputError):
        check_gpt2(file, CONFIG)
    file.with_name("config.json").unlink()


def test_logits_are_those_of_transformers(published, single_precision):
    """In float32, with random weights saved by that package; the NumPy reference gives the same logits too."""
    model, folder = published
    ours = PretrainedRecurrence(CONFIG).eval()
    load_gpt2(ours, folder)
    tokens = torch.randint(97, (2, 24))
    with torch.no_grad():
        expected, actual = model(tokens).logits, ours(tokens, ours.initial_state(2)).logits
    assert expected.abs().max() > 3, "large enough to be wrong"
    assert (expected - actual).abs().max() <= 1e-5, "the worst measured is 1.2e-6"
    params = {name: value.double().numpy() for name, value in ours.state_dict().items()}
    logits, _, _ = ref.forward(params, CONFIG, tokens.numpy(), ref.initial_state(params, CONFIG, 2))
    assert np.abs(logits - expected.double().numpy()).max() <= 1e-5 * np.abs(logits).max()


def test_the_gradient_of_a_fine_tuning_step_is_that_of_transformers(published, single_precision):
    model, folder = published
    ours = PretrainedRecurrence(CONFIG)
    load_gpt2(ours, folder)
    tokens = torch.randint(97, (2, 24))
    model.zero_grad()
    model(tokens, labels=tokens).loss.backward()
    logits = ours(tokens, ours.initial_state(2)).logits[:, :-1]
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    expected = renamed({name: p.grad for name, p in model.transformer.named_parameters()}, CONFIG)
    for name, parameter in ours.named_parameters():
        if name.endswith("key_bias"):
            assert parameter.grad is None and expected[name].abs().max() < 1e-6, "only rounding in transformers"
        else:
            assert (expected[name] - parameter.grad).abs().max() <= 1e-4 * expected[name].abs().max(), name


def test_recurrence_is_added_to_the_same_weights(published, single_precision):
    """With the recurrence module the first window still equals GPT-2, and the module keeps its initial weights."""
    model, folder = published
    config = dataclasses.replace(CONFIG, vectors=1, segment=12)
    ours, fresh = PretrainedRecurrence(config, seed=4).eval(), PretrainedRecurrence(config, seed=4)
    load_gpt2(ours, folder / "model.safetensors")
    assert all(torch.equal(a, b) for a, b in zip(ours.module.parameters(), fresh.module.parameters(), strict=True))
    tokens = torch.randint(97, (2, 24))
    with torch.no_grad():
        first, state, _ = ours(tokens[:, :12], ours.initial_state(2))
        assert (model(tokens[:, :12]).logits - first).abs().max() <= 1e-4
        assert (model(tokens[:, 12:]).logits - ours(tokens[:, 12:], state).logits).abs().max() > 1e-2


@pytest.mark.parametrize("form", ["prefixed", "with masks", "with its head", "half precision"])
def test_the_forms_that_are_published(tmp_path, tensors, form, single_precision):
    expected = PretrainedRecurrence(CONFIG)
    load_gpt2(expected, saved(tmp_path / "plain.safetensors", tensors))
    if form == "prefixed":
        tensors = {f"transformer.{name}": tensor for name, tensor in tensors.items()}
    elif form == "with masks":
        for i in range(3):
            tensors |= {f"h.{i}.attn.bias": torch.ones(1, 1, 24, 24), f"h.{i}.attn.masked_bias": torch.tensor(-1e4)}
    elif form == "with its head":
        tensors["lm_head.weight"] = tensors["wte.weight"].clone()
    else:
        tensors = {name: tensor.half() for name, tensor in tensors.items()}
    model = PretrainedRecurrence(CONFIG)
    load_gpt2(model, saved(tmp_path / "model.safetensors", tensors))
    tolerance = 2e-3 if form == "half precision" else 0
    for name, value in expected.state_dict().items():
        assert (model.state_dict()[name] - value).abs().max() <= tolerance and model.state_dict()[name].dtype == torch.float32


def refusal(path, config=CONFIG):
    """Return the message that refuses a file; it must be one line."""
    with pytest.raises(InputError) as caught:
        load_gpt2(PretrainedRecurrence(config), path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "content,words",
    [
        (b"<!DOCTYPE html><html><body>404</body></html>", "header"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:248d\nsize 548105171\n", "header"),
        (pickle.dumps({"wte.weight": [1.0]}), "header"),
        (b"", "header"),
        (b"just some text, no header at all", "header"),
        ((10).to_bytes(8, "little") + b"[1, 2, 3] ", "header"),
        ((2).to_bytes(8, "little") + b"{}", "is not a GPT-2"),
        ((27).to_bytes(8, "little") + b'{"a": {"data_offsets": []}}', "header"),
    ],
)
def test_the_message_says_what_a_wrong_file_is(tmp_path, content, words):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    message = refusal(path)
    assert words in message and str(path) in message and "expected GPT-2 in safetensors" in message


def test_a_missing_file_or_folder_is_named(tmp_path):
    assert "no such file" in refusal(tmp_path / "absent.safetensors")
    assert "neither model.safetensors nor checkpoint.pt" in refusal(tmp_path)


@pytest.mark.parametrize("lost", [1, 1000, -3, None])
def test_a_truncated_file_is_named(tmp_path, tensors, lost):
    """One byte short, many bytes short, too long, and ending inside the header."""
    path = saved(tmp_path / "model.safetensors", tensors)
    whole = path.read_bytes()
    path.write_bytes(whole[:200] if lost is None else whole[:-lost] if lost > 0 else whole + b"123")
    assert "is not a whole safetensors file (Error while deserializing header" in refusal(path)


def test_another_architecture_is_refused_with_its_parameters(tmp_path, tensors):
    bert = {"bert.embeddings.word_embeddings.weight": torch.zeros(3, 2), "bert.pooler.weight": torch.zeros(2, 2)}
    assert "not a GPT-2: it holds bert.embeddings" in refusal(saved(tmp_path / "bert.safetensors", bert))
    extra = tensors | {"h.1.attn.rotary.weight": torch.zeros(4)}
    assert "h.1.attn.rotary.weight should be absent, is (4,)" in refusal(saved(tmp_path / "rotary.safetensors", extra))
    del tensors["h.2.mlp.c_fc.bias"]
    assert "h.2.mlp.c_fc.bias should be (128,), is absent" in refusal(saved(tmp_path / "less.safetensors", tensors))


def test_an_untied_head_is_refused(tmp_path, tensors):
    tensors["lm_head.weight"] = tensors["wte.weight"] + 1
    assert "lm_head.weight differs from wte.weight" in refusal(saved(tmp_path / "model.safetensors", tensors))


def test_another_size_is_refused_with_the_preset_that_fits(tmp_path):
    deep = saved(tmp_path / "deep.safetensors", gpt2_tensors(np.random.default_rng(0), layers=2))
    message = refusal(deep, dataclasses.replace(CONFIG, max_positions=30))
    assert message.endswith(
        "layers 2, max_positions 24, the model has layers 3, max_positions 30; give --layers 2 --max-positions 24"
    )
    wide = dataclasses.replace(CONFIG, width=64, feed_forward=256)
    assert refusal(deep, wide).endswith("give --layers 2 --width 32 --feed-forward 128")
    with pytest.raises(InputError, match=r"has layers 24, width 1024, .* the model has layers 3, .*; give --preset gpt2-medium"):
        shapes = {"wte.weight": (97, 1024), "wpe.weight": (1024, 1024), "h.0.mlp.c_fc.bias": (4096,)} | layers_of(24)
        check_described(tmp_path / "x", shapes, CONFIG)
    fits = saved(tmp_path / "model.safetensors", gpt2_tensors(np.random.default_rng(0)))
    message = refusal(fits, dataclasses.replace(CONFIG, vocabulary=98))
    assert "has vocabulary 97, the model has vocabulary 98; give the --tokenizer that it was trained with" in message
    for field, found, other in (("max_positions", 24, 25), ("feed_forward", 128, 64)):
        message = refusal(fits, dataclasses.replace(CONFIG, **{field: other}))
        assert message.endswith(f"give --{field.replace('_', '-')} {found}")


def layers_of(count):
    return {f"h.{i}.ln_1.weight": (1024,) for i in range(count)}


def test_a_file_that_fits_is_named(tmp_path, tensors):
    path = saved(tmp_path / "model.safetensors", tensors)
    assert check_gpt2(tmp_path, CONFIG) == path
    with pytest.raises(InputError, match="has layers 3, the model has layers 2"):
        check_gpt2(path, dataclasses.replace(CONFIG, layers=2))


def test_the_number_of_heads_is_compared_with_config_json(tmp_path, tensors):
    path = saved(tmp_path / "model.safetensors", tensors)
    (tmp_path / "config.json").write_text('{"n_head": 2}')
    assert "has heads 2, the model has heads 4; give --heads 2" in refusal(path)
    for content in ('{"n_head": 4}', "{}", "no json"):
        (tmp_path / "config.json").write_text(content)
        load_gpt2(PretrainedRecurrence(CONFIG), path)
    small = dataclasses.replace(CONFIG, layers=12, width=768, heads=6)
    shapes = {"wte.weight": (97, 768), "wpe.weight": (24, 768), "h.0.mlp.c_fc.bias": (128,)} | layers_of(12)
    with pytest.raises(InputError, match="has heads 12, the model has heads 6; give --preset gpt2"):
        check_described(tmp_path / "elsewhere" / "model.safetensors", shapes, small)


@pytest.mark.parametrize(
    "name,value",
    [
        ("activation_function", "relu"),
        ("layer_norm_epsilon", 1e-6),
        ("scale_attn_by_inverse_layer_idx", True),
        ("scale_attn_weights", False),
        ("add_cross_attention", True),
    ],
)
def test_a_gpt2_that_computes_something_else_is_refused(tmp_path, tensors, name, value):
    """The config.json beside it decides, since no shape shows these fields; the values of a usual GPT-2 pass."""
    path = saved(tmp_path / "model.safetensors", tensors)
    described = {"n_head": 4, "activation_function": "gelu_pytorch_tanh", "layer_norm_epsilon": 1e-05, "scale_attn_weights": True}
    (tmp_path / "config.json").write_text(json.dumps(described))
    check_gpt2(path, CONFIG)
    (tmp_path / "config.json").write_text(json.dumps(described | {name: value}))
    assert f"its config.json has {name} {value!r}, our model has " in refusal(path)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64])
def test_quantised_weights_are_refused(tmp_path, tensors, dtype):
    tensors["h.1.mlp.c_fc.weight"] = tensors["h.1.mlp.c_fc.weight"].to(dtype)
    message = refusal(saved(tmp_path / "model.safetensors", tensors))
    assert "h.1.mlp.c_fc.weight is stored as " in message and "give the weights in one of F16, BF16, F32, F64" in message


@pytest.mark.parametrize("name,shape", [("h.0.attn.c_attn.weight", (3,)), ("wte.weight", (97,)), ("h.1.attn.c_attn.bias", (95,))])
def test_odd_shapes_are_refused(tmp_path, tensors, name, shape):
    tensors[name] = torch.zeros(shape)
    assert "is not a GPT-2" in refusal(saved(tmp_path / "model.safetensors", tensors))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinite_values_are_refused(tmp_path, tensors, value):
    tensors["h.1.attn.c_proj.weight"][3, 5] = value
    assert "h.1.attn.c_proj.weight has NaN or infinite values" in refusal(saved(tmp_path / "model.safetensors", tensors))


def test_a_missing_package_is_named(tmp_path, tensors, monkeypatch):
    path = saved(tmp_path / "model.safetensors", tensors)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert "needs the package safetensors; install the extra: pip install -e '.[gpt2]'" in refusal(path)


def test_nothing_is_loaded_from_a_file_that_is_refused(tmp_path, tensors):
    tensors["ln_f.bias"][0] = float("nan")
    model = PretrainedRecurrence(CONFIG)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(InputError):
        load_gpt2(model, saved(tmp_path / "model.safetensors", tensors))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_header_whose_length_looks_like_a_pickle_is_read(tmp_path, tensors):
    """A file whose header has 0x..0480 bytes begins like a pickle of protocol 4."""
    path = saved(tmp_path / "model.safetensors", tensors)
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    longer = (size | 0xFFFF) + 1 + 0x0480
    path.write_bytes(longer.to_bytes(8, "little") + raw[8 : 8 + size].ljust(longer) + raw[8 + size :])
    assert path.read_bytes().startswith(b"\x80\x04")
    load_gpt2(PretrainedRecurrence(CONFIG), path)
